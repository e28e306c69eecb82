"""A group that fails by itself, wherever that shows, costs the run that group and nothing else."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from buffer_rl.buffer.ledger import Ledger
from buffer_rl.data.source import PromptDataSource
from buffer_rl.errors import DeadlineError, EngineError, RewardError, RolloutError
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import GroupUid
from buffer_rl.rollout import failure_policy
from buffer_rl.rollout.conversion import GroupConverter
from buffer_rl.rollout.default import DefaultRollout
from buffer_rl.rollout.failure_policy import QUARANTINE_FILE, Canary, FailurePolicy
from buffer_rl.rollout.failures import STALE_WEIGHTS, AttemptFailure, Domain, FailureKind, failure_of, kind_of
from buffer_rl.rollout.stats import RolloutStats
from buffer_rl.testing.fake_buffer import FakeBuffer
from harness.local_buffer import local_client, local_state
from harness.tickets import close_rollout

POISON = str(Path(__file__).with_name("poison.py"))
ROWS, BAD = 12, 1


def poison(name: str) -> str:
    """The reference of a function in ``poison.py``."""
    return f"{POISON}:{name}"


class Run:
    """One rollout of three groups over rows of which one is bad, into a Buffer's state by way of its client."""

    def __init__(self, kit: Any, folder: Path, **options: Any) -> None:
        data = folder / "rows.jsonl"
        prompts = ["bad" if row == BAD else f"p{row}" for row in range(ROWS)]
        data.write_text("".join(json.dumps({"prompt": prompt, "label": "1"}) + "\n" for prompt in prompts))
        common = {"rollout_batch_size": 3, "n_samples_per_prompt": 2, "rollout_shuffle": False}
        self.options = {**common, "custom_rm_path": poison("by_index"), "prompt_data": str(data), **options}
        self.kit, self.folder, self.args = kit, folder, kit.make_args(**self.options)
        self.source = PromptDataSource(self.args).get_samples(1)[0].uid.source
        self.ledger = Ledger.in_memory()
        self.state = local_state(self.args, self.ledger, schedule=None)
        self.ticket = self.state.generate(0)
        self.buffer = local_client(self.state, self.ticket, GroupConverter.from_args(self.args, PluginRegistry()))

    async def roll(self) -> dict[str, float]:
        async with self.kit.opened(self.kit.ScriptedEngine(), **self.options) as context:
            context.run_dir = self.folder
            output = await DefaultRollout(context.args)(context.args, 0, self.buffer)
        metrics: dict[str, float] = output.metrics
        return metrics

    def trained_rows(self) -> list[int]:
        close_rollout(self.state, self.ticket)
        return sorted({row.uid.row for row in self.state.get_data(0).row_ids})

    @property
    def reason(self) -> str:
        return self.ledger.entry(GroupUid(self.source, BAD, 0)).reason or ""

    @property
    def report(self) -> dict[str, Any]:
        (line,) = (self.folder / QUARANTINE_FILE).read_text().splitlines()
        report: dict[str, Any] = json.loads(line)
        return report


CONVERT, POST, GENERATE = (
    "custom_convert_samples_to_train_data_path",
    "custom_reward_post_process_path",
    "custom_generate_function_path",
)
HELD = {"rollout_sample_filter_path": poison("looks_on")}


@pytest.mark.parametrize(
    ("options", "reason", "words"),
    [
        ({"custom_rm_path": poison("huge_reward")}, "reward_failed:invalid", "huge_reward"),
        ({"custom_group_rm_path": poison("huge_group_reward")}, "reward_failed:invalid", "huge_group_reward"),
        ({GENERATE: poison("short_log_probs")}, "conversion_failed", "rollout_log_probs has 2 entries"),
        ({GENERATE: poison("long_loss_mask")}, "conversion_failed", "loss_mask has 4 entries"),
        ({GENERATE: poison("mask_is_a_number")}, "conversion_failed", "TypeError"),
        ({POST: poison("post_raises")}, "conversion_failed", "post_raises"),
        ({POST: poison("post_is_huge")}, "conversion_failed", "post_is_huge"),
        ({CONVERT: poison("convert_raises")}, "conversion_failed", "convert_raises"),
        ({CONVERT: poison("convert_forgets_the_mask")}, "conversion_failed", "convert_forgets_the_mask"),
        ({CONVERT: poison("convert_raises"), **HELD}, "conversion_failed", "convert_raises"),
        ({GENERATE: poison("short_log_probs"), **HELD}, "conversion_failed", "rollout_log_probs has 2 entries"),
    ],
)
async def test_a_group_of_which_no_rows_can_be_made_is_tried_twice_and_replaced(
    kit: Any, tmp_path: Path, options: dict[str, str], reason: str, words: str
) -> None:
    run = Run(kit, tmp_path, **options)
    metrics = await run.roll()
    assert (metrics["data_failures"], metrics["drop_quarantined"]) == (2.0, 1.0)
    assert run.reason == reason
    assert words in run.report["error"]
    assert (run.report["reason"], run.report["attempts"], run.report["prompt"]) == (reason, 2, "bad")
    assert run.trained_rows() == [0, 2, 3]


async def test_rows_are_made_once_and_are_those_that_the_buffer_gets(kit: Any, tmp_path: Path) -> None:
    run = Run(kit, tmp_path, **{CONVERT: poison("convert_counts")})
    await run.roll()
    assert run.trained_rows() == [0, 1, 2]
    assert sorted(group[0].metadata["converted"] for group in run.buffer.finished.values()) == [1, 1, 1]


async def test_a_post_process_that_changes_samples_sees_those_of_a_whole_rollout_unchanged(
    kit: Any, tmp_path: Path
) -> None:
    run = Run(kit, tmp_path, **{POST: poison("post_doubles")}, **HELD)
    await run.roll()
    run.trained_rows()
    assert run.state.get_data(0).columns["raw_reward"].tolist() == [0.0, 2.0] * 3  # type: ignore[union-attr]


async def test_a_conversion_that_always_fails_is_found_out_before_the_budget_is_spent(kit: Any, tmp_path: Path) -> None:
    run = Run(kit, tmp_path, max_data_failures=99, **{CONVERT: poison("convert_always_raises")})
    with pytest.raises(RolloutError, match="the training rows of 3 groups could not be computed") as caught:
        await run.roll()
    assert "convert_always_raises" in str(caught.value)
    assert "ZeroDivisionError: never" in str(caught.value)


async def test_a_rollout_function_that_finishes_a_bad_group_itself_gets_the_error(kit: Any, tmp_path: Path) -> None:
    run = Run(kit, tmp_path)
    (group,) = run.buffer.get_samples(1)
    for sample in group:
        sample.tokens, sample.response_length, sample.reward = [3, 4, 5], 2, 1.0
    group[1].loss_mask = [1]
    for report in (run.buffer.finish, run.buffer.encode):
        with pytest.raises(RolloutError, match="loss_mask has 1 entries"):
            report(group)
    with pytest.raises(RolloutError, match="loss_mask has 1 entries"):
        await run.buffer.afinish(group)
    group[1].loss_mask = None
    run.buffer.finish(group, run.buffer.encode(group))
    assert run.trained_rows() == [0]


class RefusingBuffer(FakeBuffer):
    """Finishes no group of which no rows can be made, as the real one; ``fails``: so often first."""

    def __init__(self, *args: Any, fails: int) -> None:
        super().__init__(*args)
        self.left = fails

    def finish(self, group: Any, encoded: Any = None) -> None:
        self.left -= 1
        if self.left >= 0:
            raise RolloutError("no rows today")
        super().finish(group)


async def test_an_evaluation_makes_rows_of_a_group_at_its_second_attempt_or_ends(kit: Any) -> None:
    for fails in (1, 2):
        buffer = RefusingBuffer([kit.make_group(0)], kit.make_ticket(1, evaluation=True), fails=fails)
        async with kit.opened(kit.ScriptedEngine(), custom_rm_path=kit.user("slow_async")) as context:
            rolling = DefaultRollout(context.args)(context.args, 0, buffer, evaluation=True)
            if fails == 1:
                assert (await rolling).metrics["eval/default"] == 1.0
            else:
                with pytest.raises(RolloutError, match="no rows today"):
                    await rolling
        assert buffer.failures["data", buffer.leased[0]] == fails
        assert len(buffer.finished) == 2 - fails


# -- what shows as a failure of the engines ----------------------------------------------------------


def http_500() -> EngineError:
    error = EngineError("HTTP 500: assertion failed", where="http://engine")
    error.status = 500
    return error


def engine_with(kit: Any, fails: Any) -> Any:
    """Raises what ``fails(row, asked)`` gives, where that is no None; ``asked``: how many requests there were."""

    class Failing(kit.ScriptedEngine):  # type: ignore[misc,name-defined]
        async def agenerate(self, rid: str, input_ids: Any, sampling_params: Any, **more: Any) -> Any:
            error = fails(int(rid.split("/")[0].split(":")[2]), len(self.calls))
            self.calls.append((rid, list(input_ids), sampling_params))
            if error is not None:
                raise error
            return self.respond(list(input_ids), sampling_params)

    return Failing()


async def roll(kit: Any, engine: Any, *, wanted: int = 4, **options: Any) -> tuple[FakeBuffer, Any]:
    buffer = FakeBuffer([kit.make_group(row, labels=["1"]) for row in range(ROWS)], kit.make_ticket(wanted))
    async with kit.opened(engine, **{"custom_rm_path": kit.user("slow_async"), **options}) as context:
        output = await DefaultRollout(context.args)(context.args, 0, buffer)
    return buffer, output


@pytest.mark.parametrize(
    ("error", "reason"), [(http_500(), "infra:engine"), (DeadlineError("no answer within 600 s"), "infra:deadline")]
)
async def test_a_prompt_that_always_costs_the_engines_an_error_is_in_quarantine_after_four(
    kit: Any, error: Exception, reason: str
) -> None:
    engine = engine_with(kit, lambda row, asked: error if row == 0 else None)
    buffer, output = await roll(kit, engine, max_infra_failures=5)
    assert [uid.row for uid in buffer.finished_uids] == [1, 2, 3, 4]
    assert [(group.uid.row, why) for group, why in buffer.quarantined] == [(0, reason)]
    assert (output.metrics["infra_failures"], output.metrics["drop_quarantined"]) == (4.0, 1.0)
    assert [uid.row for uid in buffer.leased] == [0, 1, 2, 3, 0, 0, 0, 4]


async def test_such_a_prompt_still_counts_for_the_budget(kit: Any) -> None:
    engine = engine_with(kit, lambda row, asked: http_500() if row == 0 else None)
    with pytest.raises(EngineError, match=r"4 attempts .* --max-infra-failures is 3"):
        await roll(kit, engine, max_infra_failures=3)


async def test_an_outage_of_the_engines_is_no_groups_fault(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_policy, "LONGEST_PAUSE_S", 0.05)
    engine = engine_with(kit, lambda row, asked: http_500() if 2 <= asked < 24 else None)  # two groups succeed before
    buffer, _ = await roll(kit, engine, max_infra_failures=99)
    assert max(buffer.failures.values()) >= 4
    assert buffer.quarantined == []
    assert [uid.row for uid in buffer.finished_uids] == [0, 1, 2, 3]


INFRA = AttemptFailure(domain=Domain.INFRA, reason="engine", error=EngineError("lost"))


async def settled(kit: Any, failure: AttemptFailure, well: list[bool]) -> list[bool]:
    """Whether the group is in quarantine after each failure; ``well``: whether the engines answer others then."""
    group, other = kit.make_group(0), kit.make_group(1)
    other[0].tokens, other[0].response_length = [3, 4, 5], 1
    buffer = FakeBuffer([group], kit.make_ticket(2))
    now = [True]
    engine = engine_with(kit, lambda row, asked: None if now[0] else http_500())
    results = []
    async with kit.opened(engine) as context:
        policy = FailurePolicy(context, buffer, RolloutStats())
        policy.succeeded(other)
        for now[0] in well:
            (leased,) = buffer.get_samples(1)
            results.append(await policy.handle(leased, failure))
    assert all(ids == [3, 4] and params["max_new_tokens"] == 1 for _, ids, params in engine.calls)
    return results


async def test_the_engines_must_be_well_before_and_after_the_failure_that_is_one_too_many(kit: Any) -> None:
    assert await settled(kit, INFRA, [True] * 4) == [False] * 3 + [True]
    assert await settled(kit, INFRA, [False] * 3 + [True] * 2) == [False] * 4 + [True]
    assert await settled(kit, INFRA, [True] * 3 + [False] + [True] * 2) == [False] * 5 + [True]
    assert await settled(kit, INFRA, [False] * 8) == [False] * 8


async def test_tokens_of_other_weights_are_never_the_prompts_fault(kit: Any) -> None:
    stale = AttemptFailure(domain=Domain.INFRA, reason=STALE_WEIGHTS, error=RolloutError("of version 3"))
    assert await settled(kit, stale, [True] * 6) == [False] * 6


async def test_a_question_to_the_engines_ends_when_the_rollout_needs_no_answer(kit: Any) -> None:
    class Silent(kit.ScriptedEngine):  # type: ignore[misc,name-defined]
        async def agenerate(self, rid: str, input_ids: Any, sampling_params: Any, **more: Any) -> Any:
            stop.set()
            await asyncio.sleep(3600)

    stop, group, odd = asyncio.Event(), kit.make_group(0), kit.make_group(1)
    group[0].tokens, odd[0].tokens = [3], ["no token"]
    async with kit.opened(Silent()) as context:
        canary = Canary(context, kit.make_ticket(1), stop)
        canary.remember(odd)
        assert not await canary.is_answered()  # nothing to ask for
        canary.remember(group)
        async with asyncio.timeout(failure_policy.CANARY_DEADLINE_S / 2):
            assert not await canary.is_answered()
    assert asyncio.all_tasks() == {asyncio.current_task()}


# -- a generate function of the user's ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("deadlines", "attempts"),
    [
        ({"rollout_timeout_s": 60.0, "custom_generate_timeout_s": 0.2}, 2),
        ({"rollout_timeout_s": 1.0}, 1),  # half of it, so there is time for another prompt but not for a second try
    ],
)
async def test_a_generate_function_that_hangs_at_one_prompt_costs_that_prompt(
    kit: Any, deadlines: dict[str, float], attempts: int
) -> None:
    options = {"custom_generate_function_path": poison("hangs_at_row_0"), **deadlines}
    buffer, output = await roll(kit, kit.ScriptedEngine(), **options)
    assert [uid.row for uid in buffer.finished_uids] == [1, 2, 3, 4]
    assert [(group.uid.row, why) for group, why in buffer.quarantined] == [(0, "generate_timeout")]
    assert output.metrics["data_failures"] == attempts


async def test_a_generate_function_that_always_hangs_ends_the_run_after_two_groups(kit: Any) -> None:
    options = {"custom_generate_function_path": poison("hangs"), "custom_generate_timeout_s": 0.1}
    with pytest.raises(RolloutError, match="the responses of 2 groups could not be computed") as caught:
        await roll(kit, kit.ScriptedEngine(), wanted=6, **options)
    assert "not done within 0.1 s" in str(caught.value)
    assert "--custom-generate-timeout-s" in str(caught.value)


async def test_a_refusal_of_what_a_generate_function_asks_is_not_asked_again(kit: Any) -> None:
    buffer, output = await roll(kit, kit.ScriptedEngine(), custom_generate_function_path=poison("refused_at_row_0"))
    assert [(group.uid.row, why) for group, why in buffer.quarantined] == [(0, "refused:404")]
    assert output.metrics["data_failures"] == 1.0
    assert [uid.row for uid in buffer.finished_uids] == [1, 2, 3, 4]


def of_aiohttp(status: int) -> Exception:
    request: Any = SimpleNamespace(real_url="http://tool")
    return aiohttp.ClientResponseError(request, (), status=status)


def of_httpx(status: object) -> Exception:
    """As httpx and requests have it."""
    error = RuntimeError("refused")
    error.response = SimpleNamespace(status_code=status)  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (of_aiohttp(404), FailureKind.REFUSED),
        (of_aiohttp(429), FailureKind.EXCEPTION),
        (of_aiohttp(503), FailureKind.EXCEPTION),
        (of_httpx(403), FailureKind.REFUSED),
        (of_httpx(500), FailureKind.EXCEPTION),
        (of_httpx("404"), FailureKind.EXCEPTION),
        (RewardError("no status"), FailureKind.EXCEPTION),
    ],
)
def test_an_http_refusal_is_known_by_the_status_that_an_exception_bears(error: Exception, kind: FailureKind) -> None:
    assert kind_of(error) is kind


async def test_a_refusal_of_a_reward_functions_server_is_not_asked_again(kit: Any, tmp_path: Path) -> None:
    run = Run(kit, tmp_path, custom_rm_path=poison("refused_reward"))
    metrics = await run.roll()
    assert (run.reason, metrics["data_failures"]) == ("reward_failed:refused", 1.0)


def test_an_engines_refusal_of_the_set_up_still_ends_the_run_and_a_tools_does_not() -> None:
    error, tool = EngineError("no key"), RolloutError("no such page")
    error.status = tool.status = 401
    with pytest.raises(EngineError, match="no key"):
        failure_of(error)
    failure = failure_of(tool)
    assert (failure.domain, failure.reason, failure.repeatable) == (Domain.DATA, "refused:401", False)


class Refusing:
    """The tokenizer of a run, which refuses the text of the bad row. error: what it raises."""

    def __init__(self, inner: Any, error: BaseException) -> None:
        self.inner, self.error = inner, error

    def encode(self, text: str, **options: Any) -> list[int]:
        if text == "bad":
            raise self.error
        ids: list[int] = self.inner.encode(text, **options)
        return ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class PanicException(BaseException):
    """As the Rust library's."""


@pytest.mark.parametrize(
    "error", [TypeError("no text"), UnicodeEncodeError("utf-8", "\ud800", 0, 1, "no"), PanicException()]
)
async def test_a_text_that_the_tokenizer_refuses_is_a_group_in_quarantine(
    kit: Any, tmp_path: Path, error: BaseException
) -> None:
    run = Run(kit, tmp_path)
    async with kit.opened(kit.ScriptedEngine(), **run.options) as context:
        context.run_dir = tmp_path
        context.prompts.tokenizer = Refusing(context.tokenizer, error)
        await DefaultRollout(context.args)(context.args, 0, run.buffer)
    assert run.reason == "generate_failed"
    assert f"the tokenizer cannot encode the text: {type(error).__name__}" in run.report["error"]
    assert run.trained_rows() == [0, 2, 3]
