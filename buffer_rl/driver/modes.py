"""Which halves of a run the options of ``DebugOptions`` leave, and what they need."""

from __future__ import annotations

from typing import Any

from buffer_rl.errors import ConfigError

PLACEHOLDER = "{rollout_id}"


def train_only(args: Any) -> bool:
    """Whether the run trains on recorded rollouts, without engines and rollout workers."""
    return bool(args.debug_train_only or args.load_debug_rollout_data is not None)


def rollout_only(args: Any) -> bool:
    """Whether the run generates without a trainer."""
    return bool(args.debug_rollout_only)


def reads_data_source(args: Any) -> bool:
    """Whether the run takes groups from a data source of the user's own. An evaluation (no rollout) does not."""
    return args.data_source_path is not None and args.num_rollout != 0 and not train_only(args)


def check_modes(args: Any) -> None:
    """Raises ConfigError for a half run that lacks what it works on, or that could not do what it is asked to."""
    for name, flag in (
        ("save_debug_rollout_data", "--save-debug-rollout-data"),
        ("load_debug_rollout_data", "--load-debug-rollout-data"),
    ):
        template = getattr(args, name)
        if template is not None and PLACEHOLDER not in template:
            raise ConfigError(
                f"{template!r} names one file for all rollouts",
                where=flag,
                expected=f"a path with {PLACEHOLDER}, such as 'rollouts/{PLACEHOLDER}.safetensors'",
            )
    if train_only(args):
        _check_train_only(args)
    if rollout_only(args):
        for name in ("save", "load"):
            if getattr(args, name) is not None:
                raise ConfigError(
                    "there is no trainer to save or to resume",
                    where=f"--debug-rollout-only and --{name}",
                    hint="to generate with a checkpoint's weights: --hf-checkpoint CHECKPOINT/hf",
                )


def _check_train_only(args: Any) -> None:
    if args.load_debug_rollout_data is None:
        raise ConfigError(
            "there are no rollouts to train on",
            where="--debug-train-only",
            hint="add --load-debug-rollout-data PATH, written by --save-debug-rollout-data",
        )
    if rollout_only(args):
        raise ConfigError("nothing is left of the run", where="--debug-rollout-only and --load-debug-rollout-data")
    if args.num_rollout is None and (args.data_source_path is not None or not args.prompt_data):
        raise ConfigError(
            "the number of recorded rollouts is not known", where="--num-rollout", hint="add --num-rollout N"
        )
    for name, flag in (
        ("save_debug_rollout_data", "--save-debug-rollout-data"),
        ("early_stop", "--early-stop"),
    ):
        if getattr(args, name) is not None:
            raise ConfigError(f"{flag} needs rollouts, and none are generated", where=flag, hint=f"take {flag} out")
