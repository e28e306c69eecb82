"""Launch commands that generate while they train: which ``--schedule`` they mean, and the flags whose verdict depends
on it."""

from __future__ import annotations

import json
from collections.abc import Iterator

from buffer_rl.options.values import Raw
from buffer_rl.plan.schedule import Mode
from buffer_rl_slime.scripts.flags import is_value
from buffer_rl_slime.scripts.meaning import Judgement, Verdict
from buffer_rl_slime.scripts.shell_script import SFT, Flags, steps_per_rollout, value_of

PROGRAM = "train_async.py"
"""The program of slime and miles that generates a rollout while it trains on the one before."""
_FULLY_ASYNC = "generate_rollout_fully_async"
"""The rollout function of slime whose groups go on from one rollout to the next."""
_CORRECTED = ("use-tis", "use-rollout-logprobs", "keep-old-actor")
_KEEP_OLD_ACTOR = (
    "it computes log-probabilities with the weights that sampled; --use-rollout-logprobs takes the engine's, which are "
    "of these weights"
)


def schedule_of(program: str, flags: Flags) -> str:
    """``--schedule`` as the command means it; empty where it generates and trains in turn, or generates nothing."""
    if value_of(flags, "loss-type") == SFT:
        return ""
    if {"fully-async", "hybrid"} & flags.keys() or _is_fully_async(flags):
        return Mode.ASYNC
    return Mode.ONE_STEP_OFF if program == PROGRAM else ""


def _is_fully_async(flags: Flags) -> bool:
    return value_of(flags, "rollout-function-path").endswith(_FULLY_ASYNC)


def of_program(flags: Flags, schedule: str) -> Judgement:
    """What ``train_async.py`` is here."""
    if value_of(flags, "loss-type") == SFT:
        return Verdict.NOT_NEEDED, "supervised fine-tuning generates nothing", {}
    if schedule == Mode.ASYNC:
        return Verdict.NOT_NEEDED, "--schedule async generates while the run trains", {}
    why = "it is --schedule one-step-off here: each rollout is generated during the step on the one before"
    return Verdict.RENAMED, why, {"schedule": schedule}


def corrections(flags: Flags, schedule: str) -> Iterator[tuple[str, str, dict[str, Raw]]]:
    """What is to be added because the command's loss takes no account of older weights: flag, reason, options."""
    if not schedule or {*_CORRECTED} & flags.keys():
        return
    if schedule == Mode.ASYNC and value_of(flags, "max-staleness") == "0":
        return
    why = (
        "its tokens are of older weights than those that are trained, and its loss corrects nothing for it; a run here "
        "would refuse that, so --use-tis is added (others: --loss-type decoupled_ppo, --use-rollout-logprobs)"
    )
    yield "(no --use-tis)", why, {"use_tis": "true"}


def judge_ahead(name: str, values: list[str], flags: Flags, schedule: str) -> Judgement | None:
    """The verdict for a flag of a command that generates while it trains, where it is another than in one that does
    not; else None."""
    if not schedule:
        return None
    value = " ".join(values)
    given = f"--schedule {schedule}"
    if name == "rollout-function-path" and _is_fully_async(flags):
        why = (
            "it is --schedule async with the built-in rollout; no sample is older than --max-staleness, 2 unless it is "
            "given (slime has no bound)"
        )
        return Verdict.RENAMED, why, {"schedule": schedule}
    if name == "keep-old-actor":
        return Verdict.RENAMED, _KEEP_OLD_ACTOR, {"use_rollout_logprobs": "true"}
    if name in ("partial-rollout", "mask-offpolicy-in-partial-rollout"):
        return Verdict.CHANGES, f"with {given} no response is cut off when a rollout ends, so there are no parts", {}
    if name == "over-sampling-batch-size" and value != value_of(flags, "rollout-batch-size"):
        why = f"with {given} the rollouts ahead are the groups in flight beyond those of a step; none is thrown away"
        return Verdict.CHANGES, why, {}
    if name in ("deterministic-mode", "sglang-enable-deterministic-inference") and schedule == Mode.ASYNC:
        why = "with --schedule async the order in which groups finish decides what a step trains on"
        return Verdict.CHANGES, why, {}
    if name == "resource":
        return _resource(value, flags)
    return None


def _resource(value: str, flags: Flags) -> Judgement | None:
    """``--resource`` of Relax, without roles that would have nothing to do here; None where it has none of these."""
    try:
        roles = json.loads(value)
    except json.JSONDecodeError:
        return None
    if not isinstance(roles, dict):
        return None
    left_out = {}
    if "reference" in roles and "use-kl-loss" not in flags and is_value(value_of(flags, "kl-coef") or "0", "0"):
        left_out["reference"] = "no KL penalty needs a reference"
    if "actor_fwd" in roles and _is_one_step(flags):
        left_out["actor_fwd"] = "with one optimizer step its own forward pass has the old log-probabilities"
    if not left_out:
        return None
    why = "; ".join(f"without {role}: {reason}" for role, reason in left_out.items())
    kept = {role: counts for role, counts in roles.items() if role not in left_out}
    return Verdict.RENAMED, why, {"resource": json.dumps(kept)}


def _is_one_step(flags: Flags) -> bool:
    try:
        return steps_per_rollout(flags) == 1
    except (ValueError, ZeroDivisionError):
        return False
