"""Names of other toolkits for generation beside training.

Relax and miles began as slime and share its flags: those of their own are taken where they mean the same, or have no
effect here. Toolkits with names of their own bound the age of samples by other rules; for their names, the options here
and the values are said, and the run does not start: docs/schedules.md has what differs. Flags of Relax and miles with
one meaning whatever their value are in ``flags.yaml``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from buffer_rl_slime.scripts.meaning import Known, Verdict

PAGE = "docs/schedules.md#names-elsewhere"

RENAMED: dict[str, tuple[tuple[str, str], ...]] = {
    "hybrid": (("schedule", "async"),),
    "max-weight-staleness": (("max_staleness", "{}"),),
    "async-max-concurrent-samples": (("rollout_concurrency", "{}"),),
    "max-actor-ckpt-to-keep": (("keep_last", "{}"),),
}
"""Options and values that flags of Relax and miles stand for; ``{}`` is the flag's own value."""

_PAUSES = {
    "in_place": "running requests would go on with a cache of the old weights, and their log-probabilities be those of "
    "no policy: take retract or drain",
    "abort": "each publication would throw away the responses under way: take retract or drain",
}


def known_peer_flag(name: str, value: str) -> Known | None:
    """What a flag of generation beside training means where that depends on its value, or needs more words than a
    table has; None for any other."""
    if name == "fully-async":
        why = "it is --schedule async here; --max-staleness is 2 unless it is given, and no sample is older"
        return Known(verdict=Verdict.RENAMED, why=why, options=(("schedule", "async"),))
    if name == "pause-generation-mode" and value == "retract":
        why = "it is --publication retract here"
        return Known(verdict=Verdict.RENAMED, why=why, options=(("publication", "retract"),))
    if name == "pause-generation-mode":
        return Known(verdict=Verdict.NOT_YET, why=_PAUSES.get(value, "--publication is retract or drain"))
    if name == "update-weights-interval":
        steps = int(value) if value.isascii() and value.isdigit() else None
        if steps == 1:
            return Known(verdict=Verdict.NOT_NEEDED, why="weights are published after each step")
        why = (
            f"weights are published after each step; samples that are up to {steps or 'K'} steps old are --schedule "
            f"async --max-staleness {steps or 'K'}, several optimizer steps a publication "
            "--num-steps-per-rollout"
        )
        return Known(verdict=Verdict.NOT_YET, why=why)
    return None


_BOUNDS = {
    "max-head-offpolicyness": "AReaL",
    "max-async-level": "prime-rl",
    "max-off-policy-steps": "prime-rl",
    "max-staleness-steps": "SkyRL",
    "max-trajectory-age-steps": "NeMo-RL",
    "max-lookahead-versions": "NeMo-RL",
    "max-staleness-versions": "NeMo-RL",
}
"""Names of a bound on the age of samples in steps, or of what is meant to be one, with the toolkits that have them."""

_WINDOW = 0.3
_TARGET = 3
"""torchtitan's defaults of ``window_fraction`` and ``target_offpolicy_steps``."""


def elsewhere(name: str, values: Sequence[str]) -> tuple[str, str] | None:
    """The toolkit that has this option, and what to write here for its value; None for any other name. name: without
    dashes, perhaps with the sections that it is in, as ``orchestrator.max-off-policy-steps``."""
    name, text = name.replace("_", "-").rpartition(".")[2], " ".join(values)
    number = _number(text)
    if name in _BOUNDS:
        return _BOUNDS[name], _async(f"--max-staleness {_up(number)}", number)
    if name == "staleness-threshold":
        return "verl", _async(f"--max-staleness {_up(number)} --target-staleness {_up(number)}", number)
    if name == "trigger-parameter-sync-step":
        return "verl", f"did you mean --num-steps-per-rollout {text or 'K'}?"
    if name == "target-offpolicy-steps":
        bound = "M" if number is None else str(bound_of_window(_WINDOW, math.ceil(number)))
        given = _async(f"--target-staleness {_up(number, 'S')} --max-staleness {bound}", number)
        return "torchtitan", f"{given} (with its window of {_WINDOW})"
    if name == "window-fraction":
        bound = "M" if number is None else str(bound_of_window(number, _TARGET))
        rule = f"S + window x (S + 1), rounded up: {bound} for --target-staleness {_TARGET}"
        return "torchtitan", f"did you mean --max-staleness? It is {rule}"
    return None


def _async(flags: str, number: float | None) -> str:
    return "did you mean --schedule lockstep?" if number == 0 else f"did you mean --schedule async {flags}?"


def bound_of_window(fraction: float, target: int) -> int:
    """``--max-staleness`` for a window that is a fraction of all groups of ``target + 1`` steps, however many groups a
    step has."""
    return target + math.ceil(fraction * (target + 1))


def _up(number: float | None, unknown: str = "M") -> str:
    return unknown if number is None else str(math.ceil(number))


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None
