"""One device whose memory trained roles and engines hold in turn, in virtual time: it refuses whatever exceeds a row of
its table, and every call that lacks what it needs."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any

from buffer_rl.records.groups import Ticket
from harness.virtual_time import VirtualRuntime

Needs = Mapping[str, frozenset[str]]
"""What a call needs: tags of memory, by holder."""

TRAINED = frozenset({"weights", "optimizer", "frozen"})
ENGINES = frozenset({"weights", "kv_cache", "cuda_graph"})
STEP = frozenset({"weights", "optimizer"})
PASSES = frozenset({"weights", "frozen"})
WEIGHTS = frozenset({"weights"})

ROWS: tuple[Needs, ...] = (
    {"train": STEP},
    {"critic": STEP},
    {"train": PASSES, "critic": PASSES},
    {"train": WEIGHTS, "engines": WEIGHTS},
    {"engines": ENGINES},
)
"""What may be held at one moment."""

SECONDS = {"sleep": 3.0, "wake_up": 4.0, "release_memory": 5.0, "resume_memory": 6.0, "train": 2.0, "log_probs": 1.0}
"""What calls take; others take what their role takes."""


class SharedDevice:
    """The memory of one device. ``calls`` lists who gave up (-) and took (+) what, and the calls that needed memory, in
    their order; ``faults`` what was refused. What is taken is held from the beginning of the call, and what is given up
    until its end.

    offloaded: the holders that give up memory; others hold theirs, and do not count. version: of the engines' weights.
    moves: called with their number so far when another one begins.
    """

    def __init__(self, trained: Collection[str], *, train: bool, rollout: bool, version: int = 0) -> None:
        self.offloaded = {*(trained if train else ()), *(["engines"] if rollout else ())}
        alone = len(trained) == 1 or not train
        self.held: dict[str, frozenset[str]] = {role: TRAINED if alone else frozenset() for role in trained}
        self.held["engines"] = frozenset() if rollout else ENGINES
        self.version: int | None = None if rollout else version
        self.calls: list[str] = []
        self.faults: list[str] = []
        self.runtime: VirtualRuntime | None = None
        self.moves: Callable[[int], None] = lambda number: None
        self._num_moves = 0
        self._moving: set[tuple[str, str]] = set()
        self._used: Counter[tuple[str, str]] = Counter()

    async def give(self, holder: str, tags: Collection[str], seconds: float) -> None:
        self.calls.append(f"{holder} -{','.join(sorted(tags))}")
        pairs = {(holder, tag) for tag in tags}
        self.require(holder in self.offloaded and frozenset(tags) <= self.held[holder], f"{holder} has no such {tags}")
        self.require(not pairs & (self._moving | (+self._used).keys()), f"{holder} gives up {tags}, which are in use")
        await self._move(pairs, seconds)
        self.held[holder] -= frozenset(tags)
        if holder == "engines" and "weights" in tags:
            self.version = None

    async def take(self, holder: str, tags: Collection[str], seconds: float) -> None:
        self.calls.append(f"{holder} +{','.join(sorted(tags))}")
        self.require(holder in self.offloaded and not frozenset(tags) & self.held[holder], f"{holder} has {tags}")
        self.held[holder] |= frozenset(tags)
        held = {name: tags for name, tags in self.held.items() if name in self.offloaded}
        fits = any(all(tags <= row.get(name, frozenset()) for name, tags in held.items()) for row in ROWS)
        self.require(fits, f"no row has all of {held}")
        pairs = {(holder, tag) for tag in tags}
        await self._move(pairs, seconds)

    @asynccontextmanager
    async def using(self, what: str, needs: Needs) -> AsyncIterator[None]:
        """A call that needs memory, which stays for its length, but for what runs in engines, which retract it."""
        self.calls.append(what)
        pairs = [(holder, tag) for holder, tags in needs.items() for tag in tags]
        lacks = [pair for pair in pairs if pair[1] not in self.held[pair[0]] or pair in self._moving]
        self.require(not lacks, f"{what} lacks {lacks}")
        kept = [pair for pair in pairs if "train" in needs or "critic" in needs]
        self._used.update(kept)
        try:
            yield
        finally:
            self._used.subtract(kept)

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            self.faults.append(what)
            raise AssertionError(what)

    async def _move(self, pairs: set[tuple[str, str]], seconds: float) -> None:
        self._moving |= pairs
        self.moves(self._num_moves)
        self._num_moves += 1
        await self.wait(seconds)
        self._moving -= pairs

    async def wait(self, seconds: float) -> None:
        assert self.runtime is not None
        await self.runtime.loop.sleep_until(self.runtime.now() + seconds)


class Holder:
    """A role on the device. needs: of the methods of ``inner`` that need memory, by their arguments. name: of the
    holder that it is, if it is one."""

    def __init__(
        self, device: SharedDevice, inner: Any, needs: Mapping[str, Callable[..., tuple[str, Needs]]], name: str = ""
    ) -> None:
        self._device, self._inner, self._needs, self._name = device, inner, needs, name

    async def sleep(self, tags: Collection[str]) -> None:
        await self._device.give(self._name, tags, SECONDS["sleep"])

    async def wake_up(self, tags: Collection[str]) -> None:
        await self._device.take(self._name, tags, SECONDS["wake_up"])

    async def release_memory(self, tags: Collection[str]) -> None:
        await self._device.give(self._name, tags, SECONDS["release_memory"])

    async def resume_memory(self, tags: Collection[str]) -> None:
        await self._device.take(self._name, tags, SECONDS["resume_memory"])

    def __getattr__(self, method: str) -> Any:
        inner = getattr(self._inner, method)
        if method not in self._needs:
            return inner

        async def call(*args: Any) -> Any:
            async with self._device.using(*self._needs[method](*args)):
                answer = inner(*args)
                await self._device.wait(SECONDS.get(method, 0.0))
                return await answer if inspect.isawaitable(answer) else answer

        return call


def on_device(device: SharedDevice, roles: Mapping[str, Any], *, asks: bool = True) -> dict[str, Any]:
    """The roles of a run, as they are on the device: ``train``, ``critic``, ``rollout``, ``publish``, ``save`` and
    ``reference``, and the engines. asks: rollouts ask engines, not evaluations alone."""

    def passes(role: str) -> Callable[..., tuple[str, Needs]]:
        return lambda model, *_: (f"{role} {model}", {role: PASSES if model in ("ref", "teacher") else WEIGHTS})

    def generates(ticket: Ticket) -> tuple[str, Needs]:
        if not (asks or ticket.evaluation):
            return "rollout", {}
        device.require(device.version == ticket.version, f"engines have {device.version}, not {ticket.version}")
        return ("evaluate" if ticket.evaluation else "rollout"), {"engines": ENGINES}

    def publishes(version: int) -> tuple[str, Needs]:
        device.version = version
        return "publish", {"train": WEIGHTS, "engines": WEIGHTS}

    def always(what: str, needs: Needs) -> Callable[..., tuple[str, Needs]]:
        return lambda *args: (what, needs)

    needs: dict[str, dict[str, Callable[..., tuple[str, Needs]]]] = {
        role: {
            "train": always(role, {role: STEP}),
            "log_probs": passes(role),
            "compare_log_probs": always("compare", {role: WEIGHTS}),
        }
        for role in ("train", "critic")
    }
    needs |= {"rollout": {"run": generates}, "publish": {"publish": publishes}, "engines": {}}
    needs["save"] = {"save": always("save", {"train": STEP}), "save_next": always("save next", {"critic": STEP})}
    needs["reference"] = {"update": always("update", {"train": PASSES})}
    found = {name: Holder(device, roles[name], needs[name], name) if name in needs else roles[name] for name in roles}
    return found | {"engines": Holder(device, None, {}, "engines")}
