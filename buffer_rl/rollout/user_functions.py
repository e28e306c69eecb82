"""Calls the user's functions in and after a rollout: filters of groups, samples and the queue, log functions."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from buffer_rl.args import Args
from buffer_rl.errors import BufferRLError, RolloutError, short_repr
from buffer_rl.kinds.reward import check_filter_decision
from buffer_rl.kinds.rollout import check_metrics
from buffer_rl.options.user_args import user_args
from buffer_rl.plugin.calls import awaited, call, contained, place, raised, returned
from buffer_rl.records.groups import FilterDecision, GroupUid, QueueHeader, SampleGroup, Status, Ticket
from buffer_rl.rollout.failures import status_of

if TYPE_CHECKING:
    from buffer_rl.plugin.registry import PluginRegistry

DEFAULT_REASON = "filtered"
UNNAMED = "default"  # the evaluation set of groups that name none
REWARD_METRICS = ("rollout/raw_reward", "rollout/raw_reward_all")


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling ``function`` gives something to await; objects with an asynchronous ``__call__`` count."""
    called = getattr(function, "__call__", None)  # noqa: B004 (not whether it can be called, but how)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


async def call_user(function: Callable[..., Any], invoke: Callable[[], Any]) -> Any:
    """``invoke()``, which calls ``function`` with its arguments.

    A synchronous function runs in a thread, so that it cannot hold up the event loop; an awaitable that it
    returns is awaited. Raises subclasses of Exception alone, and CancelledError if the caller is cancelled.
    """
    if is_async(function):
        with contained():
            answer = invoke()
        return await awaited(answer)
    answer = await asyncio.to_thread(_run_contained, invoke)
    return await awaited(answer) if inspect.isawaitable(answer) else answer


def _run_contained(invoke: Callable[[], Any]) -> Any:
    with contained():  # in the thread: a future that carries SystemExit stops the event loop
        return invoke()


async def call_plugin(
    kind: str, reference: object, function: Callable[..., Any], *arguments: Any, at: str, **keywords: Any
) -> Any:
    """``call_user`` for a plugin: what it raises becomes a RolloutError that names it, with its HTTP status if it
    has one; errors of ``buffer_rl.errors`` pass."""
    try:
        return await call_user(function, partial(function, *arguments, **keywords))
    except BufferRLError:
        raise
    except Exception as error:  # fault boundary: the user's code
        named = raised(kind, reference, error, at=at, error_class=RolloutError)
        named.status = status_of(error)
        raise named from error


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A function of the user's, with its names in errors. kind: that of the plugin. reference: as the options have it.

    Example:
        UserFunction("filter", "my_filter:keep", keep)
    """

    kind: str
    reference: str
    function: Callable[..., Any]

    @classmethod
    def named(cls, registry: PluginRegistry, kind: str, reference: str | None) -> UserFunction | None:
        """The one that ``reference`` names; None without a reference. Raises PluginError."""
        return cls(kind, reference, registry.resolve(kind, reference)) if reference else None

    def call(self, *arguments: Any, at: str) -> Any:
        """Call a synchronous one; what it raises becomes a RolloutError that names it."""
        return call(self.kind, self.reference, self.function, *arguments, at=at, error_class=RolloutError)

    async def acall(self, *arguments: Any, at: str) -> Any:
        """See ``call_plugin``."""
        return await call_plugin(self.kind, self.reference, self.function, *arguments, at=at)

    async def achange(self, *arguments: Any, expected: str, at: str) -> None:
        """As ``acall``, for one that changes samples in place. Raises RolloutError, too, if it returns something, which
        would be lost: for example the samples to keep."""
        if (answer := await self.acall(*arguments, at=at)) is not None:
            raise self.returned(answer, f"None: it {expected}", at=at)

    def place(self, at: str) -> str:
        """Its name in messages; at: while it did what."""
        return place(self.kind, self.reference, at)

    def returned(self, value: object, expected: str, *, at: str, hint: str = "") -> BufferRLError:
        """The error for a value that it may not return."""
        return returned(self.kind, self.reference, value, expected, at=at, hint=hint, error_class=RolloutError)


async def apply_filter(chosen: UserFunction | None, args: Args, group: SampleGroup) -> FilterDecision:
    """The filter's decision; a group is kept where there is no filter.

    The function may be sync or async and may return a bool. A drop without a reason is counted as
    ``filtered``. Raises RolloutError, naming the filter and the group, if it raises or returns something else.
    """
    if chosen is None:
        return FilterDecision(keep=True)
    at = f"group {group.uid}"
    decision = check_filter_decision(await chosen.acall(user_args(args), group, at=at), where=chosen.place(at))
    if not decision.keep and not decision.reason:
        return replace(decision, reason=DEFAULT_REASON)
    return decision


def choose_queued(
    chosen: UserFunction, args: Args, rollout_id: int, headers: list[QueueHeader], num_samples: int
) -> list[GroupUid]:
    """The uids of the queued groups that the user's buffer filter chooses, in its order.

    Raises RolloutError, naming the filter, if it raises, or returns anything but headers from the list.
    """
    at = f"rollout {rollout_id}"
    expected = "a list of some of the headers (buffer_rl.records.groups.QueueHeader) in the list that it received"
    try:
        answer = chosen.call(user_args(args), rollout_id, list(headers), num_samples, at=at)
    except RolloutError as error:
        if isinstance(error.__cause__, AttributeError | TypeError):
            error.expected, error.hint = expected, "buffer holds headers of the queued groups, not their samples"
        raise
    if not isinstance(answer, Sequence) or isinstance(answer, str | bytes):
        raise chosen.returned(answer, expected, at=at)
    known = {header.uid for header in headers}
    strangers = [entry for entry in answer if not isinstance(entry, QueueHeader) or entry.uid not in known]
    if strangers:
        raise chosen.returned(answer, expected, at=at, hint=f"one of its entries is {short_repr(strangers[0])}")
    return [header.uid for header in answer]


class LogFunctions:
    """``--custom-rollout-log-function-path`` and ``--custom-eval-rollout-log-function-path``, where they are given."""

    def __init__(self, args: Args, registry: PluginRegistry) -> None:
        self._args = args
        self._train = UserFunction.named(registry, "rollout_log", args.custom_rollout_log_function_path)
        self._eval = UserFunction.named(registry, "eval_rollout_log", args.custom_eval_rollout_log_function_path)

    async def metrics(
        self, ticket: Ticket, groups: Iterable[SampleGroup], metrics: dict[str, float], seconds: float
    ) -> dict[str, float]:
        """The metrics to log of ``ticket``'s rollout, after the call of the user's function.

        Raises RolloutError, naming the function, if it raises, returns something else than a boolean or None, or
        leaves something in the metrics that is no number.
        """
        chosen = self._eval if ticket.evaluation else self._train
        if chosen is None:
            return metrics
        ordered = sorted(groups, key=lambda group: group.uid)
        shared = dict(metrics)
        # A removed sample may have no reward; a function that takes the mean of all samples must not see it.
        scored = [sample for group in ordered for sample in group if sample.reward is not None]
        facts: tuple[Any, ...] = (scored, shared, seconds)
        if ticket.evaluation:
            facts = (eval_data(self._args, ordered), shared)
        logged = await chosen.acall(ticket.rollout_id, user_args(self._args), *facts, at=ticket.task)
        if logged is not None and not isinstance(logged, bool):
            raise chosen.returned(logged, "True (it did the logging), False or None", at=ticket.task)
        checked = check_metrics(shared, where=chosen.place(ticket.task))
        return {name: value for name, value in checked.items() if self._kept(name)} if logged else checked

    def _kept(self, name: str) -> bool:
        """Whether progress, learning curve or ``--early-stop`` need the metric."""
        mean_of_set = name.startswith("eval/") and name.count("/") == 1
        return name in REWARD_METRICS or mean_of_set or (self._args.early_stop or "").startswith(name)


def eval_data(args: Any, groups: Iterable[SampleGroup]) -> dict[str, dict[str, list[Any]]]:
    """The groups of an evaluation by their data sets, as slime's functions have them: rewards, truncated, samples."""
    data: dict[str, dict[str, list[Any]]] = {}
    for group in groups:
        own = data.setdefault(group.data_set or UNNAMED, {"rewards": [], "truncated": [], "samples": []})
        scored = [sample for sample in group if sample.reward is not None]  # the others' rewards abstain
        own["rewards"] += [sample.get_reward_value(args) for sample in scored]
        own["truncated"] += [sample.status is Status.TRUNCATED for sample in scored]
        own["samples"] += scored
    return data


def resolve_function(registry: PluginRegistry, kind: str, reference: str | None) -> Callable[..., Any] | None:
    """The user's function that ``reference`` names; None without a reference."""
    return cast("Callable[..., Any]", registry.resolve(kind, reference)) if reference else None
