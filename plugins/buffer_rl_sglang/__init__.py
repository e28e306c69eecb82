"""Real SGLang servers as rollout engines: ``--rollout-engine sglang``.

launcher        starts a server as a child process, on the devices of its process; what it leaves is removed
options         --sglang-python, and every argument of the server itself as --sglang-NAME
server_process  the program that runs in SGLang's environment, by its path; on a CPU without the server's kernels
"""
