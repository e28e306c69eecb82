"""Where the modules of earlier versions are now.

An import of an old name fails with the new one; an option or a checkpoint that has an old plugin reference means the
new one. A module that moves or goes is one row of ``MODULES``; one that is split, a row of ``NAMES`` for each part.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE = "buffer_rl."

MODULES: Mapping[str, str] = {
    "algo.algorithms": "plan.algorithms",
    "algo.distillation": "algo.returns",
    "algo.kl_target": "algo.kl",
    "algo.value": "algo.losses",
    "buffer.ledger_entry": "buffer.ledger_tables",
    "buffer.record": "buffer.ledger",
    "buffer.row_file": "files.row_file",
    "buffer.selection": "buffer.readers",
    "buffer.wire": "buffer.codec",
    "checkpoint": "files.checkpoint",
    "cluster.counts": "plan.counts",
    "cluster.demands": "cluster.requirements",
    "cluster.fused": "cluster.actor_group",
    "cluster.isolation": "cluster.session",
    "config": "options.section",
    "configuration": "options",
    "configuration.unknown_flags": "options.sources",
    "configuration.yaml_file": "options.values",
    "data.check": "data.reader",
    "data.stats": "verbs.data",
    "driver.process": "driver.folders",
    "driver.resume": "driver.provenance",
    "driver.schedule": "plan.schedule",
    "driver.session": "driver.restart",
    "engine": "engines",
    "engine.embedded": "embedded",
    "engine.embedded.answers": "embedded.protocol",
    "engine.embedded.generate_route": "embedded.generation_routes",
    "engine.embedded.log_probs": "embedded.sampling",
    "engine.embedded.model": "embedded.fast_decoder",
    "engine.embedded.openai_routes": "embedded.generation_routes",
    "engine.embedded.sglang_update": "embedded.sglang_service",
    "engine.heartbeat": "engines.supervisor",
    "engine.loop_thread": "engines.http",
    "engine.process": "cluster.process",
    "engine.replica": "engines.registry",
    "engine.rows": "engines.protocol",
    "engine.server_info": "engines.protocol",
    "environment": "cluster.environment",
    "file_kind": "options.file_kind",
    "hookspecs": "plugin.hookspecs",
    "ids": "records.ids",
    "lazy_list": "records.groups",
    "model_config": "files.hf_config",
    "parent": "cluster.process",
    "plugins": "plugin.registry",
    "redaction": "options.redaction",
    "remote": "files.remote",
    "resolution": "plugin",
    "roles": "plan.roles",
    "rollout.loss_masks": "rollout.sft",
    "rollout.reward_model": "rollout.reward_model_client",
    "rollout.turns": "rollout.generate",
    "sample": "records.sample",
    "scope": "kinds.marks",
    "signals": "cluster.environment",
    "terminal": "observe.terminal",
    "testing.local_buffer": "testing.fake_buffer",
    "testing.loss_step": "testing.lint_loss",
    "testing.virtual_runtime": "testing.fake_roles",
    "token_loss": "kinds.token_loss",
    "train.batch_sizes": "plan.counts",
    "train.group": "train.rank",
    "train.kl_control": "train.steps",
    "train.layout": "plan.layout",
    "train.ranks": "train.peers",
    "train.roles": "plan.algorithm",
    "train.state": "train.rank_files",
    "train.worker": "train.role_worker",
    "types": "records.groups",
    "user_args": "options.user_args",
    "utf8": "records.utf8",
    "verbs.rows": "verbs.row_sources",
    "weights.confirm": "weights.publish",
    "weights.cuda_ipc": "weights.shared_memory",
    "weights.names": "weights.sender",
    "weights.roles": "weights.role_weights",
}
"""New names by old ones, below ``buffer_rl.``. A package's row holds for all modules in it that have none."""

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
