"""Trained tokens a second and memory at a large vocabulary, of buffer_rl and of TRL's GRPO trainer.

    pip install -e '.[bench]'
    python benchmarks/vocabulary.py                        # a quarter of an hour on a quiet machine
    python benchmarks/vocabulary.py --trl-python none      # without TRL
    python benchmarks/vocabulary.py --quick                # a small vocabulary, one pass: does everything work?

A model of two layers of 64 with 151,936 tokens of vocabulary, tied, in float32: nearly all of the work is the output
layer and what follows it. A pass is the forward and backward pass of one micro-batch in the trainer of each system, by
``TorchTrainer.accumulate`` and by ``GRPOTrainer.compute_loss``: the clipped ratio, advantages that are given, entropies
as a metric. There is no optimizer step: AdamW is the same in both. TRL has no gradient checkpointing here.

Systems take turns. Each measurement is a process with one thread; the first pass is not in the times. Tokens are those
of responses. Memory is what is anonymous (``RssAnon``, looked at every 2 ms) beyond the process after its imports.
glibc is told to return what is freed, else it keeps arrays that are gone. Columns are medians, and of times a range.
The exit status is 1 if two systems do not have the same gradient.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 151_936
PROMPT, GROUP = 16, 8
"""Tokens of each prompt, and its samples."""
TRL = "TRL"
SYSTEMS = ("buffer_rl, packed", "buffer_rl, padded", "buffer_rl, all logits", TRL)
UNEVEN = (128, 11, 96, 23, 77, 55, 30, 66)
ROWS = {"8 x 64": (64,) * 8, "8 of 11 to 128": UNEVEN, "16 x 64": (64,) * 16}
"""Response tokens of each row."""
QUICK_ROWS = "8 of 11 to 128"
"""Of different lengths: only then padded rows have padding."""
TOLERANCE = 1e-3
Build = Callable[[], tuple[Callable[[], object], Any]]
"""Gives a pass, and the model whose gradients it adds to."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
LIMIT_S = 1200.0


class Peak(threading.Thread):
    """Looks at the memory of this process until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.mib = anonymous_mib()
        self._stopped = threading.Event()

    def run(self) -> None:
        """Every two milliseconds."""
        while not self._stopped.wait(0.002):
            self.mib = max(self.mib, anonymous_mib())

    def stop(self) -> float:
        """MiB more at the most than when it was made."""
        self._stopped.set()
        self.join()
        return self.mib - self.before


def anonymous_mib() -> float:
    """Of this process."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def tokens_of(lengths: Sequence[int], vocabulary: int) -> list[np.ndarray]:
    """Prompt and response of each row; rows of a group have one prompt."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, vocabulary, PROMPT) for _ in range(0, len(lengths), GROUP)]
    responses = [rng.integers(3, vocabulary, length) for length in lengths]
    return [np.concatenate([prompts[row // GROUP], response]) for row, response in enumerate(responses)]


def advantages_of(lengths: Sequence[int]) -> np.ndarray:
    """Of each row, of both signs."""
    return np.linspace(-1, 1, len(lengths), dtype=np.float32)


def ours(spec: dict[str, Any]) -> tuple[Build, str]:
    """What builds the trainer, and the version."""
    from importlib.metadata import version

    from buffer_rl.args import CORE_SECTIONS
    from buffer_rl.options.section import compose
    from buffer_rl.plugin.registry import PluginRegistry
    from buffer_rl.records.groups import GroupUid, RowId, TrainBatch
    from buffer_rl.trainer.objective import Objective
    from buffer_rl.trainer.output_layer import FUSED
    from buffer_rl.trainer.pretrained import prepare_torch
    from buffer_rl.trainer.torch_trainer import TorchTrainer

    lengths, system = spec["lengths"], spec["system"]
    options = {"hf_checkpoint": spec["model"], "train_device": "cpu", "max_tokens_per_gpu": 1 << 20}
    args: Any = compose(CORE_SECTIONS)().model_copy(update=options)

    def build() -> tuple[Callable[[], object], Any]:
        prepare_torch(args, 0)
        trainer = TorchTrainer(args, 0, 1, Objective(args, PluginRegistry.from_flags([])))
        model: Any = trainer._actor
        if not system.endswith("packed"):
            model.set_attn_implementation("sdpa")
        setattr(model.get_output_embeddings(), FUSED, not system.endswith("logits"))
        rows = tokens_of(lengths, spec["vocabulary"])
        values = advantages_of(lengths)
        batch = TrainBatch(
            rollout_id=0,
            task="train_0",
            row_ids=[RowId(GroupUid("data", row // GROUP, 0), row % GROUP) for row in range(len(rows))],
            columns={
                "tokens": [row.astype(np.int32) for row in rows],
                "response_length": np.array(lengths, dtype=np.int32),
                "advantages": [np.full(n, value, np.float32) for n, value in zip(lengths, values, strict=True)],
            },
        )
        return lambda: trainer.accumulate(batch), model

    return build, version("buffer-rl")


def of_trl(spec: dict[str, Any]) -> tuple[Build, str]:
    """What builds the trainer, and the version."""
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lengths = spec["lengths"]
    config = trl.GRPOConfig(
        output_dir=spec["folder"], per_device_train_batch_size=len(lengths), num_generations=GROUP,
        max_completion_length=max(lengths), loss_type="dapo", beta=0.0, use_cpu=True, bf16=False,
        gradient_checkpointing=False, logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip

    def build() -> tuple[Callable[[], object], Any]:
        trainer: Any = trl.GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(spec["model"]),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_list([{"prompt": "a"}] * GROUP),
        )
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        completions = torch.zeros(mask.shape, dtype=torch.long)
        rows = [torch.from_numpy(row) for row in tokens_of(lengths, spec["vocabulary"])]
        completions[mask] = torch.cat([row[PROMPT:] for row in rows])
        inputs = {
            "prompt_ids": torch.stack([row[:PROMPT] for row in rows]),
            "prompt_mask": torch.ones(len(rows), PROMPT, dtype=torch.long),
            "completion_ids": completions,
            "completion_mask": mask.long(),
            "advantages": torch.from_numpy(advantages_of(lengths)),
            "num_items_in_batch": mask.sum(),
        }
        return lambda: trainer.compute_loss(trainer.model, inputs).backward(), trainer.model

    return build, trl.__version__


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own: memory, seconds, CPU-seconds, and the norm of the gradient of a token's mean loss."""
    build, version = (of_trl if spec["system"] == TRL else ours)(spec)
    peak = Peak()
    peak.start()
    run_pass, model = build()
    seconds, cpu = [], []
    for _ in range(1 + spec["passes"]):
        model.zero_grad()
        wall, used = time.monotonic(), time.process_time()
        run_pass()
        seconds.append(time.monotonic() - wall)
        cpu.append(time.process_time() - used)
    mib = peak.stop()
    norm = sum(float(weight.grad.double().square().sum()) for weight in model.parameters()) ** 0.5
    norm /= 1 if spec["system"] == TRL else sum(spec["lengths"])  # ours divides in the optimizer step
    return {"mib": mib, "seconds": seconds[1:], "cpu": cpu[1:], "norm": norm, "version": version}


def child(spec: dict[str, Any], python: str) -> dict[str, Any]:
    """Have a process measure. Raises SystemExit if it fails."""
    command = [python, str(Path(__file__).resolve()), "--child", json.dumps(spec)]
    environment = {**os.environ, **ENVIRONMENT}
    answer = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=spec["folder"]
    )
    if answer.returncode:
        raise SystemExit(f"{spec['system']} ended with status {answer.returncode}:\n{answer.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return found


def make_model(folder: Path, vocabulary: int) -> str:
    """Random weights that make distributions neither flat nor certain."""
    from buffer_rl.testing.tiny import make_tiny_model

    return make_tiny_model(folder / "model", architecture="qwen2", vocab=vocabulary, init_scale=0.2)


def table(found: dict[tuple[str, str], list[dict[str, Any]]]) -> list[str]:
    """Markdown; the last columns compare with TRL on the same rows."""
    lines = ["| response tokens | system | tokens/s | tokens/CPU-s | MiB | tokens/CPU-s x TRL | MiB x TRL |"]
    lines.append("|---" * 7 + "|")
    for (rows, system), runs in found.items():
        count = sum(ROWS[rows])
        speed, cpu, mib = _medians(runs, count)
        against = ["-", "-"]
        if (rows, TRL) in found:
            _, other, more = _medians(found[rows, TRL], count)
            against = [f"{cpu[1] / other[1]:.2f}", f"{mib / more:.2f}"]
        name = f"TRL {runs[0]['version']}" if system == TRL else system
        spread = f"{cpu[1]:.0f} ({cpu[0]:.0f} to {cpu[2]:.0f})"
        cells = [f"{rows} = {count:,}", name, f"{speed[1]:.0f}", spread, f"{mib:.0f}", *against]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _medians(runs: Sequence[dict[str, Any]], count: int) -> tuple[tuple[float, ...], tuple[float, ...], float]:
    """Least, median and most tokens a second and a CPU-second; MiB."""
    rates = []
    for name in ("seconds", "cpu"):
        values = sorted(count / value for run in runs for value in run[name])
        rates.append((values[0], statistics.median(values), values[-1]))
    return rates[0], rates[1], statistics.median(run["mib"] for run in runs)


def main() -> int:
    """Measure in turns, and print a table; 1 if gradients differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="processes for each system and rows (default: 3)")
    parser.add_argument("--passes", type=int, default=2, help="timed passes of each (default: 2)")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--trl-python", default=sys.executable, help="an interpreter that has TRL; none: without it")
    parser.add_argument("--quick", action="store_true", help="a small vocabulary, one pass: does everything work?")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.child:
        print(json.dumps(measure(flags.child)))
        return 0
    vocabulary, runs, passes = (1000, 1, 1) if flags.quick else (VOCABULARY, flags.runs, flags.passes)
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), vocabulary)
        for run in range(runs):
            for rows in [QUICK_ROWS] if flags.quick else flags.rows:
                for system in SYSTEMS[: 3 if flags.trl_python == "none" else 4]:
                    spec = {"system": system, "model": model, "folder": folder, "lengths": ROWS[rows]}
                    python = flags.trl_python if system == TRL else sys.executable
                    one = child(spec | {"vocabulary": vocabulary, "passes": passes}, python)
                    found.setdefault((rows, system), []).append(one)
                    print(run, rows, system, {k: v for k, v in one.items() if k != "version"}, flush=True)
    print("\n".join(table(found)))
    wrong = 0
    for rows in {rows for rows, _ in found}:
        norms = [run["norm"] for (each, _), runs_of in found.items() if each == rows for run in runs_of]
        if max(norms) - min(norms) > TOLERANCE * max(norms):
            print(f"the gradients of {rows} differ: their norms are {norms}")
            wrong = 1
    return wrong


if __name__ == "__main__":
    sys.exit(main())
