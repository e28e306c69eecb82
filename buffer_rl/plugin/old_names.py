"""Where the modules of earlier versions are now.

An import of an old name fails with the new one; an option or a checkpoint that has an old plugin reference means the
new one. A module that moves or goes is named in ``_MOVED`` or ``_RENAMED``; one that is split, in ``_SPLIT``.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE = "buffer_rl."

_MOVED: Mapping[str, str] = {
    "cluster": "engine.process environment",
    "engines": "embedded.openai",
    "files": "buffer.row_file checkpoint remote",
    "kinds": "token_loss",
    "observe": "terminal",
    "options": "file_kind redaction user_args",
    "plan": "algo.algorithms cluster.counts driver.schedule roles train.layout",
    "plugin": "hookspecs",
    "records": "ids sample utf8",
}
"""The modules that a package has under their own last names, as they were."""
_RENAMED: Mapping[str, str] = {
    "algo.kl": "algo.kl_target",
    "algo.losses": "algo.cispo algo.decoupled algo.gmpo algo.gspo algo.sapo algo.value",
    "algo.returns": "algo.distillation",
    "buffer.codec": "buffer.wire",
    "buffer.ledger": "buffer.record",
    "buffer.ledger_tables": "buffer.ledger_entry",
    "buffer.queue": "buffer.partial",
    "buffer.readers": "buffer.selection",
    "buffer.selections": "buffer.selection_metrics",
    "cluster.actor_group": "cluster.fused",
    "cluster.environment": "signals",
    "cluster.options": "buffer.options engine.options engines.options",
    "cluster.process": "parent",
    "cluster.requirements": "cluster.demands",
    "cluster.session": "cluster.isolation",
    "data.reader": "data.check",
    "driver.folders": "driver.process",
    "driver.options": "observe.options",
    "driver.provenance": "driver.resume",
    "driver.restart": "driver.session",
    "embedded": "engine.embedded",
    "embedded.fast_decoder": "engine.embedded.model",
    "embedded.generation_routes": "engine.embedded.generate_route engine.embedded.openai_routes",
    "embedded.protocol": "engine.embedded.answers",
    "embedded.sampling": "engine.embedded.log_probs",
    "engines": "engine",
    "engines.http": "engine.loop_thread",
    "engines.protocol": "engine.rows engine.server_info",
    "engines.registry": "engine.replica",
    "engines.supervisor": "engine.heartbeat",
    "files.checkpoint": "files.retention",
    "files.hf_config": "model_config",
    "kinds.marks": "scope",
    "observe.metrics": "observe.tensorboard",
    "observe.report": "observe.summary",
    "observe.svg_chart": "observe.timeline_picture",
    "options": "configuration",
    "options.section": "config",
    "options.sources": "configuration.unknown_flags",
    "options.values": "configuration.yaml_file",
    "plan.algorithm": "train.roles",
    "plan.counts": "train.batch_sizes",
    "plugin": "resolution",
    "plugin.registry": "plugins",
    "records.groups": "lazy_list types",
    "rollout.context": "rollout.places",
    "rollout.generate": "rollout.turns",
    "rollout.reward_model_client": "rollout.reward_model",
    "rollout.sft": "rollout.loss_masks",
    "testing.decoding": "testing.sglang_rules",
    "testing.lint_loss": "testing.loss_step",
    "trainer": "train",
    "trainer.peers": "train.ranks",
    "trainer.rank": "train.group",
    "trainer.rank_files": "train.state",
    "trainer.role_worker": "train.worker",
    "trainer.steps": "train.kl_control",
    "verbs.data": "data.stats",
    "verbs.row_sources": "verbs.rows",
    "weights.publish": "weights.confirm",
    "weights.role_weights": "weights.roles",
    "weights.sender": "weights.names",
    "weights.shared_memory": "weights.cuda_ipc",
}
"""What became of other modules, by their new names. A package's row holds for all modules in it that have none."""
MODULES: Mapping[str, str] = {
    **{old: f"{new}.{old.rpartition('.')[2]}" for new, names in _MOVED.items() for old in names.split()},
    **{old: new for new, names in _RENAMED.items() for old in names.split()},
}
"""New names by old ones, below ``buffer_rl.``."""

_SPLIT: Mapping[str, Mapping[str, str]] = {
    "contracts": {
        "kinds.data": "DataSource SamplesToTrainData",
        "kinds.engine": "EngineLauncher EngineProcess WeightTransport",
        "kinds.marks": "Unit",
        "kinds.objective": "AdvantageEstimator Correction Objective PolicyLoss",
        "kinds.reward": "DynamicSamplingFilter GroupRewardModel RewardModel RewardPostProcess SampleFilter",
        "kinds.rollout": "AllSamplesProcess BufferFilter EvalRolloutLogFunction GenerateFunction MetricLogger "
        "RolloutBuffer RolloutFunction RolloutLogFunction",
        "kinds.token_loss": "LossInputs Sums TokenLoss",
        "kinds.trainer": "ModelConverter ModelProvider Trainer",
        "records.groups": "Column FilterDecision RolloutOutput Sample SampleGroup Ticket Topology TrainBatch",
    },
    "contract_check": {
        "kinds.reward": "check_filter_decision check_group_rewards check_reward",
        "kinds.rollout": "as_leased_group as_sample check_metrics check_rollout_output check_statuses",
    },
    "kinds": {"kinds.kind": "PluginKind", "kinds.table": "KINDS kind_named"},
    "options": {"args": "Args CORE_SECTIONS"},
    "roles": {"kinds.trainer": "FieldRole"},
}

NAMES: Mapping[str, str] = {
    f"{old}.{name}": new for old, parts in _SPLIT.items() for new, names in parts.items() for name in names.split()
}
"""The modules of classes and functions that left a module without the rest of it, by ``module.name``."""


def new_name(name: str) -> str:
    """The name of now for the old name of a module, ``module.attribute`` or ``module:attribute``; empty for others.

    Example: ``buffer_rl.embedded.launcher:launch`` for ``buffer_rl.engine.embedded.launcher:launch``.
    """
    if not name.startswith(PACKAGE):
        return ""
    rest = name.removeprefix(PACKAGE)
    dotted = rest.replace(":", ".")
    for end in [at for at in range(len(rest), 0, -1) if f"{dotted}."[at] == "."]:
        old = dotted[:end]
        if old in NAMES:
            return f"{PACKAGE}{NAMES[old]}{rest[old.rindex('.') :]}"
        if old in MODULES:
            return f"{PACKAGE}{MODULES[old]}{rest[end:]}"
    return ""


def with_new_names(value: Any) -> Any:
    """An option's value with new names: a reference, or a list of them. Any other value as it is."""
    if isinstance(value, list):
        return [with_new_names(item) for item in value]
    return (new_name(value) or value) if isinstance(value, str) else value


def find_spec(name: str) -> ModuleSpec | None:
    """Of a package that moved, or a module that was split: an empty one, which tells where each of its names is. Raises
    ModuleNotFoundError with the new name of another module that moved; None for the rest."""
    old = name.removeprefix(PACKAGE)
    was_package = "." not in MODULES.get(old, ".")
    if was_package or old in _SPLIT:
        return ModuleSpec(name, _EmptyModule(), is_package=was_package)
    if new := new_name(name):
        raise ModuleNotFoundError(f"{name} is {new} now")  # without ``name=``: then ``from package import x`` hides it
    return None


class _EmptyModule(Loader):
    """Loads a module all of whose names raise ImportError."""

    def exec_module(self, module: ModuleType) -> None:
        """As importlib's loaders."""

        def tell(name: str) -> object:
            if name == "LossOutputs":
                from buffer_rl.kinds.token_loss import NEW_FORM

                raise ImportError(f"there is no LossOutputs any more: {NEW_FORM}")
            if not name.startswith("__") and (new := new_name(f"{module.__name__}.{name}")):
                raise ImportError(f"{module.__name__}.{name} is {new} now")
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        names = [old.rpartition(".") for old in NAMES]
        module.__dict__["__all__"] = [name for owner, _, name in names if f"{PACKAGE}{owner}" == module.__name__]
        module.__dict__["__getattr__"] = tell
