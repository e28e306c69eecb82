"""``buffer-rl report RUN_DIR``: one HTML page of a run, finished or not."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from buffer_rl.errors import ConfigError
from buffer_rl.observe.terminal import say


def add_parser(subparsers: argparse._SubParsersAction[Any], argv: Sequence[str]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "report",
        description="Write one HTML page of a run: curves, evaluation, timing, dropped groups, samples. It needs\n"
        "no network and may be written while the run is still at work.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the folder of the run (--run-dir of train)")
    parser.add_argument("--output", metavar="FILE", help="where to write it (default: RUN_DIR/report.html)")
    parser.add_argument("--title", metavar="TEXT", default="", help="the heading (default: the folder's name)")
    parser.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    """Write the page and say where it is. Raises ConfigError or DataError."""
    from buffer_rl.observe.report import write_report

    if not Path(namespace.run_dir).is_dir():
        raise ConfigError(f"there is no folder {namespace.run_dir!r}", where="RUN_DIR", expected="a run's folder")
    say(write_report(namespace.run_dir, namespace.output, namespace.title))
    return 0
