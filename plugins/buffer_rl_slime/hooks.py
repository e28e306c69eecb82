"""Hooks of samples: the functions that ``args.rollout_sample_hook_path`` names, for rollout functions that call them.

No option of this library sets that name; a function of the user's may, on its copy of ``args``.
"""

from __future__ import annotations

import inspect
from typing import Any

from buffer_rl.errors import RolloutError
from buffer_rl.records.groups import Sample
from buffer_rl_slime.tools import load_function


async def apply_rollout_sample_hooks(args: Any, value: Any, **kwargs: Any) -> Any:
    """``value``, a sample or nested lists of samples, after every hook saw each sample, in order.

    A hook ``(args, sample, ...)`` gets those of ``kwargs`` that it names; it changes the sample or returns another.
    Raises RolloutError for anything else that it returns."""
    paths = getattr(args, "rollout_sample_hook_path", None) or []
    if not paths:
        return value
    if not isinstance(value, Sample):
        return [await apply_rollout_sample_hooks(args, item, **kwargs) for item in value]
    for path in paths:
        hook = load_function(path)
        parameters = inspect.signature(hook).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        given = kwargs if takes_all else {name: item for name, item in kwargs.items() if name in parameters}
        answer = hook(args, value, **given)
        answer = await answer if inspect.isawaitable(answer) else answer
        if answer is not None and not isinstance(answer, Sample):
            raise RolloutError(
                f"it returned {type(answer).__name__}", where=f"hook {path!r}", expected="Sample or None"
            )
        value = value if answer is None else answer
    return value
