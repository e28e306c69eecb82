"""How a rollout becomes optimizer steps: mini-batches of whole prompt groups, and passes over them.

With G groups of n samples a rollout, ``--global-batch-size`` N and ``--num-steps-per-rollout`` S: G x n = N x S. Either
of N and S gives the other. Optimizer steps are S x ``--num-passes-per-rollout``.

Without torch and Ray, so that options can be checked before either is loaded.
"""

from __future__ import annotations

from typing import Any

from buffer_rl.errors import ConfigError


def optimizer_steps(args: Any) -> int:
    """Optimizer steps on one rollout: one for each mini-batch and pass."""
    return int(args.num_steps_per_rollout) * int(args.num_passes_per_rollout)


def derived_steps(args: Any) -> int | None:
    """The mini-batches of a rollout that ``--global-batch-size`` means; None where it is absent or does not fit, or
    where ``args`` are options of the trainer alone."""
    size, groups = getattr(args, "global_batch_size", None), getattr(args, "rollout_batch_size", None)
    if size is None or groups is None or size % args.n_samples_per_prompt:
        return None
    steps, rest = divmod(groups, size // args.n_samples_per_prompt)
    return None if rest else steps


def check_batch_sizes(args: Any) -> None:
    """Raises ConfigError if ``--global-batch-size`` fits neither the rollout nor ``--num-steps-per-rollout``; it names
    the numbers that would."""
    size, groups, samples = args.global_batch_size, args.rollout_batch_size, args.n_samples_per_prompt
    steps = derived_steps(args)
    if size is None or steps == args.num_steps_per_rollout:
        return
    rollout = f"--rollout-batch-size {groups} x --n-samples-per-prompt {samples}"
    if steps is None:
        fitting = [divisor * samples for divisor in range(1, groups + 1) if groups % divisor == 0]
        raise ConfigError(
            f"{groups * samples} samples a rollout ({rollout}) cannot be cut into steps of {size} samples, each of "
            "whole prompt groups",
            where="--global-batch-size",
            expected=f"one of {', '.join(map(str, fitting))}",
        )
    asked = args.num_steps_per_rollout
    fits = f"--global-batch-size {groups // asked * samples}, or " if groups % asked == 0 else ""
    raise ConfigError(
        f"{asked} steps of {size} samples are {asked * size} samples; a rollout has {groups * samples} ({rollout})",
        where="--global-batch-size and --num-steps-per-rollout",
        expected=f"{fits}--num-steps-per-rollout {steps}",
        hint="without --num-steps-per-rollout it follows from --global-batch-size",
    )
