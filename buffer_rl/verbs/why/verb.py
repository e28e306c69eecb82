"""``buffer-rl why RUN UID|STEP``: what became of one group of a run and why, or where the time of one step went."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from buffer_rl.observe.terminal import say
from buffer_rl.records.groups import GroupUid


def add_parser(subparsers: argparse._SubParsersAction[Any], argv: Sequence[str]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "why",
        description="Tell the life of one group of a run: its attempts, weight versions and rewards, what filters\n"
        "decided, and the step that trained on it or the reason why none did. Or tell of one step how long its\n"
        "phases took, who waited for whom, and which groups it trained on and dropped. The run may be at work.",
    )
    parser.add_argument("run_dir", metavar="RUN", help="the folder of the run (--run-dir of train)")
    parser.add_argument(
        "asked", metavar="UID|STEP", help="a group (SOURCE:ROW:EPOCH), or a step as metrics.jsonl numbers it, from 0"
    )
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")
    parser.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    """Print the facts. Raises ConfigError for what the run does not have, CheckpointError for a ledger that is damaged,
    DataError for a line of its files that is."""
    from buffer_rl.verbs.run_records import RunRecords
    from buffer_rl.verbs.why.group_life import group_life, unknown_uid
    from buffer_rl.verbs.why.step_life import step_life

    with RunRecords.opened(namespace.run_dir) as records:
        text = namespace.asked.removeprefix("train_")
        if text.isdecimal():
            heading, facts = f"step {int(text)}", step_life(records, int(text)).facts()
        else:
            try:
                uid = GroupUid.parse(text.partition("/")[0])  # also of a row of it: UID/SAMPLE.PART
            except ValueError:
                raise unknown_uid(records, text) from None
            life = group_life(records, uid)
            state = life.kind if life.kind == "evaluation" else life.state
            heading, facts = f"group {uid}: {state}{f' ({life.reason})' if life.reason else ''}", life.facts()
    if namespace.json:
        say(json.dumps(facts, indent=2, ensure_ascii=False))
        return 0
    say("\n".join([heading, *(f"  {sentence}" for sentence in facts["sentences"])]))
    for what in facts["not_recorded"]:
        say(f"  Not recorded: {what}.")
    return 0
