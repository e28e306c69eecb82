"""``buffer-rl ledger PATH``: where the groups of a run are, what its newest tickets and selections did, what
happened to one group, and whether it adds up."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from buffer_rl.buffer.ledger_audit import LedgerAudit
from buffer_rl.buffer.ledger_file import FILE_NAME
from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.errors import ConfigError
from buffer_rl.observe.terminal import say
from buffer_rl.records.groups import GroupUid
from buffer_rl.verbs.run_records import refuse_absent
from buffer_rl.verbs.table import print_table, shown_time


def add_parser(subparsers: argparse._SubParsersAction[Any], argv: Sequence[str]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "ledger",
        description="Show how many groups of each epoch are pending, leased, finished, trained, rejected and\n"
        "quarantined. Also the leases of the newest tickets, the groups of the newest steps, the history of one\n"
        "group, and whether the accounting holds. The run may be at work.",
    )
    parser.add_argument(
        "path", metavar="PATH", help=f"a ledger, or a folder that holds {FILE_NAME}: of a run, or of a checkpoint"
    )
    parser.add_argument("--uid", metavar="UID", help="show where this group is and its history (SOURCE:ROW:EPOCH)")
    parser.add_argument("--verify", action="store_true", help="check the accounting; exit status 1 if it fails")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    """Returns 1 if ``--verify`` finds a fault. Raises ConfigError for a path or a uid that is not one, CheckpointError
    for a file that is damaged."""
    uid = _parsed(namespace.uid) if namespace.uid else None
    with closing(LedgerAudit(ledger_path(namespace.path))) as audit:
        facts = _group_facts(audit, uid) if uid else _run_facts(audit)
        faults = audit.faults() if namespace.verify else None
    if faults is not None:
        facts["faults"] = faults
    if namespace.json:
        say(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        _print_group(facts) if uid else _print_run(facts)
        if faults is not None:
            say("\n".join(["the accounting does not hold:", *faults]) if faults else "the accounting holds")
    return 1 if faults else 0


def ledger_path(path: str) -> Path:
    """The ledger that a user means: the file, or that in the folder of a run or of a checkpoint, or in the newest
    checkpoint of a folder. Raises ConfigError if there is none."""
    given = Path(path)
    if given.is_file():
        return given
    steps = sorted((step for step in given.glob("step_*") if step.is_dir()), key=lambda step: (len(step.name), step))
    for folder in (given, *reversed(steps)):
        # A checkpoint that was copied from a store has its files a folder below.
        for file in (folder / FILE_NAME, *sorted(folder.glob(f"files_*/{FILE_NAME}"))):
            if file.is_file():
                return file
    refuse_absent(path)
    expected = f"a file, or a folder that holds {FILE_NAME}"
    raise ConfigError("there is no ledger here", where=str(path), expected=expected)


def _parsed(text: str) -> GroupUid:
    try:
        return GroupUid.parse(text)
    except ValueError as error:
        raise ConfigError(f"{text!r} is not a uid", where="--uid", expected="SOURCE:ROW:EPOCH") from error


def _run_facts(audit: LedgerAudit) -> dict[str, Any]:
    facts, commits = audit.facts(), audit.commits()
    return {
        "path": str(audit.path),
        "run": facts.get("run", ""),
        "openings": int(facts.get("restarts", 0)),
        "commits": len(commits),
        "last_commit": dict(zip(("rollout_id", "step", "num_groups"), commits[-1], strict=True)) if commits else None,
        "epochs": [asdict(row) for row in audit.epochs()],
        "newest_tickets": [asdict(row) for row in audit.tickets()],
        "newest_selections": [asdict(row) for row in audit.selections()],
    }


def _group_facts(audit: LedgerAudit, uid: GroupUid) -> dict[str, Any]:
    entry, history = audit.entry(uid), [asdict(line) for line in audit.history(uid)]
    facts = {"entry": asdict(entry) if entry else None, "history": history}
    return {"path": str(audit.path), "uid": str(uid), **facts}


def _print_run(facts: dict[str, Any]) -> None:
    say(f"{facts['path']}: run {facts['run'] or '(no name)'}, openings: {facts['openings']}")
    if facts["last_commit"]:
        last = facts["last_commit"]
        say(f"{facts['commits']} rollouts committed, the last one is {last['rollout_id']} at step {last['step']}")
    rows = [
        [row["source"], _cell(row["epoch"], "foreign"), _cell(row["num_rows"], "?"), *map(str, row["counts"].values())]
        for row in facts["epochs"]
    ]
    print_table(["source", "epoch", "rows", *GroupState], rows)
    if lost := sum(row["counts"][GroupState.PENDING] for row in facts["epochs"] if row["epoch"] is None):
        say(f"{lost} foreign groups were lost before their step, or not needed, and not imported again")
    _print_newest(facts)


def _print_newest(facts: dict[str, Any]) -> None:
    if tickets := facts["newest_tickets"]:
        names = ("leased", "finished", "requeued", "rejected", "quarantined")
        say("\nnewest tickets")
        rows = [[f"train_{row['rollout_id']}", *(str(row[name]) for name in names)] for row in tickets]
        print_table(["rollout", *names], rows)
    if selections := facts["newest_selections"]:
        say("\nnewest selections")
        rows = []
        for row in selections:
            leased_by = ", ".join(f"train_{ticket}" for ticket in row["tickets"])
            rows.append([f"train_{row['rollout_id']}", str(row["num_groups"]), _cell(row["step"]), leased_by])
        print_table(["rollout", "groups", "weight version", "tickets"], rows)


def _cell(number: int | None, unknown: str = "") -> str:
    return unknown if number is None else str(number)


def _print_group(facts: dict[str, Any]) -> None:
    if facts["entry"] is None:
        say(f"group {facts['uid']} was never leased")
        return
    say(f"group {facts['uid']} is {facts['entry']['state']}")
    headings = ("time", "from", "to", "attempt", "rollout", "step", "opening", "reason")
    rows = []
    for line in facts["history"]:
        cells = [_cell(line[name]) for name in ("attempt", "rollout_id", "step", "incarnation")]
        rows.append([shown_time(line["time"]), line["before"], line["after"], *cells, line["reason"]])
    print_table(headings, rows)
