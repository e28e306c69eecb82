"""A taskset of verifiers, unchanged, is trained on; its rewards are those of verifiers' own evaluation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.testing.tiny import make_tiny_model
from harness.processes import holds_within

from .conftest import HERE

pytestmark = [pytest.mark.verifiers, pytest.mark.timeout(600)]
TEMPLATE = (
    "{% for message in messages %}{{ '>' if message.role == 'user' else '<' }}{{ message.content }}"
    "{% if message.role == 'assistant' %}<eos>{% endif %}{% endfor %}{{ '<' if add_generation_prompt }}"
)
TASKS, STEPS, GROUPS, SAMPLES = 12, 2, 3, 4
"""The prompts of the first 12 tasks differ."""


def train(folder: Path, python: str) -> list[dict[str, Any]]:
    """What each sample of a run was answered, and its reward."""
    make_tiny_model(folder / "model", characters="abc=<>", chat_template=TEMPLATE, hidden_size=32, intermediate_size=48)
    rows = f"verifiers://letters_taskset@[0:{TASKS}]"
    command = [sys.executable, "-m", "buffer_rl.cli", "train", "--agent-path", "verifiers", "--prompt-data", rows]
    command += ["--verifiers-python", python, "--reward-key", "reward", "--hf-checkpoint", str(folder / "model")]
    command += ["--num-rollout", str(STEPS), "--rollout-batch-size", str(GROUPS), "--dump-samples", "100"]
    command += ["--n-samples-per-prompt", str(SAMPLES), "--rollout-max-response-len", "6", "--lr", "1e-3"]
    command += ["--rollout-max-context-len", "64", "--engine-context-length", "64", "--run-dir", str(folder / "run")]
    environ = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(command, cwd=HERE, env=environ, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    samples = [json.loads(line) for line in (folder / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == STEPS * GROUPS * SAMPLES
    metrics = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    (agreement,) = {row["rollout/agent/turns"] for row in metrics if "rollout/agent/turns" in row}
    assert agreement == 1
    assert max(row.get("train/train_rollout_logprob_abs_diff", 0.0) for row in metrics) < 1e-5
    return samples


@contextmanager
def answering(samples: list[dict[str, Any]]) -> Iterator[str]:
    """An OpenAI endpoint that gives each prompt the answers that it had, one after another."""
    answers = defaultdict(list)
    for sample in samples:
        reason = "length" if sample["status"] == "truncated" else "stop"
        answers[sample["prompt"]].append((sample["response"], reason))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            text, reason = answers[asked["messages"][-1]["content"]].pop()
            facts = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "policy"}
            deltas = [({"role": "assistant", "content": text}, None), ({}, reason)]
            events = [
                json.dumps({**facts, "choices": [{"index": 0, "delta": delta, "finish_reason": end}]})
                for delta, end in deltas
            ]
            body = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode()
            assert asked["stream"]
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert all(not left for left in answers.values())


def evaluate(url: str, tasks: list[int], folder: Path, python: str) -> list[dict[str, Any]]:
    """The traces of verifiers' own evaluation."""
    bin_folder = Path(python).parent
    command = [str(bin_folder / "vf-eval"), "letters_taskset", "-m", "policy", "-r", str(SAMPLES), "--no-push"]
    command += ["--no-rich", "-o", str(folder), "--client.base-url", url, "--client.api-key-var", "NO_KEY", "-c", "4"]
    command += ["--env.agent.harness.id", "null", "--env.agent.runtime.type", "subprocess"]
    command += ["--select.include.idx", ",".join(map(str, tasks))]
    path = os.pathsep.join([str(bin_folder), os.environ["PATH"]])  # uv is there
    environ = {**os.environ, "PYTHONPATH": str(HERE), "PATH": path}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = folder.rglob("traces.jsonl")
    return [trace for line in file.read_text().splitlines() for trace in json.loads(line)["traces"]]


def test_the_rewards_of_two_steps_are_those_of_verifiers_own_evaluation_of_the_same_answers(
    verifiers_python: str, tmp_path: Path
) -> None:
    samples = train(tmp_path, verifiers_python)
    assert holds_within(20, lambda: programs() == [])
    prompts = sorted({sample["prompt"] for sample in samples})
    tasks = [number for number in range(TASKS) if prompt_of(number) in prompts]
    assert len(tasks) == STEPS * GROUPS
    (tmp_path / "own").mkdir()
    with answering(samples) as url:
        traces = evaluate(url, tasks, tmp_path / "own", verifiers_python)
    theirs, ours = defaultdict(list), defaultdict(list)
    for trace in traces:
        scores = {name: each["score"] for name, each in trace["rewards"].items()}
        total = sum(each["score"] * each["weight"] for each in trace["rewards"].values())
        theirs[trace["task"]["data"]["prompt"]].append({**scores, **trace["metrics"], "reward": total})
    for sample in samples:
        ours[sample["prompt"]].append(sample["reward"])
    for prompt in prompts:
        assert in_order(ours[prompt]) == in_order(theirs[prompt])
    assert len({sample["reward"]["reward"] for sample in samples}) > 3  # they vary


def prompt_of(number: int) -> str:
    return "abc"[number % 3] * (1 + number % 4) + "="


def in_order(rewards: list[dict[str, float]]) -> list[list[tuple[str, float]]]:
    return sorted(sorted(each.items()) for each in rewards)


def programs() -> list[int]:
    """The processes that play episodes, of any run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.endswith(b"buffer_rl_verifiers/program.py") for word in words) and b"episodes" in words:
            found.append(int(folder.name))
    return sorted(found)
