"""``python -m buffer_rl.engines.router_process --program MODULE``: a real router, ended with its parent.

The router takes its API key as an argument alone, which every user of the machine could read. So the key comes in the
environment, and is put among the arguments that the router parses inside this process. Its command line knows fewer
policies than it has, so the policy is set afterwards. It calls engines alone, and never through a proxy.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence

from buffer_rl.cluster.environment import drop_proxies
from buffer_rl.cluster.process import PARENT_FD_FLAG, pop_key


def main(argv: Sequence[str] | None = None) -> int:
    """Run the router of a module like ``sglang_router.launch_router`` until a signal; its flags and ``--parent-fd``."""
    rest = list(sys.argv[1:] if argv is None else argv)
    program = _taken(rest, "--program")
    if PARENT_FD_FLAG in rest:
        _fork_watcher(int(_taken(rest, PARENT_FD_FLAG)))
    policy = _taken(rest, "--policy")
    drop_proxies()
    if (key := pop_key()) is not None:
        rest += [f"--api-key={key}"]  # a key may begin with a dash
    router = importlib.import_module(program)
    arguments = router.parse_router_args(rest)
    arguments.policy = policy
    router.launch_router(arguments)
    return 0


def _taken(arguments: list[str], flag: str) -> str:
    """The value of ``flag``, which both are taken out."""
    at = arguments.index(flag)
    value = arguments[at + 1]
    del arguments[at : at + 2]
    return value


def _fork_watcher(fd: int) -> None:
    """Leave a small process behind that kills this one when the other end of the pipe ``fd`` is closed.

    A process, not a thread: the router holds the interpreter lock for as long as it runs. It stays in this
    process's group, so a signal to the group ends it too.
    """
    router = os.getpid()
    if os.fork() != 0:
        os.close(fd)
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the group's SIGTERM is for the router
    while os.read(fd, 1):
        pass
    if os.getppid() == router:
        os.kill(router, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
