"""``buffer-rl data validate FILES…`` and ``buffer-rl data show FILE -n 3``."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from typing import Any

from buffer_rl.data.options import DataOptions
from buffer_rl.data.reader import read_dataset
from buffer_rl.data.row import RowKeys
from buffer_rl.errors import DataError

_KEYS = ("input_key", "label_key", "metadata_key", "id_key")


def add_parser(subparsers: argparse._SubParsersAction[Any], argv: Sequence[str]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser("data", description="Validate and show data files.")
    actions = parser.add_subparsers(metavar="ACTION", required=True, dest="action")
    validate = actions.add_parser("validate", help="read every row; exit status 2 if one is bad")
    validate.add_argument("files", nargs="+", metavar="FILE", help="file.jsonl or file.jsonl@[start:end]")
    validate.set_defaults(run=run_validate)
    show = actions.add_parser("show", help="print rows as they are understood, one JSON object a line")
    show.add_argument("file", metavar="FILE", help="file.jsonl or file.jsonl@[start:end]")
    show.add_argument("-n", type=int, default=3, metavar="INT", help="how many rows (default: 3)")
    show.set_defaults(run=run_show)
    for action in (validate, show):
        for name in _KEYS:
            field = DataOptions.model_fields[name]
            action.add_argument(
                "--" + name.replace("_", "-"),
                default=field.default,
                metavar="TEXT",
                help=f"{field.description} (default: {field.default})",
            )


def run_validate(namespace: argparse.Namespace) -> int:
    """Check every file, also after a bad one."""
    bad = 0
    for file in namespace.files:
        try:
            dataset = read_dataset(file, _row_keys(namespace))
        except DataError as error:
            print(error, file=sys.stderr)
            bad += 1
        else:
            print(f"{file}: {len(dataset)} rows, source {dataset.source_hash}")
    return 2 if bad else 0


def run_show(namespace: argparse.Namespace) -> int:
    """Print the first rows."""
    dataset = read_dataset(namespace.file, _row_keys(namespace))
    for row in itertools.islice(dataset, max(0, namespace.n)):
        shown = {
            "line": row.line,
            "row": row.row,
            "id": row.id,
            "prompt": row.prompt,
            "label": row.label,
            "metadata": row.metadata,
        }
        print(json.dumps(shown, ensure_ascii=False))
    return 0


def _row_keys(namespace: argparse.Namespace) -> RowKeys:
    label = None if namespace.label_key.lower() == "none" else namespace.label_key
    return RowKeys(prompt=namespace.input_key, label=label, metadata=namespace.metadata_key, id=namespace.id_key)
