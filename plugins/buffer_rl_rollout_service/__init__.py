"""An HTTP service that agents anywhere write trajectories to, by group, and a rollout function that trains on them.

store       groups, leases and counts, in one SQLite file
server      the routes, what they take and its checks, their authorization and their errors
page        the statistics as a page with charts
client      the service's callers: agents, and the rollout function
rollout     ``ServiceRollout``: complete groups from the service into the Buffer
options     ``--rollout-service-url`` and the token
__main__    ``python -m buffer_rl_rollout_service``: starts the service

``plugins/buffer_rl_rollout_service/README.md`` has the commands, and the guarantees over deaths and restarts.
"""
