"""A drill: which faults are put in and when, the small model, the reward that fails, the certificate."""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.engines.client import parse_answer
from buffer_rl.errors import EngineError
from buffer_rl.options.section import compose
from buffer_rl.records.groups import GroupUid, Sample, VersionSpan
from buffer_rl.testing.tiny import make_tiny_model
from buffer_rl.verbs.drill.answers import KINDS as FALSE_ANSWERS
from buffer_rl.verbs.drill.answers import PLAN as ANSWERS_PLAN
from buffer_rl.verbs.drill.answers import _Fronted, notes
from buffer_rl.verbs.drill.certificate import Certificate, Row, line_of
from buffer_rl.verbs.drill.faults import (
    PHASES,
    Fault,
    hold_back,
    lift,
    moment,
    planned,
    read_process,
    strike,
    usual_step,
)
from buffer_rl.verbs.drill.reward import KINDS, PLAN, fault_of, reward_marks, score
from buffer_rl.verbs.drill.runs import SIZES, is_small, write_small
from buffer_rl.verbs.drill.verb import progress_line

WRITES = """
import pathlib, sys
for line in sys.stdin:
    try:
        pathlib.Path(line.strip()).write_text("x")
        print("written", flush=True)
    except OSError as error:
        print(error.errno, flush=True)
"""
PARTS = ["rollout worker", "Buffer", "trainer rank", "engine"]


def test_each_part_meets_each_kind_of_fault_once_and_every_phase_has_some() -> None:
    found = planned(PARTS, ["kill", "stop"], every_phase=False)
    assert sorted((fault.kind, fault.part) for fault in found) == sorted(
        (kind, part) for kind in ("kill", "stop") for part in PARTS
    )
    assert {fault.phase for fault in found} == set(PHASES)
    assert len(set(planned(PARTS, ["kill", "stop"], every_phase=True))) == 2 * len(PARTS) * len(PHASES)


def test_a_moment_is_the_middle_of_its_phase() -> None:
    step = {"perf/rollout_time": 4.0, "perf/train_time": 2.0, "perf/publish_time": 1.0, "perf/step_time": 7.5}
    assert [moment(phase, step) for phase in PHASES] == [2.0, 5.0, 6.5]


def test_a_usual_step_is_the_median_of_all_but_the_first() -> None:
    steps = [{"perf/step_time": 100.0}, *({"perf/step_time": value} for value in (1.0, 3.0, 2.0))]
    assert usual_step(steps) == {"perf/step_time": 2.0}


def test_a_full_disk_is_one_for_a_process_until_it_is_lifted(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITES]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        fault = Fault(kind="disk", part="trainer rank", phase="training")
        answers = []
        parts = {"trainer rank": ("pathlib.Path(line.strip())",)}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("buffer_rl.verbs.drill.faults.TITLES", parts)
            met = None
            for step in range(3):
                if step == 1:
                    met = strike(fault, os.getpid())
                    assert met is not None
                    assert met.pid == child.pid
                if step == 2 and met is not None:
                    lift(fault, met)
                child.stdin.write(f"{tmp_path / str(step)}\n")
                child.stdin.flush()
                answers.append(child.stdout.readline().strip())
        child.stdin.close()
    assert answers == ["written", "27", "written"]


def test_a_process_that_is_held_back_has_a_tenth_of_its_time() -> None:
    command = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        met = read_process(Path("/proc", str(child.pid)))
        assert met is not None
        before = cpu_seconds(child.pid)
        hold_back(met, 1.0)
        used = cpu_seconds(child.pid) - before
        assert met.alive()
        child.kill()
    assert used < 0.35  # of a second; all of it but for the stops, on a core of its own


def cpu_seconds(pid: int) -> float:
    fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (tmp_path / "own.py").write_text("def score(args, sample):\n    return 7.0\n")
    (tmp_path / "marks").mkdir()
    reward = f"{tmp_path / 'own.py'}:score"
    found = {"folder": str(tmp_path / "marks"), "every": 1, "kinds": [*KINDS], "reward": reward}
    monkeypatch.setenv(PLAN, json.dumps(found))
    return found


def sample_of(row: int, index: int = 0) -> Sample:
    return Sample(prompt="a", uid=GroupUid("data", row, 0), sample_index=index)


def test_a_reward_fails_once_and_is_then_the_run_s_own(plan: dict[str, Any], tmp_path: Path) -> None:
    args = compose(CORE_SECTIONS)(hf_checkpoint="m", prompt_data="d")
    failed: dict[str, object] = {}
    rows = 40
    for row in range(rows):
        sample = sample_of(row)
        kind = fault_of(sample, plan)
        if kind is None or kind == "hang":
            continue
        try:
            failed[kind] = asyncio.run(score(args, sample))
        except (Exception, SystemExit) as error:  # as its caller contains it
            failed[kind] = error
        assert asyncio.run(score(args, sample)) == 7.0
        assert asyncio.run(score(args, sample_of(row, 1))) == 7.0  # of its group no other
    assert set(failed) == set(KINDS) - {"hang"}
    assert isinstance(failed["nan"], float)
    assert math.isnan(failed["nan"])
    assert isinstance(failed["exit"], SystemExit)
    assert getattr(failed["http_429"], "status", None) == 429
    marks = reward_marks(tmp_path / "marks")
    assert {kind for _, kind in marks} == set(failed)
    assert len({uid for uid, _ in marks}) == len(marks)  # a group meets one


def test_the_client_refuses_each_false_answer_or_asks_again() -> None:
    answer = {
        "output_ids": [4, 5],
        "meta_info": {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-0.5, 4, None], [-1.0, 5, None]],
            "weight_versions": [{"version": "3", "start": 0, "end": 2}],
        },
    }
    text = json.dumps(answer)
    assert parse_answer(json.loads(text), "u", 6).output_ids == [4, 5]
    for kind, falsified in FALSE_ANSWERS.items():
        body = falsified([json.loads(text)])
        if kind == "version that was never published":  # the ledger refuses it, see the drill of a live run
            assert parse_answer(json.loads(body)[0], "u", 6).spans == [VersionSpan(1003, 0, 2)]
        elif kind != "status 500":
            with pytest.raises((EngineError, ValueError)):
                parse_answer(json.loads(body)[0], "u", 6)


class Echo(BaseHTTPRequestHandler):
    """An engine that answers with the body that it got."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def test_bodies_pass_the_proxy_that_falsifies_answers_whole_and_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=engine.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{engine.server_address[1]}"
    process = SimpleNamespace(url=url, wait_ready=None, check=None, stop=engine.shutdown)
    monkeypatch.setenv(ANSWERS_PLAN, "{}")
    fronted = _Fronted(cast(Any, process), "127.0.0.1")
    connection = http.client.HTTPConnection(fronted.url.removeprefix("http://"), timeout=20)
    chunks = [b"a", b"b" * 70_000, b"\r\n0\r\n\r\n"]
    try:
        for body in (b"".join(chunks), iter(chunks), b"", b"next"):  # on one connection: none is left in part
            expected = body if isinstance(body, bytes) else b"".join(chunks)
            connection.request("POST", "/echo", body)
            assert connection.getresponse().read() == expected
    finally:
        connection.close()
        fronted.stop()
        engine.server_close()


def test_notes_of_false_answers_tell_the_group_and_who_asked_again(tmp_path: Path) -> None:
    first, second = "train_0:406568:1:0/0x.0:1:1-0d", "train_3:406568:0:1/2.0:2:1-0d"
    lines = [{"kind": "status 500", "rid": first}, {"again": first}, {"kind": "token lost", "rid": second}]
    (tmp_path / "false.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    again, marks = notes(tmp_path)
    assert dict(again) == {"status 500": 1}
    assert marks == [("406568:1:0", "status 500"), ("406568:0:1", "token lost")]


def test_a_small_model_has_the_architecture_and_the_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = Path(make_tiny_model(tmp_path / "large", hidden_size=128, num_hidden_layers=5, intermediate_size=512))
    assert is_small(source)
    write_small(source, tmp_path / "small")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert model.config.num_hidden_layers == SIZES["num_hidden_layers"]
    assert model.config.hidden_size == SIZES["hidden_size"]
    texts = [AutoTokenizer.from_pretrained(folder)("abc").input_ids for folder in (source, tmp_path / "small")]
    assert texts[0] == texts[1]


def certificate(**changes: Any) -> Certificate:
    facts: dict[str, Any] = {
        "command": "buffer-rl drill --config <run>.yaml", "model": "m", "num_steps": 6, "runs": {"undisturbed": ()},
        "rows": [Row(fault="engine killed in training", step=1, found="process 7 was replaced", recovered_s=1.25)],
        "groups_lost": 0, "groups_doubled": 0, "rewards_from_failures": 0, "equal_bits": True,
    }  # fmt: skip
    return Certificate(**(facts | changes))


@pytest.mark.parametrize(
    "change",
    [
        {"groups_lost": 1},
        {"groups_doubled": 1},
        {"rewards_from_failures": 1},
        {"equal_bits": False},
        {"runs": {"undisturbed": (), "driver": ("it ended with status 2",)}},
        {"rows": [Row(fault="engine stopped in training", step=1)]},
        {"rows": [Row(fault="engine stopped in training", step=1, found="process 7", wrong=("it is still there",))]},
    ],
)
def test_one_thing_that_is_wrong_is_enough(change: dict[str, Any]) -> None:
    assert certificate().passed
    assert certificate(equal_bits=None).passed
    assert not certificate(**change).passed
    assert certificate(**change).lines()[-1] == "the drill is NOT passed"


def test_the_page_and_the_file_say_the_same(tmp_path: Path) -> None:
    made = certificate(left_out={"rewards that fail": "there is none"})
    page = made.write(tmp_path).read_text()
    facts = json.loads((tmp_path / "certificate.json").read_text())
    assert facts["passed"] is True
    assert facts["rows"][0]["recovered_s"] == 1.25
    for text in ("engine killed in training", "process 7 was replaced", "1.2", "&lt;run&gt;.yaml", "there is none"):
        assert text in page
    assert line_of(made.rows[0]) == "engine killed in training: process 7 was replaced, next step trained 1.2 s later"


def test_the_time_that_is_left_is_that_of_undisturbed_runs_and_of_the_faults() -> None:
    """Two of five runs are over: three of 40 s, and 21 s for which faults of this one last, are 141 s."""
    assert progress_line(3, 5, "false answers", 40.0, 21.0) == (
        "run 3 of 5, with false answers; to the end of the drill 2:21 or more"
    )


def test_own_flags_do_not_reach_the_runs() -> None:
    from buffer_rl.verbs.drill.verb import _without_own_flags

    words = "--config r.yaml --drill-faults kill reward --lr 1 --every-phase --drill-dir=x --num-rollout 3"
    assert _without_own_flags(words.split()) == ["--config", "r.yaml", "--lr", "1", "--num-rollout", "3"]
