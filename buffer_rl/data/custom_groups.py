"""Checks the groups that a user's data source hands out, and makes plain records of them.

Plain, because the Buffer keeps them, writes them into its checkpoints as JSON, and must not load a user's classes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from buffer_rl.data.delivery import DeliveryRequest
from buffer_rl.errors import DataError
from buffer_rl.resolution.calls import place
from buffer_rl.types import GroupUid, Prompt, Sample, SampleGroup

JSON_INTEGERS = range(-(2**63), 2**64)


def source_name(reference: str) -> str:
    """The ``source`` of the uids of groups that come without one."""
    return f"custom:{hashlib.sha256(reference.encode()).hexdigest()[:12]}"


class GroupReader:
    """Turns what ``get_samples`` of the source ``reference`` returned into groups of ``num_samples`` prompts."""

    def __init__(self, reference: str, num_samples: int) -> None:
        self._reference = reference
        self._num_samples = num_samples

    def read(self, value: object, request: DeliveryRequest) -> list[SampleGroup]:
        """The groups, each a ``SampleGroup`` or a list of samples before, with what makes a prompt and nothing else.

        Samples are numbered by their place. A group without a uid gets one of its running number; so do ``index``
        and ``group_index`` where they are absent. Raises DataError for anything that could not be trained on.
        """
        if not isinstance(value, Sequence) or isinstance(value, str | bytes | SampleGroup):
            self._refuse(f"get_samples returned {_kind(value)}", expected="a list of groups")
        if not value:
            self._refuse(
                f"get_samples({request.num_groups}) returned no group",
                expected="at least one",
                hint="a training data source must not end: go on with its first rows, as the next epoch",
            )
        if len(value) > request.num_groups:
            self._refuse(
                f"get_samples({request.num_groups}) returned {len(value)} groups",
                expected=f"at most {request.num_groups}",
                hint="the number counts prompt groups, not samples",
            )
        return [self._group(entry, place, request.first_group + place) for place, entry in enumerate(value)]

    def _group(self, entry: object, place: int, running: int) -> SampleGroup:
        if not isinstance(entry, SampleGroup | list | tuple):
            self._refuse(f"entry {place} is {_kind(entry)}", expected="a SampleGroup, or a list of samples")
        for sample in entry:
            if not isinstance(sample, Sample):
                self._refuse(f"group {place} holds {_kind(sample)}", expected="buffer_rl.types.Sample")
        if len(entry) != self._num_samples:
            self._refuse(
                f"group {place} has {len(entry)} samples",
                expected=f"--n-samples-per-prompt, which is {self._num_samples}",
                hint="args.n_samples_per_prompt has the number",
            )
        uid = self._uid(entry, place, running)
        samples = [self._prompt(sample, uid, number, running) for number, sample in enumerate(entry)]
        return SampleGroup(uid=uid, samples=samples)

    def _uid(self, entry: Sequence[Sample], place: int, running: int) -> GroupUid:
        uids = {entry.uid} if isinstance(entry, SampleGroup) else {sample.uid for sample in entry}
        if len(uids) > 1:
            self._refuse(f"the samples of group {place} have several uids: {', '.join(map(str, uids))}")
        uid: object = uids.pop()
        if uid is None:
            return GroupUid(source_name(self._reference), running, 0)
        if not isinstance(uid, GroupUid):
            self._refuse(f"the uid of group {place} is {_kind(uid)}", expected="buffer_rl.types.GroupUid, or None")
        return GroupUid(str(uid.source), int(uid.row), int(uid.epoch))

    def _prompt(self, sample: Sample, uid: GroupUid, number: int, running: int) -> Sample:
        where = f"row {uid}, sample {number}"
        fields = {
            name: self._plain(getattr(sample, name), f"{where}: {name}")
            for name in ("prompt", "multimodal_inputs", "label", "metadata", "session_id", "group_index", "index")
        }
        prompt: Prompt = fields["prompt"]
        if not isinstance(prompt, str | list):
            self._refuse(f"{where}: the prompt is {_kind(prompt)}", expected="text, or a list of chat messages")
        if not isinstance(fields["metadata"], dict):
            self._refuse(f"{where}: metadata is {_kind(sample.metadata)}", expected="a mapping")
        if fields["group_index"] is None:
            fields["group_index"] = running
        if fields["index"] is None:
            fields["index"] = running * self._num_samples + number
        return Sample(uid=uid, sample_index=number, **fields)

    def _plain(self, value: Any, where: str) -> Any:
        """``value`` made of the types that JSON has, and bytes: subclasses and numpy's numbers become plain."""
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, np.generic | np.ndarray):
            return self._plain(value.tolist(), where)
        if isinstance(value, str):
            return _utf8(value) or self._refuse(f"{where} is text with a lone surrogate") if value else ""
        if isinstance(value, int):
            number = int(value)  # a range looks through all its numbers for one of a subclass
            return number if number in JSON_INTEGERS else self._refuse(f"{where} has more than 64 bits: {number}")
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else self._refuse(f"{where} is {value}")
        if isinstance(value, bytes):
            return bytes(value)
        if isinstance(value, list | tuple):
            return [self._plain(item, f"{where}[{place}]") for place, item in enumerate(value)]
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return {str(key): self._plain(item, f"{where}[{key!r}]") for key, item in value.items()}
        return self._refuse(f"{where} is {_kind(value)}", expected="what JSON can hold (mappings by text), or bytes")

    def _refuse(self, what: str, *, expected: str = "", hint: str = "") -> NoReturn:
        raise DataError(what, where=place("data_source", self._reference), expected=expected, hint=hint)


def _utf8(text: str) -> str | None:
    try:
        return text.encode().decode()
    except UnicodeEncodeError:
        return None


def _kind(value: object) -> str:
    return "None" if value is None else f"of type {type(value).__module__}.{type(value).__qualname__}"
