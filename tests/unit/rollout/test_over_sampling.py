"""Over-sampling and partial rollouts: the default rollout over a real Buffer state and a real HTTP server."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.buffer.queue import RequeueRule
from buffer_rl.engines.client import EngineClient
from buffer_rl.errors import EngineError, RolloutError
from buffer_rl.records.groups import Status, VersionSpan
from buffer_rl.rollout import default
from buffer_rl.rollout.conversion import GroupConverter
from buffer_rl.rollout.default import DefaultRollout
from buffer_rl.rollout.generate import end_of_straddling_stop, generate, response_text, sampling_params_for
from buffer_rl.rollout.requests import Requests
from buffer_rl.testing.fake_buffer import FakeBuffer
from buffer_rl.testing.fake_engine import FakeEngine
from harness.ledger_contents import count_states
from harness.local_buffer import local_client, local_state
from harness.tickets import close_rollout, schedule_of

PROMPT = 2  # tokens of "p0", "p1", …
END = 10  # position at which every response ends
FOREVER = 600.0


def positions(input_ids: list[int], seed: int) -> list[int]:
    """Each token says where it stands, so a response in two pieces has the tokens of one in one piece."""
    return [20 + position for position in range(len(input_ids), END)]


def row_of(body: dict[str, Any]) -> int:
    return int(body["rid"].split("/")[0].split(":")[2])


def sample_of(body: dict[str, Any]) -> int:
    """The sample of a row: a request of its own, or a row of one for the samples 0 to 9."""
    rid = body["rid"]
    return int(rid.rpartition("_")[2] if "/0x" in rid else rid.split("/")[1].split(".")[0])


class Bench:
    """A Buffer of rows p0, p1, … and a rollout worker's part of one rollout after another."""

    def __init__(self, kit: Any, folder: Path, *, max_staleness: int | None = 0, **options: Any) -> None:
        path = folder / "rows.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"p{i}", "label": str(i)}) + "\n" for i in range(9)))
        defaults = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "rollout_shuffle": False}
        self.options = {**defaults, "prompt_data": str(path), "custom_rm_path": kit.user("slow_async"), **options}
        self.kit, self.args = kit, kit.make_args(**self.options)
        self.state = local_state(
            self.args, Ledger.in_memory(), rule=RequeueRule.from_args(self.args), schedule=schedule_of(max_staleness)
        )
        self.finished: dict[int, Any] = {}
        self.output: Any = None

    async def roll(self, rollout_id: int, engine: FakeEngine | None) -> list[int]:
        """Run and close a rollout; the rows of the step."""
        ticket = self.state.generate(rollout_id)
        buffer = local_client(self.state, ticket, GroupConverter(self.args))
        client = EngineClient(engine.url, [engine.url], timeout_s=60.0) if engine else None
        try:
            async with self.kit.opened(client, **self.options) as context:
                self.output = await DefaultRollout(context.args)(context.args, rollout_id, buffer)
        finally:
            if client is not None:
                await client.aclose()
        self.finished = {uid.row: group for uid, group in buffer.finished.items()}
        report = close_rollout(self.state, ticket)
        assert (report.drops, report.surplus) == ({}, 0)
        return sorted({row.uid.row for row in self.state.get_data(rollout_id).row_ids})

    def train(self, rollout_id: int) -> None:
        self.state.commit(rollout_id, rollout_id + 1)
        self.state.release(rollout_id + 1)

    @property
    def queued(self) -> list[int]:
        return [header.uid.row for header in self.state.get_headers()]


async def test_the_first_that_are_done_are_trained_on_and_the_rest_is_aborted_and_comes_first_again(
    kit: Any, tmp_path: Path
) -> None:
    bench = Bench(kit, tmp_path, over_sampling_batch_size=5)
    slow = {0, 1, 3}
    with FakeEngine(positions, latency=lambda body: FOREVER if row_of(body) in slow else 0.0) as engine:
        assert await bench.roll(0, engine) == [2, 4]
        rids = {body["rid"] for body in engine.log.requests if row_of(body) in slow}
        assert {body["rid"] for body in engine.log.aborted} == rids
        assert len({rid.rpartition("_")[0] for rid in rids}) == 3  # one request a group
        assert (engine.log.in_flight, engine.log.disconnected) == (0, 0)
        assert bench.queued == [0, 1, 3]
        metrics = bench.output.metrics
        assert (metrics["aborted_groups"], metrics["surplus_groups"]) == (3.0, 0.0)
        assert not any(name.startswith("drop") for name in metrics)
        bench.train(0)
        engine.version = 1
        slow.clear()
        slow.update({5, 6, 1})
        assert await bench.roll(1, engine) == [0, 3]
        assert bench.queued == [1, 5, 6]
        source = next(iter(bench.finished.values())).uid.source
        counts = count_states(bench.state.ledger, source, 0, 9)
        assert (counts[GroupState.FINISHED], counts[GroupState.TRAINED], counts[GroupState.PENDING]) == (2, 2, 5)


@pytest.mark.parametrize("turn", [1, 2])
async def test_a_turn_that_is_not_needed_any_more_is_aborted_and_no_other_begins(
    kit: Any, tmp_path: Path, turn: int
) -> None:
    bench = Bench(
        kit, tmp_path, over_sampling_batch_size=3, custom_generate_function_path=kit.user("two_turns_with_a_tool")
    )

    def is_endless(body: dict[str, Any]) -> bool:
        return row_of(body) == 1 and ("+" in body["rid"]) == (turn == 2)

    with FakeEngine(positions, latency=lambda body: FOREVER if is_endless(body) else 0.0) as engine:
        assert await bench.roll(0, engine) == [0, 2]
        assert {body["rid"] for body in engine.log.aborted} == {b["rid"] for b in engine.log.requests if is_endless(b)}
        assert len([body for body in engine.log.requests if row_of(body) == 1]) == 2 * turn  # a group of two samples
        assert (engine.log.in_flight, engine.log.disconnected) == (0, 0)
    assert bench.queued == [1]


async def test_a_dropped_group_is_replaced_while_the_rest_goes_on(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default, "SCORING_GRACE_S", 0.05)
    labels = ["0", "1", "hang", "1"]
    groups = [kit.make_group(row, labels=[label] * 2) for row, label in enumerate(labels)]
    buffer = FakeBuffer(groups, kit.make_ticket(2))
    options = {"custom_rm_path": kit.user("slow_async"), "dynamic_sampling_filter_path": kit.user("keep_positive")}
    engine = kit.ScriptedEngine()
    async with kit.opened(engine, over_sampling_batch_size=3, **options) as context:
        output = await DefaultRollout(context.args)(context.args, 0, buffer)
    assert [uid.row for uid in buffer.finished_uids] == [1, 3]
    assert [group.uid.row for group, _ in buffer.rejected] == [0]
    assert [group.uid.row for group in buffer.returned] == [2]
    assert (output.metrics["surplus_groups"], output.metrics["aborted_groups"]) == (1.0, 0.0)


async def test_the_greedy_response_of_a_requeued_group_is_generated_again_by_the_weights_of_the_step(
    kit: Any, tmp_path: Path
) -> None:
    bench = Bench(
        kit,
        tmp_path,
        over_sampling_batch_size=3,
        partial_rollout=True,
        max_staleness=None,
        advantage_estimator="remax",
        custom_rm_path=kit.user("length_async"),
    )

    def greedy_of_row_0(body: dict[str, Any]) -> bool:
        return row_of(body) == 0 and body["sampling_params"]["temperature"] == 0

    with FakeEngine(positions, latency=lambda body: FOREVER if greedy_of_row_0(body) else 0.0) as engine:
        assert await bench.roll(0, engine) == [1, 2]
        bench.train(0)
        engine.version, engine.latency = 1, lambda body: 0.2 if row_of(body) else 0.0  # row 0 is not the last one
        engine.respond = lambda input_ids, seed: [5, 5, 5]
        first = len(engine.log.requests)
        assert 0 in await bench.roll(1, engine)
    again = [body for body in engine.log.requests[first:] if row_of(body) == 0]
    assert [(sample_of(body), body["sampling_params"]["temperature"]) for body in again] == [(2, 0.0)]
    assert [sample.reward for sample in bench.finished[0]] == [END - PROMPT] * 2  # from the first rollout
    assert [sample.train_metadata for sample in bench.finished[0]] == [{"baseline_reward": 3.0}] * 2


async def test_a_response_in_two_pieces_has_the_tokens_log_probs_and_versions_of_both(kit: Any, tmp_path: Path) -> None:
    bench = Bench(
        kit,
        tmp_path,
        over_sampling_batch_size=3,
        partial_rollout=True,
        mask_offpolicy_in_partial_rollout=True,
        rollout_max_response_len=20,
    )
    with FakeEngine(positions, latency=lambda body: FOREVER if row_of(body) == 0 else 0.0, aborted_after=3) as engine:
        assert await bench.roll(0, engine) == [1, 2]
        bench.train(0)
        engine.version, engine.log_prob = 1, -0.25
        engine.latency = lambda body: 0.2 if row_of(body) else 0.0  # row 0 is not the last one
        first = len(engine.log.requests)
        assert 0 in await bench.roll(1, engine)
    requests = [body for body in engine.log.requests[first:] if row_of(body) == 0]
    before = [body for body in engine.log.requests[:first] if row_of(body) == 0]
    prompt = before[0]["input_ids"]
    assert len(prompt) == PROMPT
    for body in requests:
        assert body["input_ids"] == [*prompt, 22, 23, 24]
        assert body["sampling_params"]["max_new_tokens"] == 20 - 3
        assert body["rid"].endswith("+3")
    seeds = [sorted(body["sampling_params"]["sampling_seed"] for body in bodies) for bodies in (before, requests)]
    assert seeds[0] == seeds[1]  # the engine draws by position, so the response goes on with its own random numbers
    for sample in bench.finished[0]:
        assert sample.tokens == [*prompt, *range(22, 30)]
        assert sample.rollout_log_probs == [-0.5] * 3 + [-0.25] * 5
        assert sample.weight_versions == [VersionSpan(0, 0, 3), VersionSpan(1, 3, 8)]
        assert sample.loss_mask == [0] * 3 + [1] * 5
        assert sample.status is Status.COMPLETED
        assert sample.response == context_text(kit, range(22, 30))  # with the token that stopped it
    batch = bench.state.get_data(1)
    rows = [i for i, row in enumerate(batch.row_ids) if row.uid.row == 0]
    assert [batch.columns["loss_mask"][i].tolist() for i in rows] == [[0.0] * 3 + [1.0] * 5] * 2
    assert sum(mask.sum() for mask in batch.columns["loss_mask"]) == 2 * 5 + 2 * 8


def context_text(kit: Any, ids: Any) -> str:
    from buffer_rl.testing.tiny import make_char_tokenizer

    return str(make_char_tokenizer().decode(list(ids)))


async def test_a_complete_sibling_is_not_generated_again_and_counts_for_the_groups_rewards(
    kit: Any, tmp_path: Path
) -> None:
    options = {"partial_rollout": True, "mask_offpolicy_in_partial_rollout": True}
    bench = Bench(kit, tmp_path, over_sampling_batch_size=3, custom_rm_path=kit.user("by_sample_index"), **options)

    def slow(body: dict[str, Any]) -> float:
        if row_of(body) == 0:
            return FOREVER if sample_of(body) else 0.0
        return 0.2  # after the first sample of row 0

    with FakeEngine(positions, latency=slow, aborted_after=0) as engine:
        assert await bench.roll(0, engine) == [1, 2]
        bench.train(0)
        engine.version, engine.latency = 1, lambda body: 0.2 if row_of(body) else 0.0  # row 0 is not the last one
        first = len(engine.log.requests)
        assert 0 in await bench.roll(1, engine)
    assert [sample_of(body) for body in engine.log.requests[first:] if row_of(body) == 0] == [1]
    old, new = bench.finished[0]
    assert (old.weight_versions, old.loss_mask) == ([VersionSpan(0, 0, 8)], [0] * 8)
    assert (new.weight_versions, new.loss_mask) == ([VersionSpan(1, 0, 8)], None)
    batch = bench.state.get_data(1)
    rewards = [batch.columns["reward"][i] for i, row in enumerate(batch.row_ids) if row.uid.row == 0]
    assert rewards == pytest.approx([-(2**-0.5), 2**-0.5], abs=1e-4)  # rewards 0 and 1, centred, over their deviation


async def test_a_complete_group_that_is_not_needed_is_kept_whole_where_its_age_does_not_matter(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default, "SCORING_GRACE_S", 0.05)
    options = {"partial_rollout": True, "custom_rm_path": kit.user("hangs_on_first_row_once")}
    bench = Bench(kit, tmp_path, max_staleness=None, over_sampling_batch_size=3, **options)
    with FakeEngine(positions) as engine:
        assert await bench.roll(0, engine) == [1, 2]
        assert (bench.output.metrics["surplus_groups"], bench.output.metrics["aborted_groups"]) == (1.0, 0.0)
        (header,) = bench.state.get_headers()
        assert (header.version, header.reward) == (0, None)
        bench.train(0)
        engine.version = 1
        first = len(engine.log.requests)
        assert 0 in await bench.roll(1, engine)
    assert not [body for body in engine.log.requests[first:] if row_of(body) == 0]
    assert all(s.weight_versions == [VersionSpan(0, 0, 8)] and s.reward == 1.0 for s in bench.finished[0])


def user_module(kit: Any) -> Any:
    """The module of the user's functions, as the registry loaded it."""
    kit_path = Path(kit.user("x").rsplit(":", 1)[0])
    return next(m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == str(kit_path))


@pytest.mark.parametrize(("function", "given"), [("turns", 0), ("continuing_turns", 3)])
async def test_a_generate_function_gets_a_partial_sample_if_it_says_that_it_can_go_on(
    kit: Any, tmp_path: Path, function: str, given: int
) -> None:
    options = {"partial_rollout": True, "mask_offpolicy_in_partial_rollout": True}
    bench = Bench(
        kit, tmp_path, over_sampling_batch_size=3, custom_generate_function_path=kit.user(function), **options
    )
    with FakeEngine(positions, latency=lambda body: FOREVER if row_of(body) == 0 else 0.0, aborted_after=3) as engine:
        await bench.roll(0, engine)
        bench.train(0)
        engine.version, engine.latency = 1, lambda body: 0.2 if row_of(body) else 0.0  # row 0 is not the last one
        await bench.roll(1, engine)
    assert [sample.metadata["given"] for sample in bench.finished[0]] == [given] * 2
    assert all(len(sample.tokens) == END for sample in bench.finished[0])


async def test_a_generate_function_that_does_not_see_the_abort_is_cancelled(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Requests, "grace_s", 0.05)
    before = asyncio.all_tasks()
    bench = Bench(kit, tmp_path, over_sampling_batch_size=4, custom_generate_function_path=kit.user("deaf_to_aborts"))
    assert await bench.roll(0, None) == [2, 3]
    assert bench.queued == [0, 1]
    assert asyncio.all_tasks() == before


async def test_an_engine_that_fails_over_what_nobody_needs_does_not_end_the_rollout(kit: Any) -> None:
    class Broken(kit.ScriptedEngine):  # type: ignore[misc,name-defined]
        """The first row's requests fail when they are aborted."""

        async def agenerate(self, rid: str, input_ids: Any, sampling_params: Any, **more: Any) -> Any:
            if ":0:0/" in rid:
                await self.aborts.wait()
                raise EngineError("connection lost")
            return await super().agenerate(rid, input_ids, sampling_params)

        async def abort(self, rids: Any = None) -> None:
            assert all(":0:0/" in rid for rid in rids)
            self.aborts.set()
            raise EngineError("an engine is out of reach")

    engine = Broken()
    engine.aborts = asyncio.Event()
    buffer = FakeBuffer([kit.make_group(row) for row in range(3)], kit.make_ticket(2))
    async with kit.opened(engine, over_sampling_batch_size=3, custom_rm_path=kit.user("slow_async")) as context:
        output = await DefaultRollout(context.args)(context.args, 0, buffer)
    assert [uid.row for uid in buffer.finished_uids] == [1, 2]
    assert [group.uid.row for group in buffer.returned] == [0]
    assert output.metrics["aborted_groups"] == 1.0


async def test_tokens_of_an_engine_with_other_weights_end_the_rollout(kit: Any, tmp_path: Path) -> None:
    bench = Bench(kit, tmp_path, max_infra_failures=1)
    expected = r"of weight version 3(\n|.)*expected: version 0"
    with FakeEngine(positions, version=3) as engine, pytest.raises(RolloutError, match=expected):
        await bench.roll(0, engine)


async def test_all_samples_are_shown_at_the_end_kept_and_dropped_and_may_be_changed(kit: Any) -> None:
    groups = [kit.make_group(row, labels=labels) for row, labels in enumerate((["1", "1"], ["0", "0"], ["2", "2"]))]
    options = {
        "custom_rm_path": kit.user("slow_async"),
        "dynamic_sampling_filter_path": kit.user("keep_positive"),
        "rollout_all_samples_process_path": kit.user("sees_all_samples"),
    }
    buffer = FakeBuffer(groups, kit.make_ticket(2))
    async with kit.opened(kit.ScriptedEngine(), **options) as context:
        await DefaultRollout(context.args)(context.args, 0, buffer)
    seen = user_module(kit).SEEN_ROLLOUTS
    assert seen.pop() == [(0, [1.0, 1.0]), (1, [0.0, 0.0]), (2, [2.0, 2.0])]
    assert [[sample.remove_sample for sample in group] for group in buffer.finished] == [[True, False]] * 2


async def test_a_function_of_slimes_form_gets_the_buffer_as_its_data_source(kit: Any) -> None:
    buffer = FakeBuffer([kit.make_group(row) for row in range(2)], kit.make_ticket(2))
    path = kit.user("sees_all_samples_in_slimes_form")
    options = {"custom_rm_path": kit.user("slow_async"), "rollout_all_samples_process_path": path}
    async with kit.opened(kit.ScriptedEngine(), **options) as context:
        await DefaultRollout(context.args)(context.args, 0, buffer)
    assert user_module(kit).SEEN_ROLLOUTS.pop() == (2, 0)


async def test_a_broken_function_of_all_samples_ends_the_rollout_by_name(kit: Any) -> None:
    buffer = FakeBuffer([kit.make_group(0)], kit.make_ticket(1))
    path = kit.user("raising_all_samples")
    options = {"custom_rm_path": kit.user("slow_async"), "rollout_all_samples_process_path": path}
    async with kit.opened(kit.ScriptedEngine(), **options) as context:
        with pytest.raises(RolloutError, match="disk full") as caught:
            await DefaultRollout(context.args)(context.args, 0, buffer)
    assert "raising_all_samples" in caught.value.where


# -- one sample --------------------------------------------------------------------------------------


async def continued(
    kit: Any,
    before: str,
    after: str,
    *,
    finish_reason: str = "stop",
    aborted: bool = True,
    params: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """A sample with the response ``before``, gone on with by ``after``; and the engine."""
    async with kit.opened(kit.ScriptedEngine(), partial_rollout=True, **options) as context:
        encode: Callable[[str], list[int]] = context.prompts.encode_text
        context.engine.respond = lambda ids, params: kit.answer(encode(after), finish_reason, version=5)
        sample = kit.make_group(0)[0]
        ids = encode(before)
        sample.tokens, sample.response_length = [*encode("prompt 0"), *ids], len(ids)
        sample.rollout_log_probs = [-1.0] * len(ids)
        sample.weight_versions = [VersionSpan(4, 0, len(ids))] if ids else []
        sample.status = Status.ABORTED if aborted else Status.PENDING
        params = sampling_params_for(context.args, evaluation=False) | (params or {})
        await generate(context.args, sample, params)
        return sample, context.engine


async def test_a_stop_string_over_the_seam_ends_the_response_where_it_would_have_ended(kit: Any) -> None:
    sample, _ = await continued(kit, "ab<", "/s>cd", rollout_stop=["</s>", "zz"])
    assert (sample.response, sample.response_length, sample.status) == ("ab</s>", 6, Status.COMPLETED)
    assert len(sample.tokens) == len("prompt 0") + 6
    assert sample.rollout_log_probs == [-1.0] * 3 + [-0.5] * 3
    assert sample.weight_versions == [VersionSpan(4, 0, 3), VersionSpan(5, 3, 6)]


async def test_a_stop_string_that_ends_in_a_special_token_is_found_over_the_seam(kit: Any) -> None:
    eos = "<eos>"
    sample, _ = await continued(kit, "ab.", f"{eos}cd", rollout_stop=[f".{eos}"])
    assert (sample.response, sample.response_length, sample.status) == ("ab.", 4, Status.COMPLETED)


@pytest.mark.parametrize(("trimmed", "text"), [(False, "abc</s>"), (True, "abc")])
async def test_the_text_of_a_continued_response_has_the_stop_string_unless_it_was_to_be_trimmed(
    kit: Any, trimmed: bool, text: str
) -> None:
    params = {"no_stop_trim": not trimmed}
    sample, _ = await continued(kit, "ab", "c</s>", params=params, rollout_stop=["</s>"])
    assert (sample.response, sample.response_length, sample.status) == (text, 7, Status.COMPLETED)


async def test_a_response_that_was_aborted_with_its_last_token_is_truncated_without_asking(kit: Any) -> None:
    sample, engine = await continued(kit, "abcd", "e", rollout_max_response_len=4)
    assert (sample.status, sample.response_length, engine.calls) == (Status.TRUNCATED, 4, [])


async def test_the_context_limit_counts_both_pieces(kit: Any) -> None:
    _, engine = await continued(kit, "abc", "e", rollout_max_context_len=len("prompt 0") + 5)
    assert engine.calls[0][2]["max_new_tokens"] == 2


async def test_a_response_that_was_not_aborted_is_replaced(kit: Any) -> None:
    sample, engine = await continued(kit, "abc", "e", aborted=False)
    assert (sample.response_length, len(engine.calls[0][1])) == (1, len("prompt 0"))


async def test_after_the_stop_of_a_rollout_nothing_more_is_asked(kit: Any) -> None:
    async with kit.opened(kit.ScriptedEngine()) as context:
        requests = Requests()
        requests.stopped = True
        group = kit.make_group(0)
        with kit.make_lease(context, group, requests=requests).active():
            sample = await generate(context.args, group[0], sampling_params_for(context.args, False))
    assert (sample.status, context.engine.calls) == (Status.ABORTED, [])


def test_characters_of_several_tokens_are_whole_over_the_seam() -> None:
    class Bytes:
        """One token a byte."""

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return bytes(ids).decode("utf-8", errors="replace")

    ids = list("aé→b".encode())
    for start in range(1, len(ids)):
        assert response_text(Bytes(), ids, {}, None) == "aé→b"
        found = end_of_straddling_stop(Bytes(), ids, start, ["é→"])
        assert found == (6 if start < 6 else None)
    assert end_of_straddling_stop(Bytes(), ids, 0, ["é→"]) is None
