"""``buffer-rl plan --trace RUN``: the speed of a run with other splits of devices and other schedules, from its costs.

verb       the command line
forecast   runs in virtual time with the costs of a recorded one
"""
