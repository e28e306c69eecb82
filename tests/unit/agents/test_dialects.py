"""The same conversation in each dialect, streamed or not: the same turns with the same ids."""

from __future__ import annotations

from typing import Any

import pytest

from buffer_rl.agents.session import Exchange
from buffer_rl.agents.turns import rows
from harness.agent_play import AgentEngine
from harness.dialects import CALLS, DIALECTS, address_over, losing_line

pytestmark = pytest.mark.filterwarnings("error")
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


async def played(dialect: str, stream: bool, **options: Any) -> tuple[AgentEngine, list[Exchange]]:
    answers = iter([CALLS, "done", "end"])
    engine = AgentEngine(lambda prompt, params: next(answers))
    async with address_over(engine, **options) as (session, url, key):
        await DIALECTS[dialect](url, key, stream, ["go", "more"])
        return engine, session.exchanges


@STREAMED
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_conversation_has_the_same_ids_in_each_dialect(dialect: str, stream: bool) -> None:
    engine, exchanges = await played(dialect, stream)
    first = "Tadd,sSugoa"
    second = f"{first}{CALLS}<eos>t0t1a"
    assert engine.prompts == [first, second, f"{second}done<eos>umorea"]
    literal = [58, 13, 16, 16, 76, 31, 57, 33, 19, 27, 13]
    assert list(exchanges[0].turn.prompt_ids) == literal
    assert [list(each.turn.output_ids)[-4:] for each in exchanges[1:]] == [[27, 26, 17, 1], [17, 26, 16, 1]]
    (row,) = rows(each.turn for each in exchanges)
    assert sum(row.loss_mask) == sum(len(each.turn.output_ids) for each in exchanges)


async def test_ids_of_answers_and_seeds_are_the_same_in_each_dialect() -> None:
    found = [await played(dialect, stream) for dialect in DIALECTS for stream in (False, True)]
    assert len({tuple(each.id for each in exchanges) for _, exchanges in found}) == 1
    assert len({tuple(engine.seeds.values()) for engine, _ in found}) == 1


@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
async def test_what_a_client_repeats_in_the_middle_of_a_lost_answer_is_one_turn(dialect: str) -> None:
    answers = iter(["two", "other"])
    engine = AgentEngine(lambda prompt, params: next(answers))
    async with address_over(engine) as (session, url, key), losing_line(url) as (line, sent):
        await DIALECTS[dialect](line, key, False, ["go"])
        assert len(session.exchanges) == len(engine.calls) == 1
    heads = b"".join(sent).lower()
    assert [heads.count(b"x-stainless-retry-count: %d" % number) for number in (0, 1, 2)] == [1, 1, 0]
