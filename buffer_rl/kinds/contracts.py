"""What a plugin of each kind receives and returns: one Protocol a kind.

``buffer_rl.kinds.table`` is the table of the kinds; ``buffer_rl.plugin.registry.check_contract(kind, obj)`` is the
checker for authors.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from buffer_rl.kinds.marks import Unit
from buffer_rl.kinds.token_loss import NEW_FORM, Sums
from buffer_rl.kinds.token_loss import LossInputs as LossInputs
from buffer_rl.kinds.token_loss import TokenLoss as TokenLoss
from buffer_rl.records.groups import Column, FilterDecision, RolloutOutput, Sample, SampleGroup, Ticket, TrainBatch
from buffer_rl.records.groups import Topology as Topology

if TYPE_CHECKING:
    import numpy as np

    from buffer_rl.plan.roles import Role


def __getattr__(name: str) -> Any:
    if name == "LossOutputs":  # of the earlier contract: the module of a loss may still import it
        raise ImportError(f"there is no LossOutputs any more: {NEW_FORM}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class RolloutBuffer(Protocol):
    """What a rollout function receives as ``buffer``. The methods that lease and report groups have
    an ``a``-prefixed asynchronous twin.

    A group that ``get_samples`` leased ends in one of five ways: ``finish`` (it will be trained on or
    evaluated), ``reject`` (it is dropped, with a reason), ``quarantine`` (it failed by itself, and is dropped for
    good), ``add_samples`` (it goes back to the queue), or it is never mentioned again, and is then rejected as
    ``unreported``. ``finish`` also takes foreign groups, which the rollout function made, with a uid of their own (any
    ``GroupUid`` of another source) or without one; each uid is trained on at most once."""

    @property
    def ticket(self) -> Ticket:
        """The rollout that this buffer works for. ``num_groups`` is how many groups it still needs."""

    def get_samples(self, num_samples: int) -> list[SampleGroup]:
        """Lease up to ``num_samples`` **groups**: first from the queue, then from the data source.

        Training never runs out (the next epoch follows); an evaluation returns fewer, then none."""

    def add_samples(self, groups: Sequence[SampleGroup]) -> None:
        """Give leased groups back to the queue, each to its old place: as prompts, or, where ``ticket.keeps_tokens``
        says so, with what was generated of them so far."""

    def encode(self, group: SampleGroup) -> Any:
        """What ``finish`` would store of a group, for it to take. Reports nothing and does not block: there is no
        asynchronous twin. Raises RolloutError for a group that cannot be trained on."""

    def finish(self, group: SampleGroup, encoded: Any = None) -> None:
        """Report a finished group; its rewards must be set and finite. Raises RolloutError for one that cannot be
        trained on. encoded: what ``encode`` gave for it, where it was asked and the group is as it was then."""

    def reject(self, group: SampleGroup, reason: str) -> None:
        """Drop a leased group; the reason is counted and shown."""

    def quarantine(self, group: SampleGroup, reason: str) -> None:
        """Drop a leased group that fails by itself, for good; the ledger keeps the reason."""

    def count_failure(self, group: SampleGroup, kind: str) -> tuple[int, int]:
        """Count a failed attempt at a group as ``infra`` or ``data``. Returns how many of its kind the run had, and
        how many of them this group had."""

    def get_buffer_length(self) -> int:
        """Number of groups in the queue."""

    def get_metadata(self) -> dict[str, Any]:
        """The user's notes that are saved with the Buffer."""

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Merge ``metadata`` (JSON values) into the notes."""

    async def aget_samples(self, num_samples: int) -> list[SampleGroup]: ...
    async def aadd_samples(self, groups: Sequence[SampleGroup]) -> None: ...
    async def afinish(self, group: SampleGroup, encoded: Any = None) -> None: ...
    async def areject(self, group: SampleGroup, reason: str) -> None: ...
    async def aquarantine(self, group: SampleGroup, reason: str) -> None: ...
    async def acount_failure(self, group: SampleGroup, kind: str) -> tuple[int, int]: ...


class RolloutFunction(Protocol):
    """Produces one rollout: leases groups, generates, scores, reports. May be async.

    A class is accepted too: it is constructed once a worker as ``cls(args)``, and the instance is called.
    Set ``uses_engine = False`` on it if it never asks the engine (supervised fine-tuning): the weights are
    then published only where an evaluation needs them.
    """

    def __call__(
        self, args: Any, rollout_id: int, buffer: RolloutBuffer, evaluation: bool = False
    ) -> RolloutOutput | list[SampleGroup] | Awaitable[RolloutOutput | list[SampleGroup]]: ...


class GenerateFunction(Protocol):
    """Fills one sample's response; may return several samples (parts) of one prompt. May be sync.
    One that has a parameter ``evaluation`` also receives ``evaluation=True`` or ``False``.
    A sample that it gives up, with status ``aborted`` or ``failed`` and ``remove_sample = True``, is not trained on,
    and its group stays; any other sample of these statuses costs its group.
    With the attribute ``continues_partial = True`` and ``--partial-rollout`` it also receives samples of status
    ``aborted`` with the tokens they have, to go on with; without it such a sample comes as a prompt.
    """

    def __call__(
        self, args: Any, sample: Sample, sampling_params: dict[str, Any]
    ) -> Sample | list[Sample] | Awaitable[Sample | list[Sample]]: ...


class RewardModel(Protocol):
    """Scores one sample: a finite number, or a mapping of which ``--reward-key`` names the one to train on."""

    def __call__(
        self, args: Any, sample: Sample
    ) -> float | Mapping[str, Any] | Awaitable[float | Mapping[str, Any]]: ...


class GroupRewardModel(Protocol):
    """Scores all samples of a prompt together: one finite number a sample, in order."""

    def __call__(self, args: Any, group: SampleGroup) -> Sequence[float] | Awaitable[Sequence[float]]: ...


class DynamicSamplingFilter(Protocol):
    """Decides whether a finished, scored group is trained on."""

    def __call__(self, args: Any, group: SampleGroup) -> FilterDecision | bool: ...


class SampleFilter(Protocol):
    """Marks samples of a whole rollout with ``sample.remove_sample = True``."""

    def __call__(self, args: Any, groups: list[SampleGroup]) -> None: ...


class AllSamplesProcess(Protocol):
    """Receives all groups that a rollout generated, at its end, sorted by uid: kept ones and dropped ones, not those
    that went back to the queue. What it changes on kept groups is trained on.
    ``data_source`` may be left out; it is the rollout's ``RolloutBuffer``.
    """

    def __call__(
        self, args: Any, groups: list[SampleGroup], data_source: RolloutBuffer, /
    ) -> Awaitable[None] | None: ...


class BufferFilter(Protocol):
    """Chooses which queued groups to lease next; ``buffer`` is the list of the queue's headers."""

    def __call__(self, args: Any, rollout_id: int, buffer: list[Any], num_samples: int) -> list[Any]: ...


class RolloutLogFunction(Protocol):
    """Sees a finished training rollout; may be async. Called in the rollout worker.

    samples: those of the finished groups, ordered by uid, rewards set. rollout_extra_metrics: the rollout's flat
    numbers under the names that are logged; what the function adds or changes is logged. rollout_time: seconds.
    True says that the function did the logging: of the rollout's metrics only ``rollout/raw_reward`` and
    ``rollout/raw_reward_all`` are kept.
    """

    def __call__(
        self,
        rollout_id: int,
        args: Any,
        samples: list[Sample],
        rollout_extra_metrics: dict[str, float],
        rollout_time: float,
    ) -> bool | Awaitable[bool | None] | None: ...


class EvalRolloutLogFunction(Protocol):
    """Sees a finished evaluation; may be async. Called in the rollout worker.

    data: for each evaluation set ``rewards``, ``truncated`` (booleans) and ``samples``, lists of equal length.
    extra_metrics: as ``rollout_extra_metrics`` of a training rollout. True keeps, of the metrics, only the mean
    reward ``eval/NAME`` of each set and what ``--early-stop`` looks at.
    """

    def __call__(
        self, rollout_id: int, args: Any, data: dict[str, dict[str, list[Any]]], extra_metrics: dict[str, float]
    ) -> bool | Awaitable[bool | None] | None: ...


class RewardPostProcess(Protocol):
    """Turns the rewards of one group's samples into ``(raw_rewards, rewards)``, one number a sample each."""

    def __call__(self, args: Any, samples: list[Sample]) -> tuple[Sequence[float], Sequence[float]]: ...


class SamplesToTrainData(Protocol):
    """Turns one group's samples into training columns (see ``TrainBatch.columns``), one row a sample."""

    def __call__(self, args: Any, samples: list[Sample]) -> dict[str, Column]: ...


class AdvantageEstimator(Protocol):
    """Sets ``batch.columns["advantages"]`` and ``["returns"]``: per row ``[response_length]`` float32. Other columns
    that it adds, of the same shape, are there for the loss.

    ``buffer_rl.kinds.marks.scoped`` says which rows it reads, and which columns. batch: rows of whole prompts for scope
    ``group``; any rows, perhaps some of a prompt, for scope ``row``; all rows of the rollout where nothing is declared.
    One with a scope of ``row`` or ``group`` gets ``ref_log_probs``, ``teacher_log_probs`` and ``old_log_probs`` only if
    it declares that it needs them.
    """

    def __call__(self, args: Any, batch: TrainBatch) -> None: ...


class PolicyLoss(Protocol):
    """Computes a number for each response token, or each row, of one micro-batch.
    ``buffer_rl.kinds.marks.loss_unit`` says what it must see together, and which columns it reads beside the usual
    ones."""

    def __call__(self, args: Any, inputs: LossInputs) -> TokenLoss: ...


class Correction(Protocol):
    """Computes the weights ``[num_rows, max_response]`` that the values of a policy loss are multiplied by, for the
    difference between the engine's log-probabilities and the trainer's. They are taken without a gradient. It declares
    what it must see together, and which columns it reads, as a loss does."""

    def __call__(self, args: Any, inputs: LossInputs) -> Any: ...


@runtime_checkable
class DataSource(Protocol):
    """Returns prompt groups in a reproducible order, and never ends. Constructed as ``cls(args)`` in a process of its
    own; see docs/plugins.md for what it may return. The groups may be lists of samples, and methods may be async.
    ``save`` writes one file, from which ``load`` of a new object goes on; it is called after each batch. With a
    parameter ``rollout_id`` it writes files below ``args.save``. Groups that are given back wait in the Buffer's queue.
    """

    def get_samples(self, num_samples: int) -> list[SampleGroup]: ...
    def save(self, path: str) -> None: ...
    def load(self, path: str) -> None: ...
    def __len__(self) -> int: ...


class ModelConverter(Protocol):
    """Loads a Hugging Face folder into the trainer's model and exports its weights. Constructed as ``cls(args)``.
    ``buffer_rl.train.converter.NameMap`` is the base class for what maps one tensor at a time."""

    def load(self, model: Any, folder: str) -> None:
        """Copy the folder's weights into the model, without gradient. Every element of every floating-point weight
        must be written: it holds NaN before."""

    def export(self, model: Any) -> Iterator[tuple[str, Any]]:
        """The weights under the folder's names, each name once, one tensor at a time, so that a large model is never
        gathered whole. A tensor may be the model's own memory; it stays as it is until the next optimizer step."""


class ModelProvider(Protocol):
    """Builds the model of the torch trainer, or its reference model, from the folder ``args.hf_checkpoint``. A trainer
    that splits the model over ranks may call it with the names ``pre_process``, ``post_process`` and, where it takes
    that, ``vp_stage`` in place of ``args``, for the part that a rank has: its documentation says so.

    It is a torch module with ``forward(input_ids, use_cache)``, whose answer has ``logits``
    ``[num_rows, num_tokens, vocabulary]``, with ``get_output_embeddings()`` and causal attention. It is moved to the
    trainer's device and to float32."""

    def __call__(self, args: Any) -> Any: ...


class Objective(Protocol):
    """The loss of a trained role, which the framework owns and every trainer backend calls. temperature: the divisor of
    logits. unit: rows that one call must see together (``buffer_rl.kinds.marks.Unit``). critic: the model has a value
    head, and calls have ``values`` in place of ``log_probs`` and ``entropy``."""

    temperature: float
    unit: Unit
    critic: bool

    def __call__(self, log_probs: Any, entropy: Any, rows: TrainBatch, values: Any = None) -> tuple[Any, Sums]:
        """The loss of a micro-batch, summed and not divided, to call ``backward`` on, and its sums.

        log_probs, entropy: ``[num_rows, width]`` float32 in nats, of the response tokens of ``rows``, with any padding
        on the right. values: the same of a critic. A loss of the backend's own (such as one that balances experts) is
        multiplied by ``sums.divisor`` and added."""


class Trainer(Protocol):
    """One rank of a trainer backend. Constructed as ``cls(args, rank, world_size, objective)`` in the rank's process,
    where ``torch.distributed`` joins all ranks if there are several.

    Every rank gets the same calls in the same order. What a rank that is not the head of its replica returns is not
    used, but for ``log_probs`` on ranks that call the objective: it goes into their rows.
    For ``--ref-update-interval`` it also has ``load_ref(path)``, unless ``--num-ref-workers`` have the reference: the
    model "ref" takes the weights in the Hugging Face folder ``path``, which ``save_hf`` wrote.
    For ``--offload-train`` it also has ``sleep()``, which frees the device's memory and keeps the state elsewhere, and
    ``wake_up()``, its inverse. ``sleep`` is called between two steps, and no other method before ``wake_up``.
    Where ``save`` returns under ``args.async_save`` before all is written, it has ``is_saved()``, which says whether it
    is, or raises CheckpointError. All ranks are asked, between their other calls, asleep too.

    Unless the class, or the function that makes it, has ``reads_old_log_probs = False``, rows have that column. The
    objective needs it with several optimizer steps a rollout alone, and has it then.
    """

    @property
    def topology(self) -> Topology:
        """The rank's place; it never changes."""

    def log_probs(self, model: str, batch: TrainBatch) -> list[np.ndarray] | None:
        """Log-probabilities of the response tokens under ``model`` ("actor", "ref" or "teacher"): per row
        ``[response_length]`` float32, in nats; None on ranks that do not have them. A backend for a critic has
        ``values(batch)`` beside it, the same of the value model before each token (see ``Objective.critic``)."""

    def accumulate(self, batch: TrainBatch) -> Sums:
        """Forward and backward of the rows, in micro-batches: adds their gradient, which is not divided by anything, to
        that of the step. Called any number of times for one step, with zero rows only where ``in_step``."""

    def optimizer_step(self, scale: float) -> dict[str, float]:
        """Sum the gradients over replicas, multiply by ``scale``, clip, step, zero them. Metrics: ``grad_norm``,
        ``lr``, equal on all ranks.

        Raises NonFiniteError, on every rank or on none and with nothing changed, if the gradient is not finite: the
        step is then left out (``--max-non-finite-steps``)."""

    def zero_grad(self) -> None:
        """Drop what was accumulated of a step that is not taken."""

    def export(self) -> Iterator[dict[str, Any]]:
        """The weights under Hugging Face names, in buckets of bounded size; every rank iterates to the end, as
        gathering a bucket may need all, and the head of replica 0 has the tensors. They may be the weights themselves:
        they are read before the next ``optimizer_step``."""

    def save_hf(self, path: str) -> None:
        """Write a folder that ``AutoModelForCausalLM.from_pretrained`` loads, tokenizer included."""

    def save(self, path: str) -> None:
        """Write this rank's weights, optimizer, schedule and random state into the folder ``path``."""

    def load(self, path: str) -> None:
        """The inverse of ``save``. Raises CheckpointError if something is missing or does not fit."""


class FieldRole(Protocol):
    """A role of the user's own (``--role-path``), constructed as ``cls(args)`` in each of its processes.

    role: its row of the table: a ``name``, the ``fields`` that it adds, what it ``needs``, the number of ``processes``,
    and ``restart``.
    """

    role: ClassVar[Role]

    def compute(self, batch: TrainBatch) -> Mapping[str, Column]:
        """The role's fields for some finished groups: of each a list of ``[response_length]`` arrays or an array
        ``[num_rows]``. Called again for rows whose process died; losses and estimators read the fields by name."""
        ...


class EngineProcess(Protocol):
    """A rollout engine that was started: a server that speaks SGLang's HTTP protocol at ``url``.

    ``check`` raises EngineError once the server has ended. It is called several times a second, and waits for nothing.
    A server that hangs is found by its silence: ``GET /server_info`` must be answered by what decodes. For
    ``--offload-rollout`` it has ``/release_memory_occupation`` and ``/resume_memory_occupation``, with tags."""

    @property
    def url(self) -> str: ...
    def wait_ready(self, timeout_s: float) -> None: ...
    def check(self) -> None: ...
    def stop(self) -> None: ...


class EngineLauncher(Protocol):
    """Starts one rollout engine, without waiting for it. Called on its node, in a process whose environment names its
    devices: the server listens on a free port of ``args.engine_host`` and ends with that process, as a child does that
    ``buffer_rl.cluster.process.ChildProcess`` starts; ``ServerProcess`` there finds the port of a server that cannot
    inherit a socket.

    The launcher may have ``deterministic``, true if under ``args.deterministic`` an answer depends on the request and
    its ``sampling_seed`` alone, and ``check(args)``, which is called before anything starts and raises ConfigError for
    options that its engines cannot serve."""

    def __call__(self, args: Any, index: int, log_path: str) -> EngineProcess: ...


class WeightTransport(Protocol):
    """Brings the weights from the trainer to the engines, version by version. Constructed as ``cls(args)``.

    sender: its side in the trainer, a class constructed as ``sender(args, topology)`` in each rank of the actor. Its
    methods get ``Trainer.export()``, which all ranks iterate to the end or none does, and the arguments of ``start``.
    staged: ``publish`` runs within one ``begin_weight_update`` and ``end_weight_update`` of the engines.
    It may also have ``release(version)``: all engines that go on have the version, so free what it took.
    """

    sender: type[Any]
    staged: bool

    def connect(self, trainer: Any, engines: Any) -> None:
        """Fix what is sent to whom; idempotent. Called first, before each retry, and when engines joined or left.

        trainer: ``start(method, *arguments)`` calls every rank's sender; the ``wait()`` of what it returns has the
        answers in rank order; ``send`` does both. engines: ``buffer_rl.engines.control.EngineControlClient``, whose
        calls wait for all engines: start the trainer's side of an exchange first."""

    def prepare(self, version: int) -> None:
        """Copy the version to where the engines can take it, while they still generate. Once for all retries."""

    def publish(self, version: int) -> None:
        """Have the engines, which are paused, take it. Raises EngineError if one refuses: it is called again then."""

    def close(self) -> None:
        """Free everything: the run ends, or a publication failed for good. May be called twice."""


class MetricLogger(Protocol):
    """Receives flat metrics. Constructed as ``cls(args, run_dir)``."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...
    def close(self) -> None: ...
