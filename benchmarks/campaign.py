"""Long fault campaigns and statistics, too long for every change: runs them one after another and writes a dated table.

    python benchmarks/campaign.py [--only NAME ...]

The table is ``docs/evidence/campaigns.md``, a row each with its day; with ``--only`` the other rows stay as they are.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "evidence" / "campaigns.md"
TIMEOUT_S = 3600.0
CAMPAIGNS: Mapping[str, tuple[str, ...]] = {
    "ledger": ("benchmarks/ledger_kills.py",),
    "buffer, lockstep": ("benchmarks/faults.py", "buffer"),
    "buffer, pipelined": ("benchmarks/faults.py", "buffer", "--schedule", "pipelined"),
    "rollout worker, lockstep": ("benchmarks/faults.py", "rollout"),
    "rollout worker, pipelined": ("benchmarks/faults.py", "rollout", "--schedule", "pipelined"),
    "driver": ("benchmarks/faults.py", "driver"),
    "rank": ("benchmarks/faults.py", "rank"),
    "schedules": ("benchmarks/schedule_equality.py", "--whole"),
    "asynchronous schedules": ("benchmarks/schedule_campaign.py",),
    "golden runs": ("tests/golden/runs.py", "record"),
    "golden mutants": ("tests/golden/mutants.py",),
}
_HEAD = """\
# Campaigns

What runs too long for every change: `make campaign` runs it and writes this page. Status 0 is a pass: no group lost or
trained twice, bit-equal weights, every fault that was put in found. Of faults the last line has what was killed, how
often, violations, and seconds. Python {python}, {cores} cores.

| campaign | command | day | status | minutes | last line |
|---|---|---|---|---|---|
"""


def run(name: str) -> tuple[str, bool]:
    """One row of the table, and whether the campaign passed."""
    command, started = CAMPAIGNS[name], time.monotonic()
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    answer = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    minutes = (time.monotonic() - started) / 60
    lines = [line for line in answer.stdout.splitlines() if line.strip()] or answer.stderr.splitlines()[-1:] or [""]
    last = lines[-1].strip().replace("|", "\\|")[:160]
    cells = [name, f"`{' '.join(command)}`", date.today().isoformat(), str(answer.returncode), f"{minutes:.1f}", last]
    return f"| {' | '.join(cells)} |", answer.returncode == 0


def merged(page: str, rows: Mapping[str, str]) -> list[str]:
    """The rows of a page with ``rows``, by name, in the place of those of the same name; in the campaigns' order."""
    known = {line.split(" | ")[0].removeprefix("| "): line for line in page.splitlines() if line.startswith("| ")}
    return [row for name in CAMPAIGNS if (row := rows.get(name) or known.get(name))]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CAMPAIGNS), help="these alone")
    args = parser.parse_args(argv)
    passed = True
    for name in args.only or CAMPAIGNS:
        row, good = run(name)
        print(row, flush=True)
        rows = merged(PAGE.read_text(encoding="utf-8"), {name: row})
        head = _HEAD.format(python=platform.python_version(), cores=os.cpu_count())
        PAGE.write_text(head + "\n".join(rows) + "\n", encoding="utf-8")
        passed &= good
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
