"""``buffer-rl data validate FILES…``, ``buffer-rl data show FILE -n 3`` and ``buffer-rl data stats FILES…``."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, median
from typing import Any

from buffer_rl.args import Args
from buffer_rl.data.dataset import PromptDataset, PromptRow, RowKeys
from buffer_rl.data.options import DataOptions
from buffer_rl.data.reader import read_dataset
from buffer_rl.errors import DataError
from buffer_rl.observe.terminal import say
from buffer_rl.options.help import add_config_flag, add_option
from buffer_rl.options.sources import resolve_namespace
from buffer_rl.records.groups import Prompt
from buffer_rl.rollout.prompts import PromptEncoder, load_tokenizer
from buffer_rl.trainer.options import TrainOptions
from buffer_rl.verbs.row_sources import RowSource, at_row, encode_row
from buffer_rl.verbs.table import print_notices
from buffer_rl.verbs.train import sections_of

_FILE_HELP = "a .jsonl or .parquet file, or a folder of Hugging Face datasets; file@[start:end] is a slice"
_FIELDS = ("input_key", "label_key", "metadata_key", "tool_key", "id_key", "decode_json", "multimodal_keys")
_RENDERING = ("hf_checkpoint", "apply_chat_template", "apply_chat_template_kwargs", "add_special_tokens")


def add_parser(subparsers: argparse._SubParsersAction[Any], argv: Sequence[str]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser("data", description="Validate, show and count data files.")
    actions = parser.add_subparsers(metavar="ACTION", required=True, dest="action")
    validate = actions.add_parser("validate", help="read every row; exit status 2 if one is bad")
    show = actions.add_parser("show", help="print rows as a run reads them, one JSON object per line")
    show.add_argument("file", metavar="FILE", help=_FILE_HELP)
    show.add_argument("-n", type=int, default=3, metavar="INT", help="number of rows (default: 3)")
    stats = actions.add_parser("stats", help="count rows, lengths, duplicates and metadata of each file")
    stats.add_argument("--json", action="store_true", help="print one JSON object per file")
    fields = {**DataOptions.model_fields, **TrainOptions.model_fields}
    for action, run in ((validate, run_validate), (show, run_show), (stats, run_stats)):
        action.set_defaults(run=run)
        if action is not show:
            action.add_argument("files", nargs="+", metavar="FILE", help=_FILE_HELP)
        add_config_flag(action)
        for name in (*_FIELDS, *_RENDERING) if action is show else _FIELDS:
            add_option(action, name, fields[name])


def run_validate(namespace: argparse.Namespace) -> int:
    """Check every file, also after a bad one."""
    bad = 0
    for file in namespace.files:
        try:
            dataset = read_dataset(file, RowKeys.from_args(_options(namespace)))
        except DataError as error:
            say(error, file=sys.stderr)
            bad += 1
        else:
            say(f"{file}: {len(dataset)} rows, source {dataset.source_hash}")
            print_notices(dataset.notices)
    return 2 if bad else 0


def run_show(namespace: argparse.Namespace) -> int:
    """Print the first rows, with ``--hf-checkpoint`` as the model reads them."""
    args = _options(namespace)
    dataset = read_dataset(namespace.file, RowKeys.from_args(args))
    source = RowSource(use="train", path=namespace.file, dataset=dataset)
    encoder = None
    if args.hf_checkpoint:
        tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=args.trust_remote_code)
        encoder = PromptEncoder.from_args(args, tokenizer)
    else:
        print_notices(["--hf-checkpoint FOLDER also shows each prompt as the model reads it, and its number of tokens"])
    for row in itertools.islice(dataset, max(0, namespace.n)):
        shown: dict[str, Any] = {"line" if dataset.parts[0].unit == "line" else "file_row": row.line}
        shown |= {name: getattr(row, name) for name in ("row", "id", "prompt", "label", "metadata")}
        if row.multimodal is not None:
            shown["multimodal"] = row.multimodal
        if encoder is not None:
            shown |= _as_read(args, encoder, source, row)
        say(json.dumps(shown, ensure_ascii=False, default=lambda value: f"<{len(value)} bytes>"))
    return 0


def _as_read(args: Args, encoder: PromptEncoder, source: RowSource, row: PromptRow) -> dict[str, Any]:
    """The text of the row's prompt and its number of tokens; for a conversation that ends with an answer those of all
    of it, as supervised fine-tuning reads it."""
    if row.label is not None or isinstance(row.prompt, str) or row.prompt[-1].get("role") != "assistant":
        return {"text": source.rendered(row, encoder), "tokens": len(encode_row(encoder, source, row))}
    from buffer_rl.rollout.sft import encode_conversation

    with at_row(source, row):
        tokens, mask = encode_conversation(encoder, source.sample(row), args.loss_mask_type)
    return {"text": encoder.tokenizer.decode(tokens), "tokens": len(tokens), "trained_tokens": sum(mask)}


def run_stats(namespace: argparse.Namespace) -> int:
    """Print what the rows of each file are like."""
    for file in namespace.files:
        facts = dataset_stats(file, read_dataset(file, RowKeys.from_args(_options(namespace))))
        say(json.dumps(facts, ensure_ascii=False) if namespace.json else stats_text(facts))
    return 0


def dataset_stats(file: str, dataset: PromptDataset) -> dict[str, Any]:
    """Counts of ``dataset``, which was read from ``file``. A label of several answers counts each of them in
    ``label_lengths``.

    duplicate_prompts: rows whose prompt an earlier row has. conflicting_labels: prompts that come with more than one
    label. metadata: in how many rows each key is.
    """
    labels_of: dict[str, set[str]] = {}
    for row in dataset:
        labels_of.setdefault(_canonical(row.prompt), set()).add(_canonical(row.label))
    labels = [row.label for row in dataset if row.label is not None]
    answers = [answer for label in labels for answer in (label if isinstance(label, list) else [label])]
    return {
        "file": file,
        "rows": len(dataset),
        "chat_rows": sum(not isinstance(row.prompt, str) for row in dataset),
        "prompt_lengths": _lengths([_prompt_length(row.prompt) for row in dataset]),
        "labelled_rows": len(labels),
        "label_lengths": _lengths([len(str(answer)) for answer in answers]),
        "distinct_labels": len({_canonical(label) for label in labels}),
        "duplicate_prompts": len(dataset) - len(labels_of),
        "conflicting_labels": sum(len(labels) > 1 for labels in labels_of.values()),
        "metadata": dict(sorted(Counter(key for row in dataset for key in row.metadata).items())),
    }


def _lengths(lengths: Sequence[int]) -> dict[str, float]:
    """Extremes, median and mean in characters; all 0 if nothing was measured."""
    found = lengths or [0]
    return {
        "shortest": min(found),
        "median": float(median(found)),
        "mean": mean(found) if lengths else 0.0,
        "longest": max(found),
    }


def _prompt_length(prompt: Prompt) -> int:
    """Characters of the text; of chat messages, those of every content and of its parts' texts."""
    return len(prompt) if isinstance(prompt, str) else sum(_content_length(message) for message in prompt)


def stats_text(stats: Mapping[str, Any]) -> str:
    """The counts for people, one a line."""
    metadata = ", ".join(f"{key} ({count})" for key, count in stats["metadata"].items())
    shown = "{shortest} to {longest} characters, median {median:g}, mean {mean:.1f}"
    labels = f"in {stats['labelled_rows']} rows, {stats['distinct_labels']} distinct"
    labels += f"; {shown.format(**stats['label_lengths'])}" if stats["labelled_rows"] else ""
    several = f"{stats['conflicting_labels']} prompts have several labels"
    lines = [
        f"{stats['file']}: {stats['rows']} rows",
        f"  prompts    {shown.format(**stats['prompt_lengths'])}; {stats['chat_rows']} of chat messages",
        f"  labels     {labels}",
        f"  duplicates {stats['duplicate_prompts']} rows repeat an earlier prompt; {several}",
        f"  metadata   {metadata or 'none'}",
    ]
    return "\n".join(lines)


def _content_length(message: object) -> int:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str):
        return len(content)
    parts: Iterable[object] = content if isinstance(content, list) else ()
    return sum(len(str(part.get("text", ""))) for part in parts if isinstance(part, dict))


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


def _options(namespace: argparse.Namespace) -> Args:
    """The options of a run, of which the flags here are a few."""
    namespace.sections = sections_of(())
    return resolve_namespace(namespace).args
