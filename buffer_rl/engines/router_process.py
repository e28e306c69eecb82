"""``python -m buffer_rl.engines.router_process``: the real ``sglang-router``, ended with its parent.

The router takes its API key as an argument alone, which every user of the machine could read. So the key comes in the
environment, and is put among the arguments that the router parses inside this process. Its command line knows fewer
policies than it has, so the policy is set afterwards. It calls engines alone, and never through a proxy.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from buffer_rl.cluster.environment import drop_proxies
from buffer_rl.cluster.process import PARENT_FD_FLAG, pop_key


def main(argv: Sequence[str] | None = None) -> int:
    """Run the router until a signal; flags are those of ``sglang_router.launch_router`` and ``--parent-fd``."""
    rest = list(sys.argv[1:] if argv is None else argv)
    if PARENT_FD_FLAG in rest:
        at = rest.index(PARENT_FD_FLAG)
        _fork_watcher(int(rest[at + 1]))
        del rest[at : at + 2]
    at = rest.index("--policy")
    policy = rest[at + 1]
    del rest[at : at + 2]
    drop_proxies()
    if (key := pop_key()) is not None:
        rest += [f"--api-key={key}"]  # a key may begin with a dash
    from sglang_router.launch_router import launch_router, parse_router_args  # type: ignore[import-untyped]

    arguments = parse_router_args(rest)
    arguments.policy = policy
    launch_router(arguments)
    return 0


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
