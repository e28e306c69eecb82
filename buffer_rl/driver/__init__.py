"""What a run does, and what that needs of its process.

driver       trains step by step, publishes, saves, evaluates
production   tickets, the selections of steps, the work of roles on them; what is lost starts again
production_metrics  a step's metrics from those of tickets
tasks        the runtime's contract; calls on roles and what coroutines wait for; replacement of dead processes
runtime      calls on Ray actors and on objects of this process
local_roles  roles in this process: checkpoints, files of rollouts
launch       the parts of a run: how each starts, is ready, watched and stopped
offload      who has the memory of shared devices, and when
role_checks  checks of options that depend on imported plugins
restart      when and how a run's processes are started again, and what it keeps then
folders      locks of the folders that only one driver may write to
provenance   versions, plugins, code and data of a run; what differs from the run that wrote the checkpoint
options      the options of a run and of what is observed of it
"""
