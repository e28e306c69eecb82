"""``buffer-rl rescore RUN``: another reward on the samples that a run has recorded, compared with the run's own.

verb              the command line
recorded_groups   the recorded groups as samples that can be scored again
rescoring         recorded groups with another reward, compared with before
"""
