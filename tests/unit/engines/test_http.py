"""An event loop in a thread: answers, errors, one loop for all calls, and an end that leaves nobody waiting."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

from buffer_rl.engines.http import LoopThread
from buffer_rl.errors import PluginError
from harness.processes import holds_within


def threads_named(name):
    return [thread for thread in threading.enumerate() if thread.name == name]


async def doubled(number):
    await asyncio.sleep(0)
    return 2 * number


async def current_loop():
    return asyncio.get_running_loop()


async def failing():
    raise KeyError("lost")


def test_calls_of_several_threads_are_answered_by_one_loop():
    loop = LoopThread("loop-a")
    assert not loop.is_running
    assert not threads_named("loop-a")
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda n: loop.run(doubled(n)), range(50))) == [2 * n for n in range(50)]
        assert len(set(pool.map(lambda _: loop.run(current_loop()), range(8)))) == 1
    assert len(threads_named("loop-a")) == 1
    with pytest.raises(KeyError, match="lost"):
        loop.run(failing())
    loop.stop()
    assert holds_within(10, lambda: not threads_named("loop-a"))


def test_a_call_that_is_under_way_at_the_end_is_not_waited_for_for_ever():
    loop = LoopThread("loop-b")
    begun = threading.Event()

    async def endless():
        begun.set()
        await asyncio.Event().wait()

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(loop.run, endless())
        assert begun.wait(10)
        loop.stop()
        with pytest.raises(CancelledError):
            answer.result(timeout=10)
    assert loop.run(doubled(4)) == 8  # it starts anew
    loop.stop()


def test_the_thread_ends_with_the_object():
    loop = LoopThread("loop-c")
    assert loop.run(doubled(1)) == 2
    assert threads_named("loop-c")
    del loop
    gc.collect()
    assert holds_within(10, lambda: not threads_named("loop-c"))


@pytest.mark.filterwarnings("error")
def test_a_policy_that_gives_no_loop_is_named_and_the_call_may_be_made_again():
    class Policy(asyncio.DefaultEventLoopPolicy):
        def new_event_loop(self):
            raise RuntimeError("no loops")

    loop, given = LoopThread("loop-d"), asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(Policy())
    try:
        with pytest.raises(PluginError, match=r"test_http(.|\n)*no loops(.|\n)*hint: .*set_event_loop_policy"):
            loop.run(doubled(1))
        gc.collect()  # warns of a coroutine that was never awaited
    finally:
        asyncio.set_event_loop_policy(given)
    assert loop.run(doubled(1)) == 2
    loop.stop()
