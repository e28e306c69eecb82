"""Ray: the cluster, what of it each role gets, and groups of actors.

session       the cluster of a run, joined or started
isolation     a local cluster that only its run can use
options       options that count devices and nodes
counts        the numbers of processes that follow from them
devices       which devices of the nodes each process gets
demands       what the roles of a run need, and what is said where a cluster has too few
placement     bundles that are reserved, and the actor options of each member
actor_group   the members of a role: started, called, replaced, stopped; their failures and log files
dispatch      which members a call goes to, and how their answers become one
fused         several roles in one process
"""
