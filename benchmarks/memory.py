"""Memory of a trainer rank by the number of ranks that a model is split over.

    pip install -e '.[scale]'
    python benchmarks/memory.py             # five minutes
    python benchmarks/memory.py --quick     # a small model: does everything work?

A qwen2 model of 103 million parameters (tied, 32,000 tokens of vocabulary) with random weights in float32. Ranks are
processes on this machine, which meet by gloo. Each loads the model, trains a step on rows of its own (16 of 64 response
tokens, or a single one of 2,048) and publishes the weights in buckets of 64 MiB.

Columns are MiB of the rank that has most:

loaded, stepped       after loading; after a step, whose gradients are freed
loading               the most while it loads, beyond what stays
passes, publication   the most meanwhile, beyond what it had before
state                 weights and moments, counted

Memory is what is anonymous (``RssAnon``, looked at every 2 ms) beyond the process after its imports; glibc is told to
return what is freed.

The exit status is 1 unless weights and moments are within 5% of 1/N of those of one rank, what a rank has after a step
is at most ``OVERHEAD_MIB`` more, and loading never has more than a bucket beyond what stays.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from vocabulary import ENVIRONMENT, Peak, anonymous_mib

BUCKET_MIB = 64
SHORT, LONG = (64,) * 16, (2048,)
PROMPT = 8
LIMIT_S = 600.0
SLACK = 0.05
OVERHEAD_MIB = 96
"""Of gloo, oneDNN and modules that are imported late."""
RUNS: dict[str, tuple[int, dict[str, Any], tuple[int, ...]]] = {
    "whole": (1, {}, SHORT),
    "split, 1 rank": (1, {"fsdp_size": -1}, SHORT),
    "split, 2 ranks": (2, {"fsdp_size": -1}, SHORT),
    "split, 4 ranks": (4, {"fsdp_size": -1}, SHORT),
    "split, 2 ranks, bf16": (2, {"fsdp_size": -1, "bf16": True}, SHORT),
    "LoRA, 1 rank, bf16": (1, {"lora_rank": 8, "bf16": True}, SHORT),
    "LoRA, split, 2 ranks": (2, {"lora_rank": 8, "fsdp_size": -1}, SHORT),
    "split, 2 ranks, a long row": (2, {"fsdp_size": -1}, LONG),
    "the same, layers recomputed": (2, {"fsdp_size": -1, "recompute_granularity": "full"}, LONG),
}
"""Number of ranks, options, response tokens of each row of a rank."""
QUICK = ("whole", "split, 2 ranks, bf16", "LoRA, split, 2 ranks")


def batch_of(lengths: tuple[int, ...], vocabulary: int, rank: int) -> Any:
    """Rows with advantages of both signs."""
    from buffer_rl.records.groups import GroupUid, RowId, TrainBatch

    rng = np.random.default_rng(rank)
    return TrainBatch(
        rollout_id=0,
        task="train_0",
        row_ids=[RowId(GroupUid("data", rank, 0), row) for row in range(len(lengths))],
        columns={
            "tokens": [rng.integers(3, vocabulary, PROMPT + length).astype(np.int32) for length in lengths],
            "response_length": np.array(lengths, dtype=np.int32),
            "advantages": [np.full(length, (-1.0) ** row, np.float32) for row, length in enumerate(lengths)],
        },
    )


def measure(spec: dict[str, Any], rank: int, world_size: int) -> dict[str, float]:
    """In a process of its own: MiB of a rank, at each moment."""
    import accelerate  # noqa: F401  transformers imports it as it loads a part of a model
    import torch.distributed as dist
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401

    from buffer_rl.args import CORE_SECTIONS
    from buffer_rl.options.section import compose
    from buffer_rl.plugin.registry import PluginRegistry
    from buffer_rl.trainer.objective import Objective
    from buffer_rl.trainer.pretrained import prepare_torch
    from buffer_rl.trainer.torch_trainer import TorchTrainer

    dist.init_process_group("gloo", init_method=f"file://{spec['store']}", rank=rank, world_size=world_size)
    args: Any = compose(CORE_SECTIONS)(
        hf_checkpoint=spec["model"], train_device="cpu", num_train_ranks=world_size, max_tokens_per_gpu=1024,
        update_weight_buffer_size=BUCKET_MIB << 20, **spec["options"],
    )  # fmt: skip
    prepare_torch(args, 0)
    found: dict[str, float] = {}
    start = anonymous_mib()
    peak = _started()
    trainer = TorchTrainer(args, rank, world_size, Objective(args, PluginRegistry.from_flags([])))
    found["loading"] = peak.stop()
    found["loaded"] = anonymous_mib() - start
    found["loading"] -= found["loaded"]
    batch = batch_of(tuple(spec["lengths"]), spec["vocabulary"], rank)
    peak = _started()
    trainer.accumulate(batch)
    found["passes"] = peak.stop()
    trainer.optimizer_step(1 / sum(spec["lengths"]))
    found["stepped"] = anonymous_mib() - start
    peak = _started()
    for _ in trainer.export():
        pass
    found["publication"] = peak.stop()
    state = [*trainer._model.state().values(), *trainer._optimizer.state_tensors().values()]
    found["state"] = sum(_own_bytes(tensor) for tensor in state) / 2**20
    dist.barrier()
    return found


def _own_bytes(tensor: Any) -> int:
    from buffer_rl.trainer.sharding import local

    return int(local(tensor).nbytes)


def _started() -> Peak:
    peak = Peak()
    peak.start()
    return peak


def run(spec: dict[str, Any], world_size: int, folder: Path) -> dict[str, float]:
    """Have processes measure: of each moment the most of any rank. Raises SystemExit if one fails."""
    spec = spec | {"store": str(folder / "store")}
    command = [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps(spec)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world_size)],
            env={**os.environ, **ENVIRONMENT},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        answers = []
        for process in ranks:
            out, err = process.communicate(timeout=LIMIT_S)
            if process.returncode:
                raise SystemExit(f"a rank ended with status {process.returncode}:\n{err[-3000:]}")
            answers.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in ranks:
            process.kill()
        Path(spec["store"]).unlink(missing_ok=True)
    return {name: max(answer[name] for answer in answers) for name in answers[0]}


def main() -> int:
    """Measure each run, and print a table; 1 if memory does not fall as it should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model: does everything work?")
    parser.add_argument("--only", nargs="+", choices=list(RUNS), help="these alone, and nothing is checked")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.child:
        print(json.dumps(measure(json.loads(flags.child[0]), *map(int, flags.child[1:]))))
        return 0
    from buffer_rl.testing.tiny import make_tiny_model

    size = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 9, "num_attention_heads": 12}
    size["num_key_value_heads"] = 4
    vocabulary = 1000 if flags.quick else 32_000
    if flags.quick:
        size |= {"hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": 2}
    columns = ("loaded", "loading", "passes", "stepped", "publication", "state")
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model", architecture="qwen2", vocab=vocabulary, **size)
        print(f"| run | {' | '.join(columns)} |\n|---{'|---' * len(columns)}|", flush=True)
        for name, (ranks, options, lengths) in RUNS.items():
            if name not in (flags.only or (QUICK if flags.quick else RUNS)):
                continue
            spec = {"model": model, "options": options, "lengths": lengths, "vocabulary": vocabulary}
            one = found[name] = run(spec, ranks, Path(folder))
            print(f"| {name} | {' | '.join(f'{one[column]:,.0f}' for column in columns)} |", flush=True)
    return 0 if flags.quick or flags.only else check(found)


def check(found: dict[str, dict[str, float]]) -> int:
    """1 if a rank has more than its part."""
    problems = []
    alone = found["split, 1 rank"]
    for name, one in found.items():
        parts = RUNS[name][0]
        if "LoRA" not in name and abs(one["state"] * parts / alone["state"] - 1) > SLACK:
            problems.append(f"{name}: the state is {one['state']:.0f} MiB, not {alone['state'] / parts:.0f}")
        base = alone["state"] / 3 / parts if "LoRA" in name else 0  # weights are a third of the state
        if one["stepped"] > one["state"] + base + OVERHEAD_MIB:
            problems.append(f"{name}: {one['stepped']:.0f} MiB after a step, with a state of {one['state']:.0f}")
        if one["loading"] > BUCKET_MIB:
            problems.append(f"{name}: loading had {one['loading']:.0f} MiB beyond what stays")
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
