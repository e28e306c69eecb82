"""What code of a user raises, at the boundaries that all callers share: named, never more than an error."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from buffer_rl.errors import EndedBySignal, PluginError, RolloutError, WorkerError
from buffer_rl.plugin.calls import call, contained_task, error_text, nearest
from buffer_rl.rollout.user_functions import call_plugin
from buffer_rl.rollout.worker import LoopGuard

ENDING = [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), StopIteration(), GeneratorExit()]


def raising(error: BaseException) -> Callable[[], None]:
    def raises() -> None:
        raise error

    return raises


async def plugin(function: Callable[[], Any]) -> Any:
    async with asyncio.timeout(30):
        return await call_plugin("generate", "my:fn", function, at="row 1")


@pytest.mark.parametrize("error", ENDING, ids=repr)
async def test_whatever_code_raises_is_an_error_that_names_it(error: BaseException) -> None:
    with pytest.raises(PluginError, match=f"loss 'my:fn': it raised {type(error).__name__}") as caught:
        call("loss", "my:fn", raising(error))
    assert "in raises" in str(caught.value)
    with pytest.raises(RolloutError, match=f"generate 'my:fn', row 1: it raised {type(error).__name__}") as threaded:
        await plugin(raising(error))
    assert "in raises" in str(threaded.value)
    assert "user_functions.py" not in str(threaded.value)


@pytest.mark.parametrize("error", ENDING, ids=repr)
async def test_so_is_what_asynchronous_code_and_its_tasks_raise(error: BaseException) -> None:
    async def raises() -> None:
        raising(error)()

    async def gathers() -> None:
        await asyncio.gather(asyncio.sleep(60), raises())

    guard = LoopGuard()
    try:
        for function in (raises, gathers, lambda: raises()):
            with pytest.raises(RolloutError, match=f"it raised .*{type(error).__name__}"):
                await guard.guarded(plugin(function))
    finally:
        guard.close()


FORKS = """
import os
from buffer_rl.plugin.calls import call

def forks(error):
    if (child := os.fork()) == 0:
        raise error
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

print([call("reward", "my:fn", forks, error) for error in (SystemExit(3), SystemExit(), KeyError())])
"""


def test_a_process_that_code_forks_never_goes_on_with_the_work_of_its_caller() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("[3, 0, 1]\n", "")


async def test_code_that_cancels_its_own_task_has_failed_and_its_caller_goes_on() -> None:
    async def cancels_itself() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(60)

    with pytest.raises(RolloutError, match="it raised CancelledError"):
        await plugin(cancels_itself)
    await asyncio.sleep(0)


async def test_a_deadline_and_a_cancellation_of_the_caller_cancel_the_code() -> None:
    ended: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await plugin(waits)
    caller = asyncio.create_task(plugin(waits))
    await asyncio.sleep(0.01)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended == ["cancelled"] * 2


async def test_a_signal_that_ends_the_run_ends_it_in_the_code_too() -> None:
    with pytest.raises(EndedBySignal):
        call("logger", "mine", raising(EndedBySignal(signal.SIGTERM)))


def test_a_callback_that_ends_the_event_loop_fails_the_work_that_waits_for_it() -> None:
    """As in the worker: the loop runs in a thread of its own, which ``run_forever`` would end."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    guards: list[LoopGuard] = []

    async def work(first: Callable[[], Coroutine[Any, Any, None]]) -> None:
        guards[:] = guards or [LoopGuard()]
        await guards[0].guarded(first())

    async def exits_later() -> None:
        async def one() -> None:
            asyncio.get_running_loop().call_soon(sys.exit, 3)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            await asyncio.sleep(60)

        async with asyncio.TaskGroup() as inner:
            for _ in range(4):
                inner.create_task(one())

    try:
        for _ in range(2):  # the next work is told as well
            running = asyncio.run_coroutine_threadsafe(work(exits_later), loop)
            with pytest.raises(WorkerError, match="code ended the event loop of the process: SystemExit: 3"):
                running.result(30)
    finally:
        guards[0].close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


def test_the_traceback_of_a_coroutine_begins_in_the_code_of_the_user() -> None:
    async def fails() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        asyncio.run(contained_task(fails()))
    lines = error_text(caught.value).splitlines()
    assert [line.rpartition(" in ")[2] for line in lines if line.lstrip().startswith("File ")] == ["fails"]


def test_a_full_disk_is_named_with_what_to_do_and_without_the_code_that_wrote() -> None:
    def save() -> None:
        raise RuntimeError("I/O error: No space left on device (os error 28)")

    with pytest.raises(PluginError) as caught:
        call("trainer", "my:fn", save)
    assert "it raised RuntimeError: I/O error: No space left on device" in caught.value.what
    assert "Traceback" not in str(caught.value)
    assert (caught.value.hint, caught.value.see.partition("#")[2]) == (
        "make room for --run-dir, --save and TMPDIR, and go on with --load auto",
        "the-disk-is-full",
    )


def test_the_beginning_of_a_name_means_that_name_and_not_one_that_is_more_like_it() -> None:
    """By difflib's ratio alone ``f1_exact`` is nearer to ``exact`` than ``exact_match`` is."""
    names = ["f1_exact", "exact_match", "exact_match_lenient"]
    assert nearest("exact", names) == "exact_match"
    assert nearest("exakt_match", names) == "exact_match"
    assert nearest("ex", names) is None
