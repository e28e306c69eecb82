"""``python -m buffer_rl.engines.router_process --program MODULE``: a real router, ended with its parent.

The router takes its API key as an argument alone, which every user of the machine could read. So the key comes in the
environment, and is put among the arguments that the router parses inside this process. Its command line knows fewer
policies than it has, so the policy is set afterwards. It calls engines alone, and never through a proxy.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from buffer_rl.cluster.environment import drop_proxies
from buffer_rl.cluster.process import PARENT_FD_FLAG, pop_key


def main(argv: Sequence[str] | None = None) -> int:
    """Run the router of a module like ``sglang_router.launch_router`` until a signal; its flags and ``--parent-fd``."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--program", "--policy"):
        parser.add_argument(flag, required=True)
    parser.add_argument(PARENT_FD_FLAG, type=int)
    own, rest = parser.parse_known_args(argv)
    if own.parent_fd is not None:
        _fork_watcher(own.parent_fd)
    drop_proxies()
    if (key := pop_key()) is not None:
        rest += [f"--api-key={key}"]  # a key may begin with a dash
    router = importlib.import_module(own.program)
    arguments = router.parse_router_args(rest)
    arguments.policy = own.policy
    router.launch_router(arguments)
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
