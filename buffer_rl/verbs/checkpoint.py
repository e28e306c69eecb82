"""``buffer-rl checkpoint verify PATH``: whether checkpoints are as they were written."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from buffer_rl.observe.terminal import say


def add_parser(subparsers: argparse._SubParsersAction[Any], argv: Sequence[str]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser("checkpoint", description="Check that checkpoints are whole.")
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


def run_verify(namespace: argparse.Namespace) -> int:
    """Check every checkpoint, also after a damaged one. Raises CheckpointError if there is none."""
    from buffer_rl.files.checkpoint import checkpoints_at, damaged_files, opened_checkpoint
    from buffer_rl.files.remote import is_remote, local_path
    from buffer_rl.options.redaction import mask_url

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
