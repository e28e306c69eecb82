"""What each flag of a launch command of slime is here: its verdict, the reason, and the options that it becomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic.fields import FieldInfo

from buffer_rl.options.section import declared, did_you_mean, flag_of, item_of_mapping
from buffer_rl.options.values import Raw
from buffer_rl_slime.scripts.asynchronous import judge_ahead
from buffer_rl_slime.scripts.flags import GRADERS, REFERENCES, REMARKS, REWARD_NAMES, is_of_shape, known_flag
from buffer_rl_slime.scripts.meaning import Judgement, Verdict
from buffer_rl_slime.scripts.shell_script import SFT, Flags, steps_per_rollout, value_of
from buffer_rl_slime.scripts.shell_values import as_run, marks_of

if TYPE_CHECKING:
    from buffer_rl.args import Args

GPUS_OF_A_NODE = "8"
"""slime's default of ``--num-gpus-per-node``."""
WITH_MEGATRON = "with --train-backend megatron"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What the options are for.

    names: the registered names of a plugin kind. megatron: the options of the Megatron trainer's plugin, none where it
    is not there; with_megatron: whether the run uses it. laptop: whether to leave GPUs and servers out. project: whose
    script it is, as people write it."""

    options_class: type[Args]
    names: Callable[[str], Sequence[str]]
    megatron: frozenset[str]
    with_megatron: bool
    laptop: bool
    project: str = "slime"

    @property
    def fields(self) -> Mapping[str, FieldInfo]:
        """The options, by name."""
        return self.options_class.model_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Gives flags their verdicts. flags: all of the command, since some depend on others. schedule: what the command
    means as ``--schedule``; empty where it generates and trains in turn."""

    flags: Flags
    target: Target
    schedule: str = ""

    def judge(self, name: str, values: list[str]) -> Judgement:
        """The verdict for one flag, the reason, and the options that it becomes."""
        if (ahead := judge_ahead(name, values, self.flags, self.schedule)) is not None:
            return ahead
        own = {
            "eval-prompt-data": self._eval_prompt_data,
            "ref-load": self._ref_load,
            "opd-teacher-load": self._opd_teacher_load,
            "load": self._load,
            "rm-type": self._rm_type,
            "custom-rm-path": self._custom_rm_path,
            "group-rm": self._group_rm,
            "loss-type": self._loss_type,
            "debug-train-only": self._debug_train_only,
            "num-epoch": self._num_epoch,
            "lr-warmup-fraction": self._lr_warmup_fraction,
            "opd-type": self._opd_type,
            "train-backend": self._train_backend,
            "sequence-parallel": self._sequence_parallel,
            "recompute-granularity": self._recompute_granularity,
            "optimizer-cpu-offload": lambda values: self._moments_elsewhere("optimizer-cpu-offload", values),
            "no-save-optim": lambda values: self._moments_elsewhere("no-save-optim", values),
            "rollout-num-gpus-per-engine": self._gpus_per_engine,
            "moe-router-load-balancing-type": self._load_balancing,
            "update-weight-transport": self._update_weight_transport,
            "update-weight-mode": self._update_weight_mode,
            "wandb-key": self._wandb_key,
        }
        return own[name](values) if name in own else self._other(name, values)

    def _other(self, name: str, values: list[str]) -> Judgement:
        """A flag whose verdict depends on nothing but itself and its values."""
        option, fields = name.replace("-", "_"), self.target.fields
        raw: Raw = values if len(values) > 1 else values[0] if values else "true"
        known = known_flag(name, [as_run(value) for value in values])
        if option in self.target.megatron and not is_of_shape(name):
            if known and known.verdict is Verdict.NOT_NEEDED and not self.target.with_megatron:
                return known.verdict, known.why, {}
            return Verdict.SAME, WITH_MEGATRON, {option: raw}
        if option in fields and option not in self.target.megatron:
            return self._of_option(name, option, raw)
        if known:
            return known.verdict, known.why, dict(known.options)
        if item_of_mapping(fields, option)[0]:
            return Verdict.SAME, "", {option: raw}
        if name.startswith("no-") and (yes := option.removeprefix("no_")) in fields and not values:
            return Verdict.SAME, "", {yes: "false"}
        hint = did_you_mean(f"--{name}", [flag_of(each) for each in fields])
        return Verdict.NOT_YET, f"no flag of slime or Megatron that is known here{f'; {hint}' if hint else ''}", {}

    def _of_option(self, name: str, option: str, raw: Raw) -> Judgement:
        """A flag with the name of an option."""
        verdict, why = REMARKS.get(name, (Verdict.SAME, ""))
        if verdict is Verdict.NOT_YET:
            return verdict, why, {}
        kind = declared(self.target.fields[option], "kind")
        if not kind or not isinstance(raw, str):
            return verdict, why, {option: raw}
        if raw in REFERENCES:
            reference, differs = REFERENCES[raw]
            if not reference:
                return Verdict.NOT_NEEDED, "a run does it by itself", {}
            verdict = Verdict.CHANGES if differs else Verdict.RENAMED
            return verdict, differs or f"it is {reference} here", {option: reference}
        if "." in raw or ":" in raw:
            theirs = f"{self.target.project}'s function: plugins/buffer_rl_slime/README.md says which run"
            whose = theirs if raw.startswith(("slime.", "relax.")) else "your function"
            return verdict, why or f"{whose}; --dry-run looks whether it can be imported", {option: raw}
        if not marks_of(raw) and raw not in (names := self.target.names(kind)):
            hint = did_you_mean(raw, names) or f"buffer-rl plugins list --kind {kind}"
            return Verdict.NOT_YET, f"there is no {kind.replace('_', ' ')} of this name; {hint}", {}
        return verdict, why, {option: raw}

    # ---- flags whose verdict depends on others, or on what is on this machine

    def _eval_prompt_data(self, values: list[str]) -> Judgement:
        pairs = ["aime", *values] if len(values) == 1 else values
        if not pairs or len(pairs) % 2:
            return Verdict.NOT_YET, "these are no pairs of name and path", {}
        sets: Raw = [f"{name}={path}" for name, path in zip(pairs[::2], pairs[1::2], strict=True)]
        why = "a lone path is named aime, as in slime" if len(values) == 1 else ""
        return Verdict.SAME, why, {"eval_prompt_data": sets}

    def _ref_load(self, values: list[str]) -> Judgement:
        path, model = "".join(values), value_of(self.flags, "hf-checkpoint")
        if path.rstrip("/").removesuffix("_torch_dist").rstrip("/") == model.rstrip("/"):
            return Verdict.NOT_NEEDED, "the reference model is --hf-checkpoint, which needs no conversion", {}
        if (Path(path) / "config.json").is_file():
            return Verdict.SAME, "", {"ref_load": path}
        why = (
            "slime starts from these weights, in Megatron's format, and refers to them; here both are --hf-checkpoint: "
            "name the Hugging Face folder that they were made of"
        )
        return Verdict.CHANGES, why, {}

    def _opd_teacher_load(self, values: list[str]) -> Judgement:
        path = "".join(values)
        if (Path(path) / "config.json").is_file():
            return Verdict.SAME, "", {"opd_teacher_load": path}
        return Verdict.NOT_YET, "a teacher is a Hugging Face folder: opd_teacher_load: FOLDER", {}

    def _load(self, values: list[str]) -> Judgement:
        path = "".join(values)
        if path.rstrip("/") == value_of(self.flags, "save").rstrip("/"):
            why = "resumes what is in the folder, or starts; slime's own checkpoints are not read"
            return Verdict.SAME, why, {"load": path}
        return Verdict.CHANGES, "here it resumes a run of buffer-rl; the initial weights are --hf-checkpoint", {}

    def _rm_type(self, values: list[str]) -> Judgement:
        if "custom-rm-path" in self.flags:
            return Verdict.NOT_NEEDED, "--custom-rm-path scores every sample, as in slime", {}
        given = "".join(values)
        names = self.target.names("reward")
        name = REWARD_NAMES.get(given, given)
        if name not in names:
            hint = did_you_mean(name, names) or "buffer-rl plugins list --kind reward"
            return Verdict.NOT_YET, f"there is no reward of this name; {hint}", {}
        if name in GRADERS:
            called = "" if name == given else f"{name} is slime's {given}; "
            why = f"{called}it decides otherwise on some answers (rm_hub/README.md)"
            return Verdict.CHANGES, why, {"rm_type": name}
        return Verdict.SAME, "", {"rm_type": name}

    def _custom_rm_path(self, values: list[str]) -> Judgement:
        if "group-rm" in self.flags:
            why = "with --group-rm it is --custom-group-rm-path"
            return Verdict.RENAMED, why, {"custom_group_rm_path": "".join(values)}
        return self._of_option("custom-rm-path", "custom_rm_path", "".join(values))

    def _group_rm(self, values: list[str]) -> Judgement:
        if "custom-rm-path" in self.flags:
            return Verdict.RENAMED, "--custom-group-rm-path says so", {}
        return Verdict.NOT_NEEDED, "a named reward scores each sample by itself, with the same result", {}

    def _loss_type(self, values: list[str]) -> Judgement:
        if values == ["custom_loss"]:
            return Verdict.NOT_NEEDED, "--custom-loss-function-path alone says so", {}
        if values == ["policy_loss"]:
            return Verdict.NOT_NEEDED, "the loss follows from --advantage-estimator", {}
        return self._of_option("loss-type", "loss_type", "".join(values))

    def _debug_train_only(self, values: list[str]) -> Judgement:
        if value_of(self.flags, "loss-type") == SFT:
            return Verdict.NOT_NEEDED, "supervised fine-tuning starts no engine by itself", {}
        return Verdict.NOT_YET, "here it trains on --load-debug-rollout-data", {}

    def _num_epoch(self, values: list[str]) -> Judgement:
        if "num-rollout" in self.flags:
            return Verdict.NOT_NEEDED, "--num-rollout counts, as in slime", {}
        return Verdict.SAME, "", {"num_epoch": "".join(values)}

    def _lr_warmup_fraction(self, values: list[str]) -> Judgement:
        decay = value_of(self.flags, "lr-decay-iters")
        try:
            steps = int(decay) if decay else int(value_of(self.flags, "num-rollout")) * steps_per_rollout(self.flags)
            warmup = int(float("".join(values)) * steps)
        except (ValueError, ZeroDivisionError):
            return Verdict.NOT_YET, "the number of steps follows from the data: lr_warmup_iters: STEPS", {}
        return Verdict.RENAMED, f"it is --lr-warmup-iters {warmup}, of {steps} steps", {"lr_warmup_iters": str(warmup)}

    def _opd_type(self, values: list[str]) -> Judgement:
        if values == ["megatron"]:
            return Verdict.NOT_NEEDED, "--opd-teacher-load says so", {}
        return Verdict.NOT_NEEDED, "without --opd-teacher-load the samples bring teacher_log_probs", {}

    def _train_backend(self, values: list[str]) -> Judgement:
        if values == ["megatron"] and not self.target.with_megatron:
            if self.target.megatron:
                return Verdict.SAME, "chosen otherwise: --train-backend torch, or --laptop", {}
            return Verdict.NOT_YET, "the trainer is torch", {}
        return Verdict.SAME, "", {}

    def _gpus_per_engine(self, values: list[str]) -> Judgement:
        gpus = "".join(values)
        if gpus.isdigit() and int(gpus) > int(value_of(self.flags, "num-gpus-per-node") or GPUS_OF_A_NODE):
            return Verdict.NOT_YET, "an engine is on one node", {}
        return Verdict.SAME, "", {"rollout_num_gpus_per_engine": gpus}

    def _sequence_parallel(self, values: list[str]) -> Judgement:
        if (value_of(self.flags, "tensor-model-parallel-size") or "1") == "1":
            return Verdict.NOT_NEEDED, "nothing is split", {}
        return self._other("sequence-parallel", values)

    def _recompute_granularity(self, values: list[str]) -> Judgement:
        if values == ["full"] or self.target.with_megatron:
            return self._other("recompute-granularity", values)
        return Verdict.NOT_NEEDED, "it saves memory with Megatron alone", {}

    def _moments_elsewhere(self, name: str, values: list[str]) -> Judgement:
        if self.target.with_megatron:
            return Verdict.NOT_YET, "the Megatron trainer keeps Adam's moments on its device and in checkpoints", {}
        return self._other(name, values)

    def _load_balancing(self, values: list[str]) -> Judgement:
        coefficient = known_flag("moe-aux-loss-coeff", [value_of(self.flags, "moe-aux-loss-coeff") or "0"])
        if coefficient is not None and coefficient.verdict is Verdict.NOT_NEEDED:
            return coefficient.verdict, "its loss has the weight 0", {}
        return self._other("moe-router-load-balancing-type", values)

    def _update_weight_transport(self, values: list[str]) -> Judgement:
        mode = "disk" if values == ["disk"] else "distributed"
        return Verdict.RENAMED, f"it is --weight-sync-mode {mode} here", {"weight_sync_mode": mode}

    def _update_weight_mode(self, values: list[str]) -> Judgement:
        if values == ["full"]:
            return Verdict.NOT_NEEDED, "weights are published whole", {}
        return Verdict.NOT_YET, "weights are published whole (--weight-sync-mode)", {}

    def _wandb_key(self, values: list[str]) -> Judgement:
        return Verdict.NOT_NEEDED, "a key is never an option: set the variable WANDB_API_KEY", {}
