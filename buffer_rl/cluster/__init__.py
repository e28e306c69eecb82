"""Ray: the cluster, what of it each role gets, and groups of actors.

session       the cluster of a run: joined, or started so that only the run can use it
options       options that count devices and nodes, of the Buffer and of the engines
devices       which devices of the nodes each process gets
requirements  what the roles of a run need, and what is said where a cluster has too few
placement     bundles that are reserved, and the actor options of each member
actor_group   the members of a role: started, called, replaced, stopped; their log files; roles in one process
worker_group  groups of actors for programs of users: a class, called as if it were one object
calling       calls under way: deadlines, retries, errors that name who failed
member        what a member process has so that it is seen to hang: its pulse, and the stack of its threads
hangs         the watchers of members that hang, and of actors that Ray starts again
dispatch      which members a call goes to, and how their answers become one
locality      what must be on one machine
fork_server   the process that the others of a local run are forked from
process       processes that end with the one that started them; server processes and their API key
environment   variables of the environment, those that name proxies, and signals as an exception
"""
