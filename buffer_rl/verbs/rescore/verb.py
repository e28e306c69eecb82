"""``buffer-rl rescore RUN``: another reward on the samples that a run has recorded, compared with the run's own."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from buffer_rl.args import Args
from buffer_rl.errors import ConfigError, raised_as
from buffer_rl.observe.terminal import say
from buffer_rl.options.checks import refuse
from buffer_rl.options.help import add_options, given_flags
from buffer_rl.options.redaction import MASK
from buffer_rl.options.section import compose, flag_of
from buffer_rl.options.sources import resolve
from buffer_rl.verbs.table import print_notices, print_table
from buffer_rl.verbs.train import sections_of

if TYPE_CHECKING:
    from buffer_rl.verbs.run_records import RunRecords

SECTION = "buffer_rl.rollout.options:RewardOptions"
CHOICES = ("rm_type", "custom_rm_path", "custom_group_rm_path", "rm_model")
"""Options of which one says what scores; giving one replaces the run's."""
_DESCRIPTION = """\
Score the samples that a run has recorded by another reward, with the run's options otherwise, and compare: mean
rewards, rank correlation, equal rewards and best samples, groups that the run's filter would drop, advantages that
change their sign. No engine is started. The samples are those of --save-debug-rollout-data, which has all of a step,
or of samples.jsonl (--dump-samples groups a rollout).
"""


def add_parser(subparsers: argparse._SubParsersAction[Any], argv: Sequence[str]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser("rescore", description=_DESCRIPTION)
    parser.add_argument("folder", metavar="RUN", help="the folder of the run (--run-dir of train)")
    parser.add_argument("--output", metavar="FILE", help="write one line of JSON a sample, with both rewards")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_options(parser, [SECTION])
    parser.set_defaults(run=run, sections=[SECTION])


def run(namespace: argparse.Namespace) -> int:
    """Print the comparison. Returns 1 if no group could be scored. Raises BufferRLError."""
    from buffer_rl.verbs.rescore.recorded_groups import RecordReader
    from buffer_rl.verbs.rescore.rescoring import facts_of, rescore, write_rows
    from buffer_rl.verbs.run_records import RunRecords

    with RunRecords.opened(namespace.folder) as records:
        args = options_of(records, namespace)
        reader = RecordReader(records, args)
        steps = reader.steps()
    print_notices(reader.notices)
    if not any(step.groups or step.skipped for step in steps):
        hint = "--dump-samples N writes N groups per rollout to samples.jsonl; --save-debug-rollout-data whole steps"
        raise ConfigError("the run has recorded no samples", where=str(namespace.folder), hint=hint)
    rescored = asyncio.run(rescore(args, steps, records.facts.option("--reward-key")))
    facts = {"run_dir": str(namespace.folder), "reward": _reward_of(args), **facts_of(rescored)}
    if namespace.output:
        with raised_as(ConfigError, "the rows cannot be written", OSError, where="--output"):
            facts["rows_written"] = write_rows(Path(namespace.output), rescored)
    if namespace.json:
        say(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        _print(facts)
    return 0 if facts["all"]["groups"] else 1


def options_of(records: RunRecords, namespace: argparse.Namespace) -> Args:
    """The run's options, as ``run.json`` has them, with the reward options that the command gives. A reward that is
    given replaces the run's, its ``--reward-key`` too. Raises ConfigError."""
    given = given_flags(namespace)
    base = {flag.removeprefix("--").replace("-", "_"): value for flag, value in records.facts.changed.items()}
    base = {name: value for name, value in base.items() if MASK not in json.dumps(value)}  # the secrets are not there
    options_class = compose(sections_of(base.get("plugin") or []))
    if any(name in given for name in CHOICES):
        for name in (*CHOICES, "reward_key"):
            base.pop(name, None)
    chosen = resolve(compose([SECTION]), flags=given, environ={}).args
    base |= {name: getattr(chosen, name) for name in given}
    what = "--rm-model: a reward model needs processes, which are not started here"
    refuse(bool(base.get("rm_model")), what, "add --rm-type NAME or --custom-rm-path module:fn")
    try:
        return options_class.model_validate(base)
    except ValidationError as error:
        names = sorted({flag_of(str(detail["loc"][0])) for detail in error.errors() if detail["loc"]})
        what = f"the run's options are not those of this version: {', '.join(names) or error}"
        raise ConfigError(what, where="run.json") from error


def _reward_of(args: Args) -> str:
    return next((f"{flag_of(name)} {getattr(args, name)}" for name in CHOICES if getattr(args, name)), "of the rows")


def _print(facts: Mapping[str, Any]) -> None:
    say(f"{facts['run_dir']}: scored by {facts['reward']}")
    headings = ("rollout", "groups", "old mean", "new mean", "rank corr.", "equal", "equal best", "drops", "signs")
    everything, rows = facts["all"], [_cells(f"train_{step['rollout_id']}", step) for step in facts["steps"]]
    print_table(headings, [*rows, _cells("all", everything)])
    for what in ("dropped", "failed"):
        if everything[what]:
            say(f"{what}: " + ", ".join(f"{count} {reason}" for reason, count in everything[what].items()))
    for reason, error in facts["errors"].items():
        say(f"{reason}, the first: {error.splitlines()[0]}")
    if everything["of"] is not None and everything["groups"] < everything["of"]:
        say(f"{everything['groups']} of {everything['of']} groups were scored; the others are not recorded, or failed")
    if "rows_written" in facts:
        say(f"{facts['rows_written']} rows written")


def _cells(name: str, of: Mapping[str, Any]) -> list[str]:
    forms = {"old": ".4g", "new": ".4g", "correlation": ".4g", "equal_rewards": ".0%", "equal_best": ".0%"}
    return [
        name,
        f"{of['groups']} of {'?' if of['of'] is None else of['of']}",
        *("-" if of[key] is None else format(of[key], form) for key, form in forms.items()),
        str(sum(of["dropped"].values())),
        "-" if of["signs"] is None else f"{of['signs']} of {of['rows']}",
    ]
