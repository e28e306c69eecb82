"""What a user should know about options that are allowed together. Nothing is imported and no file is read."""

from __future__ import annotations

from typing import Any

from buffer_rl.config import flag_of
from buffer_rl.driver.modes import rollout_only, train_only
from buffer_rl.driver.role_checks import whole_rollout_functions
from buffer_rl.driver.schedule import Schedule
from buffer_rl.rollout.options import is_built_in_rollout

_TRUNCATING = (("rollout_top_p", 1.0), ("rollout_top_k", -1), ("rollout_min_p", 0.0))


def notices(args: Any) -> list[str]:
    """One text for each thing to know; a run starts all the same.

    args: the flat options of a training run, with every core section, as ``check_options`` accepts them.
    """
    found = []
    trains = args.num_rollout != 0 and not rollout_only(args) and args.loss_type != "sft_loss"
    cut = [(name, getattr(args, name)) for name, neutral in _TRUNCATING if getattr(args, name) != neutral]
    if trains and cut and args.rollout_temperature > 0:
        given = ", ".join(f"{flag_of(name)} {value}" for name, value in cut)
        found.append(
            f"{given}: training samples come from a part of the distribution, but log-probabilities, the engine's and "
            "the trainer's, are of the whole; nothing corrects for it, so gradients are biased towards the tokens that "
            "are kept (the same flags with --eval- touch evaluations only)"
        )
    built_in = is_built_in_rollout(args)
    if trains and built_in and not train_only(args) and _is_alone_in_its_group(args):
        found.append(
            "--n-samples-per-prompt 1: a reward minus the mean of its group is 0 where the group has one sample, so "
            "every advantage is 0 and rewards change nothing (take more samples a prompt, or "
            "--custom-reward-post-process-path or --custom-advantage-function-path of your own)"
        )
    generates = not train_only(args) and not (args.num_rollout == 0 and args.eval_function_path)
    if args.multimodal_keys and generates and built_in and args.custom_generate_function_path is None:
        found.append(
            f"--multimodal-keys {', '.join(args.multimodal_keys)}: the built-in generate function sends the prompt's "
            "text alone to the engine, so the model does not see these fields; rewards and filters do (a function of "
            "--custom-generate-function-path can send them)"
        )
    if Schedule.named(args.schedule).streams and not rollout_only(args):
        for what, flag, reference in whole_rollout_functions(args):
            if reference is not None:
                found.append(
                    f"--schedule {args.schedule} overlaps nothing with generation here: with {flag}, {what} sees the "
                    "whole rollout, so no group is finished before all are"
                )
    return found


def _is_alone_in_its_group(args: Any) -> bool:
    """Whether the built-in normalisation, estimator and loss, which nothing replaces, get groups of one sample."""
    own = (
        args.custom_reward_post_process_path,
        args.custom_convert_samples_to_train_data_path,
        args.custom_advantage_function_path,
        args.custom_loss_function_path,
    )
    built_in = args.advantage_estimator == "grpo" and args.loss_type == "policy_loss"
    return args.n_samples_per_prompt == 1 and built_in and not any(own)
