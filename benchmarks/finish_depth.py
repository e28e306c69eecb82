"""The deepest stack of our functions while one finished group is reported: the worker's, and below it the Buffer's.

    python benchmarks/finish_depth.py

Both sides run in this process, with default options and a ledger in a file; Ray's call is a plain one. Payloads travel
in the report, and encoding the group is not counted. A second stack leaves out what stores: ledger and columns.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import ray

import buffer_rl
from buffer_rl.args import CORE_SECTIONS
from buffer_rl.buffer.actor import BufferActor
from buffer_rl.buffer.client import BufferClient
from buffer_rl.buffer.ledger_file import new_ledger
from buffer_rl.buffer.rollout_client import RolloutClient
from buffer_rl.buffer.state import BufferState
from buffer_rl.options.section import compose, dump_args
from buffer_rl.records.groups import Column, RowId, SampleGroup

PACKAGE = str(Path(buffer_rl.__file__).parent)
AIM = 8
STORES = ("ledger.py", "ledger_tables.py", "columns.py")


def deepest_stack(work: Callable[[], object], left_out: Sequence[str] = ()) -> list[str]:
    """The functions of ``buffer_rl`` on the deepest stack of ``work``, the outermost first; without those in the files
    ``left_out``."""
    deepest: list[str] = []

    def look(frame: FrameType | None, event: str, _: object) -> None:
        nonlocal deepest
        if event != "call":
            return
        found = []
        while frame is not None:
            code = frame.f_code
            if code.co_filename.startswith(PACKAGE) and not code.co_filename.endswith(tuple(left_out)):
                found.append(f"{Path(code.co_filename).relative_to(PACKAGE)}:{frame.f_lineno} {code.co_qualname}")
            frame = frame.f_back
        if len(found) > len(deepest):
            deepest = found[::-1]

    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(None)
    return deepest


class InThisProcess:
    """Stands for Ray's handle of ``actor``: a call is made when its answer is asked for."""

    def __init__(self, actor: BufferActor) -> None:
        self._actor = actor

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=partial(StartedHere, getattr(self._actor, method)))


class StartedHere:
    """Stands for the reference to the answer of a call."""

    def __init__(self, method: Callable[..., object], *args: object) -> None:
        self.call = partial(method, *args)

    def future(self) -> Future[object]:
        answer: Future[object] = Future()
        answer.set_result(self.call())
        return answer


class OneToken:
    """Encodes every sample as one prompt token and one answer token."""

    def encode(self, group: SampleGroup, evaluation: bool) -> tuple[list[RowId], dict[str, Column]]:
        return [sample.row_id for sample in group], {
            "tokens": [np.asarray([1, 2], dtype=np.int32) for _ in group],
            "response_length": np.ones(len(group), dtype=np.int32),
            "loss_mask": [np.ones(1, dtype=np.float32) for _ in group],
            "reward": np.ones(len(group), dtype=np.float32),
        }


def finish_stack(folder: Path, left_out: Sequence[str] = ()) -> list[str]:
    """The deepest stack of one ``finish``, without the functions in the files ``left_out``."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(64)))
    args: Any = compose(CORE_SECTIONS)(run_dir=str(folder / "run"), prompt_data=str(rows))
    setattr(ray, "get", lambda started, timeout: started.call())  # noqa: B010 - a function of Ray's, not of this project
    client = BufferClient(InThisProcess(BufferActor(dump_args(args), new_ledger(args))), timeout_s=60.0)
    buffer = RolloutClient(client, client.call(BufferState.generate, 0), OneToken())
    group = buffer.get_samples(1)[0]
    encoded = buffer.encode(group)
    return deepest_stack(lambda: asyncio.run(buffer.afinish(group, encoded)), left_out)


def main() -> None:
    for title, left_out in (("all functions", ()), ("without ledger and columns", STORES)):
        with tempfile.TemporaryDirectory() as folder:
            stack = finish_stack(Path(folder), left_out)
        print(f"{title}: {len(stack)} deep, aim {AIM}")
        for depth, function in enumerate(stack, start=1):
            print(f"{depth:4}  {function}")


if __name__ == "__main__":
    main()
