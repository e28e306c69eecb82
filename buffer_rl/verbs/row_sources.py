"""The rows that a run reads, with the places of the files that errors name, and what a trial of them finds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from buffer_rl.args import Args
from buffer_rl.data.dataset import PromptDataset, PromptRow, RowKeys
from buffer_rl.data.eval_sets import EvalSet, eval_sets_of
from buffer_rl.data.reader import read_dataset
from buffer_rl.data.source import make_group, read_sources
from buffer_rl.errors import BufferRLError, DataError
from buffer_rl.records.groups import GroupUid, Sample
from buffer_rl.rollout.prompts import PromptEncoder


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSource:
    """Rows that a run reads. use: ``train`` or ``eval/NAME``; eval_set: what else the options say of that set."""

    use: str
    path: str
    dataset: PromptDataset
    eval_set: EvalSet | None = None

    def facts(self) -> dict[str, Any]:
        """What a run notes of it."""
        of_dataset = {"num_rows": len(self.dataset), "source_hash": self.dataset.source_hash}
        return {"use": self.use, "path": self.path, **of_dataset}

    def sample(self, row: PromptRow) -> Sample:
        """The row as the rollout function gets it."""
        adapted = self.eval_set.adapt(row) if self.eval_set is not None else row
        uid = GroupUid(self.dataset.source_hash, row.row, 0)
        return make_group(adapted, uid, num_samples=1, group_index=row.row, index=row.row)[0]

    def rendered(self, row: PromptRow, encoder: PromptEncoder) -> str:
        """The row's prompt as the text that the model reads. Raises DataError, naming file and line."""
        with at_row(self, row):
            return str(encoder.rendered(self.sample(row)))

    def spread(self, most: int) -> Iterator[PromptRow]:
        """At most ``most`` rows at equal distances, the first among them."""
        count = min(len(self.dataset), most)
        return (self.dataset[len(self.dataset) * number // count] for number in range(count))


def read_rows(args: Args) -> list[RowSource]:
    """Read and validate every data file that the options name. Raises DataError."""
    sources = []
    own = args.data_source_path is not None  # the user's data source reads --prompt-data, in its own way
    for path, dataset in () if own else zip(args.prompt_data or (), read_sources(args), strict=True):
        sources.append(RowSource(use="train", path=path, dataset=dataset))
    keys = RowKeys.of_evaluation(args)
    for eval_set in eval_sets_of(args):
        dataset = read_dataset(eval_set.path, eval_set.row_keys(keys))
        sources.append(RowSource(use=f"eval/{eval_set.name}", path=eval_set.path, dataset=dataset, eval_set=eval_set))
    return sources


@dataclass(slots=True, kw_only=True)
class TriedPrompts:
    """The prompts of one source. text: the first as the model reads it. lengths: tokens of the prompts that were
    encoded, the first among them. masks: conversations whose loss masks were made. templated: whether the first is
    rendered with the chat template; None if it was not looked at."""

    use: str
    text: str = ""
    longest: int = 0
    longest_at: str = ""
    lengths: list[int] = field(default_factory=list)
    masks: int = 0
    templated: bool | None = None

    def add(self, length: int, where: str) -> None:
        """Count a prompt of ``length`` tokens."""
        self.lengths.append(length)
        if length > self.longest:
            self.longest, self.longest_at = length, where


@dataclass(slots=True, kw_only=True)
class TriedRow:
    """Scores of answers to one row. form: how the label was written as an answer."""

    use: str
    where: str
    reward: str
    form: str = "{}"
    scores: dict[str, float]


@dataclass(slots=True, kw_only=True)
class Trial:
    """What was found. unchecked: what was not tried, and why."""

    tokens: int = 0
    prompts: list[TriedPrompts] = field(default_factory=list)
    rows: list[TriedRow] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)


def is_evaluation(source: RowSource) -> bool:
    """Whether the rows are those of an evaluation set."""
    return source.use != "train"


@contextmanager
def at_row(source: RowSource, row: PromptRow) -> Iterator[None]:
    """Errors about the row name its file and line; whatever else the tokenizer raises is an error about the row."""
    where = source.dataset.where(row)
    try:
        yield
    except BufferRLError as error:
        if not error.where or error.where.startswith("row "):
            error.where = where
        raise
    except Exception as error:  # fault boundary: tokenizers raise whatever their parts raise
        raise DataError(f"the row cannot be encoded: {type(error).__name__}: {error}", where=where) from error


def encode_row(encoder: PromptEncoder, source: RowSource, row: PromptRow) -> list[int]:
    """Token ids of the row's prompt. Raises DataError, naming file and line."""
    with at_row(source, row):
        return encoder.encode(source.sample(row))
