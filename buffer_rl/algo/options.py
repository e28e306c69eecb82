"""Options of losses and advantage estimators."""

from __future__ import annotations

from typing import ClassVar, Literal

from buffer_rl.algo.kl import check_kl_target
from buffer_rl.args import Args
from buffer_rl.options.checks import given, needs, refuse
from buffer_rl.options.section import Section, option
from buffer_rl.plan.algorithm import estimator_of, is_supervised, loss_of
from buffer_rl.plan.algorithms import ALGORITHMS, LOSSES
from buffer_rl.plan.schedule import rollout_only

HINTS = {
    "--kl-coef": "for a KL penalty in the loss add --use-kl-loss --kl-loss-coef",
    "--turn-rewards": "the mean of a group at the same turn is no baseline for it: how many turns a sample has is the "
    "policy's choice",
}
"""What to do in place of an option that the estimator does not read."""


class AlgorithmOptions(Section):
    """Parameters of advantage estimators."""

    heading: ClassVar[str] = "Advantages"

    gamma: float = option(1.0, "discount of later token rewards (reinforce_plus_plus, gae)", gt=0, le=1)
    lambd: float = option(1.0, "lambda of generalised advantage estimation (gae)", ge=0, le=1)
    kl_coef: float = option(
        0.0,
        "subtract this times the log-ratio to the reference from token rewards (reinforce_plus_plus, remax, gae)",
        ge=0,
    )
    turn_rewards: bool = option(
        False,
        "token rewards at the end of each answer of an agent, as it or its environment gives them, in place of one at "
        "the end of the response (reinforce_plus_plus, gae, ppo)",
    )
    pass_at_k: int = option(4, "number of samples of which the best counts: k of pass@k (pass_at_k)", ge=1)
    use_opd: bool = option(False, "on-policy distillation: subtract the log-ratio to a teacher from token advantages")
    opd_kl_coef: float = option(1.0, "weight of the log-ratio of --use-opd", ge=0, needs="use_opd")
    normalize_advantages: bool = option(
        False, "normalise advantages to mean 0 and standard deviation 1 over the unmasked tokens of a rollout"
    )

    @staticmethod
    def check(args: Args) -> None:
        """For what the built-in estimator does not read; one of the user's may read any."""
        name = estimator_of(args)[1]
        if name not in ALGORITHMS or is_supervised(args):
            return
        for option_name in AlgorithmOptions.model_fields:
            readers = [each for each in ALGORITHMS if option_name in ALGORITHMS[each].options]
            unread = readers and name not in readers and given(args, option_name)
            hint, expected = HINTS.get(unread or "", "take it out"), f"--advantage-estimator {', '.join(readers)}"
            refuse(unread, f"{{}}: the advantage {name!r} does not read it", hint, expected)
        k, n = args.pass_at_k, args.n_samples_per_prompt
        what = f"--pass-at-k: the best of {k} is the same for all of {n} samples: no gradient"
        refuse(name == "pass_at_k" and k >= n, what, expected="less than --n-samples-per-prompt")


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
        None, "your weights, in place of --tis-mode", kind="correction", one_of="correction", needs="use_tis"
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

    @staticmethod
    def check(args: Args) -> None:
        """A built-in loss has no other place for the KL coefficient; a loss or an estimator of others may read it."""
        trains = args.num_rollout != 0 and not rollout_only(args) and not is_supervised(args)
        if trains and loss_of(args) in LOSSES and estimator_of(args)[1] in ALGORITHMS:
            what = f"the loss has no KL penalty that {args.kl_loss_coef:g} could be the weight of"
            needs(args, "use_kl_loss", what, "kl_loss_coef", hint="add --use-kl-loss, or write --kl-loss-coef 0")
        check_kl_target(args)
        if args.use_tis:
            low, high, loss = args.tis_clip_low, args.tis_clip, LOSSES.get(loss_of(args))
            refuse(low > high, f"--tis-clip-low and --tis-clip: no weight is between {low:g} and {high:g}")
            refuse(args.use_rollout_logprobs, "--use-tis and --use-rollout-logprobs: every weight would be 1")
            why = loss.uncorrected if loss is not None else ""
            refuse(bool(why), f"--use-tis: {loss_of(args)} {why}")
