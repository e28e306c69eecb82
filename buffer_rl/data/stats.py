"""What the rows of a data file are like: lengths, duplicates, labels, metadata."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median

from buffer_rl.data.dataset import PromptDataset
from buffer_rl.records.groups import Prompt


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
        prompt_lengths=Lengths.of([prompt_length(row.prompt) for row in dataset]),
        labelled_rows=len(labels),
        label_lengths=Lengths.of([len(str(answer)) for answer in answers]),
        distinct_labels=len({_canonical(label) for label in labels}),
        duplicate_prompts=len(dataset) - len(labels_of),
        conflicting_labels=sum(len(labels) > 1 for labels in labels_of.values()),
        metadata=dict(sorted(Counter(key for row in dataset for key in row.metadata).items())),
    )


def prompt_length(prompt: Prompt) -> int:
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
