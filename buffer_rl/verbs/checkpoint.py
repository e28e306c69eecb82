"""``buffer-rl checkpoint``: whether checkpoints are whole, what a folder has of them, and removing some."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from buffer_rl.driver.folders import folder_lock
from buffer_rl.errors import CheckpointError, ConfigError
from buffer_rl.files.checkpoint import (
    CheckpointFolder,
    Held,
    best_step,
    checkpoints_at,
    damaged_files,
    folder_at,
    held_checkpoints,
    kept_steps,
    opened_checkpoint,
)
from buffer_rl.files.remote import is_remote, local_path
from buffer_rl.observe.terminal import say
from buffer_rl.options.redaction import mask_url
from buffer_rl.verbs.resources import bytes_text
from buffer_rl.verbs.run_records import refuse_absent
from buffer_rl.verbs.table import print_table

_LIST = "show step, size, time, evaluations (a star at the best) and options of each checkpoint"
_PRUNE = "remove all checkpoints but the newest and the best; one that is being read stays"
MAX_OPTIONS = 240
"""Characters of a run's options in a list."""


def add_parser(subparsers: argparse._SubParsersAction[Any], argv: Sequence[str]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser("checkpoint", description="Check, list and remove checkpoints.")
    actions = parser.add_subparsers(metavar="ACTION", required=True, dest="action")
    verify = actions.add_parser(
        "verify",
        help="compare every file with the manifest; exit status 2 if one is damaged",
        description="Compare every file of a checkpoint, or of all in a folder, with the size and the hash in its\n"
        "manifest, and name each that is damaged or missing. Of the checkpoints at a URL the newest is downloaded.",
    )
    verify.add_argument(
        "path", metavar="PATH", help="a folder or URL step_NNNNNN, or --save's, then all of them (of a URL the newest)"
    )
    verify.set_defaults(run=run_verify)
    listing, prune = (actions.add_parser(n, help=t, description=t) for n, t in (("list", _LIST), ("prune", _PRUNE)))
    for action, run in ((listing, run_list), (prune, run_prune)):
        action.add_argument("path", metavar="PATH", help="the folder or URL of --save")
        action.set_defaults(run=run)
    prune.add_argument(
        "--keep-last", type=int, required=True, metavar="N", help="how many of the newest remain, at least 1"
    )
    prune.add_argument("--keep-best", metavar="EVAL", help="eval/NAME: its best remains too (=-eval/NAME: the lowest)")
    prune.add_argument("--dry-run", action="store_true", help="show what would be removed, and remove nothing")


def _written(value: object) -> str:
    """A value as one would write it behind its flag."""
    return shlex.join(map(str, value)) if isinstance(value, list) else str(value)


def run_list(namespace: argparse.Namespace) -> int:
    """Print a line for each checkpoint, and one for each run. Raises CheckpointError if there is none."""
    _, found, metrics = _found(namespace.path)
    scores = {step: held.scores for step, held in found.items()}
    lowest = str(found[max(found)].manifest.facts.get("options", {}).get("keep_best"))  # with a leading -
    best = {name: best_step(scores, f"-{name}" if lowest == f"-{name}" else name) for name in metrics}
    rows, runs = [], dict[str, int]()
    for step, held in found.items():
        facts, noted = held.manifest.facts, [(name, held.scores.get(name)) for name in metrics]
        cells = ["" if score is None else f"{score:.4g}{'*' * (best[name] == step)}" for name, score in noted]
        options = " ".join(f"{flag} {_written(value)}" for flag, value in facts.get("changed", {}).items())
        options = options[:MAX_OPTIONS]
        run = runs.setdefault(options, len(runs) + 1)
        rows.append([str(step), _size(held), str(facts.get("saved", "")), *cells, str(run)])
    rows[-1][0] += " (newest)"
    print_table(["step", "size", "saved", *metrics, "run"], rows)
    for options, number in runs.items():
        say(f"run {number}: {options}")
    return 0


def run_prune(namespace: argparse.Namespace) -> int:
    """Remove what is not kept. Raises CheckpointError, also for a metric that no checkpoint has; ConfigError if a run
    is saving to the folder."""
    folder, found, metrics = _found(namespace.path)
    if namespace.keep_last < 1:
        raise ConfigError("the newest checkpoint always remains", where="--keep-last", expected="at least 1")
    if namespace.keep_best and namespace.keep_best.removeprefix("-") not in metrics:
        known = f"one of {', '.join(metrics) or 'none'}"
        raise ConfigError(f"no checkpoint has {namespace.keep_best!r}", where="--keep-best", expected=known)
    local = local_path(namespace.path)
    with nullcontext() if namespace.dry_run or is_remote(local) else folder_lock(Path(local), "PATH"):
        scores = {step: held.scores for step, held in found.items()}
        kept = kept_steps(scores, namespace.keep_last, namespace.keep_best)
        for step, held in found.items():
            done = "kept" if step in kept else "would be removed"
            if step not in kept and not namespace.dry_run:
                folder.remove(held.name)
                done = "kept: it is being read" if held.name in folder.names() else "removed"
            say(f"{held.name}  {_size(held)}  {done}")
    return 0


def _found(path: str) -> tuple[CheckpointFolder, dict[int, Held], list[str]]:
    """The checkpoints there, and the names of their evaluations. Raises CheckpointError if there is none."""
    refuse_absent(path)
    folder = folder_at(path)
    if not (found := held_checkpoints(folder)):
        raise CheckpointError("the folder holds no checkpoint", where=mask_url(path))
    return folder, found, sorted({name for held in found.values() for name in held.scores if name.count("/") == 1})


def _size(held: Held) -> str:
    return bytes_text(sum(size for size, _ in held.manifest.files.values()))


def run_verify(namespace: argparse.Namespace) -> int:
    """Check every checkpoint, also after a damaged one. Raises CheckpointError if there is none."""
    if is_remote(local_path(namespace.path)):
        with opened_checkpoint(namespace.path) as checkpoint:
            say(f"{mask_url(namespace.path)}: the checkpoint after {checkpoint.step} steps is whole")
        return 0
    bad = 0
    for folder in checkpoints_at(namespace.path):
        faults = damaged_files(folder)
        bad += bool(faults)
        say(f"{folder}: {f'DAMAGED, {len(faults)} faults' if faults else 'whole'}")
        for fault in faults:
            say(fault, file=sys.stderr)
    return 2 if bad else 0
