"""The learning rate of each optimizer step. Without torch, so that the driver can say what a resume changes."""

from __future__ import annotations

import math
from typing import Any

from buffer_rl.args import Args
from buffer_rl.errors import ConfigError
from buffer_rl.plan.counts import optimizer_steps


def learning_rate(args: Args, step: int) -> float:
    """The learning rate of optimizer step ``step`` (counted from 0): linear warm-up over ``lr_warmup_iters`` steps to
    ``lr``, then ``lr_decay_style``.

    With W steps of warm-up, D = ``lr_decay_iters`` and x = (step - W) / (D - W), at most 1: ``constant`` stays at
    ``lr``, ``linear`` is ``min_lr + (lr - min_lr) (1 - x)``, ``cosine`` is
    ``min_lr + (lr - min_lr) (1 + cos(pi x)) / 2`` (SGDR, arXiv 1608.03983, equation 5). Steps from D on have
    ``min_lr``. The first step already has ``lr / W``, and step D - 1 a little more than ``min_lr``: a step with 0 would
    be wasted.

    It depends on the options and the step alone, so a run that is resumed with equal options goes on as it was.
    """
    warm_up, lr = args.lr_warmup_iters, float(args.lr)
    if step < warm_up:
        return lr * (step + 1) / float(warm_up)
    if args.lr_decay_style == "constant":
        return lr
    end = decay_steps(args)
    passed = min(1.0, (step - warm_up) / (end - warm_up)) if end > warm_up else 1.0
    left = 1.0 - passed if args.lr_decay_style == "linear" else 0.5 * (1.0 + math.cos(math.pi * passed))
    return float(args.min_lr) + (lr - float(args.min_lr)) * left


def decay_steps(args: Args) -> int:
    """The optimizer step from which on the learning rate is ``min_lr``: ``lr_decay_iters``, or all steps of the run.

    Raises ConfigError if the options say neither, as where the length is given in epochs."""
    if args.lr_decay_iters is not None:
        return int(args.lr_decay_iters)
    if args.num_rollout is None:
        what = "the number of optimizer steps is not known"
        raise ConfigError(what, where="--lr-decay-iters", hint="add --lr-decay-iters N or --num-rollout N")
    return int(args.num_rollout) * optimizer_steps(args)


def with_decay_iters(args: Args, num_updates: int) -> Any:
    """The options with the number of optimizer steps of the decay, in a run that trains on so many rollouts."""
    if args.lr_decay_iters is not None:
        return args
    return args.model_copy(update={"lr_decay_iters": max(1, num_updates * optimizer_steps(args))})
