from __future__ import annotations

import asyncio
import random
from contextvars import Context
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer_rl.errors import EngineError, RolloutError
from buffer_rl.records.groups import GroupUid, Status, VersionSpan
from buffer_rl.rollout.context import current_context
from buffer_rl.rollout.generate import generate, sampling_params_for
from buffer_rl.rollout.lease import Lease, current_lease
from buffer_rl.rollout.production import generate_group
from buffer_rl.rollout.requests import request_id, sampling_seed, shared_seed
from buffer_rl.rollout.stats import RolloutStats
from buffer_rl.verbs.plugins import write_plugin


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
            await generate_group(kit.make_lease(context, kit.make_group(0)), params, RolloutStats())
    assert [params["no_stop_trim"] for params in seen] == [True] * 4
    assert [params["no_stop_trim"] for _, _, params in engine.calls] == [True] * 4


def test_the_seed_is_a_known_function_of_run_uid_and_sample() -> None:
    # Of samples 32 to 47 the third sixteen; the place of 35 in it is 3: the fourth output of SplitMix64.
    import hashlib

    def splitmix64(state: int) -> int:
        z = state = state % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    shared = int(hashlib.blake2b(b"42|s:1:0|2", digest_size=8).hexdigest(), 16) // 2**33
    assert shared_seed(42, GroupUid("s", 1, 0), 35) == shared_seed(42, GroupUid("s", 1, 0), 32) == shared
    assert sampling_seed(42, GroupUid("s", 1, 0), 35) == splitmix64(shared + 4 * 0x9E3779B97F4A7C15) // 2**33
    assert splitmix64(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # of the reference implementation, seeded with 0


@given(st.sets(st.tuples(st.integers(0, 9), st.integers(0, 999), st.integers(0, 9), st.integers(0, 63)), max_size=60))
def test_different_samples_get_different_seeds(keys: set[tuple[int, int, int, int]]) -> None:
    seeds = {sampling_seed(run, GroupUid("s", row, epoch), index) for run, row, epoch, index in keys}
    assert len(seeds) == len(keys)
    assert all(0 <= seed < 2**31 for seed in seeds)


async def test_a_generate_function_sees_its_lease_and_the_built_in_one_needs_no_variable(kit: Any) -> None:
    seen: list[Lease] = []

    async def looking(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
        seen.append(current_lease())
        return await asyncio.create_task(generate(args, sample, sampling_params))

    async with kit.opened(kit.ScriptedEngine()) as context:
        params, group = sampling_params_for(context.args, False), kit.make_group(0)
        lease = kit.make_lease(context, group, kit.make_ticket(1, rollout_id=7))
        context.generate = looking
        await generate_group(lease, params, RolloutStats())
        assert current_lease().group is None
        context.generate = None
        bare = kit.make_lease(context, kit.make_group(0))
        await Context().run(asyncio.create_task, generate_group(bare, params, RolloutStats()))
    assert [each is lease for each in seen] == [True, True]
    assert lease.group is group
    assert (lease.attempt, lease.stopped, lease.buffer.ticket.task) == (1, False, "train_7")
    assert [sample.tokens for sample in bare.group] == [sample.tokens for sample in group]


async def test_request_ids_differ_between_leases_and_are_stable_within_one(kit: Any) -> None:
    seen = []
    async with kit.opened() as context:
        for rollout_id, incarnation, attempt in ((0, "a", 1), (0, "a", 2), (1, "a", 1), (0, "b", 1)):
            group = replace(kit.make_group(0), attempt=attempt, incarnation=incarnation)
            lease = kit.make_lease(context, group, kit.make_ticket(1, rollout_id=rollout_id))
            assert request_id(lease, group[0]) == request_id(lease, group[0])
            seen.append(request_id(lease, group[0]))
    assert seen[1] == "train_0:source:0:0/0.0:2:a"
    assert len(set(seen)) == 4


def test_min_p_reaches_the_engine_and_evaluation_may_have_its_own(kit: Any) -> None:
    args = kit.make_args(rollout_min_p=0.05)
    assert [sampling_params_for(args, evaluation)["min_p"] for evaluation in (False, True)] == [0.05, 0.05]
    args = kit.make_args(rollout_min_p=0.05, eval_min_p=0.0)
    assert [sampling_params_for(args, evaluation)["min_p"] for evaluation in (False, True)] == [0.05, 0.0]


async def asked(kit: Any, function: str, *, order: Any = None, attempt: int = 1) -> tuple[list[Any], list[Any]]:
    """The requests of a group of two samples, and its samples, under a generate function of the user's."""
    engine = kit.ScriptedEngine(order=order)
    group = kit.make_group(0)
    group.attempt = attempt
    stats = RolloutStats()
    async with kit.opened(engine, custom_generate_function_path=kit.user(function)) as context:
        params = sampling_params_for(context.args, False)
        answering = asyncio.create_task(engine.let_go()) if order is not None else None
        await generate_group(kit.make_lease(context, group), params, stats)
        if answering is not None:
            answering.cancel()
    return engine.calls, group.samples


async def test_the_skeleton_of_a_generate_function_samples_what_the_trainer_computes(kit: Any, tmp_path: Path) -> None:
    """At another temperature than --rollout-temperature a run ends, as engine and trainer disagree."""
    plugin, _ = write_plugin("generate", "own", tmp_path)
    engine = kit.ScriptedEngine()
    async with kit.opened(engine, custom_generate_function_path=f"{plugin}:own") as context:
        params = sampling_params_for(context.args, False)
        await generate_group(kit.make_lease(context, kit.make_group(0)), params, RolloutStats())
    assert [asked["temperature"] for _, _, asked in engine.calls] == [context.args.rollout_temperature] * 2


async def test_several_responses_of_one_sample_have_seeds_and_request_ids_of_their_own(kit: Any) -> None:
    calls, samples = await asked(kit, "best_of_three")
    seeds = [params["sampling_seed"] for _, _, params in calls]
    rids = [rid for rid, _, _ in calls]
    assert len(set(seeds)) == len(set(rids)) == len(calls) == 6
    assert not any(a != b and b.startswith(a) for a in rids for b in rids)  # an engine aborts by prefix
    assert sampling_seed(42, samples[0].uid, 0) in seeds  # the first one of a sample has the sample's own
    assert len({tuple(answer) for answer in samples[0].metadata["answers"]}) > 1


async def test_an_attempt_that_is_made_again_asks_under_the_same_seeds(kit: Any) -> None:
    (first, _), (again, _) = [await asked(kit, "best_of_three", attempt=attempt) for attempt in (1, 2)]
    assert [params for _, _, params in first] == [params for _, _, params in again]
    assert not {rid for rid, _, _ in first} & {rid for rid, _, _ in again}


async def test_the_parts_of_a_sample_differ_and_neither_turns_nor_time_change_their_seeds(kit: Any) -> None:
    runs = []
    for seed in (1, 2, 3):
        calls, _ = await asked(kit, "one_after_another", order=random.Random(seed))
        runs.append({rid: params["sampling_seed"] for rid, _, params in calls})
        assert len(runs[-1]) == len(calls) == 10
    assert runs[0] == runs[1] == runs[2]
    first_sample = {rid: seed for rid, seed in runs[0].items() if "/0." in rid}
    seeds_of = {part: [seed for rid, seed in first_sample.items() if f"/0.{part}:" in rid] for part in (0, 1)}
    own = sampling_seed(42, GroupUid("source", 0, 0), 0)
    assert seeds_of[0] == [own, own]  # two turns of one response
    assert len(set(seeds_of[1])) == 1
    (third,) = [seed for rid, seed in first_sample.items() if "/0.0#1:" in rid]
    assert len({own, third, *seeds_of[1]}) == 3


async def test_a_seed_that_the_user_gives_is_kept(kit: Any) -> None:
    calls, _ = await asked(kit, "with_a_seed")
    assert {params["sampling_seed"] for _, _, params in calls} == {77}
