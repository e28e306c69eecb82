"""``buffer-rl data validate FILES…``, ``buffer-rl data show FILE -n 3`` and ``buffer-rl data stats FILES…``."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from buffer_rl.data.dataset import RowKeys
from buffer_rl.data.options import DataOptions
from buffer_rl.data.reader import read_dataset
from buffer_rl.data.stats import dataset_stats, stats_text
from buffer_rl.errors import DataError
from buffer_rl.observe.terminal import say
from buffer_rl.options.values import convert, option_type

_FILE_HELP = "a .jsonl or .parquet file, or a folder of Hugging Face datasets; file@[start:end] is a slice"
_KEYS = ("input_key", "label_key", "metadata_key", "tool_key", "id_key")


def add_parser(subparsers: argparse._SubParsersAction[Any], argv: Sequence[str]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser("data", description="Validate, show and count data files.")
    actions = parser.add_subparsers(metavar="ACTION", required=True, dest="action")
    validate = actions.add_parser("validate", help="read every row; exit status 2 if one is bad")
    validate.add_argument("files", nargs="+", metavar="FILE", help=_FILE_HELP)
    validate.set_defaults(run=run_validate)
    show = actions.add_parser("show", help="print rows as they are understood, one JSON object a line")
    show.add_argument("file", metavar="FILE", help=_FILE_HELP)
    show.add_argument("-n", type=int, default=3, metavar="INT", help="how many rows (default: 3)")
    show.set_defaults(run=run_show)
    stats = actions.add_parser("stats", help="count rows, lengths, duplicates and metadata of each file")
    stats.add_argument("files", nargs="+", metavar="FILE", help=_FILE_HELP)
    stats.add_argument("--json", action="store_true", help="print one JSON object a file")
    stats.set_defaults(run=run_stats)
    for action in (validate, show, stats):
        for name in _KEYS:
            field = DataOptions.model_fields[name]
            action.add_argument(
                "--" + name.replace("_", "-"),
                default=field.default,
                metavar="TEXT",
                help=f"{field.description} (default: {field.default})",
            )
        action.add_argument(
            "--decode-json",
            action=argparse.BooleanOptionalAction,
            default=True,
            help=DataOptions.model_fields["decode_json"].description,
        )
        action.add_argument(
            "--multimodal-keys",
            type=_media,
            default=(),
            metavar="MEDIA=FIELD,...",
            help=DataOptions.model_fields["multimodal_keys"].description,
        )


def run_validate(namespace: argparse.Namespace) -> int:
    """Check every file, also after a bad one."""
    bad = 0
    for file in namespace.files:
        try:
            dataset = read_dataset(file, _row_keys(namespace))
        except DataError as error:
            say(error, file=sys.stderr)
            bad += 1
        else:
            say(f"{file}: {len(dataset)} rows, source {dataset.source_hash}")
            for text in dataset.notices:
                say(f"buffer-rl: notice: {text}", file=sys.stderr)
    return 2 if bad else 0


def run_show(namespace: argparse.Namespace) -> int:
    """Print the first rows."""
    dataset = read_dataset(namespace.file, _row_keys(namespace))
    for row in itertools.islice(dataset, max(0, namespace.n)):
        shown = {
            dataset.unit if dataset.unit == "line" else "file_row": row.line,
            "row": row.row,
            "id": row.id,
            "prompt": row.prompt,
            "label": row.label,
            "metadata": row.metadata,
        }
        if row.multimodal is not None:
            shown["multimodal"] = row.multimodal
        say(json.dumps(shown, ensure_ascii=False, default=lambda value: f"<{len(value)} bytes>"))
    return 0


def run_stats(namespace: argparse.Namespace) -> int:
    """Print what the rows of each file are like."""
    for file in namespace.files:
        facts = dataset_stats(file, read_dataset(file, _row_keys(namespace)))
        say(json.dumps(asdict(facts), ensure_ascii=False) if namespace.json else stats_text(facts))
    return 0


def _row_keys(namespace: argparse.Namespace) -> RowKeys:
    label, tools = (None if key.lower() == "none" else key for key in (namespace.label_key, namespace.tool_key))
    return RowKeys(
        prompt=namespace.input_key,
        label=label,
        metadata=namespace.metadata_key,
        tools=tools,
        id=namespace.id_key,
        multimodal=namespace.multimodal_keys,
        decode_json=namespace.decode_json,
    )


def _media(text: str) -> tuple[tuple[str, str], ...]:
    value = convert(option_type(DataOptions.model_fields["multimodal_keys"]), text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not MEDIA=FIELD, for example image=images")
    return tuple(sorted((str(media), str(field)) for media, field in value.items()))
