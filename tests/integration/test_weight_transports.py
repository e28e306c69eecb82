"""A whole run whose weights never touch the disk, against the same run whose weights do."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from harness.processes import holds_within

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]


def metrics_of(run_dir: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] != "perf"]


def weights_of(run_dir: str) -> dict[str, torch.Tensor]:
    return load_file(Path(run_dir) / "hf" / "model.safetensors")


DISTRIBUTED = "buffer_rl.weights.distributed:DistributedTransport"


SHARE = "publish/unchanged_share"
GAP = "train/train_rollout_logprob_abs_diff"
IMITATING = "harness.sglang_service:launch_imitating_sglang"


@pytest.mark.parametrize(
    ("transport", "engine"),
    [
        pytest.param("tensor", IMITATING, marks=pytest.mark.slow, id="tensor, as SGLang"),
        pytest.param("tensor", "embedded", marks=pytest.mark.slow, id="tensor"),
        pytest.param("disk", IMITATING, marks=pytest.mark.slow, id="disk, as SGLang"),
        pytest.param(DISTRIBUTED, "embedded", marks=pytest.mark.slow, id="distributed"),
        pytest.param(DISTRIBUTED, IMITATING, marks=pytest.mark.slow, id="distributed, as SGLang"),
    ],
)
def test_two_engines_that_get_weights_in_another_way_train_as_one_that_reads_files(
    train: Callable[[Any], Any], whole_run: Any, make_options: Callable[..., Any], transport: str, engine: str
) -> None:
    same = {name: getattr(whole_run, name) for name in ("deterministic", "num_rollout", "lr_decay_style")}
    args = make_options(
        **same,
        lr_decay_iters=whole_run.lr_decay_iters,
        rollout_num_engines=2,
        weight_sync_mode=transport,
        rollout_engine=engine,
        max_logprob_diff=1e-4,
        check_weight_update_equal=True,
    )
    train(args)
    assert metrics_of(args.run_dir) == metrics_of(whole_run.run_dir)
    found, wanted = weights_of(args.run_dir), weights_of(whole_run.run_dir)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert transport == "disk" or not (Path(args.run_dir) / "weights").exists()
    assert holds_within(60, lambda: "engine-control" not in {thread.name for thread in threading.enumerate()})


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts",
    [{"fsdp_size": 2}, {"lora_rank": 4}, {"fsdp_size": 2, "lora_rank": 4}],
    ids=["split", "adapters", "adapters of what is split"],
)
def test_engines_serve_what_is_trained_in_parts_after_each_step_in_every_way(
    train: Callable[[Any], Any], options_in: Callable[..., Any], tmp_path: Path, parts: dict[str, Any]
) -> None:
    """Each publication compares what engines have with what the optimizer has, and their log-probabilities."""
    checks = {"max_logprob_diff": 1e-4, "check_weight_update_equal": True, "rollout_num_engines": 2}
    same = {"num_train_ranks": 2, "deterministic": True, **parts, **checks}
    ways = {
        "disk": {"weight_sync_mode": "disk"},
        "tensor": {"weight_sync_mode": "tensor"},
        "distributed": {"weight_sync_mode": DISTRIBUTED},
        "async": {"schedule": "async", "max_staleness": 2},
    }
    for name, way in ways.items():
        assert train(options_in(tmp_path / name, **same, **way)).steps == 3
    if "lora_rank" in parts:
        shares = [row[SHARE] for row in metrics_of(str(tmp_path / "disk")) if SHARE in row]
        assert len(shares) == 3
        assert max(shares) < 0.5  # in float32
        alone = same | {"lora_publish": "adapter", "check_weight_update_equal": False}
        for name in "disk", "async":
            folder = tmp_path / f"{name}, adapters alone"
            assert train(options_in(folder, **alone, **ways[name])).steps == 3
            gaps = [row[GAP] for row in metrics_of(str(folder)) if GAP in row]
            assert gaps
            assert max(gaps) < 1e-5
    first = weights_of(str(tmp_path / "disk"))
    for name in "tensor", "distributed":
        assert metrics_of(str(tmp_path / name)) == metrics_of(str(tmp_path / "disk"))
        assert all(torch.equal(tensor, first[key]) for key, tensor in weights_of(str(tmp_path / name)).items())
