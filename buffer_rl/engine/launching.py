"""Launchers of engines, which may be the user's: what they do wrong is said under their name."""

from __future__ import annotations

import inspect
from typing import Any, cast

from buffer_rl.contracts import EngineLauncher, EngineProcess
from buffer_rl.errors import EngineError
from buffer_rl.resolution.calls import Guarded, call, returned

_METHODS = ("wait_ready", "stop")


def named_launcher(launcher: EngineLauncher, reference: str) -> EngineLauncher:
    """``launcher``, whose failures and whose engines' name ``reference``.

    Raises EngineError if it raises, PluginError if what it returns is no ``EngineProcess``.
    """

    def launch(args: Any, index: int, log_path: str) -> EngineProcess:
        at = f"engine {index}"
        engine: Any = call("engine", reference, launcher, args, index, log_path, at=at, error_class=EngineError)
        # The address may not be known before the engine is ready: only whether there will be one is asked.
        has_url = hasattr(type(engine), "url") or "url" in getattr(engine, "__dict__", {})
        if not has_url or inspect.isawaitable(engine) or not all(callable(getattr(engine, m, None)) for m in _METHODS):
            raise returned("engine", reference, engine, "an object with url, wait_ready(timeout_s) and stop()", at=at)
        return cast(EngineProcess, Guarded("engine", reference, engine, EngineError, (*_METHODS, "check")))

    return launch
