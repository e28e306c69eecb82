"""Weights by broadcast: a process group of the trainer's source rank and all ranks of all engines, on any machines.

The processes of role ``actor_fwd`` are receivers as engines are, of a transport and in a group of their own
(``buffer_rl.weights.role_weights``): what fails in one group is nothing to the other.

Who waits for whom: the source listens before an engine is asked to join. For what both sides do together, the driver
starts the trainer's side, then calls the engines, and only then waits for the trainer. A side that fails leaves the
group, so the other does not wait for it long. The group is made again, under another name, when engines join or leave
and after each failure: its members no longer agree on what comes next.

While a bucket is sent, the trainer gathers the next one. Under ``--publish-delta`` it gathers before the pause, and
holds the version and what changed: that is sent where all engines say that they have the version before, else all.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

from buffer_rl.args import Args
from buffer_rl.engines.http import Body
from buffer_rl.engines.protocol import ServerInfo
from buffer_rl.errors import BufferRLError, EngineError
from buffer_rl.records.groups import Topology
from buffer_rl.weights.sender import HoldsVersion, Senders
from buffer_rl.weights.tensor import tensor_parallel_ranks

if TYPE_CHECKING:
    from buffer_rl.weights.delta import Encoded
    from buffer_rl.weights.process_group import Backend, Rendezvous, WeightGroup

JOIN_TIMEOUT_S = 15.0
"""An engine that dies while the group is made is noticed after so long; later deaths are noticed at once."""
BLOCKED_TIMEOUT_S = 30.0
"""A SGLang server that joins a group which does not come about may never answer: it is given up after so long."""
JOIN, UPDATE, LEAVE = "/init_weights_update_group", "/update_weights_from_distributed", "/destroy_weights_update_group"


class Receivers(Protocol):
    """Engines, or the processes of a role: who joins a group."""

    def server_info(self) -> dict[str, ServerInfo]: ...
    def post(self, path: str, body: Body = ..., *, each: Mapping[str, Body] | None = ..., **how: Any) -> None: ...


class DistributedSender(HoldsVersion):
    """The side of one rank. All ranks iterate the weights or none does; the source, rank 0 of each group, sends."""

    def __init__(self, args: Args, topology: Topology) -> None:
        super().__init__(args, topology)
        self._timeout_s = args.update_weights_timeout_s
        self._rendezvous: Rendezvous | None = None
        self._groups: dict[str, WeightGroup] = {}

    def listen(self, buckets: Iterator[Mapping[str, Any]]) -> tuple[str, int, list[Any], bool] | None:
        """The source: address and port at which it waits for a group from now, names, dtypes and shapes of every
        bucket, and whether it can send from a GPU."""
        import ray
        from torch.distributed import is_nccl_available

        from buffer_rl.weights.process_group import Rendezvous, described

        plan, on_gpu = [], is_nccl_available()
        for bucket in buckets:
            plan.append(described(bucket))
            on_gpu &= all(tensor.is_cuda for tensor in bucket.values())
        if not self._is_source:
            return None
        util: Any = ray.util
        self._rendezvous = Rendezvous(util.get_node_ip_address(), timeout_s=JOIN_TIMEOUT_S)
        return self._rendezvous.address, self._rendezvous.port, plan, on_gpu

    def join(self, _: Iterator[Mapping[str, Any]], name: str, world_size: int, backend: Backend) -> None:
        """Make the group once all receivers have joined."""
        if self._rendezvous is None:
            return
        try:
            self._groups[name] = self._rendezvous.group(name, world_size, backend)
        finally:
            self._rendezvous = None

    def broadcast_held(self, _: Iterator[Mapping[str, Any]], name: str, as_delta: bool) -> None:
        """Send the group what is held, or what changed in it, which is a broadcast for each bucket."""
        if self._held is None or (group := self._groups.get(name)) is None:
            return
        for bucket in self._held.buckets(as_delta=as_delta):
            self._send(group, list(bucket.values()), flattened=as_delta)

    def broadcast(self, buckets: Iterator[Mapping[str, Any]], name: str) -> None:
        """Send the group bucket after bucket, tensor by tensor, each bucket while the next one is gathered."""
        group = self._groups.get(name)
        sent: Future[None] | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="broadcast") as thread:
            for bucket in buckets:  # to the end, whatever fails: the other ranks gather these too
                if group is not None and (sent is None or sent.exception() is None):
                    # Copied: a trainer may gather the next bucket in the same memory.
                    copied = [tensor.detach().to(group.device, copy=True) for tensor in bucket.values()]
                    sent = thread.submit(self._send, group, copied)
        if sent is not None:
            sent.result()

    def close(self, _: Iterator[Mapping[str, Any]], name: str) -> None:
        """Leave the group ``name``, if there is one."""
        if (group := self._groups.pop(name, None)) is not None:
            group.close()

    def _send(self, group: WeightGroup, tensors: list[Any], *, flattened: bool = False) -> None:
        try:
            group.send(tensors, self._timeout_s, flattened=flattened)
        except BufferRLError:
            group.close()  # the receivers' part fails now rather than at their deadline
            raise


class DistributedTransport:
    """``--weight-sync-mode distributed``. reaches_roles: the processes of a role may stand in place of engines."""

    sender = DistributedSender
    staged = True
    reaches_roles = True

    def __init__(self, args: Args) -> None:
        self._name: str | None = None
        self._publishes_delta, self._takes_delta = args.publish_delta, False
        self.sent_share: float | None = None

    def connect(self, trainer: Senders, engines: Receivers) -> None:
        """Make the group of the trainer and the engines that are there now. A name of its own each time: an engine may
        still be in a group that failed, and the trainer is in others' groups."""
        self.close()
        self._trainer = trainer
        self._engines: Any = engines  # roles take whole versions, and have no more than ``Receivers``
        infos = engines.server_info()  # of those that live
        ranks = tensor_parallel_ranks(infos)
        # Roles and servers of others take all of it: an update of a delta has a begin and an end of its own.
        self._takes_delta = self._publishes_delta and all(info.is_ours for info in infos.values())
        self.staged = self.staged or not self._takes_delta
        plans = [answer for answer in trainer.send(DistributedSender.listen) if answer is not None]
        if not plans or not plans[0][2]:
            raise EngineError("the trainer has no weights to send", where="--weight-sync-mode distributed")
        address, port, self._plan, on_gpu = plans[0]
        backend = chosen_backend(infos.values(), on_gpu=on_gpu)
        self._name = f"buffer_rl_{secrets.token_hex(4)}"
        joining = trainer.start(DistributedSender.join, self._name, 1 + sum(ranks.values()), backend)
        join_group(engines, address, port, ranks, name=self._name, backend=backend, timeout_s=BLOCKED_TIMEOUT_S)
        joining.wait()

    def prepare(self, version: int) -> None:
        """Nothing, but for a delta: the trainer's weights stay as they are until the publication has ended."""
        self.staged, self.sent_share = not self._takes_delta, None
        if not self.staged:
            answers = self._trainer.send(DistributedSender.encode)
            self._encoded: Encoded = next(answer for answer in answers if answer is not None)

    def publish(self, version: int) -> None:
        """Have the engines receive bucket after bucket; the version gets its number with the last."""
        if not self.staged:
            self._engines.end_weight_update(self._send_held(), version)
            return
        assert self._name is not None
        last = len(self._plan) - 1
        sending = self._trainer.start(DistributedSender.broadcast, self._name)
        for index, bucket in enumerate(self._plan):
            receive_bucket(self._engines, bucket, name=self._name, version=version if index == last else None)
        sending.wait()

    def stage(self, version: int) -> None:
        """Have the engines receive and prepare the version while they generate."""
        if not self.staged:
            self._engines.prepare_weight_update(digest=self._send_held(), version=version)
            return
        self._engines.begin_weight_update()
        self.publish(version)
        self._engines.prepare_weight_update()

    def swap(self, version: int) -> None:
        """Have the paused engines serve what they prepared."""
        self._engines.serve_prepared()

    def _send_held(self) -> str:
        """Begin an update and send what is held, or what changed in it. Returns the digest of the version."""
        assert self._name is not None
        digest, base = self._encoded.digest, self._encoded.base
        if base is not None and any(info.digest != base for info in self._engines.server_info().values()):
            base = None
        plan, as_delta = (self._encoded.full_plan, False) if base is None else (self._encoded.delta_plan, True)
        self.sent_share = self._encoded.sent_share(as_delta=as_delta)
        self._engines.begin_weight_update(base)
        sending = self._trainer.start(DistributedSender.broadcast_held, self._name, as_delta)
        for bucket in plan:
            receive_bucket(self._engines, bucket, name=self._name, flattened=as_delta)
        sending.wait()
        return digest

    def close(self) -> None:
        """Have both sides leave the group: the engines first, as the trainer may be waiting for them."""
        name, self._name = self._name, None
        if name is not None:
            with suppress(BufferRLError):  # an engine that failed has left by itself, and so has a process that died
                self._engines.post(LEAVE, {"group_name": name})
            with suppress(BufferRLError):
                self._trainer.send(DistributedSender.close, name)


def join_group(
    receivers: Receivers,
    address: str,
    port: int,
    ranks: Mapping[str, int],
    *,
    name: str,
    backend: Backend = "gloo",
    timeout_s: float | None = None,
) -> None:
    """Have the receivers ``ranks``, each with so many ranks, join a group as its ranks 1, 2, …, in their order. Rank 0
    listens at ``address``; the call ends when all members are there: start rank 0 before. timeout_s: of this call."""
    common = {"master_address": address, "master_port": port, "world_size": 1 + sum(ranks.values())}
    common |= {"group_name": name, "backend": backend}
    offsets = accumulate(ranks.values(), initial=1)
    bodies = {url: {"rank_offset": offset, **common} for url, offset in zip(ranks, offsets, strict=False)}
    receivers.post(JOIN, each=bodies, timeout_s=timeout_s)


def receive_bucket(
    receivers: Receivers, bucket: Body, *, name: str, version: int | None = None, flattened: bool = False
) -> None:
    """Have the receivers take a bucket from rank 0 of a group; it ends when all have it: start rank 0 before.

    bucket: ``names``, ``dtypes`` and ``shapes``, in the order of the broadcasts. version: what the weights are called,
    with the last bucket. flattened: the bucket is one broadcast."""
    how = {"group_name": name, "flush_cache": False, "load_format": "flattened_bucket" if flattened else None}
    receivers.post(UPDATE, {**bucket, **how, "weight_version": None if version is None else str(version)})


def chosen_backend(receivers: Iterable[ServerInfo], *, on_gpu: bool) -> Backend:
    """nccl where the trainer sends from a GPU (``on_gpu``) to SGLang servers on GPUs, else gloo."""
    return "nccl" if on_gpu and all(info.device == "cuda" and not info.is_embedded for info in receivers) else "gloo"
