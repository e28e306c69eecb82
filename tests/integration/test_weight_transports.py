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


GLOO = Path(__file__).resolve().parents[2] / "examples" / "weight_transports" / "gloo_broadcast.py"


@pytest.mark.parametrize(
    "transport", ["tensor", pytest.param(f"{GLOO}:GlooBroadcast", marks=pytest.mark.slow, id="gloo broadcast")]
)
def test_two_engines_that_read_the_trainer_s_memory_or_its_broadcasts_train_as_one_that_reads_files(
    train: Callable[[Any], Any], whole_run: Any, make_options: Callable[..., Any], transport: str
) -> None:
    same = {name: getattr(whole_run, name) for name in ("deterministic", "num_rollout", "lr_decay_style")}
    args = make_options(
        **same,
        lr_decay_iters=whole_run.lr_decay_iters,
        rollout_num_engines=2,
        weight_sync_mode=transport,
        check_weight_update_equal=True,
    )
    train(args)
    assert metrics_of(args.run_dir) == metrics_of(whole_run.run_dir)
    found, wanted = weights_of(args.run_dir), weights_of(whole_run.run_dir)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert not (Path(args.run_dir) / "weights").exists()
    assert holds_within(10, lambda: "engine-control" not in {thread.name for thread in threading.enumerate()})
