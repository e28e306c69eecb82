"""The user's log functions: what a finished rollout or evaluation hands to them, and what their answer means."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

from buffer_rl.contract_check import check_metrics
from buffer_rl.errors import RolloutError
from buffer_rl.resolution.calls import place, returned
from buffer_rl.rollout.calling import call_plugin
from buffer_rl.types import SampleGroup, Status, Ticket

if TYPE_CHECKING:
    from buffer_rl.plugins import PluginRegistry

UNNAMED = "default"  # the evaluation set of groups that name none
REWARD_METRICS = ("rollout/raw_reward", "rollout/raw_reward_all")


class LogFunctions:
    """``--custom-rollout-log-function-path`` and ``--custom-eval-rollout-log-function-path``, where they are given."""

    def __init__(self, args: Any, registry: PluginRegistry) -> None:
        self._args = args
        self._train = _resolve(registry, "rollout_log", args.custom_rollout_log_function_path)
        self._eval = _resolve(registry, "eval_rollout_log", args.custom_eval_rollout_log_function_path)

    async def metrics(
        self, ticket: Ticket, groups: Iterable[SampleGroup], metrics: dict[str, float], seconds: float
    ) -> dict[str, float]:
        """What is to be logged of ``ticket``'s rollout, after the user's function has seen it.

        Raises RolloutError, naming the function, if it raises, returns something else than a boolean or None, or
        leaves something in the metrics that is no number.
        """
        function = self._eval if ticket.evaluation else self._train
        if function is None:
            return metrics
        kind, path = "rollout_log", self._args.custom_rollout_log_function_path
        if ticket.evaluation:
            kind, path = "eval_rollout_log", self._args.custom_eval_rollout_log_function_path
        ordered = sorted(groups, key=lambda group: group.uid)
        shared = dict(metrics)
        # A sample that was given up may have no reward; a function that takes the mean of all must not meet it.
        scored = [sample for group in ordered for sample in group if sample.reward is not None]
        facts: tuple[Any, ...] = (scored, shared, seconds)
        if ticket.evaluation:
            facts = (self._answers(ordered), shared)
        logged = await call_plugin(kind, path, function, ticket.rollout_id, self._args, *facts, at=ticket.task)
        if logged is not None and not isinstance(logged, bool):
            expected = "True (it did the logging), False or None"
            raise returned(kind, path, logged, expected, at=ticket.task, error_class=RolloutError)
        checked = check_metrics(shared, where=place(kind, path, ticket.task))
        return {name: value for name, value in checked.items() if self._kept(name)} if logged else checked

    def _answers(self, groups: list[SampleGroup]) -> dict[str, dict[str, list[Any]]]:
        data: dict[str, dict[str, list[Any]]] = {}
        for group in groups:
            own = data.setdefault(group.data_set or UNNAMED, {"rewards": [], "truncated": [], "samples": []})
            own["rewards"] += [sample.get_reward_value(self._args) for sample in group]
            own["truncated"] += [sample.status is Status.TRUNCATED for sample in group]
            own["samples"] += group.samples
        return data

    def _kept(self, name: str) -> bool:
        """Whether progress, learning curve or ``--early-stop`` are made of the metric."""
        mean_of_set = name.startswith("eval/") and name.count("/") == 1
        return name in REWARD_METRICS or mean_of_set or (self._args.early_stop or "").startswith(name)


def _resolve(registry: PluginRegistry, kind: str, reference: str | None) -> Callable[..., Any] | None:
    return cast("Callable[..., Any]", registry.resolve(kind, reference)) if reference else None
