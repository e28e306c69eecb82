"""Several turns in one sample: requests, bookkeeping and limits, through HTTP and with the example's tool."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.engines.client import EngineClient
from buffer_rl.errors import RolloutError
from buffer_rl.records.groups import Sample, VersionSpan
from buffer_rl.rollout.conversion import GroupConverter
from buffer_rl.rollout.default import DefaultRollout
from buffer_rl.rollout.generate import add_observation, generate_turn
from buffer_rl.testing.fake_buffer import FakeBuffer
from buffer_rl.testing.fake_engine import FakeEngine
from buffer_rl.testing.tiny import make_char_tokenizer

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "tool_use" / "calculator.py"
TOKENIZER = make_char_tokenizer()


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def text(tokens: Any) -> str:
    return str(TOKENIZER.decode(list(tokens)))


def scripted(input_ids: list[int], seed: int) -> list[int]:
    """First a call, then, behind the tool's answer, a final one."""
    return ids("84") if text(input_ids).endswith(">84=") else ids("<12*7>")


async def roll(kit: Any, engine: FakeEngine, **options: Any) -> list[Sample]:
    groups = [kit.make_group(0, labels=["84", "84"])]
    for sample in groups[0]:
        sample.prompt = "12*7="
    buffer = FakeBuffer(groups, kit.make_ticket(1))
    client = EngineClient(engine.url, [engine.url], timeout_s=60.0)
    plugins = {"custom_generate_function_path": f"{EXAMPLE}:generate", "custom_rm_path": f"{EXAMPLE}:score"}
    try:
        async with kit.opened(client, **plugins, **options) as context:
            await DefaultRollout(context.args)(context.args, 0, buffer)
    finally:
        await client.aclose()
    return list(buffer.finished[0])


async def test_two_turns_are_two_requests_and_the_tool_s_tokens_are_masked(kit: Any) -> None:
    with FakeEngine(respond=scripted, decode=text, version=3) as engine:
        samples = await roll(kit, engine)
    for sample in samples:
        assert sample.response == "<12*7>84=84"
        assert sample.tokens == ids("12*7=<12*7>84=84")
        assert sample.loss_mask == [1] * 6 + [0] * 3 + [1] * 2
        assert sample.rollout_log_probs == [-0.5] * 6 + [0.0] * 3 + [-0.5] * 2
        assert sample.weight_versions == [VersionSpan(3, 0, 6), VersionSpan(3, 9, 11)]
        assert (sample.reward, sample.metadata["tool_calls"]) == (1.0, 1)
    requests = engine.log.requests
    assert len({request["rid"] for request in requests}) == len(requests) == 4
    first, second = sorted((r for r in requests if "/0.0" in r["rid"]), key=lambda r: len(r["input_ids"]))
    assert (text(first["input_ids"]), text(second["input_ids"])) == ("12*7=", "12*7=<12*7>84=")
    assert second["rid"].startswith(first["rid"])
    assert first["sampling_params"]["stop"] == [">"]
    kit_group = kit.make_group(0, labels=["84", "84"])
    kit_group.samples = samples
    _, columns = GroupConverter(kit.make_args()).encode(kit_group, False)
    assert [mask.tolist() for mask in columns["loss_mask"]] == [[1] * 6 + [0] * 3 + [1] * 2] * 2


async def forgets_the_tool(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Trains on the tool's tokens, which no version is known of."""
    await generate_turn(args, sample, sampling_params)
    add_observation(sample, "84=")
    sample.loss_mask = None
    return sample


async def test_a_generate_function_whose_version_spans_leave_trained_tokens_out_fails_its_group(kit: Any) -> None:
    buffer = FakeBuffer([kit.make_group(0)], kit.make_ticket(1))
    options = {"custom_rm_path": kit.user("slow_async"), "max_data_failures": 0}
    async with kit.opened(kit.ScriptedEngine(), **options) as context:
        context.generate = forgets_the_tool
        with pytest.raises(
            RolloutError, match=r"version spans \[\(0, 3\)\] do not fit its 6 response tokens"
        ) as caught:
            await DefaultRollout(context.args)(context.args, 0, buffer)
    assert "of the data" in str(caught.value)
    assert not buffer.finished


@pytest.mark.slow
async def test_the_limits_hold_for_all_turns_together(kit: Any) -> None:
    with FakeEngine(respond=scripted, decode=text) as engine:
        (sample, _) = await roll(kit, engine, rollout_max_response_len=10)
        assert (sample.response, str(sample.status)) == ("<12*7>84=8", "truncated")
        (sample, _) = await roll(kit, engine, rollout_max_response_len=9)  # the tool's answer fills it
        assert (sample.response, str(sample.status), sample.reward) == ("<12*7>84=", "truncated", 0.0)
        (sample, _) = await roll(kit, engine, rollout_max_context_len=15)  # the prompt has 5 tokens
        assert (sample.response_length, str(sample.status)) == (10, "truncated")
        with pytest.raises(RolloutError, match="leaves no room"):
            await roll(kit, engine, rollout_max_context_len=5, max_data_failures=1)


async def test_calls_without_end_are_truncated(kit: Any) -> None:
    with FakeEngine(respond=lambda *_: ids("<1+1>"), decode=text) as engine:
        (sample, _) = await roll(kit, engine)
    assert sample.response == "<1+1>2=" * 3 + "<1+1>"
    assert str(sample.status) == "truncated"


async def test_an_observation_needs_a_turn_before_it(kit: Any) -> None:
    engine = kit.ScriptedEngine()
    async with kit.opened(engine) as context:
        sample = kit.make_group(0)[0]
        with pytest.raises(RolloutError, match="an observation comes after a turn"):
            add_observation(sample, "84")
        assert await generate_turn(context.args, sample, {"max_new_tokens": 5}) == sample.response


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*7", "84"),
        ("3-10+2", "-5"),
        ("2*3*4", "24"),
        ("9**9", "?"),
        ("1/2", "?"),
        ("", "?"),
        ("x", "?"),
        ("1e3", "?"),
    ],
)
def test_the_calculator_knows_sums_differences_products_and_nothing_else(expression: str, value: str) -> None:
    spec = importlib.util.spec_from_file_location("calculator", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.calculate(expression) == value
    assert module.calculate("(" * 5000) == "?"
