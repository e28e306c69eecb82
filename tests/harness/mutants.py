"""Faults that are put into a copy of the project, one at a time: a text is replaced in a file.

Where code moves, the fault moves with it: one that does not apply is an error here, never a pass.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """``old`` is replaced by ``new`` in ``file``. runs: those of which at least one must notice it."""

    name: str
    file: str
    old: str
    new: str
    runs: tuple[str, ...]

    def apply(self, folder: Path) -> None:
        """Change the copy of the project in ``folder``."""
        source = (folder / self.file).read_text()
        if source.count(self.old) != 1:
            raise SystemExit(f"{self.name}: its text is {source.count(self.old)} times in {self.file}, not once")
        (folder / self.file).write_text(source.replace(self.old, self.new))


def find(mutants: Iterable[Mutant], caught: Callable[[Mutant, Path], str]) -> int:
    """Print of each what ``caught`` says of it in a folder of its own; nothing: passed over. Returns 1 if one is."""
    missed = 0
    for mutant in mutants:
        with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
            found = caught(mutant, Path(folder))
        missed += not found
        print(f"{'found' if found else 'PASSED OVER':12} {mutant.name}: {found[:400]}", flush=True)
    return 1 if missed else 0
