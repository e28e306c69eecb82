"""A user's data source (``--data-source-path``): batches by number, state as bytes.

The source runs in a process of its own, which delivers to the Buffer by itself: it asks the Buffer for the request of
the next batch (``DeliveryRequest``), makes the batch (``CustomSource.take``), and has the Buffer take it in
(``Delivery``). Batches are numbered from 0, and the Buffer takes in each number once.

A request has the state that the batch is to be made from. A source that stands elsewhere is restored from it first: its
process replaced one that died, the run was resumed, or the Buffer has another copy of the batch before, made by the
process that died. So each batch is made from the state after the batch that the Buffer took in before it, whatever dies
in between and however many rollout workers wait for it.

A state is the file that ``save(path)`` wrote. Where the parameter of ``save`` has slime's name, ``rollout_id``, it gets
the batch's number, and the state is all that it wrote below ``args.save``, which is below ``args.load`` for ``load``.

Whatever the user's code raises becomes a PluginError that names the reference. What it returns is checked, and made
plain records: the Buffer keeps them, writes them into its checkpoints as JSON, and must not load a user's classes.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import io
import math
import tempfile
import zipfile
from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from buffer_rl.args import Args
from buffer_rl.errors import BufferRLError, BufferStateError, DataError
from buffer_rl.options.section import required
from buffer_rl.options.user_args import user_args
from buffer_rl.plugin.calls import call, construct, contained_task, place
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import GroupUid, Prompt, Sample, SampleGroup
from buffer_rl.records.utf8 import lone_surrogate

MAX_STATE_BYTES = 64 * 2**20
"""The state travels and is kept with each batch; 64 MiB take some tenths of a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryRequest:
    """The batch that the Buffer needs before it can lease as many groups as a rollout wants.

    number: of the batch. num_groups: how many groups it should have, at least 1. first_group: how many groups all
    batches before it had. state: that after the batch before; no bytes for batch 0.
    """

    number: int
    num_groups: int
    first_group: int
    state: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One batch: at least one group, and the source's state after it, as its ``save`` wrote it."""

    number: int
    groups: list[SampleGroup]
    state: bytes


class DeliveryNeeded(BufferStateError):
    """The Buffer has too few groups, and leased none: repeat the call once ``num_groups`` are delivered."""

    def __init__(self, num_groups: int) -> None:
        super().__init__("the next batch of the data source must be delivered first", where="buffer")
        self.num_groups = num_groups


def source_name(reference: str) -> str:
    """The ``source`` of the uids of groups that come without one."""
    return f"custom:{hashlib.sha256(reference.encode()).hexdigest()[:12]}"


@dataclass(frozen=True, slots=True)
class GroupReader:
    """Turns what ``get_samples`` of the source ``reference`` returned into groups of ``num_samples`` prompts."""

    _reference: str
    _num_samples: int

    def read(self, value: object, request: DeliveryRequest) -> list[SampleGroup]:
        """The groups, each a ``SampleGroup`` or a list of samples before, with what makes a prompt and nothing else.

        Samples are numbered by their place. A group without a uid gets one of its running number; so do ``index``
        and ``group_index`` where they are absent. Raises DataError for anything that could not be trained on.
        """
        if not isinstance(value, Sequence) or isinstance(value, str | bytes | SampleGroup):
            self._refuse(f"get_samples returned {_kind(value)}", expected="a list of groups")
        if not value:
            hint = "a training data source must not end: go on with its first rows, as the next epoch"
            self._refuse(f"get_samples({request.num_groups}) returned no group", expected="at least one", hint=hint)
        if len(value) > request.num_groups:
            what = f"get_samples({request.num_groups}) returned {len(value)} groups"
            expected = f"at most {request.num_groups}"
            self._refuse(what, expected=expected, hint="the number counts prompt groups, not samples")
        return [self._group(entry, place, request.first_group + place) for place, entry in enumerate(value)]

    def _group(self, entry: object, place: int, running: int) -> SampleGroup:
        if not isinstance(entry, SampleGroup | MutableSequence | tuple):
            self._refuse(f"entry {place} is {_kind(entry)}", expected="a SampleGroup, or a list of samples")
        for sample in entry:
            if not isinstance(sample, Sample):
                self._refuse(f"group {place} holds {_kind(sample)}", expected="buffer_rl.records.groups.Sample")
        if len(entry) != self._num_samples:
            what, hint = f"group {place} has {len(entry)} samples", "args.n_samples_per_prompt has the number"
            self._refuse(what, expected=f"--n-samples-per-prompt, which is {self._num_samples}", hint=hint)
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
            what = f"the uid of group {place} is {_kind(uid)}"
            self._refuse(what, expected="buffer_rl.records.groups.GroupUid, or None")
        return GroupUid(self._plain(str(uid.source), f"the uid of group {place}"), int(uid.row), int(uid.epoch))

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
        prompt_sample = Sample(uid=uid, sample_index=number, **fields)
        for name, value in sample.own_attributes().items():
            setattr(prompt_sample, name, self._plain(value, f"{where}: {name}"))
        return prompt_sample

    def _plain(self, value: Any, where: str) -> Any:
        """``value`` made of the types that JSON has, and bytes: subclasses and numpy's numbers become plain."""
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, np.generic | np.ndarray):
            return self._plain(value.tolist(), where)
        if isinstance(value, str):
            if surrogate := lone_surrogate(value):
                self._refuse(f"{where} holds {surrogate}, a lone surrogate, which UTF-8 cannot encode")
            return value.encode().decode()
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else self._refuse(f"{where} is {value}")
        if isinstance(value, bytes):
            return bytes(value)
        if isinstance(value, list | tuple):
            return [self._plain(item, f"{where}[{place}]") for place, item in enumerate(value)]
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return {
                self._plain(key, f"the key {key!r} of {where}"): self._plain(item, f"{where}[{key!r}]")
                for key, item in value.items()
            }
        return self._refuse(f"{where} is {_kind(value)}", expected="what JSON can hold (mappings by text), or bytes")

    def _refuse(self, what: str, *, expected: str = "", hint: str = "") -> NoReturn:
        raise DataError(what, where=place("data_source", self._reference), expected=expected, hint=hint)


def _kind(value: object) -> str:
    return "None" if value is None else f"of type {type(value).__module__}.{type(value).__qualname__}"


class CustomSource:
    """Hosts one data source; not thread-safe.

    args: the flat options; ``data_source_path`` and ``n_samples_per_prompt`` are read, and the user's class gets
    them all. Raises PluginError where the class is not found or its constructor raises.
    """

    def __init__(self, args: Args, registry: PluginRegistry, *, max_state_bytes: int = MAX_STATE_BYTES) -> None:
        self.reference = required(args.data_source_path, "data_source_path")
        self._where = place("data_source", self.reference)
        self._max_state_bytes = max_state_bytes
        self._reader = GroupReader(self.reference, args.n_samples_per_prompt)
        factory = registry.resolve("data_source", self.reference)
        self._args = user_args(args)
        self._source: Any = construct("data_source", self.reference, factory, self._args).built
        self._by_rollout_id = "rollout_id" in inspect.signature(self._source.save).parameters
        self._stands_at = (0, b"")  # the number of the next batch, and the state before it
        self._last: Delivery | None = None
        self._failure: BufferRLError | None = None

    def num_rows(self) -> int:
        """``len(source)``. Raises DataError for a source of no rows."""
        rows: int = self._call("__len__")
        if rows < 1:
            raise DataError(f"its length is {rows}", where=self._where, hint="or set --num-rollout, not --num-epoch")
        return rows

    def take(self, request: DeliveryRequest) -> Delivery:
        """The batch that ``request`` names, with the state after it; the same again if it is the last one that was
        made. A source that does not stand at the request's state is restored to it first.

        Raises PluginError and DataError. The source is then of no use any more, and the error is raised again, unless
        it was its ``load`` that raised."""
        if self._failure is not None:
            raise self._failure
        if self._last is not None and self._last.number == request.number:  # the Buffer did not take it in
            return self._last
        if self._stands_at != (request.number, request.state):
            self._restore(request.number, request.state)
        try:
            value = self._call("get_samples", request.num_groups)
            groups = self._reader.read(value, request)
            self._last = Delivery(number=request.number, groups=groups, state=self._save(request.number))
        except BufferRLError as error:  # the source has gone on; a second try would lose its groups
            self._failure = error
            raise
        self._stands_at = (request.number + 1, self._last.state)
        return self._last

    def _restore(self, number: int, state: bytes) -> None:
        with tempfile.TemporaryDirectory(prefix="buffer-rl-source-") as folder:
            if self._by_rollout_id:
                zipfile.ZipFile(io.BytesIO(state)).extractall(folder)
            else:
                (Path(folder) / "state").write_bytes(state)
            self._call_with("load", Path(folder), number - 1)

    def _save(self, number: int) -> bytes:
        with tempfile.TemporaryDirectory(prefix="buffer-rl-source-") as temporary:
            folder = Path(temporary)
            self._call_with("save", folder, number)
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            if not files or (not self._by_rollout_id and folder / "state" not in files):
                written = ", ".join(sorted(child.name for child in folder.iterdir()))
                what = "its method save wrote no state" + (f", but {written}" if written else "")
                expected = "a file below args.save, or, where save has a parameter path, the file of that path"
                hint = "a source with nothing to keep writes an empty file"
                raise DataError(what, where=self._where, expected=expected, hint=hint)
            if (size := sum(path.stat().st_size for path in files)) > self._max_state_bytes:
                what = f"its method save wrote {size} bytes"
                hint = "save where the source stands, such as a row number, not its rows"
                raise DataError(what, where=self._where, expected=f"at most {self._max_state_bytes}", hint=hint)
            return _packed(folder, files) if self._by_rollout_id else (folder / "state").read_bytes()

    def _call_with(self, method: str, folder: Path, number: int) -> None:
        """Call ``save`` or ``load`` for the state in ``folder``, which is that after batch ``number``."""
        if not self._by_rollout_id:
            self._call(method, str(folder / "state"))
            return
        names = vars(self._args)
        before = {name: names.get(name) for name in ("save", "load")}
        names.update(dict.fromkeys(before, str(folder)))
        try:
            self._call(method, number)
        finally:
            names.update(before)

    def _call(self, method: str, *arguments: Any) -> Any:
        """What a method of the user's object answers; it may be async."""

        def answer() -> Any:
            value = getattr(self._source, method)(*arguments)
            return asyncio.run(contained_task(value)) if inspect.isawaitable(value) else value

        return call("data_source", self.reference, answer, at=method)


def _packed(folder: Path, files: Sequence[Path]) -> bytes:
    """The files as one; equal files give equal bytes."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for path in files:
            archive.writestr(zipfile.ZipInfo(path.relative_to(folder).as_posix()), path.read_bytes())
    return packed.getvalue()
