"""``buffer-rl report RUN_DIR``: one HTML page of a run, finished or not. ``report RUN1 RUN2 …`` compares runs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from buffer_rl.buffer.ledger_audit import LedgerAudit
from buffer_rl.buffer.ledger_file import FILE_NAME
from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.errors import BufferRLError, CheckpointError, ConfigError, DataError
from buffer_rl.observe.checks import LedgerFacts
from buffer_rl.observe.metrics import METRICS_FILE
from buffer_rl.observe.terminal import say
from buffer_rl.verbs.table import print_notices


def add_parser(subparsers: argparse._SubParsersAction[Any], argv: Sequence[str]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "report",
        description="Write one HTML page of a run: five checks, curves, evaluation, timing, dropped groups, samples.\n"
        "Of several runs: one page that compares them. It needs no network and may be written while a run is at work.",
    )
    parser.add_argument(
        "run_dirs", metavar="RUN_DIR", nargs="+", help="the folder of a run (--run-dir of train); several are compared"
    )
    where = "where to write it (default: RUN_DIR/report.html, of several runs comparison.html here)"
    parser.add_argument("--output", metavar="FILE", help=where)
    parser.add_argument("--title", metavar="TEXT", default="", help="the heading (default: the folder's name)")
    parser.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    """Write the page and say where it is. Raises ConfigError or DataError."""
    from buffer_rl.observe.comparison import COMPARISON_FILE, render_comparison
    from buffer_rl.observe.page import write_page
    from buffer_rl.observe.report import read_report, write_report

    for folder in namespace.run_dirs:
        if not Path(folder).is_dir():
            raise ConfigError(f"there is no folder {folder!r}", where="RUN_DIR", expected="a run's folder")
    folders, is_one = namespace.run_dirs, len(namespace.run_dirs) == 1
    with _reading(", ".join(folders)):
        reports = [read_report(name, namespace.title if is_one else name, ledger_facts(name)) for name in folders]
        if is_one:
            page = write_report(reports[0], folders[0], namespace.output)
        else:
            page = write_page(render_comparison(reports, namespace.title), Path(namespace.output or COMPARISON_FILE))
    say(page)
    return 0


def report_run(run_dir: str | Path) -> None:
    """What a run shows at its end: the page, with what its ledger says, and a summary in the terminal. The run has
    ended, so a report that cannot be made is a notice."""
    from buffer_rl.observe.report import run_report

    try:
        with _reading(str(run_dir)):
            run_report(run_dir, ledger=ledger_facts(run_dir))
    except BufferRLError as error:
        print_notices([f"the run has ended, and its report could not be made: {error}"])


def has_written_metrics(run_dir: str | Path, since: float) -> bool:
    """Whether a run has written metrics ``since`` a time of the clock (``time.time``)."""
    path = Path(run_dir, METRICS_FILE)
    return path.is_file() and path.stat().st_size > 0 and path.stat().st_mtime >= since


@contextmanager
def _reading(where: str) -> Iterator[None]:
    """Raises DataError for whatever the block raises, but for errors raised on purpose: lines that are JSON may
    have any form. where: the folders of the runs."""
    try:
        yield
    except BufferRLError:
        raise
    except OSError as error:
        hint = "mend it, and try buffer-rl report again"
        raise DataError(f"the report could not be made: {error}", where=where, hint=hint) from error
    except Exception as error:  # fault boundary: the files may have been edited, or written by another program
        what = f"the report could not be made: {type(error).__name__}: {error}"
        expected = "metrics.jsonl, samples.jsonl and run.json as a run writes them"
        hint = "correct or remove what was edited there, and try buffer-rl report again"
        raise DataError(what, where=where, expected=expected, hint=hint) from error


def ledger_facts(run_dir: str | Path) -> LedgerFacts:
    """What the ledger in a run's folder says for the report's checks. One that is damaged is a fault."""
    path = Path(run_dir, FILE_NAME)
    if not path.is_file():
        return LedgerFacts(unread=f"the folder has no {FILE_NAME}")
    try:
        with closing(LedgerAudit(path)) as audit:
            epochs = audit.epochs()
            counts = {str(state): sum(epoch.counts[state] for epoch in epochs) for state in GroupState}
            return LedgerFacts(faults=audit.faults(), commits=audit.commits(), counts=counts)
    except CheckpointError as error:  # damaged, which is no lack of knowledge
        return LedgerFacts(faults=[str(error)])
