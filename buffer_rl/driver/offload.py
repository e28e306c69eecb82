"""Who holds the memory of shared devices, as a table: ``--offload-train``, ``--offload-rollout``.

``HELD`` says what trained roles and engines hold in each phase of a run. ``MemoryTurns`` goes from row to row: first
each holder gives up what the next row does not have, then each takes what it lacks. So a device never has to hold more
than one row. One trained role trains at a time, while others hold nothing. What a row does not name keeps its memory:
processes of dedicated roles and of a reward model, and a side without its option.

SGLang keeps no weights that it releases, so that each publication after it is one of whole weights, of an old version
too if a rollout is produced again.

A run begins with the memory of its engines released, before the trainers build their models. A single trained role
begins awake; of several, each sleeps once it is built, before the next one is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from buffer_rl.cluster.dispatch import Method
from buffer_rl.driver.tasks import all_of, unbroken
from buffer_rl.engines.control import EngineControlClient
from buffer_rl.engines.protocol import CACHE, WEIGHTS
from buffer_rl.kinds.trainer import Memory, Sleeps
from buffer_rl.plan.roles import ACTOR
from buffer_rl.plan.schedule import RolePlan, RunPlan

ENGINES = "engines"
"""The holder that is no trained role."""
GIVE = Sleeps.sleep, EngineControlClient.release_memory
TAKE = Sleeps.wake_up, EngineControlClient.resume_memory
"""Methods of trained roles and of engines."""


class Phase(StrEnum):
    """What a run does that needs memory of shared devices."""

    TRAIN = "train"
    LOG_PROBS = "log-probs"
    PUBLISH = "publish"
    GENERATE = "generate"


@dataclass(frozen=True, slots=True)
class Row:
    """What is held in a phase: by the trained roles that work in it, frozen models included, and by engines."""

    trained: frozenset[Memory] = frozenset()
    engines: frozenset[str] = frozenset()


HELD: Mapping[Phase, Row] = MappingProxyType(
    {
        Phase.TRAIN: Row(trained=frozenset({Memory.WEIGHTS, Memory.OPTIMIZER})),
        Phase.LOG_PROBS: Row(trained=frozenset({Memory.WEIGHTS, Memory.FROZEN})),
        Phase.PUBLISH: Row(trained=frozenset({Memory.WEIGHTS}), engines=frozenset(WEIGHTS)),
        Phase.GENERATE: Row(engines=frozenset({*WEIGHTS, *CACHE})),
    }
)
"""Rollouts and evaluations are GENERATE. A checkpoint of a role is saved in its TRAIN."""


def begins_asleep(roles: RolePlan) -> bool:
    """Whether trained roles hold nothing when a run under ``--offload-train`` begins."""
    return len(roles.trained) > 1


@dataclass(slots=True)
class MemoryTurns:
    """The phases of a run, one after another; without either option nothing is called.

    timed: counts a block's seconds under a name. call: a method of a role. send: publishes the newest version, in
    PUBLISH.
    """

    _plan: RunPlan
    _timed: Callable[[str], AbstractContextManager[None]]
    _call: Callable[..., Coroutine[Any, Any, object]]
    _send: Callable[[], Awaitable[object]]
    _held: dict[str, frozenset[str]] = field(default_factory=dict)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        roles = self._plan.roles
        if self._plan.offload_train:
            self._held = dict.fromkeys(roles.trained, frozenset(() if begins_asleep(roles) else Memory))
        if self._plan.offload_rollout:
            self._held[ENGINES] = frozenset()

    def in_turn(self, roles: Sequence[str]) -> list[Sequence[str]]:
        """Trained roles as they train: all at once, or one after another if they take turns."""
        return [[role] for role in roles] if self._plan.offload_train else [roles]

    async def enter(self, phase: Phase, trained: Collection[str]) -> None:
        """Before calls of a phase that need these trained roles."""
        if self._held:
            async with self._lock:
                await unbroken(self._move(phase, trained))

    async def weights(self) -> None:
        """Before the actor's weights are read, by a call that needs nothing else."""
        if self._lacks(ACTOR, HELD[Phase.PUBLISH].trained):
            await self.enter(Phase.LOG_PROBS, [ACTOR])

    async def generation(self, *, evaluation: bool) -> None:
        """Before a rollout or an evaluation: publishes once more where the engines have lost the weights. Rollouts that
        never ask an engine leave the memory where it is."""
        if self._held and (evaluation or self._plan.publish_each_step):
            async with self._lock:
                await unbroken(self._generation())

    async def _generation(self) -> None:
        if self._lacks(ENGINES, HELD[Phase.PUBLISH].engines):
            await self._move(Phase.PUBLISH, [ACTOR])
            await self._send()
        await self._move(Phase.GENERATE, self._plan.roles.trained)

    def _lacks(self, holder: str, tags: frozenset[str]) -> bool:
        return not self._held.get(holder, tags) >= tags

    async def _move(self, phase: Phase, trained: Collection[str]) -> None:
        """Go to a row of the table: first everything that is given up, then what is taken."""
        row, held = HELD[phase], self._held
        rows = {role: row.trained if role in trained else frozenset[str]() for role in held} | {ENGINES: row.engines}
        self._held = {holder: rows[holder] for holder in held}
        await self._change(GIVE, {holder: tags - rows[holder] for holder, tags in held.items()})
        await self._change(TAKE, {holder: rows[holder] - tags for holder, tags in held.items()})

    async def _change(self, methods: tuple[Method[Any], Method[Any]], parts: Mapping[str, frozenset[str]]) -> None:
        of_trained = methods[0], self._plan.train_timeout_s
        calls = dict.fromkeys(parts, of_trained) | {ENGINES: (methods[1], self._plan.publish_timeout_s)}
        if moving := [(holder, tags, *calls[holder]) for holder, tags in parts.items() if tags]:
            with self._timed("offload"):
                await all_of(self._call(holder, method, tags, timeout_s=s) for holder, tags, method, s in moving)
