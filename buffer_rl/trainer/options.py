"""Options of the trainer, its roles, the optimizer, adapters and the critic."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from typing import ClassVar, Literal

from buffer_rl.args import Args
from buffer_rl.options.checks import given, needs, refuse
from buffer_rl.options.section import Section, flag_of, option
from buffer_rl.plan.algorithm import (
    estimator_of,
    frozen_models,
    frozen_models_of_trainer,
    is_supervised,
    loss_of,
    uses_critic,
    uses_reference,
)
from buffer_rl.plan.algorithms import ALGORITHMS
from buffer_rl.plan.counts import optimizer_steps
from buffer_rl.plan.roles import worker_counts
from buffer_rl.plan.schedule import Schedule, rollout_only, train_only
from buffer_rl.rollout.options import generate_path, is_built_in_rollout, whole_rollout_functions

FULL_TRAINING_LR = 1e-6
"""The default of ``--lr``."""
STREAM = "--stream-gradients"
TESTED_TRANSFORMERS = (5, 23)
"""Their shards, and the plans by which they are made, are of this version."""
OWN_MODEL = ("custom_model_provider_path", "model_converter_path")
REWARDS_TO_TRAIN_ON = ("custom_reward_post_process_path", "custom_convert_samples_to_train_data_path")


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
        None,
        "teacher model of --use-opd, with the same vocabulary: a Hugging Face folder",
        metavar="PATH",
        needs="use_opd",
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
        1,
        "number of optimizer steps per rollout; its groups are dealt to as many mini-batches, one to each in turn",
        ge=1,
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

    @staticmethod
    def check(args: Args) -> None:
        steps, groups = args.num_steps_per_rollout, args.rollout_batch_size
        what = f"--num-steps-per-rollout and --rollout-batch-size: {steps} optimizer steps on {groups} groups"
        refuse(steps > groups, what, expected="at least one group for each step")
        loss = loss_of(args)
        unread = args.use_opd and loss in ("sft_loss", "dpo")
        refuse(unread, f"--use-opd: {loss} reads no advantages, which the teacher is a part of")
        scoring = ("opd_teacher_load", "custom_rm_path", "custom_group_rm_path", *REWARDS_TO_TRAIN_ON)
        own = given(args, *scoring) or generate_path(args) or not is_built_in_rollout(args) or train_only(args)
        hint = "add --opd-teacher-load PATH, or a function of your own that sets teacher_log_probs of each sample"
        refuse(args.use_opd and not own, "--use-opd: there is no teacher", hint)
        check_role_options(args)
        if not rollout_only(args):
            check_model_options(args)


def check_role_options(args: Args) -> None:
    """Raises ConfigError for roles without work, and for gradients that cannot be streamed, as far as options tell."""
    unused = [model for model in ("ref", "teacher") if worker_counts(args)[model] and model not in frozen_models(args)]
    refuse("ref" in unused, "--num-ref-workers: no reference log-probabilities are needed", "add --use-kl-loss")
    hint = "add --use-opd --opd-teacher-load PATH, or take it out"
    refuse("teacher" in unused, "--num-teacher-workers: no teacher's log-probabilities are needed", hint)
    unread = args.num_advantage_workers and is_supervised(args)
    refuse(unread, "--num-advantage-workers: the supervised loss has no advantages")
    fixed = args.ref_update_interval is not None and not uses_reference(args) and not rollout_only(args)
    refuse(fixed, "--ref-update-interval: there is no reference model", "add --use-kl-loss")
    if args.stream_gradients:
        _check_streaming(args)


def _check_streaming(args: Args) -> None:
    critic = uses_critic(args)
    what = f"{STREAM} and --num-advantage-workers: the critic computes the advantages that it streams gradients of"
    refuse(critic and args.num_advantage_workers, what)
    for name, model in (("kl_coef", "ref"), ("use_opd", "teacher")):
        late = critic and model in frozen_models_of_trainer(args) and given(args, name)
        what = f"the critic needs log-probabilities of the model {model!r} before the policy's trainer computes them"
        refuse(late, f"{STREAM} and {{}}: {what}", f"add --num-{model}-workers 1")
    what = f"{STREAM}: --schedule {args.schedule} starts training after the last group"
    refuse(not Schedule.of(args).streams, what, "add --schedule pipelined")
    n = optimizer_steps(args)
    several = "--num-steps-per-rollout" if args.num_steps_per_rollout > 1 else "--num-passes-per-rollout"
    what = f"{STREAM} and {several}: {n} optimizer steps a rollout, of which the first could start only at the end"
    refuse(n > 1, what, expected=f"{several} 1")
    for name, seeing in whole_rollout_functions(args).items():
        what = f"{seeing} sees the whole rollout, so no group is finished before all are"
        refuse(name, f"{STREAM} and {flag_of(name)}: {what}")


def check_model_options(args: Args) -> None:
    """Raises ConfigError for what a model that is split over ranks, or is the user's own, does not go with, and for
    what the torch trainer cannot do."""
    torch, own, hint = args.train_backend == "torch", given(args, *OWN_MODEL), "take it out, or {}"
    selective = torch and args.recompute_granularity == "selective"
    refuse(selective, "--recompute-granularity: the torch trainer recomputes whole layers", expected="full")
    refuse(torch and args.bf16 and own, "--bf16: a model of {} is trained in its own number format, float32", hint)
    if args.fsdp_size == 1:
        return
    ranks, size = args.num_train_ranks, args.num_train_ranks if args.fsdp_size == -1 else args.fsdp_size
    what = f"--fsdp-size and --num-train-ranks: {ranks} ranks cannot be split into copies of {size}"
    refuse(not size or ranks % size, what, expected="a divisor of the number of ranks, or -1 for all of them")
    what, hint = "a model that is split over ranks does not go with {}", "take it out, or --fsdp-size"
    refuse(own or (uses_critic(args) and "a critic"), f"--fsdp-size: {what}", hint)
    absent = size > 1 and importlib.util.find_spec("accelerate") is None
    what = "transformers reads a part of a model with accelerate, which is not installed"
    refuse(absent, f"--fsdp-size: {what}", "pip install 'buffer-rl[scale]'")
    version, oldest = importlib.metadata.version("transformers"), ".".join(map(str, TESTED_TRANSFORMERS))
    is_old = tuple(map(int, version.split(".")[:2])) < TESTED_TRANSFORMERS
    refuse(is_old, f"--fsdp-size: transformers {version} cannot split models", expected=f"{oldest} or later")


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

    @staticmethod
    def check(args: Args) -> None:
        _check_decay(args, args.lr, args.lr_warmup_iters)


def _check_decay(args: Args, lr: float, warmup: int, whose: str = "") -> None:
    """The critic's learning rate has the policy's end, and its own peak and warm-up. whose: "critic-", or empty."""
    decays, end = args.lr_decay_style != "constant", args.lr_decay_iters
    what = f"--{whose}lr and --min-lr: the learning rate would rise from {lr:g} to {args.min_lr:g}"
    refuse(decays and args.min_lr > lr, what, expected="a lower --min-lr")
    what = f"--lr-decay-iters and --{whose}lr-warmup-iters: the decay ends at step {end}, the warm-up at step {warmup}"
    refuse(decays and end is not None and end <= warmup, what, "--lr-decay-iters counts the warm-up too")


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

    @staticmethod
    def check(args: Args) -> None:
        if rollout_only(args):
            return
        refuse(args.lora_dropout, "--lora-dropout: two passes would differ, so that no ratio begins at 1")
        adapter, mode, where = args.lora_publish == "adapter", args.weight_sync_mode, "--lora-publish adapter"
        whole = adapter and not args.lora_rank
        refuse(whole, f"{where}: all weights would be trained, and no adapter", "add --lora-rank")
        refused = {
            "engines read adapters from a folder": mode != "disk" and f"--weight-sync-mode {mode}",
            "an engine's base goes with its memory": given(args, "offload_rollout"),
            "the base is not sent": given(args, "check_weight_update_equal"),
        }
        for why, found in refused.items():
            refuse(adapter and found, f"{where}: {why}: it does not go with {{}}", f"take {{}} out, or {where}")
        needs(args, "lora_rank", "all weights would be trained", "lora_adapter_path")
        own = args.lora_rank and given(args, *OWN_MODEL)
        refuse(own, "--lora-rank: adapters do not go with {}", "take it out, or {}")
        absent, what = importlib.util.find_spec("peft") is None, "adapters are made by peft, which is not installed"
        refuse(args.lora_rank and absent, f"--lora-rank: {what}", "pip install 'buffer-rl[scale]'")

    @staticmethod
    def notices(args: Args) -> Iterator[str]:
        if args.lora_rank and args.lr < 5 * FULL_TRAINING_LR:
            yield (
                f"--lr {args.lr:g} is one of full training: adapters learn with 5 to 20 times as much, "
                f"{5 * FULL_TRAINING_LR:g} or more"
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

    @staticmethod
    def check(args: Args) -> None:
        """For options of a critic that is not there, and for a critic whose values nothing reads."""
        if not uses_critic(args):
            found = given(args, *CriticOptions.model_fields)
            refuse(is_supervised(args) and found, "{}: the supervised loss has no critic")
            refuse(found, "{}: there is no critic", "add --advantage-estimator ppo, or --use-critic")
            return
        flag, name = estimator_of(args)
        hint = "--advantage-estimator ppo, or a function of your own that reads the column 'values'"
        unread = name in ALGORITHMS and name not in ("gae", "ppo")
        refuse(unread, f"--use-critic and {flag}: the advantage {name!r} reads no values", hint)
        lr = args.lr if args.critic_lr is None else args.critic_lr
        _check_decay(args, lr, args.critic_lr_warmup_iters, "critic-")
