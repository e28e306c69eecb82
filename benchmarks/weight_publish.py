"""The time of one publication to one engine: through shared memory and through the disk, for two sizes of model.

    python benchmarks/weight_publish.py            # about a minute

A trainer with random weights and an embedded engine in a process of its own, one thread each. ``prepare`` is what
engines generate through; ``pause`` is the time without generation: update, check of the version, continue.
``checksum`` is what ``--check-weight-update-equal`` adds to the pause. Medians over alternating publications, so
that both see the same machine; the folder of the disk transport is in the temporary folder.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from buffer_rl.config import compose
from buffer_rl.engine.control import EngineControlClient
from buffer_rl.engine.embedded.launcher import launch
from buffer_rl.options import CORE_SECTIONS
from buffer_rl.plugins import PluginRegistry
from buffer_rl.testing.fake_roles import local_senders
from buffer_rl.testing.tiny import make_tiny_model
from buffer_rl.train.objective import Objective
from buffer_rl.train.torch_trainer import TorchTrainer
from buffer_rl.weights.disk import DiskTransport
from buffer_rl.weights.publish import Publisher
from buffer_rl.weights.tensor import TensorTransport

SIZES: dict[str, dict[str, int]] = {
    "0.1 million parameters": {},
    "30 million parameters": {
        "vocab": 4096,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 9,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
}


def measure(folder: Path, sizes: dict[str, int], repeats: int) -> tuple[int, dict[str, dict[str, float]]]:
    """The number of parameters, and the median seconds of each part for each transport."""
    path = make_tiny_model(folder / "model", init_scale=0.02, **sizes)  # type: ignore[arg-type]
    args: Any = compose(CORE_SECTIONS)(run_dir=str(folder / "run"), hf_checkpoint=path, train_device="cpu")
    args = args.model_copy(update={"num_train_threads": 1})
    trainer = TorchTrainer(args, 0, 1, Objective(args, PluginRegistry()))
    count = sum(tensor.numel() for bucket in trainer.export() for tensor in bucket.values())
    engine = launch(args, 0, str(folder / "engine.log"))
    try:
        engine.wait_ready(120)
        with EngineControlClient([engine.url], timeout_s=120) as control:
            publishers = {
                name: Publisher(transport(args), local_senders(transport, args, trainer.export), control)
                for name, transport in (("disk", DiskTransport), ("tensor", TensorTransport))
            }
            times: dict[str, list[dict[str, float]]] = {name: [] for name in publishers}
            for version in range(1, repeats + 2):
                for name, publisher in publishers.items():
                    parts = publisher.publish(version)
                    started = time.monotonic()
                    control.checksums()
                    parts["checksum"] = time.monotonic() - started
                    if version > 1:  # the first of each warms up
                        times[name].append(parts)
    finally:
        engine.stop()
    return count, {name: medians(rows) for name, rows in times.items()}


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """Of every part, and of their sum without the checksum."""
    parts: dict[str, Callable[[dict[str, float]], float]] = {
        "prepare": lambda row: row["write_time"],
        "pause": lambda row: row["pause_time"],
        "total": lambda row: row["write_time"] + row["pause_time"],
        "checksum": lambda row: row["checksum"],
    }
    return {name: statistics.median(part(row) for row in rows) for name, part in parts.items()}


def main() -> int:
    """Print a table; 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    for name, sizes in SIZES.items():
        with tempfile.TemporaryDirectory(prefix="weight_publish_") as folder:
            count, found = measure(Path(folder), sizes, repeats)
        print(f"{name} ({count:,}, {count * 4 / 1e6:.1f} MB)")
        for transport, times in found.items():
            print(f"  {transport:7}" + "  ".join(f"{part} {seconds * 1e3:7.1f} ms" for part, seconds in times.items()))
        ratios = {part: found["disk"][part] / found["tensor"][part] for part in ("prepare", "pause", "total")}
        print("  disk / tensor: " + ", ".join(f"{part} {ratio:.2f}" for part, ratio in ratios.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
