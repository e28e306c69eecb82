"""Ray: the cluster and groups of actors.

session       the cluster of a run, joined or started; its accelerators
isolation     a local cluster that only its run can use
worker_group  calls on the actors of a role, their failures, their log files
"""
