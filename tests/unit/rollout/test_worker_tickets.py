"""Several tickets in one rollout worker, on a real event loop: which calls of a rollout function may overlap."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.buffer.ledger import Ledger
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import RolloutOutput, Status, Ticket
from buffer_rl.rollout.conversion import GroupConverter
from buffer_rl.rollout.default import DefaultRollout
from buffer_rl.rollout.sft import SFTRollout
from buffer_rl.rollout.user_functions import LogFunctions
from buffer_rl.rollout.worker import LoopGuard, RolloutWorker
from harness.local_buffer import DirectCalls, local_state


class Gates:
    """A rollout function, each of whose calls waits for its gate. calls: what began and ended, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}

    async def __call__(self, args: Any, rollout_id: int, buffer: Any, evaluation: bool = False) -> RolloutOutput:
        task = buffer.ticket.task
        self.calls.append(f"+{task}")
        await self.gates.setdefault(task, asyncio.Event()).wait()
        groups = [] if evaluation else await buffer.aget_samples(1)
        for sample in (sample for group in groups for sample in group):
            sample.tokens, sample.response, sample.response_length = [1, 2, 3], "x", 1
            sample.reward, sample.status, sample.rollout_log_probs = 1.0, Status.COMPLETED, [-0.5]
        self.calls.append(f"-{task}")
        if self.gates[task].is_set() and task == "train_9":
            raise ValueError("at its end")
        return RolloutOutput(groups=groups)

    def open(self, *tasks: str) -> None:
        for task in tasks:
            self.gates.setdefault(task, asyncio.Event()).set()


class ConcurrentGates(Gates):
    concurrent = True


class Bench:
    """A worker with a rollout function, over a Buffer's state; without a process of its own."""

    def __init__(self, kit: Any, folder: Path, function: Callable[..., Any]) -> None:
        path = folder / "rows.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"p{i}", "label": "1"}) + "\n" for i in range(9)))
        options = {"n_samples_per_prompt": 1, "rollout_batch_size": 1, "custom_rm_path": kit.user("length_async")}
        self.kit, self.options = kit, {"prompt_data": str(path), **options}
        args = kit.make_args(**self.options)
        self.state = local_state(args, Ledger.in_memory(), schedule=None)
        self.worker = worker = object.__new__(RolloutWorker)  # __init__ redirects the output of its process
        worker._args, worker._run_dir, worker._deliver, worker._reward_model = args, folder, None, ()
        worker._client = DirectCalls(self.state)  # type: ignore[assignment]
        worker._registry = PluginRegistry()
        worker._converter = GroupConverter.from_args(args, worker._registry)
        worker._functions, worker._buffer_filter = {False: function, True: function}, None
        worker._log_functions = LogFunctions(args, worker._registry)
        worker._one_rollout, worker._logging = asyncio.Lock(), asyncio.Lock()

    async def __aenter__(self) -> Bench:
        self.opened = self.kit.opened(self.kit.ScriptedEngine(), **self.options)
        self.worker._opened, self.worker._guard = await self.opened.__aenter__(), LoopGuard()
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self.worker._guard is not None
        self.worker._guard.close()
        await self.opened.__aexit__(*error)

    def start(self, rollout_id: int) -> asyncio.Task[Any]:
        return asyncio.create_task(self.worker.run(self.state.generate(rollout_id)))

    def evaluate(self) -> asyncio.Task[Any]:
        ticket = Ticket(rollout_id=0, evaluation=True, num_groups=1, version=0, incarnation="i")
        return asyncio.create_task(self.worker.run(ticket))


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_a_function_is_called_for_one_ticket_after_the_other_in_their_order(kit: Any, tmp_path: Path) -> None:
    function = Gates()
    async with Bench(kit, tmp_path, function) as bench:
        tasks = [bench.start(number) for number in range(3)]
        function.open("train_1", "train_2")
        await settle()
        assert function.calls == ["+train_0"]
        function.open("train_0")
        await asyncio.gather(*tasks)
    assert function.calls == [f"{mark}train_{number}" for number in range(3) for mark in "+-"]


async def test_a_function_that_declares_it_is_called_for_several_tickets_at_a_time(kit: Any, tmp_path: Path) -> None:
    function = ConcurrentGates()
    async with Bench(kit, tmp_path, function) as bench:
        tasks = [bench.start(number) for number in range(3)]
        await settle()
        assert function.calls == ["+train_0", "+train_1", "+train_2"]
        function.open("train_2")
        await tasks[2]
        assert function.calls[3:] == ["-train_2"]
        function.open("train_0", "train_1")
        await asyncio.gather(*tasks)
    assert len(bench.state._rollouts.finished) == 3


async def test_an_evaluation_runs_beside_a_ticket(kit: Any, tmp_path: Path) -> None:
    function = Gates()
    async with Bench(kit, tmp_path, function) as bench:
        training = bench.start(0)
        await settle()
        function.open("eval_0")
        await bench.evaluate()
        assert function.calls == ["+train_0", "+eval_0", "-eval_0"]
        function.open("train_0")
        await training


async def test_a_ticket_that_fails_or_is_cancelled_lets_the_next_one_pass(kit: Any, tmp_path: Path) -> None:
    function = Gates()
    async with Bench(kit, tmp_path, function) as bench:
        failing, cancelled, last = bench.start(9), bench.start(10), bench.start(11)
        function.open("train_9", "train_11")
        await asyncio.wait([failing])
        await settle()
        cancelled.cancel()
        await last
        assert "at its end" in str(failing.exception())
    assert function.calls == ["+train_9", "-train_9", "+train_10", "+train_11", "-train_11"]


@pytest.mark.parametrize("built_in", [DefaultRollout, SFTRollout])
def test_the_built_in_functions_keep_nothing_from_ticket_to_ticket(kit: Any, built_in: Any) -> None:
    function = built_in(kit.make_args())
    assert function.concurrent
    assert list(vars(function)) == ["_args"]


async def test_two_tickets_of_the_built_in_function_share_the_places_and_finish_their_own_groups(
    kit: Any, tmp_path: Path
) -> None:
    async with Bench(kit, tmp_path, DefaultRollout(kit.make_args())) as bench:
        tasks = [bench.start(number) for number in range(4)]
        answers = await asyncio.gather(*tasks)
        assert [metrics["rollout/response_len/mean"] for metrics, _ in answers] == [3.0] * 4
        assert len(bench.state._rollouts.finished) == 4
        assert bench.worker._opened is not None
        assert bench.worker._opened.places.free == bench.worker._args.rollout_concurrency
