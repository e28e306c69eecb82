"""Kills processes that write a ledger, at every statement and at random, and counts what went wrong.

    python benchmarks/ledger_kills.py --kills 5000      # every failpoint, 5,000 random kills, the mutants
    python benchmarks/ledger_kills.py --kills 100 --every 20

Three ledgers that are wrong on purpose (``harness.ledger_mutants``) must be found out. Exit status 1 for a
violation, or for a mutant that was not found out. Only killed processes are simulated, not power losses: the files are
kept in memory where ``/dev/shm`` exists.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # for tests/harness

from harness.ledger_failpoints import kill_everywhere
from harness.ledger_kills import kill_at_random
from harness.ledger_mutants import MUTANTS

MEMORY = Path("/dev/shm")


def main() -> int:
    """Run all parts; each prints one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5000, help="how many random kills (default: 5000)")
    parser.add_argument("--limit-s", type=float, default=1e9, help="stop the random kills after so many seconds")
    parser.add_argument("--every", type=int, default=1, help="take every n-th failpoint only (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the random kills")
    parser.add_argument("--folder", type=Path, help="where the files go (default: memory)")
    options = parser.parse_args()
    base = options.folder or (MEMORY if os.access(MEMORY, os.W_OK) else None)
    with tempfile.TemporaryDirectory(dir=base) as folder:
        violations = failpoints(Path(folder), options.every)
        violations += random_kills(Path(folder) / "random", options.kills, options.seed, options.limit_s)
        missed = mutants(Path(folder), options.every)
    return 1 if violations or missed else 0


def failpoints(folder: Path, every: int) -> int:
    """Every way to write; returns the violations."""
    violations = 0
    for batched, keep_selected in itertools.product((False, True), (False, True)):
        name = f"{'in batches' if batched else 'one by one'}, selected groups {'kept' if keep_selected else 'returned'}"
        path = folder / f"failpoints_{batched}_{keep_selected}"
        path.mkdir()
        start = time.monotonic()
        report = kill_everywhere(path, batched=batched, keep_selected=keep_selected, every=every)
        took = time.monotonic() - start
        print(
            f"failpoints, {name}: {report.kills} kills, {len(report.violations)} violations, {took:.1f} s", flush=True
        )
        print("\n".join(report.violations[:20]), end="\n" if report.violations else "")
        violations += len(report.violations)
    return violations


def random_kills(folder: Path, kills: int, seed: int, limit_s: float) -> int:
    """Returns the violations."""
    start = time.monotonic()
    report = kill_at_random(folder, kills, seed=seed, limit_s=limit_s)
    took = time.monotonic() - start
    print(
        f"random kill -9: {report.kills} kills, {report.groups} groups, {report.commits} commits, {report.restores}"
        f" restores, {report.repeated_attempts} attempt numbers given again: {report.duplicated} duplicated,"
        f" {report.missing} missing, {len(report.faults)} faults, {took:.1f} s ({report.kills / took:.1f} kills/s)",
        flush=True,
    )
    print("\n".join(report.faults[:20]), end="\n" if report.faults else "")
    return report.violations


def mutants(folder: Path, every: int) -> int:
    """Returns how many were not found out."""
    missed = 0
    for name, kind in MUTANTS.items():
        path = folder / name
        path.mkdir()
        report = kill_everywhere(path, kind, batched=True, every=every, stop=True)
        found = report.violations[0] if report.violations else "NOT FOUND OUT"
        print(f"mutant {name}: {found}", flush=True)
        missed += not report.violations
    return missed


if __name__ == "__main__":
    sys.exit(main())
