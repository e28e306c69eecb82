"""``buffer-rl drill``: a configuration is put to the test with faults, and gets a certificate.

verb          the command line
faults        which process of a live run meets what, and when
reward        the run's own reward, which fails on order
answers       the run's own engine, some of whose answers are falsified
runs          runs of a drill, and what they came to; a small model in place of their own
certificate   what was found, as JSON, as text and as a page
"""
