"""What a reward may do to a run: the prompt is tried twice and put into quarantine, and nothing of it is trained on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from buffer_rl.algo.advantages import grpo
from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.data.source import PromptDataSource
from buffer_rl.errors import RolloutError
from buffer_rl.records.groups import GroupUid
from buffer_rl.rollout.conversion import GroupConverter
from buffer_rl.rollout.default import DefaultRollout
from buffer_rl.rollout.failure_policy import QUARANTINE_FILE
from buffer_rl.testing.tiny import make_char_tokenizer
from harness.ledger_contents import count_states
from harness.local_buffer import local_client, local_state
from harness.tickets import close_rollout

BEHAVIOURS = ["raise", "nan", "inf", "none", "short_list", "string", "hang", "http_500"]
PLACES = ["single", "group", "remote"]
SLOW = [("single", "hang"), ("group", "hang")]
FUNCTIONS = Path(__file__).with_name("bad_rewards.py")
ANSWERS = {"nan": "NaN", "inf": "Infinity", "none": "null", "short_list": "[1.0]", "string": '"1.0"'}
ROWS, BAD = 5, 1


class RewardServer:
    """Answers samples in slime's form; those of the prompt ``bad`` as the path says. ``asked``: how often of it."""

    def __init__(self) -> None:
        self.asked = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        payload = await request.json()
        if payload["prompt"] != "bad":
            return web.json_response(float(len(payload.get("response", ""))))
        self.asked += 1
        behaviour = request.match_info["behaviour"]
        if behaviour == "raise":
            assert request.transport is not None
            request.transport.abort()
        if behaviour == "hang":
            await asyncio.sleep(3600)
        if behaviour.startswith("http_"):
            return web.Response(status=int(behaviour[5:]), text="out of order")
        return web.Response(text=ANSWERS.get(behaviour, ""), content_type="application/json")


@asynccontextmanager
async def reward_server() -> AsyncIterator[tuple[str, RewardServer]]:
    server = RewardServer()
    app = web.Application()
    app.router.add_post("/{behaviour}", server.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}", server
    finally:
        await runner.cleanup()


class Run:
    """One rollout of two groups over rows of which one is bad."""

    def __init__(self, kit: Any, folder: Path, **options: Any) -> None:
        data = folder / "rows.jsonl"
        prompts = ["bad" if row == BAD else f"p{row}" for row in range(ROWS)]
        data.write_text("".join(json.dumps({"prompt": prompt, "label": "1"}) + "\n" for prompt in prompts))
        self.kit, self.folder = kit, folder
        self.options = {
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 2,
            "rollout_shuffle": False,
            "prompt_data": str(data),
            **options,
        }
        self.args = kit.make_args(**self.options)
        self.source = PromptDataSource(self.args).get_samples(1)[0].uid.source
        self.ledger = Ledger(folder / "ledger.sqlite", run="test")
        self.state = local_state(self.args, self.ledger, schedule=None)
        self.ticket = self.state.generate(0)

    async def roll(self, *reward_model: Any) -> dict[str, float]:
        engine = self.kit.ScriptedEngine()
        buffer = local_client(self.state, self.ticket, GroupConverter(self.args))
        async with self.kit.opened(engine, reward_model, **self.options) as context:
            context.run_dir = self.folder
            output = await DefaultRollout(context.args)(context.args, 0, buffer)
        metrics: dict[str, float] = output.metrics
        return metrics

    @property
    def reports(self) -> list[dict[str, Any]]:
        file = self.folder / QUARANTINE_FILE
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def options_of(place: str, behaviour: str, url: str) -> dict[str, Any]:
    function = f"{place}_hangs" if behaviour == "hang" else place
    chosen = {
        "single": {"custom_rm_path": f"{FUNCTIONS}:{function}"},
        "group": {"custom_group_rm_path": f"{FUNCTIONS}:{function}"},
        "remote": {"rm_type": "remote"},
    }[place]
    return {**chosen, "rm_url": f"{url}/{behaviour}", "rm_timeout_s": 0.7 if behaviour == "hang" else 10.0}


@pytest.mark.parametrize(
    ("place", "behaviour"),
    [
        pytest.param(place, behaviour, marks=[pytest.mark.slow] if (place, behaviour) in SLOW else [])
        for behaviour in BEHAVIOURS
        for place in PLACES
    ],
)
async def test_a_prompt_without_a_reward_is_tried_twice_and_is_no_label(
    kit: Any, tmp_path: Path, behaviour: str, place: str
) -> None:
    async with reward_server() as (url, _):
        run = Run(kit, tmp_path, **options_of(place, behaviour, url))
        metrics = await run.roll()
    report = close_rollout(run.state, run.ticket)
    assert (report.num_groups, report.drops) == (2, {"quarantined": 1})
    assert (metrics["drop_quarantined"], metrics["data_failures"]) == (1.0, 2.0)
    entry = run.ledger.entry(GroupUid(run.source, BAD, 0))
    assert (entry.state, entry.attempt) == (GroupState.QUARANTINED, 2)
    timed_out = behaviour == "hang" and place != "remote"  # a remote reward says so before its deadline, in words
    assert entry.reason.startswith("reward_failed:timeout" if timed_out else "reward_failed:")
    counts = count_states(run.state.ledger, run.source, 0, ROWS)
    assert {state: count for state, count in counts.items() if count} == {
        GroupState.PENDING: 2,
        GroupState.FINISHED: 2,
        GroupState.QUARANTINED: 1,
    }
    batch = run.state.get_data(0)
    assert {row.uid.row for row in batch.row_ids} == {0, 2}
    grpo(run.args, batch)
    for name in ("raw_reward", "reward"):
        assert np.isfinite(np.asarray(batch.columns[name], dtype=np.float64)).all()
    assert all(np.isfinite(row).all() for row in batch.columns["advantages"])
    (line,) = run.reports
    assert (line["uid"], line["prompt"], line["attempts"]) == (f"{run.source}:{BAD}:0", "bad", 2)
    assert line["reason"] == entry.reason
    assert line["error"]


async def test_a_refusal_of_the_reward_server_is_not_asked_again(kit: Any, tmp_path: Path) -> None:
    async with reward_server() as (url, server):
        run = Run(kit, tmp_path, rm_type="remote", rm_url=f"{url}/http_422")
        await run.roll()
    assert server.asked == 2  # one request a sample
    assert [(line["reason"], line["attempts"]) for line in run.reports] == [("reward_failed:refused", 1)]


async def test_quarantine_at_once_where_the_policy_says_so(kit: Any, tmp_path: Path) -> None:
    run = Run(kit, tmp_path, **options_of("single", "raise", "http://x"), on_reward_error="quarantine")
    metrics = await run.roll()
    assert (metrics["drop_quarantined"], metrics["data_failures"]) == (1.0, 1.0)
    assert run.ledger.entry(GroupUid(run.source, BAD, 0)).attempt == 1


async def test_the_run_ends_with_the_error_where_the_policy_says_so(kit: Any, tmp_path: Path) -> None:
    run = Run(kit, tmp_path, **options_of("single", "raise", "http://x"), on_reward_error="abort")
    with pytest.raises(RolloutError, match=r"--on-reward-error is abort(.|\n)*KeyError: 'no such answer'"):
        await run.roll()
    assert run.reports == []
    assert sum(count_states(run.state.ledger, run.source, 0, ROWS).values()) == ROWS


@pytest.mark.parametrize("value", [np.nan, np.inf])
async def test_a_prompt_whose_score_by_the_reward_model_is_not_finite_is_tried_twice(
    kit: Any, tmp_path: Path, value: float
) -> None:
    folder = kit.make_reward_model(tmp_path / "model")
    process = kit.LocalRewardModel(folder)
    process.model._model.get_input_embeddings().weight[token_of("b")] = value  # of the prompt 'bad' alone
    run = Run(kit, tmp_path, rm_model=folder)
    metrics = await run.roll(process)
    assert (metrics["drop_quarantined"], metrics["data_failures"]) == (1.0, 2.0)
    entry = run.ledger.entry(GroupUid(run.source, BAD, 0))
    assert (entry.state, entry.attempt, entry.reason) == (GroupState.QUARANTINED, 2, "reward_failed:invalid")
    assert "nan (float), not finite" in run.reports[0]["error"]
    close_rollout(run.state, run.ticket)
    assert {row.uid.row for row in run.state.get_data(0).row_ids} == {0, 2}


def token_of(character: str) -> int:
    (token,) = make_char_tokenizer().encode(character)
    return int(token)
