"""Whether the golden runs notice: five faults, one at a time, in a copy of the tree, each of which turns a run red.

    make golden-record            first: the table that the copies are compared with
    python tests/golden/mutants.py

A fault is a text that is replaced in a file. Where code moves, the fault moves with it: one that does not apply is an
error here, never a pass.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TABLE = Path("build/golden.json")
TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A fault: ``old`` is replaced by ``new`` in ``file``. runs: those of which at least one must notice it."""

    name: str
    file: str
    old: str
    new: str
    runs: tuple[str, ...]


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
        old="self._replace(lambda: self._replace_weights(path), version, flush_cache)",
        new="self._replace(lambda: version != '2' and self._replace_weights(path), version, flush_cache)",
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
    source = (folder / mutant.file).read_text()
    if source.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: its text is {source.count(mutant.old)} times in {mutant.file}, not once")
    (folder / mutant.file).write_text(source.replace(mutant.old, mutant.new))
    command = [sys.executable, str(folder / "tests/golden/runs.py"), "compare", "--only", *mutant.runs]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    said = [line for line in answer.stdout.splitlines() if "ended with" in line or "failed:" in line]
    return "" if answer.returncode == 0 else (said or [answer.stderr.strip()[-200:]])[0][:200]


def main() -> int:
    """Returns 1 if a mutant is passed over."""
    if not (ROOT / TABLE).exists():
        raise SystemExit(f"there is no {TABLE}: make golden-record first")
    missed = 0
    for mutant in MUTANTS:
        with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
            found = caught(mutant, Path(folder))
        missed += not found
        print(f"{'red' if found else 'PASSED OVER':12} {mutant.name}: {found}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
