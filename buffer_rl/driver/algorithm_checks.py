"""Checks of options of an algorithm: its estimator, loss, KL penalties, critic, teacher, rewards and corrections. No
plugin is imported."""

from __future__ import annotations

import shlex
import shutil
from typing import TYPE_CHECKING

from buffer_rl.agents.options import AgentOptions
from buffer_rl.agents.template_reader import TemplateReader
from buffer_rl.algo.kl import check_kl_target
from buffer_rl.algo.options import AlgorithmOptions
from buffer_rl.algo.rewards import reward_bounds
from buffer_rl.errors import ConfigError
from buffer_rl.options.section import flag_of
from buffer_rl.plan.algorithm import estimator_of, is_supervised, loss_of, uses_critic
from buffer_rl.plan.algorithms import ALGORITHMS, LOSSES
from buffer_rl.plan.schedule import rollout_only, train_only
from buffer_rl.rollout.options import generate_path, is_built_in_rollout
from buffer_rl.train.options import CriticOptions

if TYPE_CHECKING:
    from buffer_rl.args import Args


REMOTE = "remote"
"""The name of agents elsewhere, for ``--agent-path``."""


def check_algorithm(args: Args) -> None:
    """Raises ConfigError for options that the run's algorithm does not read, or that contradict each other.

    args: the flat options of a training run, with every core section."""
    _check_kl(args)
    check_kl_target(args)
    _check_estimator(args)
    _check_critic(args)
    _check_distillation(args)
    _check_reward_shaping(args)
    _check_correction(args)


def _check_kl(args: Args) -> None:
    """A built-in loss has no other place for the coefficient; a loss or an estimator of others may read it."""
    trains = args.num_rollout != 0 and not rollout_only(args)
    builtin = loss_of(args) in LOSSES and estimator_of(args)[1] in ALGORITHMS and not is_supervised(args)
    if trains and builtin and args.kl_loss_coef and not args.use_kl_loss:
        raise ConfigError(
            f"the loss has no KL penalty that {args.kl_loss_coef:g} could be the weight of",
            where="--kl-loss-coef",
            hint="add --use-kl-loss, or write --kl-loss-coef 0",
        )


def _check_estimator(args: Args) -> None:
    """An option that the built-in estimator does not read would change nothing; one of the user's may read any."""
    name = estimator_of(args)[1]
    if name not in ALGORITHMS or is_supervised(args):
        return
    for option, field in AlgorithmOptions.model_fields.items():
        value, readers = getattr(args, option), [n for n in ALGORITHMS if option in ALGORITHMS[n].options]
        if readers and name not in readers and value != field.default:
            hints = {
                "kl_coef": "for a KL penalty in the loss add --use-kl-loss --kl-loss-coef",
                "turn_rewards": "the mean of a group at the same turn is no baseline for it: how many turns a sample "
                "has is the policy's choice",
            }
            raise ConfigError(
                f"the advantage {name!r} does not read it",
                where=flag_of(option),
                expected=f"--advantage-estimator {', '.join(readers)}",
                hint=hints.get(option, "take it out"),
            )
    if name == "pass_at_k" and args.pass_at_k >= args.n_samples_per_prompt:
        raise ConfigError(
            f"the best of {args.pass_at_k} is the same for all of {args.n_samples_per_prompt} samples: no gradient",
            where="--pass-at-k",
            expected="less than --n-samples-per-prompt",
        )


def _check_critic(args: Args) -> None:
    """Options of a critic that is not there would change nothing; a critic whose values nothing reads, neither."""
    if uses_critic(args):
        flag, name = estimator_of(args)
        if name in ALGORITHMS and name not in ("gae", "ppo"):
            expected = "--advantage-estimator ppo, or a function of your own that reads the column 'values'"
            raise ConfigError(
                f"the advantage {name!r} reads no values", where=f"--use-critic and {flag}", expected=expected
            )
        _check_critic_decay(args)
        return
    given = [name for name, field in CriticOptions.model_fields.items() if getattr(args, name) != field.default]
    if given:
        why = "the supervised loss has no critic" if is_supervised(args) else "there is no critic"
        hint = "take it out" if is_supervised(args) else "add --advantage-estimator ppo, or --use-critic"
        raise ConfigError(why, where=flag_of(given[0]), hint=hint)


def _check_critic_decay(args: Args) -> None:
    """The critic's learning rate has the policy's end, and its own peak and warm-up."""
    if args.lr_decay_style == "constant":
        return
    if args.critic_lr is not None and args.min_lr > args.critic_lr:
        raise ConfigError(
            f"the critic's learning rate would rise from {args.critic_lr:g} to {args.min_lr:g}",
            where="--critic-lr and --min-lr",
        )
    if args.lr_decay_iters is not None and args.lr_decay_iters <= args.critic_lr_warmup_iters:
        raise ConfigError(
            f"the decay ends at step {args.lr_decay_iters}, the critic's warm-up at {args.critic_lr_warmup_iters}",
            where="--lr-decay-iters and --critic-lr-warmup-iters",
            hint="--lr-decay-iters counts the warm-up too",
        )


def _check_distillation(args: Args) -> None:
    """A teacher that nothing reads, or none."""
    if not args.use_opd:
        given = {"--opd-teacher-load": args.opd_teacher_load, "--opd-kl-coef": args.opd_kl_coef != 1}
        if flag := next((flag for flag, value in given.items() if value), ""):
            raise ConfigError("nothing is distilled", where=flag, hint="add --use-opd, or take it out")
        return
    if loss_of(args) in ("sft_loss", "dpo"):
        what = f"{loss_of(args)} reads no advantages, which the teacher is a part of"
        raise ConfigError(what, where="--use-opd", hint="take it out, or take another loss")
    own = (
        generate_path(args),
        args.custom_rm_path,
        args.custom_group_rm_path,
        args.custom_reward_post_process_path,
        args.custom_convert_samples_to_train_data_path,
    )
    if not args.opd_teacher_load and is_built_in_rollout(args) and not train_only(args) and not any(own):
        raise ConfigError(
            "there is no teacher",
            where="--use-opd",
            hint="add --opd-teacher-load PATH, or a function of your own that sets teacher_log_probs of each sample",
        )


def _check_reward_shaping(args: Args) -> None:
    reward_bounds(args)
    given: dict[str, object] = {
        "--overlong-buffer-len": args.overlong_buffer_len,
        "--length-penalty": args.length_penalty,
    }
    given |= {"--reward-clip": args.reward_clip, "--reward-scale": args.reward_scale != 1}
    if is_supervised(args) and (flag := next((flag for flag, value in given.items() if value), "")):
        raise ConfigError("the supervised loss reads no rewards", where=flag, hint="take it out")
    if args.overlong_buffer_len > args.rollout_max_response_len:
        raise ConfigError(
            f"a buffer of {args.overlong_buffer_len} of at most {args.rollout_max_response_len} tokens",
            where="--overlong-buffer-len",
            expected="at most --rollout-max-response-len",
        )
    given |= {"--disable-rewards-normalization": args.disable_rewards_normalization}
    path = args.custom_reward_post_process_path or args.custom_convert_samples_to_train_data_path
    if path and (flag := next((flag for flag, value in given.items() if value), "")):
        raise ConfigError(
            f"{path} makes the rewards to train on", where=flag, expected="rewards that the framework normalises"
        )


def _check_correction(args: Args) -> None:
    if not args.use_tis:
        if args.custom_tis_function_path:
            raise ConfigError("nothing is corrected", where="--custom-tis-function-path", hint="add --use-tis")
        return
    if args.tis_clip_low > args.tis_clip:
        bounds = f"{args.tis_clip_low:g} and {args.tis_clip:g}"
        raise ConfigError(f"no weight is between {bounds}", where="--tis-clip-low and --tis-clip")
    if args.use_rollout_logprobs:
        raise ConfigError(
            "the ratio of the loss is to the engine's log-probabilities already: every weight would be 1",
            where="--use-tis and --use-rollout-logprobs",
            hint="take one of them out",
        )
    loss = LOSSES.get(loss_of(args))
    if loss is not None and loss.uncorrected:
        raise ConfigError(f"{loss_of(args)} {loss.uncorrected}", where="--use-tis", hint="take it out")


def check_agents(args: Args) -> None:
    """Raises ConfigError for options that contradict an agent."""
    given = [
        flag_of(name) for name in ("agent_path", "agent_command", "tools_path", "environment") if getattr(args, name)
    ]
    if args.agent_command is not None and (fault := _command_fault(args)):
        raise ConfigError(fault, where="--agent-command", expected="a program and its arguments, without a shell")
    if args.agent_path != REMOTE:
        _refuse_options_of_remote(args)
    if not given:
        return
    if len(given) > 1:
        what, hint = "a run has one agent", "take one of them out"
        if "--environment" in given:
            what = "an environment is played by the built-in agent, and its methods are the tools"
        elif "--tools-path" in given:
            what, hint = "an agent of yours calls tools itself", "--tools-path alone is the built-in agent"
        raise ConfigError(what, where=" and ".join(given), hint=hint)
    refused = {
        "custom_generate_function_path": "an agent takes its place",
        "custom_convert_samples_to_train_data_path": "it returns values per row, and an agent's sample may be several",
        "partial_rollout": "an answer that was aborted is asked for again",
    }
    for name, why in refused.items():
        if getattr(args, name):
            raise ConfigError(why, where=f"{given[0]} and {flag_of(name)}", hint=f"take {flag_of(name)} out")
    if args.response_template:
        TemplateReader(args.response_template)  # refuses what is none
    if 2 * args.agent_timeout_s > args.rollout_timeout_s:
        raise ConfigError(
            f"a sample may be played twice, {args.agent_timeout_s:g} s each, and the rollout ends after "
            f"{args.rollout_timeout_s:g} s",
            where="--agent-timeout-s and --rollout-timeout-s",
            expected="a rollout's deadline of at least twice a sample's",
        )


def _command_fault(args: Args) -> str:
    """What is wrong with ``--agent-command``; empty if nothing is. Other nodes may have other programs."""
    try:
        words = shlex.split(args.agent_command or "")
    except ValueError as error:
        return f"it cannot be split into words: {error}"
    if not words:
        return "it is empty"
    is_here = args.ray_address is not None or shutil.which(words[0])
    return "" if is_here else f"there is no program {words[0]!r} here"


def _refuse_options_of_remote(args: Args) -> None:
    for name in ("agent_host", "agent_port", "agent_api_key"):
        if getattr(args, name) != AgentOptions.model_fields[name].default:
            raise ConfigError("no agents lease samples of this run", where=flag_of(name), hint="--agent-path remote")
