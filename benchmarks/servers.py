"""An engine in a process of its own, embedded or a SGLang server, with one thread on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.embedded.launcher import launch
from buffer_rl.kinds.engine import EngineProcess
from buffer_rl.options.section import compose
from buffer_rl_sglang.launcher import launch as launch_sglang
from buffer_rl_sglang.options import SglangOptions

START_S = 300.0


def options_for(model: str, **options: Any) -> Any:
    """The run's options, but for those given the default ones of a run on the CPU."""
    return compose([*CORE_SECTIONS, SglangOptions])(hf_checkpoint=model, engine_device="cpu", **options)


@contextmanager
def served(args: Any, folder: Path) -> Iterator[EngineProcess]:
    """An engine that is ready, of the kind of ``args.rollout_engine``; its log is in ``folder``."""
    start: Any = launch_sglang if args.rollout_engine == "sglang" else launch
    engine: EngineProcess = start(args, 0, str(folder / f"{args.rollout_engine}.log"))
    try:
        engine.wait_ready(START_S)
        yield engine
    finally:
        engine.stop()
