"""``buffer-rl data validate FILES…``, ``buffer-rl data show FILE -n 3`` and ``buffer-rl data stats FILES…``."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

from buffer_rl.data.dataset import PromptDataset, RowKeys
from buffer_rl.data.options import DataOptions
from buffer_rl.data.reader import read_dataset
from buffer_rl.errors import DataError
from buffer_rl.observe.terminal import say
from buffer_rl.options.values import convert, option_type
from buffer_rl.records.groups import Prompt

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lengths in characters; all 0 where nothing was measured."""

    shortest: int = 0
    median: float = 0.0
    mean: float = 0.0
    longest: int = 0

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Lengths:
        """The lengths' extremes, median and mean."""
        if not lengths:
            return cls()
        return cls(shortest=min(lengths), median=float(median(lengths)), mean=mean(lengths), longest=max(lengths))


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetStats:
    """Counts of one file. A label of several answers counts each of them in ``label_lengths``.

    duplicate_prompts: rows whose prompt an earlier row has. conflicting_labels: prompts that come with more than one
    label. metadata: in how many rows each key is.
    """

    file: str
    rows: int
    chat_rows: int
    prompt_lengths: Lengths
    labelled_rows: int
    label_lengths: Lengths
    distinct_labels: int
    duplicate_prompts: int
    conflicting_labels: int
    metadata: dict[str, int]


def dataset_stats(file: str, dataset: PromptDataset) -> DatasetStats:
    """Count the rows of ``dataset``, which was read from ``file``."""
    labels_of: dict[str, set[str]] = {}
    for row in dataset:
        labels_of.setdefault(_canonical(row.prompt), set()).add(_canonical(row.label))
    labels = [row.label for row in dataset if row.label is not None]
    answers = [answer for label in labels for answer in (label if isinstance(label, list) else [label])]
    return DatasetStats(
        file=file,
        rows=len(dataset),
        chat_rows=sum(not isinstance(row.prompt, str) for row in dataset),
        prompt_lengths=Lengths.of([_prompt_length(row.prompt) for row in dataset]),
        labelled_rows=len(labels),
        label_lengths=Lengths.of([len(str(answer)) for answer in answers]),
        distinct_labels=len({_canonical(label) for label in labels}),
        duplicate_prompts=len(dataset) - len(labels_of),
        conflicting_labels=sum(len(labels) > 1 for labels in labels_of.values()),
        metadata=dict(sorted(Counter(key for row in dataset for key in row.metadata).items())),
    )


def _prompt_length(prompt: Prompt) -> int:
    """Characters of the text; of chat messages, those of every content and of its parts' texts."""
    return len(prompt) if isinstance(prompt, str) else sum(_content_length(message) for message in prompt)


def stats_text(stats: DatasetStats) -> str:
    """The counts for people, one a line."""
    metadata = ", ".join(f"{key} ({count})" for key, count in stats.metadata.items())
    lines = [
        f"{stats.file}: {stats.rows} rows",
        f"  prompts    {_lengths_text(stats.prompt_lengths)}; {stats.chat_rows} of chat messages",
        f"  labels     in {stats.labelled_rows} rows, {stats.distinct_labels} distinct"
        + (f"; {_lengths_text(stats.label_lengths)}" if stats.labelled_rows else ""),
        f"  duplicates {stats.duplicate_prompts} rows repeat an earlier prompt;"
        f" {stats.conflicting_labels} prompts have several labels",
        f"  metadata   {metadata or 'none'}",
    ]
    return "\n".join(lines)


def _lengths_text(lengths: Lengths) -> str:
    return f"{lengths.shortest} to {lengths.longest} characters, median {lengths.median:g}, mean {lengths.mean:.1f}"


def _content_length(message: object) -> int:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str):
        return len(content)
    parts: Iterable[object] = content if isinstance(content, list) else ()
    return sum(len(str(part.get("text", ""))) for part in parts if isinstance(part, dict))


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


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
