"""Processes that join gloo as the ranks of Megatron's groups, and run functions of ``harness`` modules for the tests.

Each call is in processes of its own, which are forked from one that has imported Megatron, as that takes several
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
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from buffer_rl.cluster.fork_server import die_with_parent

HAS_MEGATRON = importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("mbridge") is not None
REASON = "megatron-core and mbridge are not installed: pip install 'buffer-rl[megatron]'"
MOST = 8
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
    """Up to ``MOST`` ranks in one gloo group for each call, forked from one process that has imported Megatron."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        store = str(Path(self._folder.name, "store"))
        self._calls, calls = context.Pipe()
        pipes = [context.Pipe() for _ in range(MOST)]
        self._answers: list[Connection] = [ours for ours, _ in pipes]
        # No daemon: a checkpoint has writers of its own.
        self._process = context.Process(target=_serve, args=(calls, [theirs for _, theirs in pipes], store))
        self._process.start()
        for theirs in (calls, *(theirs for _, theirs in pipes)):
            theirs.close()

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
        """What ``function(*args)`` returns on each rank. Raises RankError if it raises on one. If a rank
        ends (RankError) or does not answer in time (TimeoutError), all are ended."""
        try:
            self._calls.send((world_size, function, args))
            deadline = time.monotonic() + START_TIMEOUT_S + timeout_s
            answers = [self._answer(rank, deadline) for rank in range(world_size)]
        except BaseException:
            self.close()
            raise
        for rank, (failed, answer) in enumerate(answers):
            if failed:
                raise RankError(f"rank {rank}: {answer}")
        return [answer for _, answer in answers]

    def _answer(self, rank: int, deadline: float) -> tuple[bool, Any]:
        connection = self._answers[rank]
        if not connection.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"rank {rank} did not answer in time")
        try:
            answer: tuple[bool, Any] = pickle.loads(connection.recv_bytes())
        except EOFError as error:
            raise RankError(f"rank {rank} ended") from error
        return answer

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def close(self) -> None:
        for connection in (self._calls, *self._answers):
            connection.close()
        self._process.join(END_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(10)
        self._folder.cleanup()


class RankPool:
    """Ranks for all calls, started when they are first asked for, and again after they failed."""

    def __init__(self) -> None:
        self._ranks: Ranks | None = None

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
        """``Ranks.run`` on that many ranks."""
        if self._ranks is None or not self._ranks.alive:
            self.close()
            self._ranks = Ranks()
        return self._ranks.run(world_size, function, *args, timeout_s=timeout_s)

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None


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


def _serve(calls: Connection, answers: list[Connection], store: str) -> None:
    import torch

    torch.set_num_threads(1)
    for name in WARM:
        importlib.import_module(name)
    fork, own = multiprocessing.get_context("fork"), os.getpid()
    for number in itertools.count():
        try:
            world_size, function, args = calls.recv()
        except (EOFError, ConnectionResetError):
            os._exit(0)  # taking Megatron's modules apart would take seconds
        places = [(rank, world_size, f"file://{store}-{number}") for rank in range(world_size)]
        running = [
            fork.Process(target=_answer, args=(own, answers[place[0]], place, function, args)) for place in places
        ]
        for rank in running:
            rank.start()
        while running:
            wait([rank.sentinel for rank in running])
            ended = [rank for rank in running if rank.exitcode is not None]
            if any(rank.exitcode for rank in ended):
                os._exit(1)  # and the connections end with it, and with it the other ranks
            running = [rank for rank in running if rank not in ended]


def _answer(
    parent: int, connection: Connection, place: tuple[int, int, str], function: Callable[..., Any], args: Any
) -> None:
    import torch.distributed as dist

    from buffer_rl_megatron.compat import install

    die_with_parent(parent)
    rank, world_size, store = place
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    install()
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        answer = (False, function(*args))
    except Exception:
        answer = (True, traceback.format_exc())
    dist.destroy_process_group()
    connection.send_bytes(pickle.dumps(answer))  # copies tensors, which send() would share with this process
