"""Which failures cost a group an attempt, its place in the run, or the run."""

from __future__ import annotations

import random
from typing import Any

import pytest

from buffer_rl.errors import ConfigError, DataError, DeadlineError, EngineError, RolloutError
from buffer_rl.rollout.default import DefaultRollout
from buffer_rl.rollout.failure_policy import FailurePolicy
from buffer_rl.rollout.failures import AttemptFailure, Domain, failure_of
from buffer_rl.rollout.stats import RolloutStats
from buffer_rl.testing.fake_buffer import FakeBuffer


def engine_error(status: int | None, what: str = "failed") -> EngineError:
    error = EngineError(what, where="http://engine")
    error.status = status
    return error


@pytest.mark.parametrize(
    ("error", "domain", "reason", "repeatable"),
    [
        (engine_error(None), Domain.INFRA, "engine", True),
        (engine_error(500), Domain.INFRA, "engine", True),
        (engine_error(429), Domain.INFRA, "engine", True),
        (DeadlineError("late"), Domain.INFRA, "deadline", True),
        (engine_error(400), Domain.DATA, "refused:400", False),
        (engine_error(422), Domain.DATA, "refused:422", False),
        (RolloutError("no room"), Domain.DATA, "generate_failed", True),
        (DataError("no template"), Domain.DATA, "generate_failed", True),
    ],
)
def test_whose_fault_a_failure_is(error: Any, domain: Domain, reason: str, repeatable: bool) -> None:
    failure = failure_of(error)
    assert (failure.domain, failure.reason, failure.repeatable) == (domain, reason, repeatable)


@pytest.mark.parametrize("error", [engine_error(401), engine_error(404), ConfigError("wrong option")])
def test_what_is_wrong_with_the_set_up_is_no_groups_failure(error: Any) -> None:
    with pytest.raises(type(error)) as caught:
        failure_of(error)
    assert caught.value is error


def failing_engine(kit: Any, error: Exception, rows: tuple[int, ...], times: int) -> Any:
    """Fails the first ``times`` requests of the prompts of ``rows``."""
    left = dict.fromkeys(rows, times)

    class Failing(kit.ScriptedEngine):  # type: ignore[misc,name-defined]
        async def agenerate(self, rid: str, input_ids: Any, sampling_params: Any, **more: Any) -> Any:
            row = int(rid.split("/")[0].split(":")[2])
            if left.get(row, 0):
                left[row] -= 1
                raise error
            return await super().agenerate(rid, input_ids, sampling_params)

    return Failing()


async def roll(kit: Any, engine: Any, *, wanted: int = 2, num_rows: int = 6, **options: Any) -> tuple[FakeBuffer, Any]:
    groups = [kit.make_group(row, labels=["1"]) for row in range(num_rows)]
    buffer = FakeBuffer(groups, kit.make_ticket(wanted))
    async with kit.opened(engine, custom_rm_path=kit.user("slow_async"), **options) as context:
        output = await DefaultRollout(context.args)(context.args, 0, buffer)
    return buffer, output


async def test_a_group_that_an_engine_lost_is_tried_until_it_succeeds(kit: Any) -> None:
    engine = failing_engine(kit, engine_error(None), rows=(0,), times=3)
    buffer, output = await roll(kit, engine)
    assert [uid.row for uid in buffer.finished_uids] == [0, 1]
    assert (output.metrics["infra_failures"], buffer.quarantined) == (3.0, [])
    assert [uid.row for uid in buffer.leased] == [0, 1, 0, 0, 0]  # nothing newer is leased for it


async def test_the_log_has_the_first_failure_of_each_kind(kit: Any, caplog: pytest.LogCaptureFixture) -> None:
    await roll(kit, failing_engine(kit, engine_error(500, "the disk is full"), (0, 1), times=2))
    logged = [record.getMessage() for record in caplog.records if record.name == "buffer_rl.rollout.failure_policy"]
    assert len(logged) == 1
    assert "failed for reasons of the engines or the network, at " in logged[0]
    assert "the disk is full" in logged[0]


async def test_a_prompt_that_the_engine_refuses_is_not_sent_again(kit: Any) -> None:
    engine = failing_engine(kit, engine_error(400, "too long"), rows=(0,), times=9)
    buffer, output = await roll(kit, engine)
    assert [uid.row for uid in buffer.finished_uids] == [1, 2]
    assert [(group.uid.row, reason) for group, reason in buffer.quarantined] == [(0, "refused:400")]
    assert output.metrics["data_failures"] == 1.0


async def test_a_refusal_that_is_no_prompts_fault_ends_the_run_at_once(kit: Any) -> None:
    engine = failing_engine(kit, engine_error(401, "no key"), rows=(0, 1), times=9)
    with pytest.raises(EngineError, match="no key"):
        await roll(kit, engine)


@pytest.mark.parametrize("limit", [0, 2])
async def test_the_run_ends_at_one_failure_of_the_engines_more_than_the_budget(kit: Any, limit: int) -> None:
    engine = failing_engine(kit, engine_error(None, "connection lost"), rows=(0, 1), times=99)
    expected = rf"{limit + 1} attempts .* of the engines or the network, and --max-infra-failures is {limit}\."
    with pytest.raises(EngineError, match=expected) as caught:
        await roll(kit, engine, max_infra_failures=limit)
    assert "connection lost" in str(caught.value)


async def test_budgets_are_separate(kit: Any) -> None:
    engine = failing_engine(kit, engine_error(None), rows=(0, 1), times=2)
    buffer, _ = await roll(kit, engine, max_infra_failures=4, max_data_failures=0)
    assert len(buffer.finished) == 2


async def test_the_default_budget_grows_with_the_batch(kit: Any) -> None:
    failure = AttemptFailure(domain=Domain.INFRA, reason="engine", error=EngineError("lost"))
    for batch, limit in ((1, 16), (4, 16), (32, 128)):
        async with kit.opened(rollout_batch_size=batch) as context:
            policy = FailurePolicy(context, FakeBuffer([], kit.make_ticket(batch)), RolloutStats())
            await policy.count(kit.make_group(0), failure)
            policy.check_budget(failure, limit)
            with pytest.raises(EngineError, match=f"{limit + 1} attempts"):
                policy.check_budget(failure, limit + 1)


async def test_pauses_grow_with_failures_in_a_row_and_end_with_a_success(kit: Any) -> None:
    failure = AttemptFailure(domain=Domain.INFRA, reason="engine", error=EngineError("lost"))
    async with kit.opened() as context:
        policy = FailurePolicy(context, FakeBuffer([], kit.make_ticket(1)), RolloutStats())
        pauses = [policy.pause_s]
        for _ in range(8):
            await policy.count(kit.make_group(0), failure)
            pauses.append(policy.pause_s)
        assert pauses == pytest.approx([0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])
        policy.succeeded(kit.make_group(0))
        assert policy.pause_s == 0


async def test_failures_that_come_and_go_change_neither_the_groups_nor_their_tokens(kit: Any) -> None:
    def tokens(buffer: FakeBuffer) -> dict[str, list[int]]:
        return {str(sample.row_id): sample.tokens for group in buffer.finished for sample in group}

    expected = tokens((await roll(kit, kit.ScriptedEngine(), wanted=4, num_rows=8))[0])
    rng = random.Random(3)
    for _ in range(4):
        rows = tuple(rng.sample(range(4), 2))
        buffer, _ = await roll(kit, failing_engine(kit, engine_error(None), rows, 2), wanted=4, num_rows=8)
        assert tokens(buffer) == expected
        assert buffer.quarantined == []


async def test_an_evaluation_is_tried_again_as_well_and_keeps_its_mean(kit: Any) -> None:
    for error, times in ((engine_error(None), 3), (RolloutError("once"), 1)):
        groups = [kit.make_group(row, labels=["1"], data_set="held") for row in range(3)]
        buffer = FakeBuffer(groups, kit.make_ticket(3, evaluation=True))
        engine = failing_engine(kit, error, rows=(1,), times=times)
        async with kit.opened(engine, custom_rm_path=kit.user("slow_async")) as context:
            output = await DefaultRollout(context.args)(context.args, 0, buffer, evaluation=True)
        assert len(buffer.finished) == 3
        assert output.metrics["eval/held"] == 1.0


async def test_an_evaluation_of_which_a_prompt_fails_twice_ends_with_its_error(kit: Any) -> None:
    buffer = FakeBuffer([kit.make_group(0, labels=["1"])], kit.make_ticket(1, evaluation=True))
    engine = failing_engine(kit, RolloutError("the tool broke"), rows=(0,), times=2)
    async with kit.opened(engine, custom_rm_path=kit.user("slow_async")) as context:
        with pytest.raises(RolloutError, match="the tool broke"):
            await DefaultRollout(context.args)(context.args, 0, buffer, evaluation=True)
