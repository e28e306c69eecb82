"""What trainer backends, own roles, model converters and model providers receive and return."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from buffer_rl.kinds.kind import PluginKind
from buffer_rl.kinds.token_loss import Sums
from buffer_rl.records.groups import Column, Topology, TrainBatch

if TYPE_CHECKING:
    import numpy as np

    from buffer_rl.plan.roles import Role


class Trainer(Protocol):
    """One rank of a trainer backend. Constructed as ``cls(args, rank, world_size, objective)`` in the rank's process,
    where ``torch.distributed`` joins all ranks if there are several.

    Every rank gets the same calls in the same order. What a rank that is not the head of its replica returns is not
    used, but for ``log_probs`` on ranks that call the objective: it goes into their rows. What else it may have:
    ``HasValues``, ``ReplaysExperts``, ``ReloadsReference``, ``Sleeps`` and ``SavesLater``.

    Unless the class, or the function that makes it, has ``reads_old_log_probs = False``, rows have that column. The
    objective needs it with several optimizer steps a rollout alone, and has it then.
    """

    @property
    def topology(self) -> Topology:
        """The rank's place; it never changes."""

    def log_probs(self, model: str, batch: TrainBatch) -> list[np.ndarray] | None:
        """Log-probabilities of the response tokens under ``model`` ("actor", "ref" or "teacher"): per row
        ``[response_length]`` float32, in nats; None on ranks that do not have them."""

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


class HasValues(Protocol):
    """A trainer that can be a critic's (see ``Objective.critic``)."""

    def values(self, batch: TrainBatch) -> list[np.ndarray] | None:
        """The value model before each response token: per row ``[response_length]`` float32; None on ranks that do not
        have them."""


class ReplaysExperts(Protocol):
    """A trainer for ``--replay-routed-experts``: rows have the column ``routed_experts`` (see ``TrainBatch``). The
    policy's passes, those of ``log_probs`` too, send each token to its experts, if it has some; those of other models
    do not."""

    @property
    def replays_experts(self) -> bool:
        """Whether experts are replayed."""


class ReloadsReference(Protocol):
    """A trainer for ``--ref-update-interval`` without ``--num-ref-workers``."""

    def load_ref(self, path: str) -> None:
        """The model "ref" takes the weights in the Hugging Face folder ``path``, which ``save_hf`` wrote."""


class Memory(StrEnum):
    """The parts of a trainer's memory on its device: the weights that it trains; its gradients and the optimizer's
    state; its frozen models, such as a reference or a teacher."""

    WEIGHTS = "weights"
    OPTIMIZER = "optimizer"
    FROZEN = "frozen"


class TrainsAdapters(Protocol):
    """A trainer for ``--lora-rank``. Its ``log_probs`` has the model "base": the policy without adapters."""

    @property
    def trains_adapters(self) -> bool:
        """Whether adapters alone are trained."""

    def write_adapter(self, path: str) -> None:
        """Write the adapters into the folder ``path``, in peft's format. Called in all ranks; one of them writes."""

    def unchanged_share(self) -> float:
        """Of merged adapters, the share of the elements of the matrices that are adapted which round to the same number
        of ``args.engine_dtype`` as at the last call. Called in all ranks, after each publication."""


class Sleeps(Protocol):
    """A trainer for ``--offload-train``. One whose methods take no ``tags`` moves everything: it sleeps once no part is
    needed, and wakes up if one is."""

    def sleep(self, tags: Collection[Memory]) -> None:
        """Free the device's memory of the parts ``tags``, and keep them elsewhere. Called between two steps.

        Until ``wake_up``, only what needs none of them is called: ``log_probs`` of the policy, ``values``, ``export``
        and ``save_hf`` need WEIGHTS; ``log_probs`` of another model and ``load_ref`` FROZEN too; ``is_saved`` nothing;
        all others WEIGHTS and OPTIMIZER."""

    def wake_up(self, tags: Collection[Memory]) -> None:
        """The inverse of ``sleep``."""


class SavesLater(Protocol):
    """A trainer whose ``save`` returns under ``args.async_save`` before all is written."""

    def is_saved(self) -> bool:
        """Whether all is written. Raises CheckpointError if it cannot be. All ranks are asked, between their other
        calls, asleep too."""


class FieldRole(Protocol):
    """A role of the user's own (``--role-path``), constructed as ``cls(args)`` in each of its processes.

    role: its row of the table: a ``name``, the ``fields`` that it adds, what it ``needs``, the number of ``processes``,
    and ``restart``.

    It may also have ``work(dataset)``, which does all work on a step in place of ``compute`` for each micro-batch: it
    reads ``dataset``, a ``buffer_rl.trainer.stream.StreamingDataset``, in one or several passes, and writes the fields.
    """

    role: ClassVar[Role]

    def compute(self, batch: TrainBatch) -> Mapping[str, Column]:
        """The role's fields for some finished groups: of each a list of ``[response_length]`` arrays or an array
        ``[num_rows]``. Called again for rows whose process died; losses and estimators read the fields by name."""


class ModelConverter(Protocol):
    """Loads a Hugging Face folder into the trainer's model and exports its weights. Constructed as ``cls(args)``.
    ``buffer_rl.trainer.converter.NameMap`` is the base class for what maps one tensor at a time."""

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


KINDS = (
    PluginKind(
        name="trainer",
        flags=("--train-backend",),
        protocol=Trainer,
        signature="class (args, rank, world_size, objective) with what buffer_rl.kinds.trainer.Trainer has",
        changed=dict.fromkeys(
            ("forward_backward", "finish_accumulation", "compute_advantages", "export_buckets"),
            "a trainer is built as cls(args, rank, world_size, objective) now: accumulate(batch) calls the objective, "
            "backward on the summed loss, and returns its Sums (forward_backward is gone); optimizer_step(scale) "
            "multiplies the gradients; export() is collective; topology says which rows the rank gets; advantages are "
            "the framework's",
        ),
        constructed=("args", "rank", "world_size", "objective"),
    ),
    PluginKind(
        name="role",
        flags=("--role-path",),
        protocol=FieldRole,
        signature="class (args) with role (a buffer_rl.plan.roles.Role) and compute(batch) -> columns",
        constructed=("args",),
    ),
    PluginKind(
        name="converter",
        flags=("--model-converter-path",),
        protocol=ModelConverter,
        signature="class (args) with load, export",
        changed=dict.fromkeys(
            ("to_trainer", "to_hf"),
            "a converter has load(model, folder) and export(model) now: derive the class from "
            "buffer_rl.trainer.converter.NameMap, whose load and export call to_trainer and to_hf for each tensor",
        ),
        constructed=("args",),
    ),
    PluginKind(
        name="model_provider",
        flags=("--custom-model-provider-path",),
        protocol=ModelProvider,
        signature="(args) -> model, or (pre_process, post_process, vp_stage) -> its part",
        keywords=("pre_process", "post_process"),
    ),
)
