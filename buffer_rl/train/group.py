"""The trainer's ranks as Ray actors.

Who waits for whom: a rank waits for the Buffer (its rows) and, with several ranks, for the other ranks in the
gradient reduction; the driver waits for all ranks, with a deadline.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ray
import torch
import torch.distributed as dist

from buffer_rl.buffer.client import BufferClient
from buffer_rl.buffer.readers import Splitting
from buffer_rl.cluster.worker_group import WorkerGroup, redirect_output
from buffer_rl.config import load_args
from buffer_rl.contracts import Trainer
from buffer_rl.errors import BufferRestartedError, BufferStateError, TrainError
from buffer_rl.observe.timeline import WorkReport
from buffer_rl.plugins import PluginRegistry
from buffer_rl.resolution.calls import construct
from buffer_rl.scope import Scope, scope_of
from buffer_rl.train.logprob_gate import LogProbGap, compare_log_probs
from buffer_rl.train.options import TrainOptions
from buffer_rl.train.roles import FIELD_OF_MODEL, estimator_of, is_supervised
from buffer_rl.train.steps import NON_FINITE_FOLDER, NonFiniteGuard, require_old_log_probs, train_steps
from buffer_rl.train.stream import (
    GradientTrainer,
    gradient_stage,
    log_prob_stage,
    longest_wait,
    rows_per_batch,
    run_stage,
)
from buffer_rl.types import TrainBatch
from buffer_rl.weights.shared_bucket import SharedWeights
from buffer_rl.weights.tensor import LOAD_FORMAT

if TYPE_CHECKING:
    from buffer_rl.options import Args


class TrainRank:
    """One rank: a ``Trainer`` and the rows that it works on."""

    def __init__(self, args_text: str, buffer: Any, rank: int, world_size: int, log_path: str) -> None:
        redirect_output(log_path)
        self._args = cast("Args", load_args(args_text))
        self._rank, self._world_size = rank, world_size
        self._buffer = BufferClient(buffer, timeout_s=self._args.buffer_timeout_s, caller=f"train-{rank}")
        self._built: Trainer | None = None
        self._batches: list[TrainBatch] = []
        self._rendezvous = Rendezvous()
        self._streamed = 0
        self._splitting = Splitting.GROUPS
        folder = Path(log_path).parent.parent / NON_FINITE_FOLDER
        self._guard = NonFiniteGuard(folder, rank, self._args.max_non_finite_steps)
        self._shared = SharedWeights(use_cuda_ipc=self._args.engine_device != "cpu")

    def host(self) -> tuple[str, int]:
        """This node's address and a port, which this rank listens on from now, for the ranks to meet at."""
        return self._rendezvous.open(str(cast(Any, ray.util).get_node_ip_address()))

    def setup(self, master: str, port: int) -> None:
        """Join the other ranks, which meet at ``master:port``, and build the model."""
        if self._world_size > 1:
            self._rendezvous.join(
                "nccl" if torch.cuda.is_available() and self._args.train_device != "cpu" else "gloo",
                master,
                port,
                rank=self._rank,
                world_size=self._world_size,
                timeout=timedelta(seconds=self._args.train_timeout_s),
            )
        registry = PluginRegistry.from_flags(self._args.plugin)
        self._splitting = splitting(self._args, registry)
        self._built = build_trainer(self._args, registry, self._rank, self._world_size)

    @property
    def _trainer(self) -> Trainer:
        if self._built is None:
            raise TrainError("the model is not built", hint="call setup(master, port) first")
        return self._built

    def fetch(self, rollout_id: int) -> None:
        """Get this rank's rows: its share of each of the rollout's mini-batches."""
        self._batches = mini_batches(
            self._buffer,
            rollout_id,
            self._rank,
            self._world_size,
            num_steps=self._args.num_steps_per_rollout,
            splitting=self._splitting,
        )

    def log_probs(self, model: str) -> None:
        """Compute the log-probabilities of the fetched rows under ``model``; they go into the pool, and stay here."""
        field = FIELD_OF_MODEL[model]
        for batch in self._fetched():
            batch.columns[field] = self._trainer.log_probs(model, batch)
            self._buffer.put_fields(batch.task, batch.row_ids, {field: batch.columns[field]})

    def compare_log_probs(self, rollout_id: int) -> LogProbGap:
        """Compare the engine's log-probabilities with this trainer's on the first of this rank's rows, which were
        fetched or streamed. Raises TrainError above ``--max-logprob-diff``."""
        share = partial(self._buffer.get_data, rollout_id, self._rank, self._world_size)
        batch = self._batches[0] if self._batches else streamed_rows(share)
        if batch is None:
            return LogProbGap()
        return compare_log_probs(
            self._args, batch, lambda rows: self._trainer.log_probs("actor", rows), where=f"trainer rank {self._rank}"
        )

    def stream(
        self, rollout_id: int, models: Sequence[str], external_fields: Sequence[str], gradients: bool
    ) -> WorkReport:
        """Work on the groups of a rollout that still runs, until it is closed and read to its end.

        models: models whose log-probabilities this trainer computes. gradients: go on to forward and backward, with the
        ``external_fields`` that other roles add; ``finish_stream`` then takes the step."""
        if gradients:
            self._streamed = rollout_id
            stage = gradient_stage(cast(GradientTrainer, self._trainer), models, frozenset(external_fields))
        else:
            stage = log_prob_stage("train_log_probs", models, self._trainer.log_probs)
        return run_stage(
            stage,
            self._buffer,
            rollout_id,
            rows_per_batch=rows_per_batch(self._args, self._world_size),
            replica=self._rank,
            num_replicas=self._world_size,
            timeout_s=longest_wait(self._args),
        )

    def finish_stream(self, total_samples: int, total_tokens: int) -> dict[str, float]:
        """The optimizer step on the gradients that ``stream`` accumulated, over all ranks, with the step's totals."""
        shares = cast(GradientTrainer, self._trainer).finish_accumulation(total_samples, total_tokens)
        same = self._guard.step(
            self._trainer.optimizer_step, lambda: self._buffer.get_data(self._streamed, self._rank, self._world_size)
        )
        metrics = {} if same is None else {f"sum/{name}": share for name, share in shares.items()} | same
        return metrics | self._guard.metrics()

    def train(self) -> dict[str, float]:
        """Advantages, forward and backward, and one optimizer step on each mini-batch of the fetched rows."""
        batches = self._fetched()
        require_old_log_probs(self._args, batches)
        metrics = train_steps(self._trainer, batches, self._guard)
        self._batches = []
        return metrics

    def discard(self) -> None:
        """Forget what was fetched and accumulated of a step that was not taken: its rollout is produced again."""
        self._batches = []
        if self._args.stream_gradients:
            cast(GradientTrainer, self._trainer).zero_grad()

    def save_hf(self, path: str) -> None:
        """Write the weights as a Hugging Face folder."""
        self._trainer.save_hf(path)

    def share_weights(self, load_format: str | None, num_receivers: int) -> list[list[str]]:
        """Put the weights into shared memory: for every bucket a handle for each receiver. Ranks but the first, whose
        weights are the same, share nothing; they take part because gathering a bucket may need them."""
        buckets = self._trainer.export_buckets()
        if self._rank > 0:
            for _ in buckets:
                pass
            return []
        share = self._shared.share if load_format == LOAD_FORMAT else self._shared.share_pickled
        return share(buckets, num_receivers)

    def release_weights(self) -> None:
        """Free the memory that ``share_weights`` took."""
        self._shared.release()

    def save(self, path: str) -> None:
        """Write everything that a resume needs."""
        self._trainer.save(path)

    def load(self, path: str) -> None:
        """The inverse of ``save``."""
        self._trainer.load(path)

    def _fetched(self) -> list[TrainBatch]:
        if not self._batches:
            raise TrainError("no rows were fetched", hint="call fetch(rollout_id) first")
        return self._batches


def build_trainer(args: Any, registry: PluginRegistry, rank: int, world_size: int) -> Trainer:
    """One rank of ``--train-backend``. Raises PluginError if it cannot be built; what its methods raise names it."""
    name = args.train_backend
    backend = registry.resolve("trainer", name)
    return cast(Trainer, construct("trainer", name, backend, args, rank, world_size, error_class=TrainError))


def streamed_rows(share: Callable[[], TrainBatch]) -> TrainBatch | None:
    """A rank's share of a rollout that was streamed; None where there are more ranks than rows.

    Raises BufferRestartedError if the rollout was lost with the Buffer: it is produced again, and compared then."""
    try:
        return share()
    except BufferRestartedError:
        raise
    except BufferStateError:
        return None


def combine_metrics(method: str, answers: list[Any]) -> Any:
    """Ranks' metrics as one: shares add up, the rest is alike on every rank. A rank that a stream left without rows has
    no shares."""
    if method == "stream":
        return WorkReport.joined(answers)
    if method == "compare_log_probs":
        return LogProbGap.worst(answers)
    if method not in ("train", "finish_stream"):
        return answers[0]
    metrics: dict[str, float] = {}
    for answer in answers:
        for name, value in answer.items():
            kind, _, rest = name.partition("/")
            if kind == "sum":  # absent where a rank got no rows
                metrics[f"train/{rest}"] = metrics.get(f"train/{rest}", 0.0) + value
            else:
                metrics.setdefault(f"train/{name}", value)
    return metrics


def start_train_group(args: TrainOptions, args_text: str, buffer: Any, log_dir: str, num_gpus: float) -> WorkerGroup:
    """Start the ranks; they have built their models when ``setup`` has answered (see ``launch``).

    num_gpus: accelerators of each rank; 0 on a machine without.
    """
    world_size = args.num_train_ranks
    threads = str(args.num_train_threads)
    environment = {"env_vars": {"OMP_NUM_THREADS": threads}}
    remote = cast(Any, ray.remote)(num_cpus=0, num_gpus=num_gpus, max_restarts=0, runtime_env=environment)(TrainRank)
    actors = [
        remote.remote(args_text, buffer, rank, world_size, f"{log_dir}/train_{rank}.log") for rank in range(world_size)
    ]
    return WorkerGroup("train", actors, combine=combine_metrics)


def splitting(args: Any, registry: PluginRegistry) -> Splitting:
    """The unit by which ranks share a mini-batch: whole groups where each rank's estimator must see a prompt's rows
    together. Under ``--deterministic`` whole groups too, where there are enough: a micro-batch then holds the same rows
    on any number of ranks. Raises PluginError if the estimator does not resolve."""
    ranks_estimate = not is_supervised(args) and not args.num_advantage_workers
    if ranks_estimate and scope_of(registry.resolve("advantage", estimator_of(args)[1])) is not Scope.ROW:
        return Splitting.GROUPS
    return Splitting.GROUPS_OR_ROWS if args.deterministic else Splitting.ROWS


def mini_batches(
    rows: BufferClient, rollout_id: int, rank: int, world_size: int, *, num_steps: int, splitting: Splitting
) -> list[TrainBatch]:
    """A rank's share of each of a rollout's mini-batches. Raises BufferStateError if one has too little for all ranks
    (see ``DataPool.share``)."""
    return [rows.get_data(rollout_id, rank, world_size, num_steps, step, splitting) for step in range(num_steps)]


class Rendezvous:
    """The socket of rank 0 at which the ranks meet, on the address of its node alone.

    Every rank may call ``open``; all call ``join``, with what rank 0's returned.

    Torch's own listener would be on all interfaces, without authentication. This one listens before its port is
    announced, so no other process can take the port in between.
    """

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def open(self, address: str) -> tuple[str, int]:
        """Listen on ``address``, at a free port. Returns both."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        return address, int(self._listener.getsockname()[1])

    def join(self, backend: str, address: str, port: int, *, rank: int, world_size: int, timeout: timedelta) -> None:
        """Make the default process group of all ranks; returns when they have met."""
        if _is_loopback(address) and sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else that of the machine's name
        listener, self._listener = self._listener, None
        if listener is not None and rank != 0:
            listener.close()
        store = cast(Any, dist).TCPStore(
            address,
            port,
            world_size,
            is_master=rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach() if listener is not None and rank == 0 else None,
        )
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
