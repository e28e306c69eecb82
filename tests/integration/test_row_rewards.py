"""Runs of several tasks: rows that weigh rewards, a judge among them that now and then fails, and rewards of single
answers."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.observe.metrics import read_metrics
from buffer_rl.options.section import compose
from buffer_rl.records.groups import Sample, Status
from buffer_rl_judge.options import JudgeOptions
from rm_hub import f1

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(200)]
FAULTS = ("abstain", "429", "nonsense", "401", "stall")


class Judge:
    """A model, in a thread, that marks a response by its length. Of the texts that it is asked about, some meet a fault
    the first time; of one it always abstains.

    faults: by prompt and response."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.faults: dict[tuple[str, str], str] = {}
        self._ready, self._loop = threading.Event(), asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._ready.wait(30)

    async def answer(self, request: web.Request) -> web.Response:
        text = (await request.json())["messages"][0]["content"]
        self.asked[text] += 1
        is_new = self.asked[text] == 1
        prompt, response = (re.findall(rf"=== \w+ {name}\n(.*)\n===", text)[0] for name in ("prompt", "response"))
        if is_new and len(self.asked) % 2 == 0 and len(self.faults) < len(FAULTS):
            self.faults[prompt, response] = FAULTS[len(self.faults)]
        fault = self.faults.get((prompt, response), "")
        if fault == "stall" and is_new:
            await asyncio.sleep(30)
        if fault in ("429", "401") and is_new:
            return web.Response(status=int(fault))
        mark = f"[[{min(len(response), 10)}]]"
        if fault == "abstain" or (fault == "nonsense" and is_new):
            mark = {"abstain": "[[abstain]]", "nonsense": "I like it."}[fault]
        return web.json_response({"choices": [{"message": {"content": mark}}]})

    def _serve(self) -> None:
        async def start() -> None:
            app = web.Application()
            app.router.add_post("/v1/chat/completions", self.answer)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
            self._ready.set()

        self._loop.run_until_complete(start())
        self._loop.run_forever()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


@pytest.fixture
def judge() -> Iterator[Judge]:
    started = Judge()
    yield started
    started.stop()


def test_two_tasks_have_a_curve_each_and_no_failure_of_the_judge_is_a_number(
    task: Path, train: Callable[[Any], Any], judge: Judge, tmp_path: Path
) -> None:
    weights = {"words": {"f1": 1.0, "judge": 0.5}, "letters": {"exact_match": 1.0, "random": 0.0}}
    for name, rewards in weights.items():
        rows = [json.loads(line) | {"metadata": {"rewards": rewards}} for line in (task / "train.jsonl").open()]
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps(row | {"id": name + row["prompt"]}) + "\n" for row in rows)
        )
    folder = tmp_path / "run"
    args = compose([*CORE_SECTIONS, JudgeOptions])(
        **{
            "run_dir": str(folder),
            "prompt_data": [str(tmp_path / f"{name}.jsonl") for name in weights],
            "eval_prompt_data": [f"held={tmp_path / 'words.jsonl'}@[0:4]"],
            "eval_interval": 6,
            "skip_eval_before_train": True,
            "hf_checkpoint": str(task / "model"),
            "row_rm_types": ["f1", "judge", "exact_match", "random"],
            "judge_url": judge.url,
            "rm_timeout_s": 4.0,
            "num_rollout": 6,
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 4,
            "rollout_max_response_len": 6,
            "engine_max_running_requests": 16,
            "engine_context_length": 64,
            "logger": [],
            "progress": "none",
        }
    )
    train(args)
    metrics = read_metrics(folder / "metrics.jsonl")
    seen = {name for line in metrics for name in line}
    assert {"rollout/reward/judge", "rollout/reward/f1/words", "rollout/reward/exact_match/letters"} <= seen
    assert "rollout/reward/judge/letters" not in seen
    assert {"eval/held/f1", "eval/held/judge"} <= seen
    assert len([line for line in metrics if "train/loss" in line]) == 6
    assert set(judge.faults.values()) == set(FAULTS)
    quarantined = [json.loads(line) for line in (folder / "quarantine.jsonl").open()]
    assert [entry["reason"] for entry in quarantined] == ["reward_failed:refused"]  # 401 stays so
    assert "HTTP 401" in json.dumps(quarantined)
    records = [json.loads(line) for line in (folder / "samples.jsonl").open()]
    of_words = [record for record in records if record["data_set"] in ("words", "held")]
    assert of_words
    for record in of_words:
        sample = Sample(prompt="", response=record["response"], label=record["label"], status=Status(record["status"]))
        overlap, response = f1.score(args, sample), record["response"]
        expected = overlap + 0.5 * (min(len(response), 10) / 10 if record["status"] == "completed" else 0)
        abstained = overlap * 1.5
        judged = judge.faults.get((record["prompt"], response)) != "abstain" or record["status"] != "completed"
        assert record["reward"] == pytest.approx(expected if judged else abstained), record
