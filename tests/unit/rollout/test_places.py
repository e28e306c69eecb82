"""Which sample may ask the engines next: those of an evaluation, and of each kind the first that asked."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer_rl.rollout.context import Places
from buffer_rl.rollout.default import DefaultRollout
from buffer_rl.testing.fake_buffer import FakeBuffer


async def settle() -> None:
    """Let every task go as far as it can."""
    for _ in range(50):
        await asyncio.sleep(0)


class Queue:
    """Requests on ``Places``, each with a name. begun: those that hold their places, in order."""

    def __init__(self, total: int) -> None:
        self.places = Places(total)
        self.begun: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def ask(self, name: str, count: int = 1, *, evaluation: bool = False) -> None:
        async def hold() -> None:
            await self.places.acquire(count, evaluation=evaluation)
            self.begun.append(name)

        self.tasks[name] = asyncio.create_task(hold())


async def test_evaluations_come_first_and_each_kind_in_the_order_in_which_it_asked() -> None:
    queue = Queue(2)
    await queue.places.acquire(2)
    for name in ("train 0", "eval 0", "train 1", "eval 1", "eval 2"):
        queue.ask(name, evaluation=name.startswith("eval"))
        await settle()
    assert queue.begun == []
    for _ in range(5):
        queue.places.release()
        await settle()
    assert queue.begun == ["eval 0", "eval 1", "eval 2", "train 0", "train 1"]
    queue.places.release(2)
    assert queue.places.free == 2


async def test_a_request_of_many_places_is_not_passed_by_one_that_needs_less() -> None:
    queue = Queue(3)
    await queue.places.acquire(3)
    queue.ask("many", 3)
    await settle()
    queue.ask("one")
    queue.places.release(2)
    await settle()
    assert (queue.begun, queue.places.free) == ([], 2)
    queue.ask("of an evaluation", evaluation=True)
    await settle()
    assert queue.begun == ["of an evaluation"]
    queue.places.release(2)
    await settle()
    assert queue.begun == ["of an evaluation", "many"]


async def test_who_is_cancelled_holds_nothing_and_lets_the_next_one_pass() -> None:
    queue = Queue(2)
    await queue.places.acquire(1)
    queue.ask("many", 2)
    await settle()
    queue.ask("one")
    await settle()
    assert queue.begun == []
    queue.tasks["many"].cancel()
    await settle()
    assert queue.begun == ["one"]
    queue.ask("late")
    await settle()
    queue.places.release()  # granted to the last one, and cancelled before it runs
    queue.tasks["late"].cancel()
    await settle()
    assert (queue.begun, queue.places.free) == (["one"], 1)


async def test_more_places_than_there_are_would_be_waited_for_for_ever() -> None:
    with pytest.raises(ValueError, match="3 of 2 places"):
        await Places(2).acquire(3)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_places_are_never_lost_nor_given_twice(seed: int) -> None:
    draw, total = random.Random(seed), 4

    async def run() -> None:
        places, held = Places(total), 0

        async def work(count: int, evaluation: bool) -> None:
            nonlocal held
            await places.acquire(count, evaluation=evaluation)
            held += count
            try:
                assert held + places.free <= total
                for _ in range(draw.randrange(3)):
                    await asyncio.sleep(0)
            finally:
                held -= count
                places.release(count)

        tasks = []
        for _ in range(30):
            tasks.append(asyncio.create_task(work(draw.randint(1, total), draw.random() < 0.3)))
            for _ in range(draw.randrange(3)):
                await asyncio.sleep(0)
            if draw.random() < 0.3:
                draw.choice(tasks).cancel()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
        assert (held, places.free) == (0, total)

    asyncio.run(run())


async def test_an_evaluation_does_not_wait_for_the_training_samples_that_asked_before_it(kit: Any) -> None:
    started: list[str] = []
    asked, gate = asyncio.Event(), asyncio.Event()

    class Engine(kit.ScriptedEngine):  # type: ignore[misc]
        async def agenerate(self, rid: str, *args: Any, **kwargs: Any) -> Any:
            started.append(rid.partition("_")[0])
            if len(started) == 1:
                asked.set()
                await gate.wait()
            return await super().agenerate(rid, *args, **kwargs)

    options = {"n_samples_per_prompt": 1, "rollout_concurrency": 1, "custom_rm_path": kit.user("length_async")}
    async with kit.opened(Engine(), **options) as context:
        train = FakeBuffer([kit.make_group(row, labels=["1"]) for row in range(3)], kit.make_ticket(3))
        held_out = [kit.make_group(row, labels=["1"], data_set="dev") for row in range(3, 5)]
        evaluate = FakeBuffer(held_out, kit.make_ticket(2, evaluation=True))
        function = DefaultRollout(context.args)
        training = asyncio.create_task(function(context.args, 0, train))  # type: ignore[arg-type]
        await asked.wait()
        evaluation = asyncio.create_task(function(context.args, 0, evaluate, True))  # type: ignore[arg-type]
        await settle()
        gate.set()
        await asyncio.gather(training, evaluation)
    assert started == ["train", "eval", "eval", "train", "train"]
