"""A group of one sender, rank 0, and the engines that receive its broadcasts, ranks 1 and up: gloo between CPUs, nccl
between a trainer and SGLang servers on GPUs, of which each member has one of its own.

Store and keys are those of a group that torch makes by ``tcp://`` and a group name, as SGLang does for
``/init_weights_update_group``, so a group has members of this module and SGLang servers alike. It is not registered
with ``torch.distributed``: a process needs no default group, has any number of these, and may make one again under the
same name. Sockets listen on the address that reaches the sender, never on all.

Who waits for whom: ``Rendezvous`` listens from its start, so engines that are asked to join find it;
``Rendezvous.group`` and ``join`` wait for all members, a broadcast for its counterparts, each with a deadline. After a
failed broadcast the members no longer agree on what comes next: close the group and make another, of another
``Rendezvous``, since the old one's keys name members that are gone.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import distributed

from buffer_rl.errors import EngineError
from buffer_rl.weights.shared_memory import as_bytes

FLATTENED = "flattened_bucket"
"""``load_format`` of a bucket that is sent as one broadcast; SGLang's name."""
Backend = Literal["gloo", "nccl"]
_dist: Any = distributed  # names that its type information lacks
_NCCL_TIMEOUT_S = 86_400.0
_REACH_S = 5.0  # for a sender that starts to listen at the same time as engines are asked to join
_PAUSE_S = 0.05  # between two attempts to reach it


class WeightGroup:
    """One member's end of a group. name: the group's. rank: this member's. device: of what is broadcast; ``"cuda"``
    with nccl, whose members meet at the first broadcast, else ``"cpu"``."""

    def __init__(
        self,
        store: Any,
        *,
        name: str,
        rank: int,
        world_size: int,
        address: str,
        timeout_s: float,
        backend: Backend = "gloo",
    ) -> None:
        self.name, self.rank = name, rank
        self.device = "cuda" if backend == "nccl" else "cpu"
        options = _options(backend, address, timeout_s)
        keys = _dist.PrefixStore(f"{self.device}/", _dist.PrefixStore(f"{name}/", _dist.PrefixStore(name, store)))
        make = _dist.ProcessGroupNCCL if backend == "nccl" else _dist.ProcessGroupGloo
        what = f"the {world_size} members did not meet within {timeout_s:.0f} s"
        hint = "each rank has to join once, with the same world_size"
        with _named(what, f"weight group {name!r}, rank {rank}", hint):
            self._backend: Any = make(keys, rank, world_size, options)

    def broadcast(self, flat: torch.Tensor, timeout_s: float) -> None:
        """Send (rank 0) or fill (all others) contiguous bytes on the group's device, uint8. Raises EngineError if a
        member is gone or the deadline passes."""
        if self._backend is None:
            raise EngineError("the group was closed", where=f"weight group {self.name!r}")
        options = _dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, timedelta(seconds=max(timeout_s, 0.001))
        # With nccl a wait without a time is that of a stream, and not of this thread.
        limit = (options.timeout,) if self.device == "cuda" else ()
        with _named("a broadcast failed", f"weight group {self.name!r}"):
            # Nothing may keep the work: a member that failed leaves, and its connections close with the last reference.
            self._backend.broadcast([flat], options).wait(*limit)

    def send(self, tensors: Sequence[torch.Tensor], timeout_s: float, *, flattened: bool = False) -> None:
        """Rank 0: broadcast tensors one by one, or as one concatenation. timeout_s: for all."""
        deadline = time.monotonic() + timeout_s
        parts = [as_bytes(tensor.to(self.device)) for tensor in tensors]
        for part in [torch.cat(parts)] if flattened else parts:
            self.broadcast(part, deadline - time.monotonic())

    def receive(
        self, expected: Sequence[tuple[torch.dtype, torch.Size]], timeout_s: float, *, flattened: bool = False
    ) -> list[torch.Tensor]:
        """The counterpart of ``send`` on the other ranks: tensors on the group's device."""
        deadline = time.monotonic() + timeout_s
        sizes = [dtype.itemsize * shape.numel() for dtype, shape in expected]
        sent = [sum(sizes)] if flattened else sizes
        parts = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sent]
        for part in parts:
            self.broadcast(part, deadline - time.monotonic())
        if flattened:  # copied: a view of several bytes a value has to start at a multiple of them
            parts = [part.clone() for part in torch.split(parts[0], sizes)]
        return [part.view(dtype).view(shape) for part, (dtype, shape) in zip(parts, expected, strict=True)]

    def close(self) -> None:
        """Leave the group: the connections close as soon as no broadcast of this member runs."""
        self._backend = None


class Rendezvous:
    """The sender's listening end, on a free port of ``address``, which its groups keep: their store listens there."""

    def __init__(self, address: str = "127.0.0.1", *, timeout_s: float = 60.0) -> None:
        self.address, self._timeout_s = address, timeout_s
        listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        self.port = int(listener.getsockname()[1])
        self._store: Any = _dist.TCPStore(
            address,
            self.port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def group(self, name: str, world_size: int, backend: Backend = "gloo") -> WeightGroup:
        """Rank 0 of a group, once all others have joined. Raises EngineError after ``timeout_s`` seconds."""
        return WeightGroup(
            self._store,
            name=name,
            rank=0,
            world_size=world_size,
            address=self.address,
            timeout_s=self._timeout_s,
            backend=backend,
        )


def join(
    address: str,
    port: int,
    *,
    name: str,
    rank: int,
    world_size: int,
    timeout_s: float,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> WeightGroup:
    """Any rank but 0: join the group of the sender that listens, or soon will, at ``address``. is_cancelled: asked
    while the sender is not there. Raises EngineError if not all members are there within ``timeout_s`` seconds."""
    deadline = time.monotonic() + timeout_s
    own = _own_address(address, port, min(deadline, time.monotonic() + _REACH_S), is_cancelled)
    with _named("no store of a group", f"{address}:{port}"):
        # It counts itself among the workers, for which a sender that torch's own rendezvous made waits.
        store = _dist.TCPStore(
            address, port, world_size, is_master=False, timeout=_left(deadline), wait_for_workers=True
        )
    left_s = _left(deadline).total_seconds()
    return WeightGroup(store, name=name, rank=rank, world_size=world_size, address=own, timeout_s=left_s)


def described(bucket: Mapping[str, torch.Tensor]) -> dict[str, list[Any]]:
    """``names``, ``dtypes`` and ``shapes`` of ``/update_weights_from_distributed``."""
    return {
        "names": list(bucket),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in bucket.values()],
        "shapes": [list(tensor.shape) for tensor in bucket.values()],
    }


def _own_address(address: str, port: int, deadline: float, is_cancelled: Callable[[], bool]) -> str:
    """This machine's address on the way to the sender. Asked here because torch's client overruns its deadline."""
    while True:
        try:
            with socket.create_connection((address, port), timeout=_left(deadline).total_seconds()) as connection:
                return str(connection.getsockname()[0])
        except OSError as error:
            if time.monotonic() + _PAUSE_S >= deadline or is_cancelled():
                what = f"the sender of the weights cannot be reached: {error}"
                hint = "rank 0 has to listen before engines are asked to join"
                raise EngineError(what, where=f"{address}:{port}", hint=hint) from error
        time.sleep(_PAUSE_S)


def _options(backend: Backend, address: str, timeout_s: float) -> Any:
    """Of torch's groups. gloo: sockets on ``address``; nccl chooses interfaces by itself, and ends the process of a
    member that waits longer than its groups may, so a broadcast's own deadline comes first."""
    if backend == "nccl":
        options = _dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=_NCCL_TIMEOUT_S)
        return options
    options = _dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname=address)]
    return options


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))


@contextmanager
def _named(what: str, where: str, hint: str = "") -> Iterator[None]:
    """A block whose error of torch becomes an EngineError, with its first line: traces of C++ follow."""
    try:
        yield
    except RuntimeError as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise EngineError(f"{what}: {first}", where=where, hint=hint) from error
