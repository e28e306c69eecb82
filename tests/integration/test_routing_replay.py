"""Runs of a mixture-of-experts model whose tokens go to the engine's experts in the trainer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.files.row_file import read_rollout
from buffer_rl.testing.tiny import make_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

MIXTURE = {"num_hidden_layers": 4, "num_experts": 8, "hidden_size": 32, "intermediate_size": 48}
COMMON = {"eval_prompt_data": [], "eval_interval": None, "num_rollout": 2, "engine_dtype": "bfloat16"}
COMMON |= {"max_logprob_diff": None, "progress": "plain"}
GAP, SHARE = "train/train_rollout_logprob_abs_diff", "train/routed_experts_differ"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("mixture"))
    return make_tiny_model(folder, "qwen3_moe", characters="abcdefgh=", init_scale=0.3, **MIXTURE)


def metrics_of(run_dir: str, kind: str = "train") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.parametrize(
    "own",
    [
        {"schedule": "lockstep", "num_steps_per_rollout": 2, "use_kl_loss": True, "kl_loss_coef": 0.1},
        {"schedule": "pipelined", "stream_gradients": True},
    ],
    ids=lambda own: own["schedule"],
)
def test_replayed_experts_bring_engine_and_trainer_closer(
    own: dict[str, Any], mixture: str, train: Callable[[Any], Any], make_options: Callable[..., Any], tmp_path: Path
) -> None:
    found = {}
    for replayed in (False, True):
        options = {"hf_checkpoint": mixture, **COMMON, **own, "replay_routed_experts": replayed}
        args = make_options(**options, run_dir=str(tmp_path / f"run-{replayed}"))
        assert train(args).steps == 2
        found[replayed] = metrics_of(args.run_dir)[0]
    assert found[True][GAP] < found[False][GAP]
    assert 0 < found[True][SHARE] < 0.5
    assert SHARE not in found[False]


def test_recorded_rollouts_have_the_experts_and_train_alike(
    mixture: str, train: Callable[[Any], Any], make_options: Callable[..., Any], tmp_path: Path
) -> None:
    recorded = str(tmp_path / "{rollout_id}.safetensors")
    # The policy's old log-probabilities come from a process of their own.
    options = {"hf_checkpoint": mixture, **COMMON, "replay_routed_experts": True, "num_actor_fwd_workers": 1}
    args = make_options(**options, save_debug_rollout_data=recorded, eval_temperature=1.0)
    assert train(args).steps == 2
    batch = read_rollout(tmp_path / "0.safetensors")
    lengths = [length - 1 for length in batch.lengths]
    assert [experts.shape for experts in batch.columns["routed_experts"]] == [(n, 4, 2) for n in lengths]
    alone = {"load_debug_rollout_data": recorded, "prompt_data": [], "custom_rm_path": None}
    again = make_options(**options | alone, run_dir=str(tmp_path / "again"))
    assert train(again).steps == 2
    assert metrics_of(again.run_dir) == metrics_of(args.run_dir)


def test_experts_of_retracted_requests_are_counted(
    mixture: str, train: Callable[[Any], Any], make_options: Callable[..., Any]
) -> None:
    """Responses are long enough for a publication to find some running."""
    args = make_options(
        **{"hf_checkpoint": mixture, **COMMON, "num_rollout": 6},
        **{"schedule": "async", "use_tis": True, "replay_routed_experts": True, "replay_recomputed_experts": True},
        rollout_max_response_len=400,
        engine_context_length=512,
    )
    assert train(args).steps == 6
    counts = [line["rollout/experts_recomputed"] for line in metrics_of(args.run_dir, "rollout")]
    assert len(counts) == 6
    assert counts[0] == 0  # nothing was published before
    assert sum(counts) > 0
