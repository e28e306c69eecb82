"""The trainer's side of a weight transport: its sender in each rank, and the calls to it from the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from buffer_rl.cluster.actor_group import Call
from buffer_rl.cluster.dispatch import all_answers
from buffer_rl.errors import PluginError
from buffer_rl.plan.roles import ACTOR
from buffer_rl.plugin.calls import call, place
from buffer_rl.records.groups import Topology

if TYPE_CHECKING:
    from buffer_rl.args import Args


KIND = "weight_transport"


class Answers:
    """What the ranks answer to a call that was started."""

    def __init__(self, method: str, futures: Sequence[Future[Any]], timeout_s: float) -> None:
        names = [f"{ACTOR} {rank}" for rank in range(len(futures))]
        self._call = Call(role=ACTOR, method=method, members=names, futures=futures, collect=all_answers)
        self._timeout_s = timeout_s

    def wait(self, timeout_s: float | None = None) -> list[Any]:
        """All answers, in rank order. Raises DeadlineError, or a rank's error, named."""
        answers: list[Any] = self._call.wait(self._timeout_s if timeout_s is None else timeout_s)
        return answers


class Senders:
    """The senders of the trainer's ranks: ``trainer`` of ``WeightTransport.connect``.

    start_call: calls ``send_weights`` of every rank with its arguments; one future each. timeout_s: deadline of a call.
    """

    def __init__(self, start_call: Callable[..., Sequence[Future[Any]]], timeout_s: float) -> None:
        self._start_call = start_call
        self._timeout_s = timeout_s

    def start(self, method: str, *arguments: Any) -> Answers:
        """Have every rank's sender do ``method`` with the rank's weights and ``arguments``; does not wait for it."""
        return Answers(method, self._start_call(method, *arguments), self._timeout_s)

    def send(self, method: str, *arguments: Any) -> list[Any]:
        """``start`` and wait for the answers, in rank order."""
        return self.start(method, *arguments).wait()


class RankSender:
    """The sender of one rank, whose errors name the transport.

    factory: what ``--weight-sync-mode``, here ``name``, resolves to. Raises PluginError if it has no sender.
    """

    def __init__(self, name: str, factory: Any, args: Args, topology: Topology) -> None:
        self._name = name
        sender = getattr(factory, "sender", None)
        if not callable(sender):
            raise PluginError("it has no sender", where=place(KIND, name), expected="a class attribute `sender`")
        self._sender = call(KIND, name, sender, args, topology, at="its sender")

    def __call__(self, method: str, buckets: Iterator[Mapping[str, Any]], *arguments: Any) -> Any:
        """What ``method`` answers."""
        return call(KIND, self._name, getattr(self._sender, method), buckets, *arguments, at=f"sender.{method}")
