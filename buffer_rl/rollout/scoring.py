"""Scores samples: chooses each one's reward function and runs it off the event loop, within a deadline."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast

from buffer_rl.args import Args
from buffer_rl.errors import BufferRLError, ConfigError, DataError, RewardError, RolloutError
from buffer_rl.kinds.marks import is_at_once, is_for_rows
from buffer_rl.kinds.reward import check_reward, reward_weights, weighted_reward
from buffer_rl.kinds.rollout import check_statuses
from buffer_rl.options.section import dump_args
from buffer_rl.options.user_args import user_args
from buffer_rl.plugin.calls import contained, error_text
from buffer_rl.records.groups import Sample, SampleGroup, Status
from buffer_rl.rollout.failures import AttemptFailure, FailureKind, kind_of
from buffer_rl.rollout.reward_pool import Outcome, RewardPool
from buffer_rl.rollout.reward_process import RewardTarget
from buffer_rl.rollout.user_functions import call_user, is_async

if TYPE_CHECKING:
    from buffer_rl.plugin.registry import PluginRegistry
    from buffer_rl.rollout.reward_model_client import RewardModelClient

MODEL = RewardTarget("--rm-model", registered=False)
"""Scores of the reward model."""


def check_row_choice(args: Args, name: str, *, where: str) -> None:
    """Raises DataError if a row at ``where`` may not choose the reward ``name``: it is neither ``--rm-type`` nor one of
    ``--row-rm-types``."""
    if name == args.rm_type or name in args.row_rm_types:
        return
    named = [*([args.rm_type] if args.rm_type else []), *args.row_rm_types]
    what = f"the metadata choose the reward {name!r:.80}, which this run does not let rows choose"
    expected = f"no rm_type, or {' or '.join(map(repr, named))}" if named else "no rm_type"
    hint = f"to allow it, add --row-rm-types {shlex.quote(name):.80}; else take rm_type or rewards out of the rows"
    raise DataError(what, where=where, expected=expected, hint=hint)


def unmarked_reward(name: str) -> ConfigError:
    """The refusal of a reward in ``--row-rm-types`` whose author did not mark it with ``rows_may_choose``."""
    return ConfigError(
        f"the reward {name!r} is not marked as safe for data to choose",
        where="--row-rm-types",
        expected="rewards that run nothing of what a row or a response holds, and send it nowhere",
        hint="its author says so with @rows_may_choose from buffer_rl.kinds.marks above the function; where every row "
        f"wants this reward, choose it yourself: --rm-type {name}",
    )


class Scorer:
    """Computes rewards for one rollout worker. Belongs to one event loop.

    ``--custom-group-rm-path`` scores the samples of a prompt together. Else a sample's function is
    ``--custom-rm-path``. Else it is what the row's metadata name: one as ``rm_type``, or several with weights as
    ``rewards``, if ``--row-rm-types`` lists them or the evaluation set's own configuration chose it. Else it is
    ``--rm-model`` or ``--rm-type``. Synchronous functions run in processes that are killed at ``--rm-timeout-s``: their
    return value and what they changed of ``sample.metadata`` come back, as JSON. Asynchronous ones run on the event
    loop under the same deadline, and those marked with ``at_once`` there without one. A sample that already has a
    reward keeps it, after the same check. One whose rewards all abstain has none, and is masked. With ``--use-opd`` one
    that nothing scores has the reward 0.
    """

    def __init__(self, args: Args, registry: PluginRegistry, model: RewardModelClient | None = None) -> None:
        self._args = args
        self.model = model
        self._registry = registry
        self._functions: dict[RewardTarget, Callable[..., Any]] = {}
        self._not_json: set[tuple[str, str]] = set()

    async def score(self, samples: Sequence[Sample], *, of_set: str = "") -> list[AttemptFailure]:
        """Set ``reward`` on every sample that can be scored; the others get status FAILED and no reward.

        of_set: the reward that the configuration of the samples' evaluation set names (``SampleGroup.rm_type``).

        Returns one failure for each of the others, in order. Raises ConfigError if no reward function is
        configured, PluginError if it cannot be resolved, DataError if a row names one that rows may not choose: these
        end the run.
        """
        if self._args.custom_group_rm_path and samples:
            return await self._score_together(samples)
        by_target: dict[RewardTarget, list[Sample]] = {}
        outcomes: dict[int, dict[RewardTarget, Outcome]] = {}
        weights: dict[int, dict[str, float]] = {}
        failures: dict[int, AttemptFailure] = {}
        for sample in samples:
            if sample.reward is None and self._args.use_opd and not self.scores(sample):
                sample.reward = 0.0  # the teacher is all that there is to learn from
            if sample.reward is not None:
                self._set_reward(sample, "set by the generate function", Outcome(value=sample.reward), failures)
                continue
            targets = self.targets_of(sample, of_set)
            outcomes[id(sample)] = {}
            if targets[0].of_several:
                weights[id(sample)] = reward_weights(sample.metadata)
            for target in targets:
                by_target.setdefault(target, []).append(sample)
        for target, rows in by_target.items():
            for sample, outcome in zip(rows, await self._run(target, rows), strict=True):
                outcomes[id(sample)][target] = outcome
        for sample in samples:
            self._take_outcomes(sample, outcomes.get(id(sample), {}), weights.get(id(sample), {}), failures)
        return [failures[id(sample)] for sample in samples if id(sample) in failures]

    def _take_outcomes(
        self,
        sample: Sample,
        outcomes: Mapping[RewardTarget, Outcome],
        weights: Mapping[str, float],
        failures: dict[int, AttemptFailure],
    ) -> None:
        """Set the reward of a sample from what its reward functions answered: of several, the sum with ``weights``."""
        if not outcomes:
            return
        target, outcome = next(iter(outcomes.items()))
        if not target.of_several:
            self._set_reward(sample, repr(target.reference), outcome, failures)
            if outcome.kind is FailureKind.ABSTAINED:
                sample.rewards_by_name = {target.reference: None}
            elif self._args.row_rm_types and sample.reward is not None:
                sample.rewards_by_name = {target.reference: sample.get_reward_value(self._args)}
            return
        rewards: dict[str, float | None] = {}
        for target, outcome in outcomes.items():
            if outcome.kind is FailureKind.ABSTAINED or (outcome.kind is None and outcome.value is None):
                rewards[target.reference] = None
                continue
            self._set_reward(sample, repr(target.reference), outcome, failures)
            if sample.reward is None:
                return
            rewards[target.reference] = sample.get_reward_value(self._args)
        total = weighted_reward(weights, rewards)
        key = self._args.reward_key
        sample.rewards_by_name = rewards
        sample.reward = {**rewards, key: total} if key and total is not None else total
        sample.remove_sample = sample.remove_sample or total is None

    async def _score_together(self, samples: Sequence[Sample]) -> list[AttemptFailure]:
        """Score the samples of one prompt by ``--custom-group-rm-path``; if it fails, all of them have failed."""
        (target,) = self.targets_of(samples[0], "")
        group = SampleGroup(uid=samples[0].row_id.uid, samples=list(samples))
        (outcome,) = await self._run(target, [group])
        where = f"{target.kind} {target.reference!r}, group {group.uid}"
        kind, text, expected, hint = outcome.kind, outcome.text, outcome.expected, outcome.hint
        if kind is None:
            try:
                for sample, reward in zip(samples, target.check(outcome.value, len(samples)), strict=True):
                    sample.reward = reward
                check_statuses(samples, where=where)
                return []
            except (RewardError, RolloutError) as error:
                kind, text, expected, hint = FailureKind.INVALID, error.what, error.expected, error.hint
        for sample in samples:
            sample.reward, sample.status = None, Status.FAILED
        return [AttemptFailure.of_reward(kind, RewardError(text, where=where, expected=expected, hint=hint))]

    async def aclose(self) -> None:
        """Stop the reward processes."""
        if "pool" in self.__dict__:
            await self.pool.aclose()

    @cached_property
    def pool(self) -> RewardPool:
        """The processes for synchronous rewards; none is started before it is needed."""
        args = self._args
        return RewardPool(dump_args(args), num_workers=args.rm_workers, timeout_s=args.rm_timeout_s)

    def scores(self, sample: Sample) -> bool:
        """Whether anything scores the sample."""
        args = self._args
        return bool(args.custom_rm_path or args.rm_type or args.rm_model or reward_weights(sample.metadata))

    def targets_of(self, sample: Sample, of_set: str) -> list[RewardTarget]:
        """The functions that score the sample, one if its metadata give no weights; of_set: as for ``score``.

        Raises ConfigError, DataError and PluginError as ``score``."""
        if self._args.custom_group_rm_path:
            return [RewardTarget(self._args.custom_group_rm_path, registered=False, of_group=True)]
        if self._args.custom_rm_path:
            return [RewardTarget(self._args.custom_rm_path, registered=False)]
        try:
            weights = reward_weights(sample.metadata)
        except DataError as error:
            raise DataError(error.what, where=f"row {sample.row_id}", expected=error.expected) from error
        of_several = sample.metadata.get("rewards") is not None
        if weights:
            return [self._chosen(sample, name, of_set)._replace(of_several=of_several) for name in weights]
        if self._args.rm_model:
            return [MODEL]
        if self._args.rm_type:
            return [RewardTarget(self._args.rm_type, registered=False)]
        raise ConfigError(
            "no reward function",
            where=f"row {sample.row_id}",
            expected="a generate function that sets the reward, --custom-rm-path module:fn, --rm-type NAME, "
            "--rm-model PATH, or a row whose metadata choose one "
            "of --row-rm-types",
        )

    def _chosen(self, sample: Sample, name: str, of_set: str) -> RewardTarget:
        """The reward that a row's metadata, or the configuration of its evaluation set, choose."""
        if name == of_set:
            return RewardTarget(name, registered=True)
        if name == self._args.rm_type:
            return RewardTarget(name, registered=False)
        check_row_choice(self._args, name, where=f"row {sample.row_id}")
        if not is_for_rows(self._registry.resolve_registered("reward", name)):
            raise unmarked_reward(name)
        return RewardTarget(name, registered=True)

    async def _run(self, target: RewardTarget, samples: Sequence[Sample | SampleGroup]) -> list[Outcome]:
        if target == MODEL:
            if self.model is None:
                raise ConfigError("no reward model runs here", where=MODEL.reference)
            return await self.model.score(cast("Sequence[Sample]", samples))
        if target not in self._functions:
            self._functions[target] = target.resolve(self._registry)
        call = self._functions[target]
        if is_async(call):
            return await asyncio.gather(*(self._run_async(call, sample) for sample in samples))
        if is_at_once(call):
            return self._called(call, samples)
        outcomes = await self.pool.score(target, samples)
        for item, outcome in zip(samples, outcomes, strict=True):
            if outcome.metadata:
                own = [item] if isinstance(item, Sample) else item
                self._take_metadata(target, own, outcome.metadata)
        return outcomes

    def _take_metadata(
        self, target: RewardTarget, samples: Sequence[Sample], changes: Sequence[Mapping[str, Any]]
    ) -> None:
        """Make a reward's changes of metadata on the samples here. What JSON cannot hold is reported once a name."""
        for sample, change in zip(samples, changes, strict=True):
            for name in change.get("removed", ()):
                sample.metadata.pop(name, None)
            noted = change.get("set", {})
            if self._args.custom_rm_path is None:  # else these would choose the rewards of another attempt
                noted = {name: value for name, value in noted.items() if name not in ("rewards", "rm_type")}
            sample.metadata |= noted
            for name, kind in change.get("not_json", {}).items():
                if (target.reference, name) not in self._not_json:
                    self._not_json.add((target.reference, name))
                    print(
                        f"buffer-rl: notice: the reward {target.reference!r} sets sample.metadata[{name!r}] to a value "
                        f"of type {kind}, which JSON cannot hold, so it is lost",
                        file=sys.stderr,
                        flush=True,
                    )

    def _called(self, call: Callable[..., Any], samples: Sequence[Sample | SampleGroup]) -> list[Outcome]:
        args, of_user, outcomes = user_args(self._args), contained(), list[Outcome]()
        for sample in samples:
            try:
                with of_user:
                    outcomes.append(Outcome(value=call(args, sample)))
            except Exception as error:  # fault boundary: user code
                outcomes.append(Outcome(kind=kind_of(error), text=error_text(error)))
        return outcomes

    async def _run_async(self, call: Callable[..., Any], sample: Sample | SampleGroup) -> Outcome:
        timeout_s = self._args.rm_timeout_s
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                return Outcome(value=await call_user(call, partial(call, user_args(self._args), sample)))
        except Exception as error:  # fault boundary: user code
            if isinstance(error, TimeoutError) and deadline.expired():
                return Outcome(kind=FailureKind.TIMEOUT, text=f"no reward within --rm-timeout-s {timeout_s:g} s")
            return Outcome(kind=kind_of(error), text=error_text(error))

    def _set_reward(self, sample: Sample, origin: str, outcome: Outcome, failures: dict[int, AttemptFailure]) -> None:
        kind, text, expected, hint = outcome.kind, outcome.text, outcome.expected, outcome.hint
        if kind is FailureKind.ABSTAINED:
            sample.reward, sample.remove_sample = None, True
            return
        if kind is None:
            try:
                sample.reward = check_reward(outcome.value, where=origin)
                sample.get_reward_value(self._args)
                if type(sample.status) is not Status:  # an asynchronous function works on the sample itself
                    check_statuses([sample], where=origin)
                return
            except BufferRLError as error:
                kind, text, expected, hint = FailureKind.INVALID, error.what, error.expected, error.hint
            except ValueError as error:  # a mapping without --reward-key
                kind, text = FailureKind.INVALID, str(error).removeprefix(f"{sample.row_id}: ")
        sample.reward = None
        sample.status = Status.FAILED
        where = f"reward {origin}, row {sample.row_id}"
        failed = RewardError(text, where=where, expected=expected, hint=hint)
        failures[id(sample)] = AttemptFailure.of_reward(kind, failed)
