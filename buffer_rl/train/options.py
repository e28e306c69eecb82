"""Options of the trainer, the optimizer and the loss."""

from __future__ import annotations

from typing import ClassVar, Literal

from buffer_rl.options.section import Section, option


class TrainOptions(Section):
    """Model, length of the run, batches, trainer processes."""

    heading: ClassVar[str] = "Training"

    train_backend: str = option("torch", "trainer backend", kind="trainer")
    hf_checkpoint: str | None = option(
        None, "initial model and tokenizer: a folder, or a name of the Hub", metavar="PATH", common=True
    )
    trainer_load: str | None = option(
        None,
        "initial weights and optimizer state of a new run, in the format of --train-backend, for example trainer/ of "
        "a checkpoint; if not set: --hf-checkpoint",
        metavar="PATH",
    )
    ref_load: str | None = option(None, "reference model; if not set: --hf-checkpoint", metavar="PATH")
    opd_teacher_load: str | None = option(
        None, "teacher model of --use-opd, with the same vocabulary: a Hugging Face folder", metavar="PATH"
    )
    ref_update_interval: int | None = option(
        None, "copy the actor's weights to the reference model every N rollouts; if not set: never", ge=1
    )
    trust_remote_code: bool = option(
        False, "run the Python files of the model folder, if transformers does not have its architecture"
    )
    custom_model_provider_path: str | None = option(
        None, "builds the trainer's model in place of transformers", kind="model_provider"
    )
    model_converter_path: str | None = option(
        None, "converts names and tensors between --hf-checkpoint and the trainer's model", kind="converter"
    )
    num_rollout: int | None = option(None, "number of training steps (rollouts)", ge=0, one_of="length", common=True)
    num_epoch: int | None = option(
        None, "number of epochs, in place of --num-rollout; rounded down to complete rollouts", ge=1, one_of="length"
    )
    num_steps_per_rollout: int = option(
        1, "number of optimizer steps per rollout; its groups are split, in order, into as many mini-batches", ge=1
    )
    global_batch_size: int | None = option(
        None,
        "number of samples per optimizer step, in complete prompt groups; sets --num-steps-per-rollout = "
        "--rollout-batch-size x --n-samples-per-prompt / this",
        ge=1,
    )
    num_passes_per_rollout: int = option(
        1, "number of passes over each rollout (PPO epochs), each of --num-steps-per-rollout steps", ge=1
    )
    num_train_ranks: int = option(1, "number of trainer ranks; data-parallel replicas by default", ge=1, common=True)
    fsdp_size: int = option(
        1,
        "number of trainer ranks that one copy of the model is split over (FSDP2); 1: each rank has all of it, "
        "-1: all ranks; between: there are several copies",
        ge=-1,
    )
    bf16: bool = option(
        False,
        "compute in bfloat16; trained weights, optimizer and sums of gradients are float32, frozen models bfloat16",
    )
    recompute_granularity: Literal["full", "selective"] | None = option(
        None,
        "recompute activations in the backward pass: of layers (full), or of parts of them (selective), which not every"
        " trainer backend can",
    )
    num_train_threads: int = option(1, "number of torch threads per trainer rank", ge=1)
    train_device: Literal["auto", "cpu", "cuda"] = option("auto", "device of the trainer", common=True)
    max_tokens_per_gpu: int = option(
        16384,
        "maximum number of tokens per micro-batch; a prompt's tokens count once, padding counts if the model needs it",
        ge=1,
        common=True,
    )
    peak_tflops: float | None = option(
        None,
        "peak of one device of the trainer, in TFLOP/s of its matrix products in the trainer's number format, for the "
        "metric perf/mfu; if not set: no such metric",
        gt=0,
    )
    num_ref_workers: int = option(
        0, "number of processes for reference log-probabilities of finished groups; 0: in the trainer", ge=0
    )
    num_teacher_workers: int = option(
        0, "number of processes for the teacher's log-probabilities of finished groups; 0: in the trainer", ge=0
    )
    num_actor_fwd_workers: int = option(
        0, "number of processes for old log-probabilities of finished groups; 0: in the trainer, if needed", ge=0
    )
    num_advantage_workers: int = option(0, "number of processes for advantages of groups; 0: in the trainer", ge=0)
    role_path: list[str] = option([], "your own roles: processes that add fields to finished groups", kind="role")
    fuse_roles: list[str] = option(
        [], "roles that share processes, for example 'ref+actor_fwd'; each must have the same number", metavar="A+B"
    )
    role_max_restarts: int = option(
        2,
        "maximum number of replacements of the processes of each role, rollout worker, --data-source-path and "
        "--rm-model; the next death of a role or rollout worker is a global restart (--max-global-restarts)",
        ge=0,
    )
    balance_data: bool = option(
        False,
        "distribute finished groups to all trainer replicas at once, with similar numbers of tokens, instead of "
        "first come, first served; shares of a complete rollout are always balanced",
    )
    stream_gradients: bool = option(
        False, "with --schedule pipelined: compute gradients of finished groups during generation"
    )
    max_non_finite_steps: int = option(
        3,
        "stop after N consecutive optimizer steps with NaN or infinity in loss or gradient; earlier ones are skipped "
        "and their rows saved in RUN/non_finite. 0 and 1 stop at the first",
        ge=0,
    )
    max_logprob_diff: float | None = option(
        0.2,
        "stop before the first optimizer step if log-probabilities of engine and trainer differ by more than this, "
        "in nats per token on average; for engines that are not embedded also after publications. none: no check",
        gt=0,
    )
    train_timeout_s: float = option(3600.0, "deadline for one call to the trainer, in seconds", gt=0)


class OptimizerOptions(Section):
    """AdamW and its learning-rate schedule."""

    heading: ClassVar[str] = "Optimizer"

    lr: float = option(1e-6, "peak learning rate", ge=0, common=True)
    lr_warmup_iters: int = option(0, "number of steps of linear warm-up", ge=0)
    lr_decay_style: Literal["constant", "linear", "cosine"] = option(
        "constant", "shape of the decay from --lr to --min-lr after the warm-up"
    )
    lr_decay_iters: int | None = option(
        None, "number of optimizer steps, including warm-up, until --min-lr; if not set: all of the run", ge=1
    )
    min_lr: float = option(0.0, "learning rate at the end of the decay", ge=0)
    weight_decay: float = option(0.0, "AdamW weight decay", ge=0)
    adam_beta1: float = option(0.9, "AdamW beta 1", ge=0, lt=1)
    adam_beta2: float = option(0.95, "AdamW beta 2", ge=0, lt=1)
    adam_eps: float = option(1e-8, "AdamW epsilon", gt=0)
    clip_grad: float = option(1.0, "maximum global gradient norm; 0: no clipping", ge=0)
    optimizer_cpu_offload: bool = option(
        False, "keep Adam's moments in the host's memory, but for the optimizer step: slower steps, more free memory"
    )


class LoraOptions(Section):
    """Adapters in place of full training, with the torch trainer."""

    heading: ClassVar[str] = "LoRA"

    lora_rank: int = option(0, "rank of the adapters of the policy; 0: train all weights", ge=0)
    lora_alpha: float = option(32.0, "adapters are scaled by this divided by their rank", gt=0)
    lora_dropout: float = option(0.0, "dropout of the adapters' input; only 0: ratios would not begin at 1", ge=0)
    target_modules: list[str] = option(
        ["all-linear"], "names of the linear layers with an adapter; all-linear: all but the output layer"
    )
    lora_publish: Literal["merged", "adapter"] = option(
        "merged",
        "what engines get: whole weights with the adapters merged, or adapters alone, which they apply beside the base",
    )
    lora_adapter_path: str | None = option(
        None, "initial adapters, a folder in peft's format; if not set: new ones, which begin with 0", metavar="PATH"
    )


class CriticOptions(Section):
    """The value model of PPO."""

    heading: ClassVar[str] = "Critic"

    use_critic: bool = option(False, "train a value model for your estimator; --advantage-estimator ppo has one")
    critic_load: str | None = option(
        None,
        "initial weights of the critic, but for its output layer (zeros); if not set: --hf-checkpoint",
        metavar="PATH",
    )
    critic_lr: float | None = option(None, "peak learning rate of the critic; if not set: --lr", ge=0)
    critic_lr_warmup_iters: int = option(0, "number of steps of linear warm-up of the critic", ge=0)
    value_clip: float | None = option(
        0.2, "clip range of values around those before the first optimizer step; none: no clipping", gt=0
    )
    num_critic_only_steps: int = option(
        0, "number of rollouts at the start that train only the critic", ge=0, one_of="critic_only_steps"
    )
    num_freeze_actor_steps: int = option(0, "another name of --num-critic-only-steps", ge=0, one_of="critic_only_steps")


class LossOptions(Section):
    """Loss, advantage estimator, clipping, KL penalty, importance weights."""

    heading: ClassVar[str] = "Loss"

    loss_type: str | None = option(
        None, "loss by registered name; if not set: the loss of --advantage-estimator", kind="loss", one_of="loss"
    )
    custom_loss_function_path: str | None = option(
        None, "your loss, in place of --loss-type", kind="loss", one_of="loss"
    )
    advantage_estimator: str = option(
        "grpo", "advantage estimator, for example grpo, rloo or ppo", kind="advantage", one_of="advantage", common=True
    )
    custom_advantage_function_path: str | None = option(
        None, "your advantage estimator, in place of --advantage-estimator", kind="advantage", one_of="advantage"
    )
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"] = option(
        "token-mean", "aggregation of token losses to one number"
    )
    eps_clip: float = option(0.2, "lower clip range of the probability ratio", ge=0, le=1)
    eps_clip_high: float | None = option(None, "upper clip range of the ratio; if not set: --eps-clip", ge=0)
    eps_clip_c: float | None = option(
        None, "dual clip: bound the loss of a negative advantage A by this times |A|; if not set: no bound", gt=1
    )
    decoupled_behave_cap: float | None = option(
        None, "decoupled_ppo: maximum weight from the engine's policy to the proximal one; if not set: no bound", gt=0
    )
    decoupled_behave_mode: Literal["clamp", "mask"] = option(
        "clamp", "decoupled_ppo: give a token above the cap the cap as its weight (clamp) or the weight 0 (mask)"
    )
    sapo_tau_pos: float = option(1.0, "sapo: temperature of the gate for positive advantages", gt=0)
    sapo_tau_neg: float = option(1.05, "sapo: temperature of the gate for negative and zero advantages", gt=0)
    dpo_beta: float = option(0.1, "dpo: strength of the KL constraint to the reference", gt=0)
    use_rollout_logprobs: bool = option(False, "use the engine's log-probabilities as the old ones")
    use_tis: bool = option(False, "weight the loss by importance ratios of trainer to engine log-probabilities")
    allow_uncorrected: bool = option(
        False, "train on tokens of older weights though nothing corrects for that (--schedule one-step-off, async)"
    )
    tis_clip: float = option(2.0, "upper bound of the weights of --use-tis", gt=0)
    tis_clip_low: float = option(0.0, "lower bound of the weights of --use-tis", ge=0)
    tis_mode: Literal["truncate", "token", "sequence", "geometric"] = option(
        "truncate",
        "outside the bounds, truncate a weight, or set it to 0: per token (IcePop), or per row by the product "
        "(sequence) or geometric mean (geometric) of its weights",
        one_of="correction",
    )
    custom_tis_function_path: str | None = option(
        None, "your weights, in place of --tis-mode", kind="correction", one_of="correction"
    )
    use_kl_loss: bool = option(False, "add a KL penalty to the loss, weighted by --kl-loss-coef")
    kl_loss_coef: float = option(0.0, "weight of the KL penalty of --use-kl-loss", ge=0)
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl", "k1+", "k3+"] = option(
        "k3", "estimator of the KL penalty; k1+ and k3+ have the gradient of k2"
    )
    kl_target: float | None = option(
        None,
        "after each rollout, adapt --kl-coef or --kl-loss-coef towards this KL divergence from the reference, in "
        "nats per token; if not set: no adaptation",
        gt=0,
    )
    kl_horizon: float = option(
        10000, "with --kl-target: number of samples above the target that raise the coefficient by at most 20%", gt=0
    )
    entropy_coef: float = option(0.0, "weight of the entropy bonus", ge=0)
