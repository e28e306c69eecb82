"""Whether ``buffer-rl drill`` finds faults in this project's own code: five, one at a time, in a copy of the package.

    python benchmarks/drill_mutants.py              # five minutes on two cores
    python benchmarks/drill_mutants.py seeds        # those whose names have these words

A fault is a text that is replaced in a file; one that does not apply is an error here, never a pass. Exit status 1: the
drill passed one over.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("buffer_rl", "rm_hub", "filter_hub", "plugins")
TIMEOUT_S = 900.0
sys.path.insert(0, str(ROOT / "tests"))  # for tests/harness


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """``old`` is replaced by ``new`` in ``file``. faults: of the drill."""

    name: str
    file: str
    old: str
    new: str
    faults: tuple[str, ...]


MUTANTS = (
    Mutant(
        name="a reward that fails is a 0",
        file="buffer_rl/rollout/scoring.py",
        old="failures[id(sample)] = RewardFailure(kind=kind, error=RewardError(text, where=where, expected=expected))",
        new="sample.reward = 0.0",
        faults=("reward",),
    ),
    Mutant(
        name="a rank in place of one that died has no moments of Adam",
        file="buffer_rl/trainer/rank_files.py",
        old='    moments = _read_tensors(folder / "optimizer.safetensors")\n',
        new='    moments = {k: v * 0 for k, v in _read_tensors(folder / "optimizer.safetensors").items()}\n',
        faults=("driver",),
    ),
    Mutant(
        name="an engine in place of one that died keeps the initial weights",
        file="buffer_rl/embedded/service.py",
        old="self._replace(lambda: self._replace_weights(path), version, flush_cache)",
        new="self._replace(lambda: vars(self).setdefault('first', int(version)) == 1"
        " and self._replace_weights(path), version, flush_cache)",
        faults=("kill",),
    ),
    Mutant(
        name="another attempt at a group samples under other seeds",
        file="buffer_rl/rollout/requests.py",
        old="shared_seed(lease.context.seed, row.uid, row.sample_index, row.part)",
        new="shared_seed(lease.context.seed + lease.attempt, row.uid, row.sample_index, row.part)",
        faults=("reward",),
    ),
    Mutant(
        name="a resumed run begins one row later in the data",
        file="buffer_rl/data/source.py",
        old='Cursor(_count(pair[0], "epoch"), _count(pair[1], "position"))',
        new='Cursor(_count(pair[0], "epoch"), _count(pair[1], "position") + 1)',
        faults=("driver",),
    ),
)


def caught(mutant: Mutant, folder: Path) -> str:
    """What the certificate has against the mutant; empty if it is passed."""
    from harness.faulty_runs import make_task

    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name)
    source = (folder / mutant.file).read_text()
    if source.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: its text is {source.count(mutant.old)} times in {mutant.file}, not once")
    (folder / mutant.file).write_text(source.replace(mutant.old, mutant.new))
    make_task(folder)
    options = {
        "run_dir": "run", "hf_checkpoint": "model", "prompt_data": "train.jsonl", "num_rollout": 100, "lr": 0.01,
        "custom_rm_path": f"{folder / 'letters.py'}:count_a", "rollout_batch_size": 3, "n_samples_per_prompt": 4,
        "rollout_max_response_len": 6, "deterministic": True, "engine_max_running_requests": 16,
        "engine_context_length": 64,
    }  # fmt: skip
    (folder / "run.yaml").write_text(json.dumps(options))
    command = [sys.executable, "-m", "buffer_rl", "drill", "--config", "run.yaml", "--drill-faults", *mutant.faults]
    path = os.pathsep.join(map(str, (folder, folder / "plugins")))
    answer = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    certificate = folder / "run-drill" / "certificate.json"
    if answer.returncode not in (0, 1) or not certificate.exists():
        raise SystemExit(f"{mutant.name}: the drill could not be run: {answer.stdout}{answer.stderr}")
    return "" if json.loads(certificate.read_text())["passed"] else " · ".join(answer.stdout.splitlines()[-4:-1])


def main() -> int:
    """Returns 1 if a mutant is passed over."""
    missed = 0
    chosen = [mutant for mutant in MUTANTS if all(word in mutant.name for word in sys.argv[1:])]
    for mutant in chosen:
        with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
            found = caught(mutant, Path(folder))
        missed += not found
        print(f"{'found' if found else 'PASSED OVER':12} {mutant.name}: {found[:400]}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
