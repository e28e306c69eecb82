"""The trainer's ranks as Ray actors.

Who waits for whom: a rank waits for the Buffer (its rows); with several ranks, for all of them in the sums of an
optimizer step, and for its peers before a forward pass that has collectives (``Peers``). The driver waits for all
ranks, with a deadline.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import ray

from buffer_rl.args import Args
from buffer_rl.buffer.client import BufferClient
from buffer_rl.buffer.readers import Share, Splitting
from buffer_rl.cluster.actor_group import ActorGroup, redirect_output
from buffer_rl.cluster.dispatch import all_answers, dispatch
from buffer_rl.cluster.member import Member
from buffer_rl.cluster.placement import Placement
from buffer_rl.cluster.process import settle_garbage_collector
from buffer_rl.errors import BufferRestartedError, BufferRLError, BufferStateError, TrainError
from buffer_rl.kinds.kind import implements
from buffer_rl.kinds.marks import Unit
from buffer_rl.kinds.token_loss import Sums
from buffer_rl.kinds.trainer import (
    HasValues,
    Memory,
    ReloadsReference,
    ReplaysExperts,
    SavesLater,
    Trainer,
    TrainsAdapters,
)
from buffer_rl.observe.memory import peak_metrics, take_peaks
from buffer_rl.observe.pulse import Waits, waiting
from buffer_rl.observe.timeline import WorkReport
from buffer_rl.options.checks import refuse
from buffer_rl.options.section import load_args
from buffer_rl.plan.algorithm import loss_of, role_args
from buffer_rl.plan.flops import RowCost, speed_metrics
from buffer_rl.plan.roles import ACTOR, CRITIC, FIELD_OF_MODEL
from buffer_rl.plugin.calls import construct, returned
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.plugin.signature import takes
from buffer_rl.records.groups import Topology, TrainBatch
from buffer_rl.trainer.logprob_gate import LogProbGap, batch_of, compare_log_probs
from buffer_rl.trainer.options import TrainOptions
from buffer_rl.trainer.peers import Peers, Rendezvous
from buffer_rl.trainer.role_worker import joined_reports
from buffer_rl.trainer.steps import (
    NON_FINITE_FOLDER,
    KLControl,
    NonFiniteGuard,
    StepReport,
    loss_size,
    require_old_log_probs,
    row_cost,
    take_step,
    train_steps,
    train_work,
)
from buffer_rl.trainer.stream import gradient_stage, log_prob_stage
from buffer_rl.weights.sender import RankSender

if TYPE_CHECKING:
    from buffer_rl.trainer.objective import Objective


def named_metrics(role: str, answers: list[StepReport]) -> dict[str, float]:
    """The metrics of an optimizer step, of all ranks, named after the role, and those of speed and memory, if they are
    known."""
    costs = speed_metrics([answer.work for answer in answers if answer.work is not None])
    costs |= peak_metrics(role, [answer.peak for answer in answers])
    return {f"{role}/{name}": value for name, value in StepReport.metrics_of(answers).items()} | costs


def answer_of_head(role: str, answers: list[Any]) -> Any:
    """The first answer that is not None."""
    return next((answer for answer in answers if answer is not None), None)


class TrainRank(Member):
    """One rank: a ``Trainer`` and the rows that it works on."""

    def __init__(self, args_text: str, buffer: Any, role: str, rank: int, world_size: int, log_path: str) -> None:
        settle_garbage_collector()
        import buffer_rl.trainer.objective  # noqa: F401  torch takes seconds, which pass while others start

        redirect_output(log_path)
        self._role = role
        self._args = role_args(load_args(args_text), role)
        self._rank, self._world_size = rank, world_size
        self._buffer = BufferClient(buffer, timeout_s=self._args.buffer_timeout_s, caller=f"{role}-{rank}")
        self._built: Trainer | None = None
        self._awake = frozenset(Memory)
        self._batches: list[TrainBatch] = []
        self._rendezvous = Rendezvous()
        self._streamed = 0
        self._sums, self._size = Sums(), (0.0, 0.0)
        self._calls_objective = True
        self._cost: RowCost | None = None
        folder = Path(log_path).parent.parent / NON_FINITE_FOLDER / ("" if role == ACTOR else role)
        self._guard = NonFiniteGuard(folder, rank, self._args.max_non_finite_steps)
        self._sender: RankSender | None = None

    def host(self) -> tuple[str, int]:
        """This node's address and a port, which this rank listens on from now, for the ranks to meet at."""
        return self._rendezvous.open(str(cast("Any", ray.util).get_node_ip_address()))

    def setup(self, master: str, port: int) -> None:
        """Join the other ranks, which meet at ``master:port``, and build the model."""
        import torch

        from buffer_rl.trainer.objective import Objective
        from buffer_rl.trainer.pretrained import prepare_torch, seed_all
        from buffer_rl.weights.sender import PublishedNames

        self._names = PublishedNames(self._args)
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
        self._objective = Objective(self._args, registry, self._role)
        self._kl = KLControl(self._args, self._objective)
        self._cost = row_cost(self._args)
        prepare_torch(self._args, self._args.seed + self._rank)
        self._built = build_trainer(self._args, registry, self._rank, self._world_size, self._objective)
        if self._role == ACTOR and self._args.trainer_load is not None and self._args.load is None:
            self._built.load(self._args.trainer_load)
        place = self._built.topology
        seed_all(self._args.seed + place.dp_rank)  # ranks of a replica compute the same
        self._peers = Peers(place)
        check_groups(self._args, self._objective.unit, place.dp_size)
        settle_garbage_collector()

    @property
    def _trainer(self) -> Trainer:
        if self._built is None:
            raise TrainError("the model is not built", hint="call setup(master, port) first")
        return self._built

    def fetch(self, rollout_id: int) -> None:
        """Get this rank's rows: its replica's share of each of the rollout's mini-batches.

        Raises BufferStateError if one has too little for all replicas (see ``DataPool.share``)."""
        place, steps = self._trainer.topology, self._args.num_steps_per_rollout
        split = splitting(self._args, self._objective.unit)
        # Ranks that work in step make equally many passes, and these are limited by tokens.
        cost = None if place.in_step else self._cost
        self._batches = [
            self._buffer.get_data(rollout_id, Share(place.dp_rank, place.dp_size, steps, step, split, cost=cost))
            for step in range(steps)
        ]

    def log_probs(self, model: str, rollout_id: int | None = None, writes: bool = True) -> None:
        """Compute the log-probabilities of the fetched rows under ``model``, or the values of a critic; they stay here.

        rollout_id: whose rows to ``fetch`` first. writes: the head of each replica writes them into the pool, too."""
        if rollout_id is not None:
            error: BufferRLError | None = None
            try:
                self.fetch(rollout_id)
            except BufferRLError as caught:
                error = caught
            self._peers.meet(error)
        field = FIELD_OF_MODEL[model]
        computed = [self._outputs(model, batch) for batch in self._fetched()]
        for batch, rows in zip(self._batches, computed, strict=True):
            if rows is None:
                self._calls_objective = False
                continue
            batch.columns[field] = rows
            if writes and self._trainer.topology.is_head:
                self._buffer.put_fields(batch.task, batch.row_ids, {field: rows})

    def estimate(self, rollout_id: int) -> None:
        """Have the advantage estimator work on all rows of the rollout at once: rank 0 writes its columns into the
        pool; ``fetch`` then gives every rank its part."""
        if self._rank > 0:
            return
        batch = self._buffer.get_data(rollout_id)
        before = set(batch.columns)
        self._objective.compute_advantages(batch)
        columns = {name: batch.columns[name] for name in batch.columns.keys() - before}
        if columns:
            self._buffer.put_fields(batch.task, batch.row_ids, columns)

    @dispatch(collect=LogProbGap.worst)
    def compare_log_probs(self, rollout_id: int) -> LogProbGap:
        """Compare the engine's log-probabilities with this trainer's on the first of this rank's rows, which were
        fetched or streamed. Raises TrainError above ``--max-logprob-diff``."""
        batch, error, place = self._batches[0] if self._batches else None, None, self._trainer.topology
        if batch is None:
            try:
                batch = streamed_rows(lambda: self._share(rollout_id))
            except BufferRLError as caught:
                error = caught
        self._peers.meet(error)
        if batch is None:
            if place.in_step:
                self._trainer.log_probs("actor", no_rows(rollout_id))
            return LogProbGap()
        where = f"trainer rank {self._rank}"
        gap = compare_log_probs(self._args, batch, lambda rows: self._trainer.log_probs("actor", rows), where=where)
        return gap if place.is_head else LogProbGap()

    @dispatch(collect=answer_of_head)
    def log_probs_of(
        self, sequences: Sequence[Sequence[int]], num_tokens: int, model: str = "actor"
    ) -> list[np.ndarray] | None:
        """Log-probabilities ``[num_tokens]`` of the last tokens of each sequence of token ids, under ``model``; None on
        a rank that is no head."""
        computed = self._trainer.log_probs(model, batch_of(sequences, num_tokens))
        return computed if self._trainer.topology.is_head else None

    @dispatch(collect=joined_reports)
    def stream(
        self, rollout_id: int, models: Sequence[str], external_fields: Sequence[str], gradients: bool
    ) -> WorkReport:
        """Work on the groups of a rollout that still runs, until it is closed and read to its end.

        models: models whose log-probabilities this trainer computes. gradients: go on to forward and backward, with the
        ``external_fields`` that other roles add; ``finish_stream`` then takes the step."""
        place = self._trainer.topology
        if gradients:
            self._streamed, self._sums, self._size = rollout_id, Sums(), (0.0, 0.0)
            stage = gradient_stage(
                self._role,
                self._trainer,
                self._objective,
                {model: partial(self._outputs, model) for model in models},
                external_fields,
                self._accumulated,
                writes=place.is_head,
            )
        else:
            # What one rank of a replica got, the others get as well, so it must not leave the step meanwhile.
            several = self._world_size > place.dp_size
            name = f"{self._role}_log_probs" if self._role == ACTOR else FIELD_OF_MODEL[self._role]
            stage = log_prob_stage(name, models, self._outputs, writes=place.is_head, is_final=several)
        together, more = place.in_step or self._args.balance_data, {"in_step": place.in_step, "meet": self._peers.meet}
        dataset = stage.dataset(self._buffer, self._args, place.dp_rank, place.dp_size, together, **more)
        return stage.run(dataset, rollout_id)

    @dispatch(collect=named_metrics)
    def finish_stream(self) -> StepReport:
        """The optimizer step on the gradients that ``stream`` accumulated, over all ranks.

        It reports no work: a device's passes may end after the calls that began them, during waits for rows."""
        report = StepReport()
        take_step(self._trainer, self._sums, self._guard, report, lambda: self._share(self._streamed), 0)
        if report.sums:
            report.sizes.append(self._size)
        return self._ended(report)

    @dispatch(collect=named_metrics)
    def train(self) -> StepReport:
        """Advantages, forward and backward, and the optimizer steps on the mini-batches of the fetched rows."""
        batches, passes = self._fetched(), self._args.num_passes_per_rollout
        if self._calls_objective:
            require_old_log_probs(self._args, batches)
        objective = self._objective if self._calls_objective else None
        started = time.monotonic()
        report = train_steps(self._trainer, objective, batches, self._guard, passes)
        if self._role == ACTOR and self._cost is not None:
            seconds, own = time.monotonic() - started, batches if self._trainer.topology.is_head else []
            recomputes = self._args.recompute_granularity == "full"
            report.work = train_work(self._args, self._cost, own, seconds, recomputes=recomputes)
        self._batches = []
        return self._ended(report)

    def _ended(self, report: StepReport) -> StepReport:
        """The report of optimizer steps, with what follows them."""
        import torch

        self._kl.adapt(report)
        report.peak = take_peaks(torch.cuda if torch.cuda.is_initialized() else None)  # type: ignore[no-untyped-call]
        gc.collect()
        return report

    def discard(self) -> None:
        """Forget what was fetched and accumulated of a step that was not taken: its rollout is produced again."""
        self._batches, self._sums = [], Sums()
        if Memory.OPTIMIZER in self._awake:  # else it has no gradients
            self._trainer.zero_grad()

    def sleep(self, tags: Collection[Memory]) -> None:
        """Have the trainer free the parts ``tags`` of its device's memory until ``wake_up``."""
        self._awake -= set(tags)
        trainer: Any = self._trainer
        if takes(trainer.sleep, 1):
            trainer.sleep(tags)
        elif not self._awake:
            trainer.sleep()

    def wake_up(self, tags: Collection[Memory]) -> None:
        """The inverse of ``sleep``."""
        slept, self._awake = not self._awake, self._awake | set(tags)
        trainer: Any = self._trainer
        if takes(trainer.wake_up, 1):
            trainer.wake_up(tags)
        elif slept:
            trainer.wake_up()

    def save_hf(self, path: str) -> None:
        """Write the weights as a Hugging Face folder in the number format of ``--save-dtype``."""
        from buffer_rl.trainer.save_dtype import cast_as_saved  # torch, which the driver does not import

        self.write_hf(path)
        if self._trainer.topology.is_source:
            cast_as_saved(Path(path), self._args.save_dtype, self._args.hf_checkpoint)

    def write_hf(self, path: str) -> None:
        """Write the weights as a Hugging Face folder, as they are trained."""
        with waiting(Waits.DEADLINE):  # for a disk
            self._trainer.save_hf(path)

    def write_adapter(self, path: str) -> None:
        """Write the adapters that are trained in peft's format."""
        cast("TrainsAdapters", self._trainer).write_adapter(path)

    @dispatch(collect=answer_of_head)
    def unchanged_share(self) -> float | None:
        """See ``TrainsAdapters``; None on a rank that is no head."""
        share = cast("TrainsAdapters", self._trainer).unchanged_share()
        return share if self._trainer.topology.is_head else None

    @dispatch(collect=all_answers)
    def send_weights(self, method: str, *arguments: Any) -> Any:
        """Have this rank's side of the weight transport do ``method`` with the weights."""
        if self._sender is None:
            name = self._args.weight_sync_mode
            factory = PluginRegistry.from_flags(self._args.plugin).resolve("weight_transport", name)
            self._sender = RankSender(name, factory, self._args, self._trainer.topology)
        weights: Iterator[Any] = self._trainer.export()
        if self._trainer.topology.is_source:
            weights = self._names.checked(weights)
        with waiting(Waits.DEADLINE):  # for engines
            return self._sender(method, weights, *arguments)

    def save(self, path: str) -> None:
        """Write everything that a resume needs; under ``--async-save`` it may be whole only when ``is_saved``."""
        with waiting(Waits.DEADLINE):  # for a disk
            self._trainer.save(path)
        if self._rank == 0:
            self._kl.save(path)

    @dispatch(collect=lambda _, answers: all(answers))
    def is_saved(self) -> bool:
        """Whether what ``save`` began is written. Raises CheckpointError if it cannot be."""
        return self._trainer.is_saved() if implements(self._trainer, SavesLater) else True

    def load(self, path: str) -> None:
        """The inverse of ``save``."""
        self._trainer.load(path)
        self._kl.load(path)

    def load_ref(self, path: str) -> None:
        """Have the trainer's reference model take the weights in the Hugging Face folder ``path``."""
        cast("ReloadsReference", self._trainer).load_ref(path)

    def _outputs(self, model: str, batch: TrainBatch) -> list[np.ndarray] | None:
        if model == CRITIC:
            return cast("HasValues", self._trainer).values(batch)
        return self._trainer.log_probs(model, batch)

    def _share(self, rollout_id: int) -> TrainBatch:
        place = self._trainer.topology
        return self._buffer.get_data(rollout_id, Share(place.dp_rank, place.dp_size))

    def _accumulated(self, sums: Sums, batch: TrainBatch) -> None:
        if self._trainer.topology.is_head:
            (tokens, samples), (more_tokens, more_samples) = self._size, loss_size(batch)
            self._sums, self._size = self._sums + sums, (tokens + more_tokens, samples + more_samples)

    def _fetched(self) -> list[TrainBatch]:
        if not self._batches:
            raise TrainError("no rows were fetched", hint="call fetch(rollout_id) first")
        return self._batches


def build_trainer(args: Args, registry: PluginRegistry, rank: int, world_size: int, objective: Objective) -> Trainer:
    """One rank of ``--train-backend``. Raises PluginError if it cannot be built; what its methods raise names it."""
    name = args.train_backend
    backend = registry.resolve("trainer", name)
    built = construct("trainer", name, backend, args, rank, world_size, objective, error_class=TrainError)
    if not isinstance(place_of_rank := getattr(built, "topology", None), Topology):
        expected = "topology: a buffer_rl.records.groups.Topology"
        raise returned("trainer", name, place_of_rank, expected, at="topology", error_class=TrainError)
    derived = "--train-backend torch, or a class that is derived from its"
    unsplit = args.fsdp_size != 1 and world_size > 1 and not place_of_rank.in_step
    adapts = implements(built, TrainsAdapters) and built.trains_adapters
    what = f"--fsdp-size: the trainer {name!r} does not split its model over ranks"
    refuse(unsplit, what, "take --fsdp-size out", derived)
    what = f"--lora-rank: the trainer {name!r} trains all weights"
    refuse(args.lora_rank and not adapts, what, "take --lora-rank out", derived)
    replays = objective.critic or (implements(built, ReplaysExperts) and built.replays_experts)
    what = f"--replay-routed-experts: the trainer {name!r} sends tokens to the experts that its own routers choose"
    expected = "--train-backend torch, or a trainer with replays_experts (see buffer_rl.kinds.trainer.ReplaysExperts)"
    refuse(args.replay_routed_experts and not replays, what, "take --replay-routed-experts out", expected)
    what = f"--train-backend and --advantage-estimator: the trainer {name!r} has no value model"
    hint, expected = "an advantage estimator without a critic, such as grpo", "a trainer with values(batch)"
    refuse(objective.critic and not implements(built, HasValues), what, hint, expected)
    return cast("Trainer", built)


def check_groups(args: Args, unit: Unit, dp_size: int) -> None:
    """Raises ConfigError where an optimizer step has fewer groups than replicas, and the loss compares their rows."""
    smallest = args.rollout_batch_size // args.num_steps_per_rollout
    whole = unit is Unit.GROUP and not (args.stream_gradients or args.load_debug_rollout_data)
    what = f"--num-train-ranks and --rollout-batch-size: the loss {loss_of(args)!r} needs whole groups, and {dp_size} "
    what += f"replicas have {smallest} of them for an optimizer step"
    hint = "fewer ranks or more groups; if it compares no rows of a prompt, declare it: "
    hint += "@buffer_rl.kinds.marks.loss_unit('row')"
    refuse(whole and smallest < dp_size, what, hint, "at least one group for each replica and step")


def no_rows(rollout_id: int) -> TrainBatch:
    """A batch for a replica that gets no rows and works in step with others that do."""
    return TrainBatch(rollout_id=rollout_id, task=f"train_{rollout_id}", row_ids=[], columns={})


def streamed_rows(share: Callable[[], TrainBatch]) -> TrainBatch | None:
    """A rank's share of a rollout that was streamed; None where there are more ranks than rows.

    Raises BufferRestartedError if the rollout was lost with the Buffer: it is produced again, and compared then."""
    try:
        return share()
    except BufferRestartedError:
        raise
    except BufferStateError:
        return None


def start_train_group(
    role: str, args: TrainOptions, args_text: str, buffer: Any, log_dir: str, placement: Placement
) -> ActorGroup:
    """Start the ranks of a trained role; they have built their models when ``setup`` has answered (see ``launch``)."""
    world_size = args.num_train_ranks
    return ActorGroup.of(
        role,
        TrainRank,
        lambda rank: (args_text, buffer, role, rank, world_size, f"{log_dir}/{role}_{rank}.log"),
        world_size,
        options=partial(placement.options, role),
        timeout_s=args.train_timeout_s,
    )


def splitting(args: Args, unit: Unit) -> Splitting:
    """What of a mini-batch one replica gets as a whole: groups where the loss must see the rows of a prompt together.
    Under ``--deterministic`` groups too, where there are enough: a micro-batch then holds the same rows on any number
    of ranks."""
    if unit is Unit.GROUP:
        return Splitting.GROUPS
    return Splitting.GROUPS_OR_ROWS if args.deterministic else Splitting.ROWS
