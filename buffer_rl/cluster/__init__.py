"""Ray: the cluster and groups of actors.

session       the cluster of a run, joined or started; its accelerators
isolation     a local cluster that only its run can use
actor_group   the members of a role: started, called, replaced, stopped; their failures and log files
dispatch      which members a call goes to, and how their answers become one
fused         several roles in one process
"""
