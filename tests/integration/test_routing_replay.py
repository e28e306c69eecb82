"""Runs of a mixture-of-experts model whose tokens go to the engine's experts in the trainer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.testing.tiny import make_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

MIXTURE = {"num_hidden_layers": 4, "num_experts": 8, "hidden_size": 32, "intermediate_size": 48}
COMMON = {"eval_prompt_data": [], "eval_interval": None, "num_rollout": 2, "engine_dtype": "bfloat16"}
COMMON |= {"max_logprob_diff": None, "progress": "plain"}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("mixture"))
    return make_tiny_model(folder, "qwen3_moe", characters="abcdefgh=", init_scale=0.3, **MIXTURE)


def metrics_of(run_dir: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "train"]


@pytest.mark.parametrize("schedule", ["lockstep", "pipelined"])
def test_replayed_experts_bring_engine_and_trainer_closer(
    schedule: str, mixture: str, train: Callable[[Any], Any], make_options: Callable[..., Any], tmp_path: Path
) -> None:
    gaps, shares = {}, {}
    recorded = str(tmp_path / "{rollout_id}.safetensors")
    own = {"hf_checkpoint": mixture, "schedule": schedule, **COMMON}
    for replayed in (False, True):
        files = {"save_debug_rollout_data": recorded} if replayed else {}
        run_dir = str(tmp_path / f"run-{replayed}")
        args = make_options(**own, **files, run_dir=run_dir, replay_routed_experts=replayed)
        assert train(args).steps == 2
        found = metrics_of(run_dir)
        gaps[replayed] = found[0]["train/train_rollout_logprob_abs_diff"]
        shares[replayed] = found[0].get("train/routed_experts_differ")
    print(schedule, gaps, shares)
    assert gaps[True] < gaps[False]
    assert shares[False] is None
    assert 0 < shares[True] < 0.5
