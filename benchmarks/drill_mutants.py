"""Whether ``buffer-rl drill`` finds faults in this project's own code: five, one at a time, in a copy of the package.

    python benchmarks/drill_mutants.py              # five minutes on two cores
    python benchmarks/drill_mutants.py seeds        # those whose names have these words

Exit status 1: the drill passed one over.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # for tests/harness

from harness.faulty_runs import make_task
from harness.mutants import ROOT, Mutant, find

PACKAGES = ("buffer_rl", "rm_hub", "filter_hub", "plugins")
TIMEOUT_S = 900.0


MUTANTS = (
    # ``runs`` are faults of the drill.
    Mutant(
        name="a reward that fails is a 0",
        file="buffer_rl/rollout/scoring.py",
        old="failures[id(sample)] = AttemptFailure.of_reward(kind, failed)",
        new="sample.reward = 0.0",
        runs=("reward",),
    ),
    Mutant(
        name="a rank in place of one that died has no moments of Adam",
        file="buffer_rl/trainer/rank_files.py",
        old='    moments = _read_tensors(folder / "optimizer.safetensors")\n',
        new='    moments = {k: v * 0 for k, v in _read_tensors(folder / "optimizer.safetensors").items()}\n',
        runs=("driver",),
    ),
    Mutant(
        name="an engine in place of one that died keeps the initial weights",
        file="buffer_rl/embedded/service.py",
        old="self._replace(lambda: self._replace_weights(path), version, flush_cache)",
        new="self._replace(lambda: vars(self).setdefault('first', int(version)) == 1"
        " and self._replace_weights(path), version, flush_cache)",
        runs=("kill",),
    ),
    Mutant(
        name="another attempt at a group samples under other seeds",
        file="buffer_rl/rollout/requests.py",
        old="shared_seed(lease.context.seed, row.uid, row.sample_index, row.part)",
        new="shared_seed(lease.context.seed + lease.attempt, row.uid, row.sample_index, row.part)",
        runs=("reward",),
    ),
    Mutant(
        name="a resumed run begins one row later in the data",
        file="buffer_rl/data/source.py",
        old='Cursor(_count(pair[0], "epoch"), _count(pair[1], "position"))',
        new='Cursor(_count(pair[0], "epoch"), _count(pair[1], "position") + 1)',
        runs=("driver",),
    ),
)


def caught(mutant: Mutant, folder: Path) -> str:
    """What the certificate has against the mutant; empty if it is passed."""
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name)
    mutant.apply(folder)
    make_task(folder)
    options = {
        "run_dir": "run", "hf_checkpoint": "model", "prompt_data": "train.jsonl", "num_rollout": 100, "lr": 0.01,
        "custom_rm_path": f"{folder / 'letters.py'}:count_a", "rollout_batch_size": 3, "n_samples_per_prompt": 4,
        "rollout_max_response_len": 6, "deterministic": True, "engine_max_running_requests": 16,
        "engine_context_length": 64,
    }  # fmt: skip
    (folder / "run.yaml").write_text(json.dumps(options))
    command = [sys.executable, "-m", "buffer_rl", "drill", "--config", "run.yaml", "--drill-faults", *mutant.runs]
    path = os.pathsep.join(map(str, (folder, folder / "plugins")))
    answer = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    certificate = folder / "run-drill" / "certificate.json"
    if answer.returncode not in (0, 1) or not certificate.exists():
        raise SystemExit(f"{mutant.name}: the drill could not be run: {answer.stdout}{answer.stderr}")
    return "" if json.loads(certificate.read_text())["passed"] else " · ".join(answer.stdout.splitlines()[-4:-1])


if __name__ == "__main__":
    sys.exit(find([mutant for mutant in MUTANTS if all(word in mutant.name for word in sys.argv[1:])], caught))
