"""A whole run, as a user starts it, with proxies in the environment that nobody can reach."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from buffer_rl.cluster.process import reserved_port

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

FUNCTIONS = """
import asyncio, json, urllib.request

def ask(args, sample):
    body = json.dumps({"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 4}, "return_logprob": True}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {args.engine_api_key}"}
    request = urllib.request.Request(f"{args.router_url}/generate", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        found = json.load(answer)
    pairs = found["meta_info"]["output_token_logprobs"]
    sample.tokens = [3, 4, *(pair[1] for pair in pairs)]
    sample.rollout_log_probs = [pair[0] for pair in pairs]
    sample.response, sample.response_length, sample.status = found["text"], len(pairs), "truncated"
    return sample

async def generate(args, sample, sampling_params):
    return await asyncio.to_thread(ask, args, sample)

def reward(args, sample):
    outside = "api.example.com"
    return float(bool(urllib.request.getproxies().get("https")) and not urllib.request.proxy_bypass(outside))
"""


def test_a_run_trains_and_its_functions_reach_the_router_directly_and_other_addresses_by_the_proxy(
    task: Path, tmp_path: Path
) -> None:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    options = {
        "run_dir": "run",
        "hf_checkpoint": str(task / "model"),
        "prompt_data": str(task / "train.jsonl"),
        "custom_generate_function_path": "./functions.py:generate",
        "custom_rm_path": "./functions.py:reward",
        "num_rollout": 1,
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "rollout_max_response_len": 4,
        "engine_context_length": 64,
        "engine_start_timeout_s": 60,
        "progress": "none",
    }
    (tmp_path / "run.yaml").write_text(json.dumps(options))  # JSON is YAML
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with reserved_port("127.0.0.1") as held:  # which refuses connections
        names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "grpc_proxy")
        proxies = dict.fromkeys(names, f"http://127.0.0.1:{held.getsockname()[1]}")
        without = {name: value for name, value in own.items() if not name.lower().endswith("_proxy")}
        command = [sys.executable, "-m", "buffer_rl.cli", "train", "--config", "run.yaml"]
        done = subprocess.run(
            command, env={**without, **proxies}, cwd=tmp_path, capture_output=True, text=True, timeout=240
        )
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [value["rollout/raw_reward"] for value in map(json.loads, lines) if value["kind"] == "rollout"] == [1.0]
