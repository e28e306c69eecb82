"""When the work on a ticket is given up: after the time for a whole rollout, or, if the schedule runs ahead, after the
time without a group that was leased, finished or dropped."""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.rollout_client import RolloutClient
from buffer_rl.errors import DeadlineError, RolloutError
from buffer_rl.records.groups import RolloutOutput, SampleGroup, Status
from buffer_rl.rollout.conversion import GroupConverter
from buffer_rl.rollout.default import DefaultRollout
from buffer_rl.rollout.user_rollout import GRACE_S, run_user_rollout
from buffer_rl.testing.fake_buffer import FakeBuffer, local_client, local_state

POISON = str(Path(__file__).with_name("poison.py"))
TIMEOUT_S, GAP_S = 60.0, 100.0
AHEAD: dict[str, Any] = {"schedule": "async", "max_staleness": 1}


class JumpingSelector(selectors.DefaultSelector):
    """Passes the time in place of waiting."""

    passed = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "nothing is left that a task could wait for"
            self.passed += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock moves to the next timer when nothing else is to do."""

    def __init__(self) -> None:
        self.clock = JumpingSelector()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.passed


def respond(group: SampleGroup) -> SampleGroup:
    for sample in group:
        sample.tokens, sample.response, sample.response_length = [1, 2, 3], "x", 1
        sample.reward, sample.status, sample.rollout_log_probs = 1.0, Status.COMPLETED, [-0.5]
    return group


Report = Callable[[RolloutClient, SampleGroup], Awaitable[None]]
REPORTS: dict[str, Report] = {
    "finish": lambda buffer, group: buffer.afinish(respond(group)),
    "reject": lambda buffer, group: buffer.areject(group, "dull"),
    "quarantine": lambda buffer, group: buffer.aquarantine(group, "broken"),
}


class Bench:
    """A rollout of four groups with a function of the user's, in virtual time."""

    def __init__(self, kit: Any, folder: Path, **options: Any) -> None:
        path = folder / "rows.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"p{i}", "label": "1"}) + "\n" for i in range(9)))
        self.args = kit.make_args(
            prompt_data=str(path),
            n_samples_per_prompt=1,
            rollout_batch_size=4,
            rollout_timeout_s=TIMEOUT_S,
            custom_rm_path=kit.user("length_async"),
            **options,
        )
        self.ended_at = -1.0

    def run(self, function: Callable[..., Any]) -> None:
        state = local_state(self.args, Ledger.in_memory())
        buffer = local_client(state, state.generate(0), GroupConverter(self.args))

        async def roll() -> None:
            try:
                await run_user_rollout(function, self.args, buffer, where="rollout 'mine'")
            finally:
                self.ended_at = asyncio.get_running_loop().time()

        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(roll())


@pytest.mark.parametrize("report", REPORTS)
def test_ahead_of_training_a_deadline_counts_from_the_last_group_that_was_leased_finished_or_dropped(
    kit: Any, tmp_path: Path, report: str
) -> None:
    async def slow(args: Any, rollout_id: int, buffer: Any, evaluation: bool = False) -> RolloutOutput:
        for _ in range(4):
            (group,) = await buffer.aget_samples(1)
            await asyncio.sleep(GAP_S)
            await REPORTS[report](buffer, group)
            await asyncio.sleep(GAP_S)
        return RolloutOutput()

    assert GAP_S < 2 * TIMEOUT_S + GRACE_S < 2 * GAP_S
    bench = Bench(kit, tmp_path, **AHEAD)
    bench.run(slow)
    assert bench.ended_at == pytest.approx(8 * GAP_S)


def test_ahead_of_training_a_group_that_hangs_ends_the_ticket_so_long_after_the_last_other_one(
    kit: Any, tmp_path: Path
) -> None:
    async def hangs(args: Any, rollout_id: int, buffer: Any, evaluation: bool = False) -> RolloutOutput:
        first, _ = await buffer.aget_samples(2)
        await asyncio.sleep(GAP_S)
        await buffer.afinish(respond(first))
        await asyncio.sleep(1e6)
        return RolloutOutput()

    bench = Bench(kit, tmp_path, **AHEAD)
    with pytest.raises(
        RolloutError, match="leased, finished or dropped no group for 120 s, which is 2 times"
    ) as caught:
        bench.run(hangs)
    assert caught.value.where == "rollout 'mine'"
    assert bench.ended_at == pytest.approx(GAP_S + 2 * TIMEOUT_S + GRACE_S, abs=0.01)


@pytest.mark.parametrize("options", [{}, {"schedule": "pipelined"}, {"schedule": "async", "max_staleness": 0}])
def test_without_staleness_the_deadline_is_that_of_the_whole_rollout(
    kit: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    async def busy(args: Any, rollout_id: int, buffer: Any, evaluation: bool = False) -> RolloutOutput:
        for group in await buffer.aget_samples(4):
            await asyncio.sleep(TIMEOUT_S / 2)
            await buffer.afinish(respond(group))
        return RolloutOutput()

    bench = Bench(kit, tmp_path, **options)
    with pytest.raises(RolloutError, match="took longer than 60 s"):
        bench.run(busy)
    assert bench.ended_at == pytest.approx(TIMEOUT_S + GRACE_S)


async def test_the_built_in_rollout_waits_longer_if_other_tickets_have_the_engines_too(kit: Any) -> None:
    class Hangs(kit.ScriptedEngine):  # type: ignore[misc]
        async def agenerate(self, *args: Any, **kwargs: Any) -> Any:
            await asyncio.Event().wait()

    buffer = FakeBuffer([kit.make_group(0)], kit.make_ticket(1))
    options = {"rollout_timeout_s": 0.1, "custom_rm_path": kit.user("length_async"), "max_staleness": 3}
    async with kit.opened(Hangs(), schedule="async", target_staleness=2, **options) as context:
        with pytest.raises(
            DeadlineError, match=r"no group for 0\.3 s, which is 3 times --rollout-timeout-s: 0 of 1 groups"
        ):
            await DefaultRollout(context.args)(context.args, 0, buffer)


async def test_a_call_of_a_generate_function_has_half_of_the_longer_deadline(kit: Any) -> None:
    buffer = FakeBuffer([kit.make_group(row) for row in range(6)], kit.make_ticket(2))
    options = {"rollout_timeout_s": 0.2, "custom_rm_path": kit.user("length_async"), **AHEAD}
    async with kit.opened(kit.ScriptedEngine(), custom_generate_function_path=f"{POISON}:hangs", **options) as context:
        with pytest.raises(RolloutError, match=r"not done within 0\.2 s"):
            await DefaultRollout(context.args)(context.args, 0, buffer)
