"""smg as the router of a run: the ``smg`` entry of the router plugins, and the program of its process.

Its command line and its list of workers are those of sglang-router, so what starts that one starts this one too. Fields
of a request that it does not know reach the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from buffer_rl.engines.router import RouterPackage

launch = RouterPackage(name="smg", package="smg", program="buffer_rl_smg.router", passes_fields=True)


def parse_router_args(arguments: Sequence[str]) -> Any:
    """The arguments as smg parses them."""
    from smg.launch_router import parse_router_args

    return parse_router_args(list(arguments))


def launch_router(arguments: Any) -> None:
    """Run the router until a signal.

    An engine that is taken off its list leaves at once: by itself it waits for 5 s, which no argument of its command
    line changes, and refuses to list the engine again meanwhile."""
    from setproctitle import setproctitle
    from smg import router

    setproctitle("smg::router")
    router._Router = partial(router._Router, drain_settle_secs=0)
    router.Router.from_args(arguments).start()
