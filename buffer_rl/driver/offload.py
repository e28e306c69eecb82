"""Who has the devices' memory in a run whose trainer and engines share it: ``--offload-train``, ``--offload-rollout``.

One turn follows another. In the trainer's it is awake, and the engines have released all of theirs. For a publication
they take back the memory of the weights, without those weights: SGLang keeps none, so that each such publication is one
of whole weights, of an old version too where a rollout is produced again. Then the trainer sleeps, and the engines take
back the rest. No turn needs the memory of a trainer that trains and of a cache at the same time.

A run begins with the trainer's turn: engines release once they answer, before the trainer builds its models.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from buffer_rl.engines.protocol import CACHE, WEIGHTS
from buffer_rl.errors import ConfigError
from buffer_rl.options.section import flag_of
from buffer_rl.plan.schedule import RunPlan, Schedule

if TYPE_CHECKING:
    from buffer_rl.args import Args


def check_offload(args: Args) -> None:
    """Raises ConfigError where trainer and engines need their memory at the same time, or the run has no say in that of
    the engines."""
    given = [flag_of(name) for name in ("offload_train", "offload_rollout") if getattr(args, name)]
    schedule = Schedule.of(args)
    if given and (schedule.streams or schedule.max_staleness):
        raise ConfigError(
            "engines generate while the trainer or roles work, so that both need their memory at the same time",
            where=f"{given[0]} and --schedule {args.schedule}",
            hint=f"--schedule lockstep, or take {given[0]} out",
        )
    others = ("router_url", "rollout_external_engine_addrs")
    if args.offload_rollout and (found := [flag_of(name) for name in others if getattr(args, name)]):
        raise ConfigError(
            "the run does not start these engines, and others may use them",
            where=f"--offload-rollout and {found[0]}",
            expected="engines that the run starts, on the devices of its trainer",
            hint="take --offload-rollout out; --offload-train alone goes with any engines",
        )


class Turn(StrEnum):
    """Who has the memory."""

    TRAINER = "trainer"
    PUBLICATION = "publication"
    ENGINES = "engines"


@dataclass(slots=True)
class MemoryTurns:
    """The turns of a run; without either option nothing is called.

    timed: counts a block's seconds under a name. on_trained: calls a method of all trained roles. call: the same of
    another role. publish: the newest version, after a call of ``publication``.
    """

    _plan: RunPlan
    _timed: Callable[[str], AbstractContextManager[None]]
    _on_trained: Callable[[str], Awaitable[object]]
    _call: Callable[..., Awaitable[object]]
    _publish: Callable[[], Awaitable[object]]
    _turn: Turn = Turn.TRAINER

    @property
    def engines_lack_weights(self) -> bool:
        """Whether a version that was published is not there any more."""
        return self._plan.offload_rollout and self._turn is Turn.TRAINER

    @property
    def trainer_is_awake(self) -> bool:
        """Whether trained roles take calls."""
        return not self._plan.offload_train or self._turn is not Turn.ENGINES

    async def trainer(self) -> None:
        """Before a call that needs the trainer. Weights that were just published stay where they are."""
        if self._turn is Turn.ENGINES:
            await self._of_engines("release_memory")
            await self._of_trainer("wake_up")
            self._turn = Turn.TRAINER

    async def publication(self) -> None:
        """Before a publication."""
        await self.trainer()
        if self._turn is Turn.TRAINER:
            await self._of_engines("resume_memory", WEIGHTS)
        self._turn = Turn.PUBLICATION

    async def engines(self, *, evaluation: bool) -> None:
        """Before a rollout or an evaluation: publishes once more where the engines have lost the weights."""
        if self._turn is Turn.ENGINES or not (evaluation or self._plan.publish_each_step):
            return  # rollouts that never ask an engine leave the memory where it is
        if self.engines_lack_weights:
            await self._publish()
        await self._of_trainer("sleep")
        await self._of_engines("resume_memory", CACHE)
        self._turn = Turn.ENGINES

    async def _of_trainer(self, method: str) -> None:
        if self._plan.offload_train:
            with self._timed("offload"):
                await self._on_trained(method)

    async def _of_engines(self, method: str, *args: object) -> None:
        if self._plan.offload_rollout:
            with self._timed("offload"):
                await self._call("engines", method, *args, timeout_s=self._plan.publish_timeout_s)
