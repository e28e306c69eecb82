"""What a user should know about options that are allowed together. Nothing is imported and no file is read."""

from __future__ import annotations

from typing import Any

from buffer_rl.config import flag_of
from buffer_rl.driver.modes import rollout_only
from buffer_rl.driver.role_checks import whole_rollout_functions
from buffer_rl.driver.schedule import Schedule

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
    if Schedule.named(args.schedule).streams and not rollout_only(args):
        for what, flag, reference in whole_rollout_functions(args):
            if reference is not None:
                found.append(
                    f"--schedule {args.schedule} overlaps nothing with generation here: with {flag}, {what} sees the "
                    "whole rollout, so no group is finished before all are"
                )
    return found
