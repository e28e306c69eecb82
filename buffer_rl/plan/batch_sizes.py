"""How a rollout becomes optimizer steps: mini-batches of whole prompt groups, and passes over them.

With G groups of n samples a rollout, ``--global-batch-size`` N and ``--num-steps-per-rollout`` S: G x n = N x S. Either
of N and S gives the other. Optimizer steps are S x ``--num-passes-per-rollout``.

Without torch and Ray, so that options can be checked before either is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from buffer_rl.errors import ConfigError

if TYPE_CHECKING:
    from buffer_rl.args import Args


def optimizer_steps(args: Args) -> int:
    """Optimizer steps on one rollout: one for each mini-batch and pass."""
    return int(args.num_steps_per_rollout) * int(args.num_passes_per_rollout)


def with_steps(args: Args) -> Args:
    """The options of a run, with the mini-batches that ``--global-batch-size`` means; ``args`` itself where they are
    given, or follow from nothing.

    Raises ConfigError if it fits neither the rollout nor a given ``--num-steps-per-rollout``, with what would."""
    size, groups, samples = args.global_batch_size, args.rollout_batch_size, args.n_samples_per_prompt
    if size is None:
        return args
    rollout = f"--rollout-batch-size {groups} x --n-samples-per-prompt {samples}"
    if size % samples or groups % (size // samples):
        fitting = [divisor * samples for divisor in range(1, groups + 1) if groups % divisor == 0]
        raise ConfigError(
            f"{groups * samples} samples a rollout ({rollout}) cannot be cut into steps of {size} samples, each of "
            "whole prompt groups",
            where="--global-batch-size",
            expected=f"one of {', '.join(map(str, fitting))}",
        )
    steps, asked = groups * samples // size, args.num_steps_per_rollout
    if "num_steps_per_rollout" not in args.model_fields_set:
        return args.model_copy(update={"num_steps_per_rollout": steps})
    if asked != steps:
        fits = f"--global-batch-size {groups // asked * samples}, or " if groups % asked == 0 else ""
        raise ConfigError(
            f"{asked} steps of {size} samples are {asked * size} samples; a rollout has {groups * samples} ({rollout})",
            where="--global-batch-size and --num-steps-per-rollout",
            expected=f"{fits}--num-steps-per-rollout {steps}",
            hint="without --num-steps-per-rollout it follows from --global-batch-size",
        )
    return args
