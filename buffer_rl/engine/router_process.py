"""``python -m buffer_rl.engine.router_process``: the real ``sglang-router``, with its own flags, ended with its parent."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from buffer_rl.engine.process import PARENT_FD_FLAG, exit_with_parent


def main(argv: Sequence[str] | None = None) -> int:
    """Run the router until a signal; flags are those of ``sglang_router.launch_router`` and ``--parent-fd``."""
    rest = list(sys.argv[1:] if argv is None else argv)
    if PARENT_FD_FLAG in rest:
        at = rest.index(PARENT_FD_FLAG)
        exit_with_parent(int(rest[at + 1]))
        del rest[at : at + 2]
    from sglang_router.launch_router import launch_router, parse_router_args

    launch_router(parse_router_args(rest))
    return 0


if __name__ == "__main__":
    sys.exit(main())
