"""The engine as a receiver of broadcast weights: SGLang's ``/init_weights_update_group``,
``/update_weights_from_distributed`` and ``/destroy_weights_update_group``.

Joining and receiving wait for other processes. They do so in threads of their own, each with a deadline, so neither the
event loop nor decoding waits with them; the threads are daemons, so the process ends without them. What a request says
is checked against the model before memory is allocated for it.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from buffer_rl.embedded.protocol import weight_version
from buffer_rl.embedded.staged_update import StagedUpdate
from buffer_rl.engines.protocol import BadRequestError
from buffer_rl.errors import EngineError
from buffer_rl.plugin import calls
from buffer_rl.weights.delta import GAPS, VALUES
from buffer_rl.weights.process_group import FLATTENED, WeightGroup, join
from buffer_rl.weights.shared_bucket import DTYPES

T = TypeVar("T")
DEFAULT_NAME = "weight_update_group"
BACKEND = "gloo"
JOIN_TIMEOUT_S = 60.0
"""A member that dies while a group is made is noticed by the deadline only: shorter than that of a bucket."""
NICE = 5
"""A third of the time of what decodes, on a processor that both want: more would keep a publication waiting."""
MAX_NAME_CHARS = 200
MAX_WORLD_SIZE = 65_536


@dataclass(slots=True, eq=False)
class _Member:
    """This engine's membership of one group; ``group`` is None until it has joined, and when it was dropped."""

    dropped: bool = False
    group: WeightGroup | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def drop(self) -> None:
        self.dropped = True
        if self.group is not None:
            self.group.close()
            self.group = None


class WeightGroups:
    """The groups that an engine is in, by name. Lives in the event loop.

    shapes: of the model's weights, by their names in a checkpoint; None: any are received. staged: takes what arrives.
    timeout_s: deadline of receiving one bucket, and of joining a group where it is less than ``JOIN_TIMEOUT_S``.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]] | None, staged: StagedUpdate, timeout_s: float) -> None:
        self._shapes = shapes
        self._staged = staged
        self._timeout_s = timeout_s
        self._members: dict[str, _Member] = {}

    async def init(self, body: Mapping[str, Any]) -> None:
        """Join a group; one of the same name is left first. Raises BadRequestError, EngineError."""
        name = _group_name(body)
        backend = body.get("backend", BACKEND)
        if backend != BACKEND:
            raise BadRequestError(f"backend {backend!r} is not supported; expected: {BACKEND!r}")
        address = _text(body, "master_address")
        port = _number(body, "master_port", 1, 65_535)
        world_size = _number(body, "world_size", 2, MAX_WORLD_SIZE)
        rank = _number(body, "rank_offset", 1, world_size - 1)
        self._drop(name)
        member = self._members[name] = _Member()
        timeout_s = min(self._timeout_s, JOIN_TIMEOUT_S)
        joining = partial(join, address, port, name=name, rank=rank, world_size=world_size, timeout_s=timeout_s)
        try:
            group = await in_thread(partial(joining, is_cancelled=lambda: member.dropped))
        except BaseException:
            self._forget(name, member)
            raise
        if member.dropped:
            group.close()
            raise EngineError("the group was destroyed, or joined again, meanwhile", where=f"weight group {name!r}")
        member.group = group

    async def update(self, body: Mapping[str, Any]) -> None:
        """Receive a bucket and stage it.

        Raises BadRequestError or EngineError; then the update is over and the group is left, because what comes next
        in it is no longer known, and so that the sender's broadcast fails at once rather than at its deadline.
        """
        name = _group_name(body)
        member = self._members.get(name)
        try:
            if member is None:
                raise EngineError(f"no weight group {name!r}", hint="call /init_weights_update_group first")
            async with member.lock:  # broadcasts of a group are received in order
                await self._receive(member, body)
        except BaseException:
            self._staged.discard()
            if member is not None and self._shapes is not None:  # a SGLang server stays in the group
                self._forget(name, member)
            raise

    async def _receive(self, member: _Member, body: Mapping[str, Any]) -> None:
        group = member.group
        if group is None:
            raise EngineError("the group is not joined", hint="/init_weights_update_group has to succeed first")
        version, expected = weight_version(body), self._expected(body)
        load_format = body.get("load_format")
        if load_format not in (None, FLATTENED):
            raise BadRequestError(f"load_format {load_format!r} is not supported; expected: null or {FLATTENED!r}")
        update = self._staged.require(expected)
        flattened = load_format == FLATTENED
        tensors = await in_thread(lambda: group.receive(list(expected.values()), self._timeout_s, flattened=flattened))
        if self._staged.require(expected) is not update:
            raise EngineError("the update was begun again while weights arrived")
        named = dict(zip(expected, tensors, strict=True))
        self._staged.stage(named, version, flush_cache=bool(body.get("flush_cache", True)))

    def destroy(self, body: Mapping[str, Any]) -> None:
        """Leave a group. Raises EngineError if this engine is in none of that name."""
        name = _group_name(body)
        if not self._drop(name):
            raise EngineError(f"no weight group {name!r}")

    def _drop(self, name: str) -> bool:
        member = self._members.pop(name, None)
        if member is not None:
            member.drop()
        return member is not None

    def _forget(self, name: str, member: _Member) -> None:
        """Leave a group, but not one that was joined under its name since."""
        member.drop()
        if self._members.get(name) is member:
            del self._members[name]

    def _expected(self, body: Mapping[str, Any]) -> dict[str, tuple[torch.dtype, torch.Size]]:
        names, dtypes, shapes = (_list(body, key) for key in ("names", "dtypes", "shapes"))
        if not len(names) == len(dtypes) == len(shapes) or not names:
            what = "'names', 'dtypes' and 'shapes' must have one entry for each tensor, and at least one"
            raise BadRequestError(what)
        expected: dict[str, tuple[torch.dtype, torch.Size]] = {}
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            own = str(name).removesuffix(GAPS).removesuffix(VALUES) if self._staged.base is not None else name
            if not isinstance(name, str) or (self._shapes is not None and own not in self._shapes):
                raise EngineError(f"the model has no weights {str(name)[:MAX_NAME_CHARS]!r}")
            if name in expected:
                raise EngineError(f"the weights {name} came twice in one update")
            plain = str(dtype).removeprefix("torch.")
            if plain not in DTYPES:
                raise BadRequestError(f"dtype {dtype!r} of {name} is not known; known: {', '.join(DTYPES)}")
            wanted = shape if self._shapes is None else list(self._shapes[own])
            if own != name and isinstance(shape, list) and len(shape) == 1 and type(shape[0]) is int:
                wanted = [min(max(shape[0], 0), math.prod(wanted))]  # as many elements of it as changed
            if not isinstance(shape, list) or shape != wanted:
                raise EngineError(f"the shape of {name} is {shape}", expected=f"{wanted}")
            expected[name] = (DTYPES[plain], torch.Size(shape))
        return expected


async def in_thread(function: Callable[[], T], *, yields: bool = False) -> T:
    """The function's answer, from a daemon thread. Not from asyncio's pool, whose threads a process waits for. yields:
    what decodes goes before it on a processor."""

    def run() -> T:
        if yields and sys.platform == "linux":  # where a thread has a priority of its own
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICE)
        return function()

    answer, _ = calls.in_thread("weight-group", run)
    return await asyncio.wrap_future(answer)


def _group_name(body: Mapping[str, Any]) -> str:
    name = body.get("group_name", DEFAULT_NAME)
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        raise BadRequestError(f"'group_name' must be a string of 1 to {MAX_NAME_CHARS} characters")
    return name


def _text(body: Mapping[str, Any], key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str) or not value:
        raise BadRequestError(f"'{key}' must be a string")
    return value


def _number(body: Mapping[str, Any], key: str, least: int, most: int) -> int:
    value = body.get(key)
    if type(value) is not int or not least <= value <= most:
        raise BadRequestError(f"'{key}' must be a whole number from {least} to {most}")
    return value


def _list(body: Mapping[str, Any], key: str) -> list[Any]:
    value = body.get(key)
    if not isinstance(value, list):
        raise BadRequestError(f"'{key}' must be a list")
    return value
