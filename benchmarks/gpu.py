"""All that one GPU can show, in slices of at most eight minutes, and one table of it.

    python benchmarks/gpu.py                    # all slices; the table is also in build/gpu.md
    python benchmarks/gpu.py --only trainer     # those whose names begin so
    python benchmarks/gpu.py --dry-run          # on any machine: does each command work? Tiny models, tests collected

The slices come in the order of what they need. Those named "trainer" need torch, transformers and the core's small
packages (pydantic, pluggy, PyYAML), no Ray and no other process. Tests need pytest; a slice whose packages are not
there is left out, with the reason.

Trainer slices: random weights in the shapes of Qwen3 0.6B and Qwen2.5 1.5B, 8 rows of 512 prompt and 1,536 response
tokens in one micro-batch, one step to warm up, then the median of three. tokens/s counts all tokens of a step, by
forward and backward pass and optimizer step; TFLOP/s and MFU as ``buffer_rl.plan.flops`` counts them, the peak that of
``PEAKS``. peak: memory that torch allocated at the most; asleep: after ``sleep``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 480.0
PROMPT, RESPONSE, NUM_ROWS = 512, 1536, 8
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {
        "architecture": "qwen3", "vocab": 151_936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "1.5B": {
        "architecture": "qwen2", "vocab": 151_936, "hidden_size": 1536, "intermediate_size": 8960,
        "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "float32, layers recomputed": {"recompute_granularity": "full"},
    "bf16": {"bf16": True},
    "bf16, layers recomputed": {"bf16": True, "recompute_granularity": "full"},
    "bf16, moments on the host": {"bf16": True, "optimizer_cpu_offload": True},
}
PEAKS = {"H100": {"float32": 67.0, "bf16": 989.0}, "H200": {"float32": 67.0, "bf16": 989.0}}
"""TFLOP/s of a device's dense matrix products, by a part of its name (NVIDIA's data sheets, SXM)."""
COLUMNS = ("tokens/s", "TFLOP/s", "MFU", "peak GiB", "asleep GiB")


@dataclass(frozen=True, slots=True)
class Slice:
    """One row of the table. command: after the interpreter. needs: modules; without them it is left out."""

    name: str
    command: list[str]
    needs: tuple[str, ...] = ()
    reports: bool = field(default=False)


def slices(dry: bool) -> list[Slice]:
    """In the order in which they run."""
    found = []
    for shape in SHAPES:
        for way in WAYS:
            spec = json.dumps({"shape": shape, "way": way, "dry": dry})
            found.append(Slice(f"trainer {shape}, {way}", [__file__, "--child", spec], reports=True))
    collect = ["--collect-only"] if dry else []
    for name, needs in {
        "output_layer": (), "offload": ("hypothesis",), "cuda_ipc": (), "sglang": ("ray",),
        "megatron": ("ray", "megatron", "mbridge"),
    }.items():  # fmt: skip
        command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(ROOT / f"tests/gpu/test_{name}.py"), *collect]
        found.append(Slice(f"tests of {name}", command, ("pytest", *needs)))
    return found


def measure(shape: str, way: str, dry: bool) -> dict[str, float]:
    """In a process of its own: one trainer, on the GPU, or tiny and on the CPU."""
    import torch

    from buffer_rl.args import CORE_SECTIONS
    from buffer_rl.files.hf_config import read_config
    from buffer_rl.options.section import compose
    from buffer_rl.plan.flops import RowCost
    from buffer_rl.plugin.registry import PluginRegistry
    from buffer_rl.records.groups import GroupUid, RowId, TrainBatch
    from buffer_rl.testing.tiny import make_tiny_model
    from buffer_rl.train.objective import Objective
    from buffer_rl.train.pretrained import prepare_torch
    from buffer_rl.train.torch_trainer import TorchTrainer

    sizes = dict(SHAPES[shape])
    if dry:
        sizes |= {"vocab": 200, "hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2}
    prompt, response = (8, 24) if dry else (PROMPT, RESPONSE)
    device = "cpu" if dry else "cuda"
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model", init_scale=0.02, **sizes)
        options = {"hf_checkpoint": model, "train_device": device, "max_tokens_per_gpu": 1 << 20, **WAYS[way]}
        args: Any = compose(CORE_SECTIONS)(**options)
        prepare_torch(args, 0)
        trainer = TorchTrainer(args, 0, 1, Objective(args, PluginRegistry.from_flags([])))
        cost = RowCost.of(read_config("--hf-checkpoint", model))
    assert cost is not None
    rng = np.random.default_rng(0)
    tokens = [rng.integers(3, sizes["vocab"], prompt + response).astype(np.int32) for _ in range(NUM_ROWS)]
    batch = TrainBatch(
        rollout_id=0,
        task="train_0",
        row_ids=[RowId(GroupUid("data", row, 0), 0) for row in range(NUM_ROWS)],
        columns={
            "tokens": tokens,
            "response_length": np.full(NUM_ROWS, response, np.int32),
            "advantages": [np.full(response, (-1.0) ** row, np.float32) for row in range(NUM_ROWS)],
        },
    )
    seconds = []
    for _ in range(4):
        started = time.monotonic()
        sums = trainer.accumulate(batch)
        norm = trainer.optimizer_step(1 / sums.divisor)["grad_norm"]  # a number: the device has come to an end
        seconds.append(time.monotonic() - started)
        assert norm > 0
    second = statistics.median(seconds[1:])
    rate = NUM_ROWS * 3 * cost.forward(prompt + response, response) / second / 1e12
    found = {"tokens/s": NUM_ROWS * (prompt + response) / second, "TFLOP/s": rate}
    if device == "cuda":
        name = torch.cuda.get_device_name()
        peak = next((peaks["bf16" if args.bf16 else "float32"] for part, peaks in PEAKS.items() if part in name), None)
        found |= {"MFU": rate / peak} if peak else {}
        found["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
    trainer.sleep()
    if device == "cuda":
        found["asleep GiB"] = torch.cuda.memory_allocated() / 2**30
    return found


def run(one: Slice) -> tuple[str, dict[str, float]]:
    """How it ended, and what it measured."""
    if absent := [name for name in one.needs if importlib.util.find_spec(name) is None]:
        return f"left out: no {', '.join(absent)}", {}
    started = time.monotonic()
    try:
        answer = subprocess.run(
            [sys.executable, *one.command], capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=ROOT
        )
    except subprocess.TimeoutExpired:
        return f"FAILED: more than {LIMIT_S:.0f} s", {}
    lines = answer.stdout.strip().splitlines() or ["no output"]
    if answer.returncode:
        print(answer.stdout[-3000:], answer.stderr[-3000:], file=sys.stderr, flush=True)
        return f"FAILED: status {answer.returncode}", {}
    took = f"{time.monotonic() - started:.0f} s"
    return (took, json.loads(lines[-1])) if one.reports else (f"{took}: {lines[-1]}", {})


def main() -> int:
    """Run the slices; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="does each command work? Needs no GPU")
    parser.add_argument("--only", default="", help="slices whose names begin so")
    parser.add_argument("--output", default=str(ROOT / "build" / "gpu.md"), help="file of the table")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.child:
        print(json.dumps(measure(**flags.child)))
        return 0
    import torch

    if not flags.dry_run and not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device; --dry-run checks the commands without one")
    device = "no GPU: a dry run" if flags.dry_run else torch.cuda.get_device_name()
    lines = [f"{device}, torch {torch.__version__}, Python {sys.version.split()[0]}", ""]
    lines += [f"| slice | {' | '.join(COLUMNS)} | ended |", "|---" * (len(COLUMNS) + 2) + "|"]
    print("\n".join(lines), flush=True)
    failed = 0
    for one in slices(flags.dry_run):
        if not one.name.startswith(flags.only):
            continue
        ended, found = run(one)
        failed |= ended.startswith("FAILED")
        cells = [f"{found[name]:,.3g}" if name in found else "" for name in COLUMNS]
        lines.append(f"| {one.name} | {' | '.join(cells)} | {ended} |")
        print(lines[-1], flush=True)
        Path(flags.output).parent.mkdir(parents=True, exist_ok=True)
        Path(flags.output).write_text("\n".join(lines) + "\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
