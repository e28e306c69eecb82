"""Options of the trainer, the optimizer and the loss."""

from __future__ import annotations

from typing import ClassVar, Literal

from buffer_rl.options.section import Section, option


class TrainOptions(Section):
    """The trainer."""

    heading: ClassVar[str] = "Training"

    train_backend: str = option("torch", "trainer backend", kind="trainer")
    hf_checkpoint: str | None = option(None, "the initial model and tokenizer: a folder, or a Hub name", metavar="PATH")
    trainer_load: str | None = option(
        None,
        "a new run's trainer begins with these weights and this optimizer state, in a form of --train-backend: the "
        "folder trainer/ of a checkpoint, or what its documentation names; without it: --hf-checkpoint",
        metavar="PATH",
    )
    ref_load: str | None = option(None, "the reference model; --hf-checkpoint where absent", metavar="PATH")
    opd_teacher_load: str | None = option(
        None, "the teacher of --use-opd, of the model's vocabulary: a Hugging Face folder", metavar="PATH"
    )
    ref_update_interval: int | None = option(
        None, "the reference model takes the actor's weights every this many rollouts; absent: never", ge=1
    )
    trust_remote_code: bool = option(
        False, "run the Python files of the model folder, where its architecture is not one of transformers'"
    )
    custom_model_provider_path: str | None = option(
        None, "builds the trainer's model in place of transformers", kind="model_provider"
    )
    model_converter_path: str | None = option(
        None, "maps names and tensors of --hf-checkpoint to the trainer's model and back", kind="converter"
    )
    num_rollout: int | None = option(None, "training steps (rollouts) of the run", ge=0, one_of="length")
    num_epoch: int | None = option(
        None,
        "length of the run in epochs, in place of --num-rollout: as many whole rollouts as these epochs have together",
        ge=1,
        one_of="length",
    )
    num_steps_per_rollout: int = option(
        1, "optimizer steps on each rollout: its groups are split, in order, into that many mini-batches", ge=1
    )
    global_batch_size: int | None = option(
        None,
        "samples an optimizer step, of whole prompt groups: --rollout-batch-size x --n-samples-per-prompt divided by "
        "--num-steps-per-rollout, which follows from it where it is not given",
        ge=1,
    )
    num_passes_per_rollout: int = option(
        1,
        "how often each rollout is trained on: its mini-batches one after another, so many times; optimizer steps are "
        "--num-steps-per-rollout times this",
        ge=1,
    )
    num_train_ranks: int = option(1, "trainer ranks; of the default backend each is a data-parallel replica", ge=1)
    num_train_threads: int = option(1, "torch threads a trainer rank", ge=1)
    train_device: Literal["auto", "cpu", "cuda"] = option("auto", "where the trainer runs")
    max_tokens_per_gpu: int = option(
        16384,
        "token budget of one micro-batch: those of a prompt count once, and padding counts where a model needs it",
        ge=1,
    )
    num_ref_workers: int = option(
        0, "processes that compute reference log-probabilities of finished groups; 0: the trainer does", ge=0
    )
    num_teacher_workers: int = option(
        0, "processes that compute the teacher's log-probabilities of finished groups; 0: the trainer does", ge=0
    )
    num_actor_fwd_workers: int = option(
        0, "processes that compute old log-probabilities of finished groups; 0: the trainer does, where needed", ge=0
    )
    num_advantage_workers: int = option(
        0, "processes that compute advantages of finished groups; 0: the trainer does", ge=0
    )
    role_path: list[str] = option(
        [], "roles of your own, which add fields to finished groups in processes of their own", kind="role"
    )
    fuse_roles: list[str] = option(
        [], "roles whose processes are one, for example 'ref+actor_fwd'; they have as many each", metavar="A+B"
    )
    role_max_restarts: int = option(
        2,
        "how often the processes of each of these roles, and rollout workers, are replaced after one of them died; the "
        "next death is a global restart (--max-global-restarts). Also how often those of --data-source-path and "
        "--rm-model are replaced",
        ge=0,
    )
    balance_data: bool = option(
        False,
        "deal finished groups out to all replicas of the trainer at once, with about as many tokens for each, in place "
        "of first come, first served; the shares of a complete rollout are always balanced",
    )
    stream_gradients: bool = option(
        False,
        "with --schedule pipelined: forward and backward of finished groups while others are still generated; one "
        "optimizer step at the end",
    )
    max_non_finite_steps: int = option(
        3,
        "end the run at so many optimizer steps in a row whose loss or gradient is not finite; those before leave the "
        "weights as they are, and their rows are written to RUN/non_finite (0 and 1: at the first)",
        ge=0,
    )
    max_logprob_diff: float | None = option(
        0.2,
        "end the run before its first optimizer step, new or resumed, if the log-probabilities that the engine gave "
        "sampled tokens are further than this from the trainer's, in nats a token on average; so for a few tokens "
        "after each publication to engines that are not embedded ones; 'none': not compared",
        gt=0,
    )
    train_timeout_s: float = option(3600.0, "deadline of one trainer call, in seconds", gt=0)


class OptimizerOptions(Section):
    """AdamW and its learning-rate schedule."""

    heading: ClassVar[str] = "Optimizer"

    lr: float = option(1e-6, "peak learning rate", ge=0)
    lr_warmup_iters: int = option(0, "steps of linear warm-up", ge=0)
    lr_decay_style: Literal["constant", "linear", "cosine"] = option(
        "constant", "how the learning rate falls from --lr to --min-lr after the warm-up"
    )
    lr_decay_iters: int | None = option(
        None, "optimizer steps, warm-up included, after which it is --min-lr; all of the run where absent", ge=1
    )
    min_lr: float = option(0.0, "learning rate at the end of the decay", ge=0)
    weight_decay: float = option(0.0, "AdamW weight decay", ge=0)
    adam_beta1: float = option(0.9, "AdamW beta 1", ge=0, lt=1)
    adam_beta2: float = option(0.95, "AdamW beta 2", ge=0, lt=1)
    adam_eps: float = option(1e-8, "AdamW epsilon", gt=0)
    clip_grad: float = option(1.0, "largest global gradient norm; 0 does not clip", ge=0)


class CriticOptions(Section):
    """The value model, a second trained role."""

    heading: ClassVar[str] = "Critic"

    use_critic: bool = option(
        False, "train a value model, whose values your advantage estimator reads; --advantage-estimator ppo has one"
    )
    critic_load: str | None = option(
        None,
        "its initial weights, but for its output layer, which starts with zeros; --hf-checkpoint where absent",
        metavar="PATH",
    )
    critic_lr: float | None = option(None, "its peak learning rate; --lr where absent", ge=0)
    critic_lr_warmup_iters: int = option(0, "its steps of linear warm-up", ge=0)
    value_clip: float | None = option(
        0.2, "clip range of values around those before the first optimizer step; 'none': no clipping", gt=0
    )
    num_critic_only_steps: int = option(
        0,
        "rollouts at the start of the run on which the critic alone is trained, and the policy stays",
        ge=0,
        one_of="critic_only_steps",
    )
    num_freeze_actor_steps: int = option(0, "another name of --num-critic-only-steps", ge=0, one_of="critic_only_steps")


class LossOptions(Section):
    """The objective."""

    heading: ClassVar[str] = "Loss"

    loss_type: str | None = option(
        None, "the loss; absent: the one of --advantage-estimator", kind="loss", one_of="loss"
    )
    custom_loss_function_path: str | None = option(
        None, "your loss, in place of --loss-type", kind="loss", one_of="loss"
    )
    advantage_estimator: str = option("grpo", "advantage estimator", kind="advantage", one_of="advantage")
    custom_advantage_function_path: str | None = option(
        None, "your advantage estimator, in place of --advantage-estimator", kind="advantage", one_of="advantage"
    )
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"] = option(
        "token-mean", "how token losses become one number"
    )
    eps_clip: float = option(0.2, "lower clip range of the probability ratio", ge=0, le=1)
    eps_clip_high: float | None = option(None, "upper clip range; --eps-clip where absent", ge=0)
    eps_clip_c: float | None = option(
        None, "dual clip: the loss of a negative advantage A is at most this times |A|; absent: no bound", gt=1
    )
    decoupled_behave_cap: float | None = option(
        None, "decoupled_ppo: largest weight from the engine's policy to the proximal one; absent: no bound", gt=0
    )
    decoupled_behave_mode: Literal["clamp", "mask"] = option(
        "clamp", "decoupled_ppo: a token above the cap has the cap as its weight, or the weight 0"
    )
    sapo_tau_pos: float = option(1.0, "sapo: temperature of the gate for positive advantages", gt=0)
    sapo_tau_neg: float = option(1.05, "sapo: temperature of the gate for negative and zero advantages", gt=0)
    dpo_beta: float = option(0.1, "dpo: strength of the KL constraint to the reference", gt=0)
    use_rollout_logprobs: bool = option(False, "use the engine's log-probabilities as the old ones")
    use_tis: bool = option(
        False, "multiply the loss by importance weights from the engine's log-probabilities to the trainer's old ones"
    )
    tis_clip: float = option(2.0, "upper bound of these weights", gt=0)
    tis_clip_low: float = option(0.0, "lower bound of these weights", ge=0)
    tis_mode: Literal["truncate", "token", "sequence", "geometric"] = option(
        "truncate",
        "outside the bounds a weight is cut off ('truncate') or 0: of a token (IcePop), or of all tokens of a row by "
        "the product or the geometric mean of their weights",
        one_of="correction",
    )
    custom_tis_function_path: str | None = option(
        None, "your weights, in place of --tis-mode", kind="correction", one_of="correction"
    )
    use_kl_loss: bool = option(False, "add a KL penalty to the reference to the loss")
    kl_loss_coef: float = option(0.0, "weight of the KL penalty", ge=0)
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl", "k1+", "k3+"] = option(
        "k3", "estimator of the KL penalty; k1+ and k3+ have the gradient of k2"
    )
    kl_target: float | None = option(
        None,
        "after each rollout, raise or lower --kl-coef or --kl-loss-coef towards this KL divergence from the reference, "
        "in nats a token; absent: it is fixed",
        gt=0,
    )
    kl_horizon: float = option(
        10000, "--kl-target: so many samples above the target raise the coefficient by 20%, at most", gt=0
    )
    entropy_coef: float = option(0.0, "weight of the entropy bonus", ge=0)
