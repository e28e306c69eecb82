"""Data sources and data sets under slime's names; the Buffer reads ``--prompt-data`` and keeps the queue itself."""

from __future__ import annotations

import abc
import random
from typing import Any

from buffer_rl.data.dataset import RowKeys
from buffer_rl.data.reader import read_dataset
from buffer_rl.errors import ConfigError
from buffer_rl.records.groups import Sample
from buffer_rl.rollout.prompts import PromptEncoder
from buffer_rl_slime.names import PAGE


class DataSource(abc.ABC):
    """A data source of the user's (``--data-source-path``). ``add_samples`` is never called: the queue is the
    Buffer's. ``rollout_id`` counts batches, and ``args.save`` and ``args.load`` are a folder for this state alone."""

    @abc.abstractmethod
    def get_samples(self, num_samples: int) -> list[Any]:
        """The next prompt groups, each the list of its samples."""

    @abc.abstractmethod
    def save(self, rollout_id: Any) -> None:
        """Write where the source stands into files below ``args.save``."""

    @abc.abstractmethod
    def load(self, rollout_id: Any = None) -> None:
        """Go on from the files below ``args.load``."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of rows."""


def pop_first(args: Any, rollout_id: int, buffer: list[Any], num_samples: int) -> list[Any]:
    """The oldest entries of the queue, which are taken out of the list ``buffer``."""
    taken, buffer[:num_samples] = buffer[:num_samples], []
    return taken


class Dataset:
    """The rows of a file as samples with text prompts, as evaluation functions of slime's form read them.

    max_length: rows whose prompts have more tokens are left out; None: none are. The names are those of the fields.
    samples: the rows in the order of the last ``shuffle``.
    Raises ConfigError for images, DataError for a bad row.
    """

    def __init__(
        self,
        path: str,
        tokenizer: Any,
        processor: Any = None,
        max_length: int | None = None,
        *,
        prompt_key: str = "text",
        multimodal_keys: dict[str, str] | None = None,
        label_key: str | None = None,
        tool_key: str | None = None,
        metadata_key: str = "metadata",
        seed: int = 42,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if multimodal_keys:
            where = "slime.utils.data.Dataset"
            raise ConfigError("there are no images", where=where, expected="multimodal_keys=None", hint=f"see {PAGE}")
        keys = RowKeys(prompt=prompt_key, label=label_key, tools=tool_key, metadata=metadata_key)
        prompts = PromptEncoder(
            tokenizer, apply_chat_template=apply_chat_template, template_kwargs=apply_chat_template_kwargs
        )
        self.origin_samples = []
        for row in read_dataset(path, keys):
            sample = Sample(prompt=row.prompt, label=row.label, metadata=row.metadata)
            if apply_chat_template:
                sample.prompt = prompts.rendered(sample)
            if not prompts.too_long(sample, max_length):
                self.origin_samples.append(sample)
        self.samples = self.origin_samples
        self.seed = seed
        self.epoch_id = -1

    def shuffle(self, new_epoch_id: int) -> None:
        """Order the rows by the seed and the epoch."""
        if new_epoch_id != self.epoch_id:
            order = list(range(len(self.origin_samples)))
            random.Random(self.seed + new_epoch_id).shuffle(order)
            self.samples = [self.origin_samples[number] for number in order]
            self.epoch_id = new_epoch_id

    def __getitem__(self, number: int) -> Sample:
        return self.samples[number]

    def __len__(self) -> int:
        return len(self.samples)
