from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer_rl.errors import EngineError, RolloutError
from buffer_rl.rollout.context import LeaseScope, current_context, lease_scope
from buffer_rl.rollout.generate import generate, request_id, sampling_params_for, sampling_seed
from buffer_rl.rollout.production import generate_group
from buffer_rl.rollout.requests import Requests
from buffer_rl.rollout.stats import RolloutStats
from buffer_rl.types import GroupUid, Status, VersionSpan


def test_outside_a_rollout_there_is_no_context() -> None:
    with pytest.raises(RolloutError, match="no rollout context"):
        current_context()


async def test_a_context_is_gone_after_its_block(kit: Any) -> None:
    async with kit.opened() as context:
        assert current_context() is context
    with pytest.raises(RolloutError):
        current_context()


async def test_the_answer_fills_the_sample(kit: Any) -> None:
    engine = kit.ScriptedEngine(respond=lambda ids, params: kit.answer([7, 8], version=4))
    async with kit.opened(engine) as context:
        sample = kit.make_group(0)[0]
        filled = await generate(context.args, sample, sampling_params_for(context.args, False))
        prompt_ids = context.tokenizer.encode("prompt 0", add_special_tokens=False)
    assert filled is sample
    assert sample.tokens == [*prompt_ids, 7, 8]
    assert (sample.response_length, sample.rollout_log_probs, sample.loss_mask) == (2, [-0.5, -0.5], None)
    assert sample.weight_versions == [VersionSpan(4, 0, 2)]
    assert sample.status is Status.COMPLETED


@pytest.mark.parametrize(
    ("reason", "status"),
    [("stop", Status.COMPLETED), ("length", Status.TRUNCATED), ("abort", Status.ABORTED)],
)
async def test_the_finish_reason_decides_the_status(kit: Any, reason: str, status: Status) -> None:
    engine = kit.ScriptedEngine(respond=lambda ids, params: kit.answer([7], finish_reason=reason))
    async with kit.opened(engine) as context:
        sample = await generate(context.args, kit.make_group(0)[0], sampling_params_for(context.args, False))
    assert sample.status is status


async def test_tokens_and_log_probs_of_different_lengths_are_refused(kit: Any) -> None:
    broken = kit.answer([7, 8])
    broken.log_probs.pop()
    async with kit.opened(kit.ScriptedEngine(respond=lambda ids, params: broken)) as context:
        with pytest.raises(EngineError, match=r"row source:0:0/0\.0"):
            await generate(context.args, kit.make_group(0)[0], sampling_params_for(context.args, False))


@pytest.mark.parametrize("spans", [[], [VersionSpan(3, 0, 1)], [VersionSpan(3, 1, 2)], [VersionSpan(3, 0, 3)]])
async def test_an_answer_whose_version_spans_do_not_cover_its_tokens_is_refused(kit: Any, spans: list[Any]) -> None:
    broken = kit.answer([7, 8])
    broken.spans = spans
    async with kit.opened(kit.ScriptedEngine(respond=lambda ids, params: broken)) as context:
        with pytest.raises(EngineError, match=r"row source:0:0/0\.0.*version spans .* are of 2 tokens"):
            await generate(context.args, kit.make_group(0)[0], sampling_params_for(context.args, False))


async def test_a_prompt_that_the_engine_refuses_is_named(kit: Any) -> None:
    def refuse(ids: list[int], params: dict[str, Any]) -> Any:
        raise EngineError("HTTP 400: too long", where="http://engine")

    async with kit.opened(kit.ScriptedEngine(respond=refuse)) as context:
        with pytest.raises(EngineError, match=r"^row source:0:0/0\.0, http://engine: HTTP 400: too long$"):
            await generate(context.args, kit.make_group(0)[0], sampling_params_for(context.args, False))


async def test_the_context_limit_shortens_the_response(kit: Any) -> None:
    engine = kit.ScriptedEngine()
    async with kit.opened(engine, rollout_max_context_len=10, rollout_max_response_len=50) as context:
        params = sampling_params_for(context.args, False)
        await generate(context.args, kit.make_group(0)[0], params)  # "prompt 0" has 8 tokens
        assert engine.calls[0][2]["max_new_tokens"] == 2
        assert params["max_new_tokens"] == 50
        with pytest.raises(RolloutError, match="leaves no room"):
            await generate(context.args, kit.make_group(100)[0], params)  # "prompt 100" has 10


def test_evaluation_parameters_fall_back_to_the_rollouts(kit: Any) -> None:
    args = kit.make_args(
        rollout_temperature=0.7,
        eval_temperature=0.0,
        rollout_top_p=0.9,
        rollout_stop=["\n"],
        eval_max_response_len=5,
        rollout_stop_token_ids=[1],
    )
    train, evaluation = sampling_params_for(args, False), sampling_params_for(args, True)
    assert (train["temperature"], evaluation["temperature"]) == (0.7, 0.0)
    assert (train["top_p"], evaluation["top_p"]) == (0.9, 0.9)
    assert (train["max_new_tokens"], evaluation["max_new_tokens"]) == (1024, 5)
    assert evaluation["stop"] == ["\n"]
    assert evaluation["stop_token_ids"] == [1]


async def test_the_text_that_a_generate_function_gets_is_that_of_its_tokens(kit: Any) -> None:
    seen: list[dict[str, Any]] = []

    async def search(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
        seen.append(sampling_params)
        return await generate(args, sample, sampling_params | {"stop": ["</search>"]})

    engine = kit.ScriptedEngine()
    async with kit.opened(engine, custom_rm_path=kit.user("length")) as context:
        context.generate = search
        for evaluation in (False, True):
            params = sampling_params_for(context.args, evaluation)
            await generate_group(context, kit.make_ticket(1), kit.make_group(0), params, RolloutStats(), Requests())
    assert [params["no_stop_trim"] for params in seen] == [True] * 4
    assert [params["no_stop_trim"] for _, _, params in engine.calls] == [True] * 4


def test_the_seed_is_a_known_function_of_run_uid_and_sample() -> None:
    # Computed by hand: int(blake2b(b"42|s:1:0|3", digest_size=8).hexdigest(), 16) >> 33
    import hashlib

    expected = int(hashlib.blake2b(b"42|s:1:0|3", digest_size=8).hexdigest(), 16) // 2**33
    assert sampling_seed(42, GroupUid("s", 1, 0), 3) == expected


@given(st.sets(st.tuples(st.integers(0, 9), st.integers(0, 999), st.integers(0, 9), st.integers(0, 63)), max_size=60))
def test_different_samples_get_different_seeds(keys: set[tuple[int, int, int, int]]) -> None:
    seeds = {sampling_seed(run, GroupUid("s", row, epoch), index) for run, row, epoch, index in keys}
    assert len(seeds) == len(keys)
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_request_ids_differ_between_leases_and_are_stable_within_one(kit: Any) -> None:
    sample = kit.make_group(0)[0]
    seen = []
    for scope in (
        LeaseScope(task="train_0", incarnation="a", attempt=1),
        LeaseScope(task="train_0", incarnation="a", attempt=2),
        LeaseScope(task="train_1", incarnation="a", attempt=1),
        LeaseScope(task="train_0", incarnation="b", attempt=1),
    ):
        with lease_scope(scope):
            assert request_id(sample) == request_id(sample)
            seen.append(request_id(sample))
    assert len(set(seen)) == 4


def test_min_p_reaches_the_engine_and_evaluation_may_have_its_own(kit: Any) -> None:
    args = kit.make_args(rollout_min_p=0.05)
    assert [sampling_params_for(args, evaluation)["min_p"] for evaluation in (False, True)] == [0.05, 0.05]
    args = kit.make_args(rollout_min_p=0.05, eval_min_p=0.0)
    assert [sampling_params_for(args, evaluation)["min_p"] for evaluation in (False, True)] == [0.05, 0.0]
