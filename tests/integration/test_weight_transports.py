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
