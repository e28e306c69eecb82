"""What rewards receive and return."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from buffer_rl.records.groups import Sample, SampleGroup

if TYPE_CHECKING:
    from buffer_rl.args import Args


class RewardModel(Protocol):
    """Scores one sample: a finite number, or a mapping of which ``--reward-key`` names the one to train on."""

    def __call__(
        self, args: Args, sample: Sample
    ) -> float | Mapping[str, Any] | Awaitable[float | Mapping[str, Any]]: ...


class GroupRewardModel(Protocol):
    """Scores all samples of a prompt together: one finite number a sample, in order."""

    def __call__(self, args: Args, group: SampleGroup) -> Sequence[float] | Awaitable[Sequence[float]]: ...


class RewardPostProcess(Protocol):
    """Turns the rewards of one group's samples into ``(raw_rewards, rewards)``, one number a sample each."""

    def __call__(self, args: Args, samples: list[Sample]) -> tuple[Sequence[float], Sequence[float]]: ...
