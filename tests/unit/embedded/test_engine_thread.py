"""The thread that decodes, as a probe sees it: computing, waiting and stopped."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from buffer_rl.embedded.engine_thread import EngineThread


class Steps:
    """A scheduler with one step, which computes or sleeps until it is let go."""

    def __init__(self, computes: bool) -> None:
        self.has_work = True
        self.paused, self.num_running = False, 1
        self.began, self.let_go = threading.Event(), threading.Event()
        self._computes = computes

    def step(self) -> list[Any]:
        self.began.set()
        while not self.let_go.is_set():
            if not self._computes:
                self.let_go.wait(60)
        self.has_work = False
        return []


async def asked(computes: bool, times: int = 1) -> str:
    steps: Any = Steps(computes)
    thread = EngineThread(steps, on_finished=lambda _: None, on_failure=lambda _: None)
    thread.start()
    try:
        await asyncio.to_thread(steps.began.wait, 60)
        async with asyncio.timeout(60 if computes else 6):  # the step has no end before
            for _ in range(times):
                answer = str(await thread.answer_or_progress(lambda: threading.current_thread().name))
            return answer
    finally:
        steps.let_go.set()
        thread.stop()


@pytest.mark.slow
def test_a_thread_in_a_long_step_is_seen_to_compute_and_a_stopped_one_does_not_answer() -> None:
    assert asyncio.run(asked(computes=True)) == "MainThread"
    with pytest.raises(TimeoutError):
        asyncio.run(asked(computes=False, times=5))  # the first ones may see it as it falls asleep
