"""``buffer-rl why RUN UID|STEP``: what became of one group of a run and why, or where the time of one step went.

verb         the command line
group_life   the life of one group, in facts and sentences
step_life    one step: its phases, waits and groups
"""
