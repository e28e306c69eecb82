"""Processes that join gloo as the ranks of Megatron's groups, and run functions of ``harness`` modules for the tests.

Each call is in processes of its own, which are forked from some that have imported Megatron, as that takes several
seconds: what a call changes, and the threads of its groups, end with it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from buffer_rl.cluster.fork_server import die_with_parent

HAS_MEGATRON = importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("mbridge") is not None
REASON = "megatron-core and mbridge are not installed: pip install 'buffer-rl[megatron]'"
START_TIMEOUT_S = 120.0
COLLECTIVE_TIMEOUT_S = 60.0
END_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of Megatron's groups; what is left of the world is data parallel. sp: sequence parallelism."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    sp: bool = False
    cp: int = 1


class RankError(Exception):
    """A rank raised; the message has its traceback."""


class Ranks:
    """``world_size`` processes in one gloo group."""

    def __init__(self, world_size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        store = str(Path(self._folder.name, "store"))
        pipes = [context.Pipe() for _ in range(world_size)]
        self._connections: list[Connection] = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(
                target=_serve, args=(theirs, rank, world_size, store)
            )  # no daemons: a checkpoint has writers of its own
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
        """What ``function(*args)`` returns on each rank. Raises RankError if it raises on one. If a rank
        ends (RankError) or does not answer in time (TimeoutError), all are ended."""
        try:
            for connection in self._connections:
                connection.send((function, args))
            deadline = time.monotonic() + START_TIMEOUT_S + timeout_s
            answers = [self._answer(rank, deadline) for rank in range(len(self._connections))]
        except BaseException:
            self.close()
            raise
        for rank, (failed, answer) in enumerate(answers):
            if failed:
                raise RankError(f"rank {rank}: {answer}")
        return [answer for _, answer in answers]

    def _answer(self, rank: int, deadline: float) -> tuple[bool, Any]:
        connection = self._connections[rank]
        if not connection.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"rank {rank} did not answer in time")
        try:
            answer: tuple[bool, Any] = pickle.loads(connection.recv_bytes())
        except EOFError as error:
            raise RankError(f"rank {rank} ended") from error
        return answer

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(END_TIMEOUT_S)
            if process.is_alive():
                process.kill()
                process.join(10)
        self._folder.cleanup()


class RankPool:
    """The ranks of each world size, started when they are first asked for, and again after they failed."""

    def __init__(self) -> None:
        self._ranks: dict[int, Ranks] = {}

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
        """``Ranks.run`` on that many ranks."""
        ranks = self._ranks.get(world_size)
        if ranks is None or not ranks.alive:
            if ranks is not None:
                ranks.close()
            ranks = self._ranks[world_size] = Ranks(world_size)
        return ranks.run(function, *args, timeout_s=timeout_s)

    def close(self) -> None:
        for ranks in self._ranks.values():
            ranks.close()
        self._ranks.clear()


@contextlib.contextmanager
def groups(layout: Layout) -> Iterator[None]:
    """Megatron's groups of that layout for the block, and the CPU in place of CUDA. Called on all ranks."""
    from megatron.core import parallel_state, tensor_parallel

    from buffer_rl_megatron.compat import cpu_devices

    parallel_state.initialize_model_parallel(
        layout.tp,
        layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=1 if layout.ep > 1 else None,
    )
    try:
        tensor_parallel.model_parallel_cuda_manual_seed(0, inference_rng_tracker=True)
        with cpu_devices():
            yield
    finally:
        parallel_state.destroy_model_parallel()


WARM = ("transformers", "mbridge", "megatron.core.dist_checkpointing.strategies.torch", "buffer_rl_megatron.compat")
"""What takes long to import; none of it starts a thread."""


def _serve(connection: Connection, rank: int, world_size: int, store: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    import torch

    torch.set_num_threads(1)
    for name in WARM:
        importlib.import_module(name)
    own = os.getpid()
    for number in itertools.count():
        try:
            function, args = connection.recv()
        except (EOFError, ConnectionResetError):
            os._exit(0)  # taking Megatron's modules apart would take seconds
        place = (rank, world_size, f"file://{store}-{number}")
        child = multiprocessing.get_context("fork").Process(
            target=_answer, args=(own, connection, place, function, args)
        )
        child.start()
        child.join()
        if child.exitcode:
            return  # and the connection ends with it


def _answer(
    parent: int, connection: Connection, place: tuple[int, int, str], function: Callable[..., Any], args: Any
) -> None:
    import torch.distributed as dist

    from buffer_rl_megatron.compat import install

    die_with_parent(parent)
    install()
    rank, world_size, store = place
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        answer = (False, function(*args))
    except Exception:
        answer = (True, traceback.format_exc())
    dist.destroy_process_group()
    connection.send_bytes(pickle.dumps(answer))  # copies tensors, which send() would share with this process
