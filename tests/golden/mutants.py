"""Whether the golden runs notice: five faults, one at a time, in a copy of the tree, each of which turns a run red.

make golden-record            first: the table that the copies are compared with
python tests/golden/mutants.py
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for harness, as a script

from harness.mutants import ROOT, Mutant, find

TABLE = Path("build/golden.json")
TIMEOUT_S = 900.0


MUTANTS = (
    Mutant(
        name="groups that come back go to the end of the queue",
        file="buffer_rl/buffer/queue.py",
        old="self._entries[entry.group.uid] = entry",
        new="entry = self._entries[entry.group.uid] = Admitted(group=entry.group, number=entry.number + 10**6)",
        runs=("requeued",),
    ),
    Mutant(
        name="the loss mask is 1 everywhere",
        file="buffer_rl/rollout/conversion.py",
        old='"loss_mask": _loss_masks(samples),',
        new='"loss_mask": [mask * 0 + 1 for mask in _loss_masks(samples)],',
        runs=("masked",),
    ),
    Mutant(
        name="the samples of a prompt share a seed",
        file="buffer_rl/engines/protocol.py",
        old="for number in range(1, num_rows + 1)",
        new="for number in [1] * num_rows",
        runs=("lockstep",),
    ),
    Mutant(
        name="the engine confirms version 2 and keeps the weights of version 1",
        file="buffer_rl/embedded/service.py",
        old="self._replace(prepared.serve, version,",
        new="self._replace(lambda: version != '2' and prepared.serve(), version,",
        runs=("lockstep",),
    ),
    Mutant(
        name="a resumed run begins one row later in the data",
        file="buffer_rl/data/source.py",
        old='Cursor(_count(pair[0], "epoch"), _count(pair[1], "position"))',
        new='Cursor(_count(pair[0], "epoch"), _count(pair[1], "position") + 1)',
        runs=("resumed",),
    ),
)


def caught(mutant: Mutant, folder: Path) -> str:
    """What the golden runs say of the mutant; empty if they pass it over."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in filter(None, files):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    (folder / TABLE).parent.mkdir()
    shutil.copyfile(ROOT / TABLE, folder / TABLE)
    mutant.apply(folder)
    command = [sys.executable, str(folder / "tests/golden/runs.py"), "compare", "--only", *mutant.runs]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    said = [line for line in answer.stdout.splitlines() if "ended with" in line or "failed:" in line]
    return "" if answer.returncode == 0 else (said or [answer.stderr.strip()[-200:]])[0][:200]


def main() -> int:
    """Returns 1 if a mutant is passed over."""
    if not (ROOT / TABLE).exists():
        raise SystemExit(f"there is no {TABLE}: make golden-record first")
    return find(MUTANTS, caught)


if __name__ == "__main__":
    sys.exit(main())
