"""A weight transport of your own: one broadcast by gloo reaches all engines at once, whatever machine they are on.

    buffer-rl train ... --weight-sync-mode ./examples/weight_transports/gloo_broadcast.py:GlooBroadcast

Driver and trainer each have a side. The rank that has the weights, rank 0 of the group, listens before an engine is
asked to join. For what both sides have to do together, the driver starts the trainer's side, then calls the engines,
and only then waits for the trainer. When one side fails it leaves the group, so the other does not wait for it long.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from buffer_rl.errors import BufferRLError

if TYPE_CHECKING:
    from buffer_rl.contracts import Topology
    from buffer_rl.engine.control import EngineControlClient
    from buffer_rl.weights.process_group import Rendezvous, WeightGroup
    from buffer_rl.weights.sender import Senders

JOIN_TIMEOUT_S = 15.0
"""An engine that dies while the group is made is noticed after so long; later deaths are noticed at once."""


class BroadcastSender:
    """The trainer's side, one in each rank. All ranks iterate the weights or none does, since gathering a bucket may
    need all of them; the source alone sends."""

    def __init__(self, args: Any, topology: Topology) -> None:
        self._timeout_s = args.update_weights_timeout_s
        self._is_source = topology.is_source
        self._rendezvous: Rendezvous | None = None
        self._group: WeightGroup | None = None

    def listen(self, buckets: Iterator[Mapping[str, Any]]) -> tuple[str, int, list[Any]] | None:
        """Leave the group before. The source: address and port at which it waits for a group from now, and names,
        dtypes and shapes of every bucket."""
        import ray

        from buffer_rl.weights.process_group import Rendezvous, described

        self.close(iter(()))
        plan = [described(bucket) for bucket in buckets]
        if not self._is_source:
            return None
        util: Any = ray.util
        self._rendezvous = Rendezvous(util.get_node_ip_address(), timeout_s=JOIN_TIMEOUT_S)
        return self._rendezvous.address, self._rendezvous.port, plan

    def join(self, _: Iterator[Mapping[str, Any]], name: str, world_size: int) -> None:
        """Make the group once all engines have joined."""
        if self._rendezvous is None:
            return
        try:
            self._group = self._rendezvous.group(name, world_size)
        finally:
            self._rendezvous = None

    def broadcast(self, buckets: Iterator[Mapping[str, Any]]) -> None:
        """Send bucket after bucket, each as one broadcast."""
        failure: BufferRLError | None = None
        for bucket in buckets:  # to the end, whatever fails: the other ranks gather these too
            if self._group is None or failure is not None:
                continue
            try:
                self._group.send(list(bucket.values()), self._timeout_s, flattened=True)
            except BufferRLError as error:
                failure = error
                self._group.close()  # the engines' part fails now rather than at their deadline
        if failure is not None:
            raise failure

    def close(self, _: Iterator[Mapping[str, Any]]) -> None:
        """Leave the group, if there is one."""
        if self._group is not None:
            self._group.close()
        self._group = self._rendezvous = None


class GlooBroadcast:
    """The driver's side."""

    sender = BroadcastSender
    staged = True  # engines take a version whole or not at all: all buckets come between one begin and one end

    def __init__(self, args: Any) -> None:
        self._name: str | None = None

    def connect(self, trainer: Senders, engines: EngineControlClient) -> None:
        """Make the group of the trainer and the engines that are there now. A name of its own each time: an engine may
        still be in a group that failed."""
        self.close()
        self._trainer, self._engines = trainer, engines
        receivers = sorted(engines.versions())  # of those that live
        address, port, self._plan = next(answer for answer in trainer.send("listen") if answer is not None)
        self._name = f"buffer_rl_{secrets.token_hex(4)}"
        joining = trainer.start("join", self._name, 1 + len(receivers))
        engines.init_weights_update_group(address, port, receivers, name=self._name)
        joining.wait()

    def prepare(self, version: int) -> None:
        """Nothing: the trainer's weights stay as they are until the publication has ended."""

    def publish(self, version: int) -> None:
        """Have the engines receive bucket after bucket; the version gets its number with the last."""
        assert self._name is not None
        last = len(self._plan) - 1
        sending = self._trainer.start("broadcast")
        for index, bucket in enumerate(self._plan):
            number = version if index == last else None
            self._engines.update_weights_from_distributed(bucket, name=self._name, version=number, flattened=True)
        sending.wait()

    def close(self) -> None:
        """Have both sides leave the group."""
        name, self._name = self._name, None
        if name is not None:
            with suppress(BufferRLError):  # an engine that failed has left by itself, and so has a process that died
                self._engines.destroy_weights_update_group(name)
            with suppress(BufferRLError):
                self._trainer.send("close")
