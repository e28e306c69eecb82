"""The flags of slime's launch scripts, Megatron's among them, that are no options here: what each means for a run.

Those with one meaning whatever their value are in ``flags.yaml``. Flags that are options of the same name are in
``REMARKS`` alone, if at all; those whose verdict depends on other flags are in ``verdicts``.
"""

from __future__ import annotations

from collections.abc import Sequence

from buffer_rl.plugin.hookspecs import FlagMeaning, hookimpl
from buffer_rl_slime.scripts import peers
from buffer_rl_slime.scripts.meaning import Known, Verdict, reasons

PAGE = "plugins/buffer_rl_slime/README.md; 'buffer-rl import slime SCRIPT' translates a launch script"

NEUTRAL: dict[str, tuple[tuple[str, ...], str]] = {
    "attention-dropout": (("0",), "there is no dropout here"),
    "hidden-dropout": (("0",), "there is no dropout here"),
    "moe-aux-loss-coeff": (("0",), "there is no loss that balances experts here"),
    "moe-z-loss-coeff": (("0",), "there is no such loss here"),
    "moe-router-load-balancing-type": (("none",), "nothing balances experts here"),
    "moe-router-dtype": (("fp32",), "the trainer computes in float32"),
    "moe-router-bias-update-rate": (("0",), "the router's bias stays as it is"),
    "moe-token-drop-policy": (("probs", "position"), "no token is dropped"),
    "optimizer": (("adam",), "AdamW is the optimizer"),
    "tensor-model-parallel-size": (("1",), "nothing is split"),
    "pipeline-model-parallel-size": (("1",), "nothing is split"),
    "context-parallel-size": (("1",), "nothing is split"),
    "expert-model-parallel-size": (("1",), "nothing is split"),
    "expert-tensor-parallel-size": (("1",), "nothing is split"),
    "sglang-dp-size": (("1",), "an engine has none of its own"),
    "lr-warmup-init": (("0",), "the rate rises from 0"),
}
"""Values with which a flag does nothing, and the reason that it may then be left out."""

RENAMED: dict[str, tuple[tuple[str, str], ...]] = {
    "calculate-per-token-loss": (("loss_agg_mode", "token-mean"),),
    "disable-grpo-std-normalization": (("grpo_std_normalization", "false"),),
    "use-rollout-routing-replay": (("replay_routed_experts", "true"),),
    "sglang-router-policy": (("router_policy", "{}"),),
    "sglang-server-concurrency": (("rollout_concurrency", "{}"),),
    "sglang-context-length": (("engine_context_length", "{}"),),
    "sglang-max-running-requests": (("engine_max_running_requests", "{}"),),
    "sglang-dtype": (("engine_dtype", "{}"),),
    "sglang-device": (("engine_device", "{}"),),
    "sglang-trust-remote-code": (("trust_remote_code", "true"),),
    "sglang-tp-size": (("rollout_num_gpus_per_engine", "{}"),),
    "sglang-tensor-parallel-size": (("rollout_num_gpus_per_engine", "{}"),),
    "sglang-enable-deterministic-inference": (("deterministic", "true"),),
    "deterministic-mode": (("deterministic", "true"),),
    "wandb-entity": (("wandb_team", "{}"),),
    "wandb-save-dir": (("wandb_dir", "{}"),),
    "offload": (("offload_train", "true"), ("offload_rollout", "true")),
}
"""Options and values that flags stand for; ``{}`` is the flag's own value."""

REMARKS: dict[str, tuple[Verdict, str]] = {
    "custom-loss-function-path": (Verdict.NOT_YET, "a loss is (args, inputs) -> TokenLoss: write it in that form"),
    "custom-advantage-function-path": (Verdict.NOT_YET, "an estimator is (args, batch) -> None: write it in that form"),
    "custom-tis-function-path": (Verdict.NOT_YET, "a correction is (args, inputs) -> weights: write it in that form"),
    "custom-model-provider-path": (
        Verdict.NOT_YET,
        "a provider is (args) -> torch module; with --train-backend megatron it is called as in slime, and gets args "
        "and config as arguments, as there is no get_args()",
    ),
    "custom-convert-samples-to-train-data-path": (
        Verdict.NOT_YET,
        "it is called for each group, and its columns are response_length, loss_mask, reward",
    ),
    "load-debug-rollout-data": (Verdict.NOT_YET, "slime's .pt files cannot be read: files are safetensors"),
    "custom-reward-post-process-path": (Verdict.CHANGES, "it is called for each group, not for a whole rollout"),
    "save-debug-rollout-data": (Verdict.SAME, "the files are safetensors"),
    "colocate": (Verdict.SAME, "placement alone: --offload-train and --offload-rollout free memory, in lockstep"),
    "eval-config": (
        Verdict.SAME,
        "its keys are in docs/options.md; rm_type math in it is math_boxed here, and gpqa is gpqa_lenient",
    ),
    "balance-data": (Verdict.SAME, "for what is streamed; the shares of a complete rollout are always balanced"),
    "hf-checkpoint": (Verdict.SAME, "the initial weights too"),
    "train-backend": (Verdict.SAME, ""),
}
"""Flags that are options of the same name, with what is to be known about them."""

REFERENCES: dict[str, tuple[str, str]] = {
    "slime.rollout.sglang_rollout.generate_rollout": ("buffer_rl.rollout.default:DefaultRollout", ""),
    "slime.rollout.sft_rollout.generate_rollout": ("sft", ""),
    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std": ("nonzero_std", ""),
    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std_with_fallback": (
        "nonzero_std_or_some",
        "of the groups without a difference one in 32 is kept, not those that a rollout lacks",
    ),
    "relax.engine.rollout.sglang_rollout.generate_rollout": ("buffer_rl.rollout.default:DefaultRollout", ""),
    "relax.engine.filters.dynamic_sampling_filters.check_reward_nonzero_std": ("nonzero_std", ""),
    "slime.rollout.data_source.pop_first": ("first_in", ""),
    "slime.rollout.data_source.RolloutDataSource": ("", ""),
    "slime.rollout.data_source.RolloutDataSourceWithBuffer": ("", ""),
}
"""slime's own functions, with what stands for them here (nothing: what a run does by itself) and what differs."""

GRADERS = ("deepscaler", "math_boxed", "dapo", "f1", "gpqa_lenient", "boxed_f1", "boxed_gpqa", "ifbench")
"""Rewards that stand for slime's, whose decisions differ on some answers."""

REWARD_NAMES = {"math": "math_boxed", "gpqa": "gpqa_lenient"}
"""slime's names of rewards, with those that decide as they do; the same names here are stricter or other graders."""

DEFAULTS: tuple[tuple[str, str, str, str], ...] = (
    ("rollout-shuffle", "rollout_shuffle", "false", ""),
    ("rollout-skip-special-tokens", "rollout_skip_special_tokens", "false", ""),
    ("input-key", "input_key", "input", ""),
    ("label-key", "label_key", "none", ""),
    ("n-samples-per-prompt", "n_samples_per_prompt", "1", ""),
    ("kl-loss-type", "kl_loss_type", "k1", "use-kl-loss"),
    ("calculate-per-token-loss", "loss_agg_mode", "seq-mean-token-mean", ""),
    ("lr-decay-style", "lr_decay_style", "linear", ""),
    ("weight-decay", "weight_decay", "0.01", ""),
    ("adam-beta2", "adam_beta2", "0.999", ""),
    ("actor-num-gpus-per-node", "actor_num_gpus_per_node", "8", ""),
)
"""Without the flag, slime does what the option with the value does, and a run here does not. The last: only if this
flag is there."""


def known_flag(name: str, values: Sequence[str]) -> Known | None:
    """What a flag of slime, Megatron, Relax or miles that is no option here means, by its name without dashes; None if
    unknown."""
    value = " ".join(values)
    if (by_value := peers.known_peer_flag(name, value)) is not None:
        return by_value
    if name in NEUTRAL:
        neutral, why = NEUTRAL[name]
        if any(is_value(value, each) for each in neutral):
            return Known(verdict=Verdict.NOT_NEEDED, why=why)
    if (renamed := RENAMED.get(name) or peers.RENAMED.get(name)) is not None:
        options = tuple((option, text.format(value)) for option, text in renamed)
        shown = " ".join(f"--{option.replace('_', '-')} {text}" for option, text in options)
        return Known(verdict=Verdict.RENAMED, why=f"it is {shown} here", options=options)
    found = [each for each in reasons() if name in each.flags]
    found = found or [each for each in reasons() if name.startswith(each.prefixes)]
    return Known(verdict=found[0].verdict, why=found[0].why) if found else None


def is_of_shape(name: str) -> bool:
    """Whether a flag only says what the model's own configuration says."""
    return name in reasons()[0].flags


def is_value(value: str, other: str) -> bool:
    """Whether a flag's value is ``other``, as a number or as a text in small letters."""
    try:
        return float(value) == float(other)
    except ValueError:
        return value.lower() == other


@hookimpl
def buffer_rl_explain_flag(name: str, values: Sequence[str]) -> FlagMeaning | None:
    """So that a command line of slime, Relax or miles is taken, or refused with what each of its flags means, and an
    option of another toolkit with what to write for it."""
    if (known := known_flag(name, values)) is None:
        other = peers.elsewhere(name, values)
        return other and FlagMeaning(kind=f"a name of {other[0]}", reason=other[1], page=peers.PAGE)
    accepted = known.verdict in (Verdict.NOT_NEEDED, Verdict.RENAMED)
    return FlagMeaning(kind=known.verdict, reason=known.why, accepted=accepted, options=known.options, page=PAGE)
