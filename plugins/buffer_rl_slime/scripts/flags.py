"""The flags of slime's launch scripts, Megatron's among them, that are no options here: what each means for a run.

Flags that are options of the same name are in ``REMARKS`` alone, if at all; those whose verdict depends on other flags
are in ``verdicts``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from buffer_rl.plugin.hookspecs import FlagMeaning, hookimpl
from buffer_rl_slime.scripts import peers
from buffer_rl_slime.scripts.meaning import Known, Verdict

PAGE = "plugins/buffer_rl_slime/README.md; 'buffer-rl import slime SCRIPT' translates a launch script"

_SHAPE = "the model's shape is read from --hf-checkpoint"
_KERNELS = "it chooses how something is computed, not what"
_MEMORY = "it saves memory and changes no result"
_PRECISION = "the torch trainer computes in float32, and Megatron's has formats of its own"
_PACKED = "rows are packed up to --max-tokens-per-gpu tokens, always"
_SAVING = "a checkpoint is always whole, with optimizer and random states, and starts as one"
_LOGGING = "metrics go to metrics.jsonl, TensorBoard and the report"
_WANDB = "a run of Weights & Biases has the name of the run folder, and each metric its own step"
_PARALLEL = "a model is not split over GPUs without --train-backend megatron"
_PROFILING = "trace.json of the run folder shows who worked on what, and when"
_CI = "it is for slime's own tests"
_HEALTH = "engines are watched always, and replaced (--engine-max-restarts)"
_DATA = "it is about Megatron's own data loaders"

NOT_NEEDED: tuple[tuple[str, str], ...] = (
    (
        _SHAPE,
        "swiglu num-layers hidden-size ffn-hidden-size num-attention-heads group-query-attention num-query-groups "
        "use-rotary-position-embeddings disable-bias-linear add-qkv-bias normalization norm-epsilon layernorm-epsilon "
        "rotary-base rotary-percent rotary-interleaved rotary-scaling-factor rotary-seq-len-interpolation-factor "
        "use-rope-scaling rope-scaling-factor rope-type no-rope-freq no-position-embedding position-embedding-type "
        "max-position-embeddings vocab-size padded-vocab-size make-vocab-size-divisible-by kv-channels qk-layernorm "
        "qk-l2-norm untie-embeddings-and-output-weights apply-layernorm-1p post-self-attn-layernorm "
        "post-mlp-layernorm attention-output-gate use-gated-attention window-size window-attn-skip-freq squared-relu "
        "quick-geglu openai-gelu softmax-type num-experts moe-layer-freq moe-ffn-hidden-size moe-router-topk "
        "moe-router-score-function moe-router-pre-softmax moe-router-num-groups moe-router-group-topk "
        "moe-router-topk-scaling-factor moe-router-topk-limited-devices "
        "moe-shared-expert-intermediate-size moe-shared-expert-gate moe-router-enable-expert-bias moe-latent-size "
        "multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim "
        "qk-pos-emb-head-dim v-head-dim mscale mscale-all-dim linear-attention-freq linear-conv-kernel-dim "
        "linear-key-head-dim linear-value-head-dim linear-num-key-heads linear-num-value-heads "
        "experimental-attention-variant dsa-indexer-n-heads dsa-indexer-head-dim dsa-indexer-topk spec "
        "enable-experimental model-name seq-length encoder-seq-length init-method-std init-method-xavier-uniform "
        "tokenizer-type tokenizer-model",
    ),
    (
        _KERNELS,
        "attention-backend use-flash-attn flash-decode transformer-impl moe-grouped-gemm moe-permute-fusion "
        "moe-enable-deepep moe-token-dispatcher-type moe-router-fusion moe-shared-expert-overlap "
        "no-rope-fusion no-masked-softmax-fusion no-bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion "
        "no-gradient-accumulation-fusion no-persist-layer-norm cross-entropy-loss-fusion tp-comm-overlap "
        "overlap-grad-reduce overlap-param-gather overlap-p2p-communication no-overlap-p2p-communication "
        "ddp-bucket-size ddp-num-buckets ddp-average-in-collective use-nccl-ub cp-comm-type "
        "distributed-backend distributed-timeout-minutes nccl-communicator-config-path qwen-gdn-backend "
        "use-cpu-initialization manual-gc manual-gc-interval no-check-for-nan-in-loss-and-grad "
        "enable-cuda-graph cuda-graph-scope cuda-graph-impl te-rng-tracker use-mcore-models "
        "rollout-data-transport use-distributed-post data-pad-size-multiplier allgather-cp qkv-format",
    ),
    (
        _MEMORY,
        "recompute-method recompute-num-layers recompute-modules recompute-activations optimizer-offload-fraction "
        "overlap-cpu-optimizer-d2h-h2d use-torch-optimizer-for-cpu-offload "
        "recompute-loss-function log-probs-chunk-size log-probs-max-tokens-per-gpu use-distributed-optimizer "
        "distribute-saved-activations empty-unused-memory-level moe-layer-recompute use-precision-aware-optimizer",
    ),
    (
        _PRECISION,
        "accumulate-allreduce-grads-in-fp32 attention-softmax-in-fp32 loss-scale initial-loss-scale min-loss-scale "
        "loss-scale-window main-grads-dtype main-params-dtype exp-avg-dtype exp-avg-sq-dtype",
    ),
    (_PACKED, "use-dynamic-batch-size micro-batch-size ref-micro-batch-size variable-seq-lengths balance-by-flops"),
    (
        _SAVING,
        "ckpt-format dist-ckpt-format use-dist-ckpt auto-detect-ckpt-format ckpt-fully-parallel-save "
        "ckpt-fully-parallel-load ckpt-assume-constant-structure no-load-optim no-load-rng finetune "
        "dist-ckpt-strictness exit-on-missing-checkpoint use-persistent-ckpt-worker",
    ),
    (
        _LOGGING,
        "use-tensorboard tensorboard-dir tb-project-name tb-experiment-name log-multi-turn "
        "log-correct-samples log-interval log-throughput log-params-norm log-num-zeros-in-grad log-progress "
        "timing-log-level log-timers-to-tensorboard log-memory-to-tensorboard no-one-logger logging-level "
        "get-mismatch-metrics",
    ),
    ("evaluations have pass@k, as eval/SET/pass_at_K", "log-passrate"),
    (
        _WANDB,
        "wandb-exp-name disable-wandb-random-suffix wandb-always-use-train-step",
    ),
    (_HEALTH, "use-fault-tolerance rollout-health-check-interval rollout-health-check-first-wait"),
    (
        _PROFILING,
        "profile use-pytorch-profiler profile-step-start profile-step-end profile-ranks profile-target "
        "record-memory-history memory-snapshot-path memory-snapshot-dir memory-snapshot-num-steps memory-recorder",
    ),
    (
        _CI,
        "ci-test ci-disable-kl-checker ci-train-rollout-logprob-abs-diff-threshold ci-save-grad-norm ci-load-grad-norm",
    ),
    (_DATA, "num-workers split mock-data data-cache-path dataloader-type train-iters eval-iters train-samples"),
    ("SGLang servers are the run's own", "sglang-router-request-timeout-secs rollout-num-process"),
    ("the Buffer owns the data; --data-source-path names a source of your own", "disable-rollout-global-dataset"),
    ("--loss-type sft_loss has no advantages, and others need them", "disable-compute-advantages-and-returns"),
    ("the weights that train are those that generated, so their log-probabilities are the old ones", "keep-old-actor"),
    ("the address of Megatron's process groups is the run's own", "master-addr master-port"),
)
"""Reasons, with the flags that may be left out for them."""

NOT_YET: tuple[tuple[str, str], ...] = (
    (
        _PARALLEL,
        "tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size expert-model-parallel-size "
        "expert-tensor-parallel-size sequence-parallel virtual-pipeline-model-parallel-size "
        "num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank "
        "decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers pipeline-model-parallel-layout "
        "account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split use-megatron-fsdp use-torch-fsdp2 "
        "hierarchical-context-parallel-sizes",
    ),
    (
        "models and Adam's moments are moved to the CPU's memory (--offload-train, --optimizer-cpu-offload), no more",
        "release-train cpu-offloading fine-grained-activation-offloading",
    ),
    (
        "there is no training in fp8, fp4 or int4",
        "fp8 fp8-format fp8-recipe fp8-margin fp8-param-gather fp8-param fp4 fp4-format fp4-recipe "
        "te-precision-config-file megatron-deepgemm-forward-layers megatron-deepgemm-forward-modules "
        "megatron-deepgemm-moe-forward-layers megatron-deepgemm-moe-forward-modules",
    ),
    ("the trainer computes in float32, or bfloat16 with --bf16", "fp16 grad-reduce-in-bf16 moe-router-dtype"),
    (
        "heads that predict several tokens are not trained",
        "mtp-num-layers mtp-loss-scaling-factor enable-mtp-training",
    ),
    (
        "each forward pass chooses experts by itself, or as the engine did (--replay-routed-experts)",
        "use-routing-replay",
    ),
    (
        "weights are published whole (--weight-sync-mode)",
        "update-weight-delta-encoding update-weight-delta-checksum update-weight-local-checkpoint-dir "
        "custom-update-weight-post-write-path update-weight-disk-keep-files",
    ),
    ("all parameters are trained", "only-train-params-name-list freeze-params-name-list freeze-indexer"),
    (
        "servers of different kinds in one run",
        "sglang-config prefill-num-servers sglang-disaggregation-mode sglang-disaggregation-transfer-backend "
        "sglang-disaggregation-ib-device sglang-pd-disaggregation",
    ),
    (
        "an engine is on one node and has no data parallelism of its own; take more engines",
        "sglang-dp-size sglang-data-parallel-size sglang-nnodes sglang-enable-dp-attention sglang-enable-dp-lm-head",
    ),
    (
        "there is no hook at this place",
        "rollout-sample-hook-path rollout-data-postprocess-path custom-pg-loss-reducer-function-path "
        "custom-megatron-init-path custom-megatron-before-log-prob-hook-path "
        "custom-megatron-before-train-step-hook-path",
    ),
    ("off-policy sequence masking (another is --tis-mode sequence)", "use-opsm opsm-delta"),
    ("there is no weighting of this KL penalty by the ratio", "use-unbiased-kl"),
    ("the optimizer keeps its state", "reset-optimizer-states use-stateless-adam no-save-rng"),
    (
        "an evaluation set of --eval-config has keys of its own for it",
        "eval-tool-key",
    ),
    (
        "evaluations have no limit or reward key of their own",
        "eval-max-prompt-len eval-max-context-len eval-min-new-tokens eval-reward-key",
    ),
    ("no configuration by role", "megatron-config-path"),
    ("a checkpoint's number is a part of its path here", "ref-ckpt-step opd-teacher-ckpt-step ckpt-step"),
    ("a run starts at rollout 0, or where --load ended", "start-rollout-id"),
    ("the model is in the run's checkpoints (hf/), see buffer-rl export", "save-hf"),
    ("samples.jsonl has --dump-samples groups of each rollout", "dump-details save-debug-train-data"),
    (
        "trajectories from elsewhere come through the rollout service (plugins/buffer_rl_rollout_service/README.md)",
        "rollout-buffer-url fetch-trajectory-retry-times rollout-task-type",
    ),
    (
        "trajectories from elsewhere come by a rollout function of your own",
        "min-batch-collection-ratio load-forge-rollout-data load-debug-rollout-data-subsample",
    ),
    ("the optimizer's betas, decay and rate are the same for all parameters", "decoupled-lr decoupled-min-lr"),
    ("the decay of the rate is constant, linear or cosine", "lr-wsd-decay-style lr-wsd-decay-iters"),
    ("the count is in optimizer steps: --lr-decay-iters, --lr-warmup-iters", "lr-decay-samples lr-warmup-samples"),
    ("the rate rises from 0", "lr-warmup-init"),
    ("weight decay is constant", "start-weight-decay end-weight-decay weight-decay-incr-style"),
    ("the batch is the same in every step", "rampup-batch-size"),
    ("AdamW is the only optimizer", "sgd-momentum muon-momentum lion-beta1 lion-beta2"),
    ("engines reach no proxy", "http-proxy"),
    ("rewards have no categories in the metrics; log functions of your own do", "log-reward-category"),
    ("a router that runs already is --router-url http://IP:PORT", "sglang-router-ip sglang-router-port"),
    ("slime's own router is another", "use-slime-router"),
    ("the bias of an MoE router is not updated", "moe-router-bias-update-rate"),
    ("no Megatron trainer reads another file", "yaml-cfg non-persistent-save-interval pretrained-checkpoint"),
)
"""Reasons, with the flags that have nothing in their place."""

CHANGES: tuple[tuple[str, str], ...] = (
    ("there is no dropout here", "attention-dropout hidden-dropout"),
    (
        "there is no loss that balances experts, or limits them, here",
        "moe-aux-loss-coeff moe-z-loss-coeff moe-router-load-balancing-type moe-input-jitter-eps "
        "moe-expert-capacity-factor moe-token-drop-policy moe-token-dropping",
    ),
    ("AdamW is the only optimizer", "optimizer"),
)
"""Reasons, with the flags that a run cannot have and whose result is then another, unless ``NEUTRAL`` has the value."""

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

PREFIXES: tuple[tuple[str, Verdict, str], ...] = (
    ("log-", Verdict.NOT_NEEDED, _LOGGING),
    ("ddp-", Verdict.NOT_NEEDED, _KERNELS),
    ("tp-comm-", Verdict.NOT_NEEDED, _KERNELS),
    ("cuda-graph-", Verdict.NOT_NEEDED, _KERNELS),
    ("moe-deepep-", Verdict.NOT_NEEDED, _KERNELS),
    ("fp8-", Verdict.NOT_YET, "there is no training in fp8, fp4 or int4"),
    ("dist-ckpt-", Verdict.NOT_NEEDED, _SAVING),
    ("ckpt-", Verdict.NOT_NEEDED, _SAVING),
    ("tokenizer-", Verdict.NOT_NEEDED, _SHAPE),
    ("profile-", Verdict.NOT_NEEDED, _PROFILING),
    ("muon-", Verdict.NOT_YET, "AdamW is the only optimizer"),
    ("megatron-fsdp-", Verdict.NOT_YET, _PARALLEL),
    ("mtp-", Verdict.NOT_YET, "heads that predict several tokens are not trained"),
    ("dsa-", Verdict.NOT_NEEDED, _SHAPE),
)
"""Families of Megatron's flags, for names that no other table has."""

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


@functools.cache
def _tables() -> dict[str, Known]:
    groups = (
        (Verdict.NOT_NEEDED, (*NOT_NEEDED, *peers.NOT_NEEDED)),
        (Verdict.NOT_YET, (*NOT_YET, *peers.NOT_YET)),
        (Verdict.CHANGES, CHANGES),
    )
    return {
        name: Known(verdict=verdict, why=why)
        for verdict, rows in groups
        for why, names in rows
        for name in names.split()
    }


def known_flag(name: str, values: Sequence[str]) -> Known | None:
    """What a flag of slime, Megatron, Relax or miles that is no option here means, by its name without dashes; None if
    unknown."""
    value = " ".join(values)
    if (by_value := peers.known_peer_flag(name, value)) is not None:
        return by_value
    if name in NEUTRAL:
        neutral, why = NEUTRAL[name]
        if any(_equal(value, each) for each in neutral):
            return Known(verdict=Verdict.NOT_NEEDED, why=why)
    if (renamed := RENAMED.get(name) or peers.RENAMED.get(name)) is not None:
        options = tuple((option, text.format(value)) for option, text in renamed)
        shown = " ".join(f"--{option.replace('_', '-')} {text}" for option, text in options)
        return Known(verdict=Verdict.RENAMED, why=f"it is {shown} here", options=options)
    if name in _tables():
        return _tables()[name]
    found = ((verdict, why) for prefix, verdict, why in PREFIXES if name.startswith(prefix))
    return next((Known(verdict=verdict, why=why) for verdict, why in found), None)


def is_of_shape(name: str) -> bool:
    """Whether a flag only says what the model's own configuration says."""
    return name in NOT_NEEDED[0][1].split()


def _equal(value: str, other: str) -> bool:
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
