"""The table of plugin kinds: name, flags, signature. Entry points of a kind stand in the group ``buffer_rl.NAME``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from buffer_rl.errors import ConfigError
from buffer_rl.kinds.data import DataSource, SamplesToTrainData
from buffer_rl.kinds.engine import EngineLauncher, WeightTransport
from buffer_rl.kinds.objective import AdvantageEstimator, Correction, PolicyLoss
from buffer_rl.kinds.reward import GroupRewardModel, RewardModel, RewardPostProcess
from buffer_rl.kinds.rollout import (
    AllSamplesProcess,
    BufferFilter,
    DynamicSamplingFilter,
    EvalRolloutLogFunction,
    GenerateFunction,
    MetricLogger,
    RolloutFunction,
    RolloutLogFunction,
    SampleFilter,
)
from buffer_rl.kinds.trainer import FieldRole, ModelConverter, ModelProvider, Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginKind:
    """One row of the table of plugin kinds.

    positional: names of the positional arguments that a function of this kind is called with.
    methods: for kinds that are classes, the methods an object must have. attributes: other names of the class.
    optional: how many of the last of them a function may leave out.
    keywords: what some callers pass by name in place of all positional ones, with others; a function that has
    parameters of these names will do.
    constructed: the reference names a class (or factory) that is called with ``positional`` first.
    changed: methods of earlier contracts, which are never called, with the hint for an object that has one.
    """

    name: str
    flags: tuple[str, ...]
    protocol: type
    signature: str
    positional: tuple[str, ...]
    optional: int = 0
    keywords: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    constructed: bool = False
    may_be_async: bool = False
    changed: Mapping[str, str] = field(default_factory=dict)

    @property
    def newest_hint(self) -> str:
        """What changed in the contract last; empty where nothing did."""
        return next(iter(self.changed.values()), "")

    def changed_hint(self, obj: object) -> str:
        """The hint for an object of an earlier contract; empty for any other. A method that a base class of the
        framework has is none of an earlier contract."""
        bases = (obj if isinstance(obj, type) else type(obj)).__mro__
        ours = [base for base in bases if base.__module__.startswith("buffer_rl.")]
        found = (m for m in self.changed if hasattr(obj, m) and not any(hasattr(base, m) for base in ours))
        return self.changed[method] if (method := next(found, None)) else ""


_KIND_ROWS: tuple[PluginKind, ...] = (
    PluginKind(
        name="rollout",
        flags=("--rollout-function-path", "--eval-function-path"),
        protocol=RolloutFunction,
        signature="(args, rollout_id, buffer, evaluation=False) -> RolloutOutput | list[SampleGroup]",
        positional=("args", "rollout_id", "buffer", "evaluation"),
        may_be_async=True,
    ),
    PluginKind(
        name="generate",
        flags=("--custom-generate-function-path",),
        protocol=GenerateFunction,
        signature="async (args, sample, sampling_params[, evaluation]) -> Sample | list[Sample]",
        positional=("args", "sample", "sampling_params"),
        may_be_async=True,
    ),
    PluginKind(
        name="reward",
        flags=("--rm-type", "--custom-rm-path"),
        protocol=RewardModel,
        signature="(args, sample) -> float | dict",
        positional=("args", "sample"),
        may_be_async=True,
    ),
    PluginKind(
        name="group_reward",
        flags=("--custom-group-rm-path",),
        protocol=GroupRewardModel,
        signature="(args, group) -> list[float]",
        positional=("args", "group"),
        may_be_async=True,
    ),
    PluginKind(
        name="filter",
        flags=("--dynamic-sampling-filter-path",),
        protocol=DynamicSamplingFilter,
        signature="(args, group) -> FilterDecision | bool",
        positional=("args", "group"),
        may_be_async=True,
    ),
    PluginKind(
        name="sample_filter",
        flags=("--rollout-sample-filter-path",),
        protocol=SampleFilter,
        signature="(args, groups) -> None",
        positional=("args", "groups"),
        may_be_async=True,
    ),
    PluginKind(
        name="all_samples_process",
        flags=("--rollout-all-samples-process-path",),
        protocol=AllSamplesProcess,
        signature="(args, groups[, data_source]) -> None",
        positional=("args", "groups", "data_source"),
        optional=1,
        may_be_async=True,
    ),
    PluginKind(
        name="rollout_log",
        flags=("--custom-rollout-log-function-path",),
        protocol=RolloutLogFunction,
        signature="(rollout_id, args, samples, rollout_extra_metrics, rollout_time) -> bool | None",
        positional=("rollout_id", "args", "samples", "rollout_extra_metrics", "rollout_time"),
        may_be_async=True,
    ),
    PluginKind(
        name="eval_rollout_log",
        flags=("--custom-eval-rollout-log-function-path",),
        protocol=EvalRolloutLogFunction,
        signature="(rollout_id, args, data, extra_metrics) -> bool | None",
        positional=("rollout_id", "args", "data", "extra_metrics"),
        may_be_async=True,
    ),
    PluginKind(
        name="buffer_filter",
        flags=("--buffer-filter-path",),
        protocol=BufferFilter,
        signature="(args, rollout_id, buffer, num_samples) -> chosen headers",
        positional=("args", "rollout_id", "buffer", "num_samples"),
    ),
    PluginKind(
        name="reward_post_process",
        flags=("--custom-reward-post-process-path",),
        protocol=RewardPostProcess,
        signature="(args, samples) -> (raw_rewards, rewards)",
        positional=("args", "samples"),
    ),
    PluginKind(
        name="samples_to_train_data",
        flags=("--custom-convert-samples-to-train-data-path",),
        protocol=SamplesToTrainData,
        signature="(args, samples) -> dict of columns",
        positional=("args", "samples"),
    ),
    PluginKind(
        name="advantage",
        flags=("--advantage-estimator", "--custom-advantage-function-path"),
        protocol=AdvantageEstimator,
        signature="(args, batch) -> None",
        positional=("args", "batch"),
    ),
    PluginKind(
        name="loss",
        flags=("--loss-type", "--custom-loss-function-path"),
        protocol=PolicyLoss,
        signature="(args, inputs) -> TokenLoss",
        positional=("args", "inputs"),
    ),
    PluginKind(
        name="correction",
        flags=("--custom-tis-function-path",),
        protocol=Correction,
        signature="(args, inputs) -> weights [num_rows, max_response]",
        positional=("args", "inputs"),
    ),
    PluginKind(
        name="data_source",
        flags=("--data-source-path",),
        protocol=DataSource,
        signature="class (args) with get_samples, save, load, __len__",
        positional=("args",),
        methods=("get_samples", "save", "load", "__len__"),
        constructed=True,
        may_be_async=True,
    ),
    PluginKind(
        name="converter",
        flags=("--model-converter-path",),
        protocol=ModelConverter,
        signature="class (args) with load, export",
        positional=("args",),
        methods=("load", "export"),
        constructed=True,
        changed=dict.fromkeys(
            ("to_trainer", "to_hf"),
            "a converter has load(model, folder) and export(model) now: derive the class from "
            "buffer_rl.train.converter.NameMap, whose load and export call to_trainer and to_hf for each tensor",
        ),
    ),
    PluginKind(
        name="model_provider",
        flags=("--custom-model-provider-path",),
        protocol=ModelProvider,
        signature="(args) -> model, or (pre_process, post_process, vp_stage) -> its part",
        positional=("args",),
        keywords=("pre_process", "post_process"),
    ),
    PluginKind(
        name="trainer",
        flags=("--train-backend",),
        protocol=Trainer,
        signature="class (args, rank, world_size, objective) with what buffer_rl.kinds.trainer.Trainer has",
        positional=("args", "rank", "world_size", "objective"),
        methods=("log_probs", "accumulate", "optimizer_step", "zero_grad", "export", "save_hf", "save", "load"),
        constructed=True,
        changed=dict.fromkeys(
            ("forward_backward", "finish_accumulation", "compute_advantages", "export_buckets"),
            "a trainer is built as cls(args, rank, world_size, objective) now: accumulate(batch) calls the objective, "
            "backward on the summed loss, and returns its Sums (forward_backward is gone); optimizer_step(scale) "
            "multiplies the gradients; export() is collective; topology says which rows the rank gets; advantages are "
            "the framework's",
        ),
    ),
    PluginKind(
        name="role",
        flags=("--role-path",),
        protocol=FieldRole,
        signature="class (args) with role (a buffer_rl.plan.roles.Role) and compute(batch) -> columns",
        positional=("args",),
        methods=("compute",),
        constructed=True,
    ),
    PluginKind(
        name="engine",
        flags=("--rollout-engine",),
        protocol=EngineLauncher,
        signature="(args, index, log_path) -> EngineProcess",
        positional=("args", "index", "log_path"),
    ),
    PluginKind(
        name="weight_transport",
        flags=("--weight-sync-mode",),
        protocol=WeightTransport,
        signature="class (args) with sender, staged, connect, prepare, publish, close",
        positional=("args",),
        methods=("connect", "prepare", "publish", "close"),
        attributes=("sender",),
        constructed=True,
        changed=dict.fromkeys(
            ("load", "cleanup"),
            "a weight transport has two sides now: connect(trainer, engines), prepare(version), publish(version) and "
            "close() in the driver, and a class `sender` in each rank of the trainer; see docs/models.md",
        ),
    ),
    PluginKind(
        name="logger",
        flags=("--logger",),
        protocol=MetricLogger,
        signature="class (args, run_dir) with log, close",
        positional=("args", "run_dir"),
        methods=("log", "close"),
        constructed=True,
    ),
)

KINDS: Mapping[str, PluginKind] = {row.name: row for row in _KIND_ROWS}


def kind_named(name: str) -> PluginKind:
    """The plugin kind called ``name``. Raises ConfigError listing the known kinds."""
    if name not in KINDS:
        raise ConfigError(f"there is no plugin kind {name!r}", expected=f"one of {', '.join(KINDS)}")
    return KINDS[name]
