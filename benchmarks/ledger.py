"""What the ledger costs: microseconds for a group, and how that, memory and a restart grow with the run.

    python benchmarks/ledger.py                    # up to 10^6 groups: a few minutes, and 0.5 GB of disk
    python benchmarks/ledger.py --groups 100000

Each size is a process and a file of its own. Groups are leased, finished and committed 64 a step, each transition in a
transaction of its own ("single"), or the leases of a step in one ("batched", as the Buffer leases). Times are
medians of the last 6,400 groups (all, where there are fewer).
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.ledger_audit import LedgerAudit
from buffer_rl.records.groups import GroupUid

SIZES = (1_000, 10_000, 100_000, 1_000_000)
STEP = 64
MEASURED_STEPS = 100
SOURCE = "0123456789abcdef"
ROWS = 50_000


def main() -> int:
    """Print one line a size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=SIZES[-1], help="the largest size (default: 1000000)")
    parser.add_argument("--folder", type=Path, help="where the files go: a local disk (default: the system's)")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            print(json.dumps(measure(Path(folder), options.one)))
        return 0
    for size in (size for size in SIZES if size <= options.groups):
        command = [sys.executable, __file__, "--one", str(size)]
        if options.folder:
            command += ["--folder", str(options.folder)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
        facts = json.loads(done.stdout)
        print("  ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    return 0


def measure(folder: Path, size: int) -> dict[str, float | int | str]:
    """One ledger, filled, copied, closed and opened again."""
    path = folder / "ledger.sqlite"
    ledger = Ledger(path, run="benchmark")
    memory_before = resident_mib()
    steps = max(1, size // STEP)
    spent: dict[str, list[float]] = {"lease": [], "finish": [], "commit": [], "batched": []}
    for step in range(steps):
        uids = [GroupUid(SOURCE, n * 7919 % ROWS, n // ROWS) for n in range(step * STEP, (step + 1) * STEP)]
        batched = step < steps - MEASURED_STEPS or step % 2 == 1
        one_step(ledger, uids, step, batched, spent)
        if step < steps - MEASURED_STEPS:
            for times in spent.values():
                times.clear()
    held = [GroupUid(SOURCE, number, 1_000_000) for number in range(STEP)]
    with ledger.transaction():
        for uid in held:
            ledger.lease(uid, steps)
    memory = resident_mib() - memory_before
    start = time.perf_counter()
    ledger.backup(folder / "copy.sqlite")
    backup_s = time.perf_counter() - start
    del ledger  # as a kill leaves it: not closed in order
    start = time.perf_counter()
    again = Ledger(path, run="benchmark")
    queue = again.recover()
    restart_s = time.perf_counter() - start
    assert queue == held, "the leased groups must be the queue"
    again.close()
    start = time.perf_counter()
    audit = LedgerAudit(path)
    assert not audit.faults(), "the accounting must hold"
    verify_s = time.perf_counter() - start
    micro = {name: statistics.median(times) / STEP * 1e6 for name, times in spent.items() if times}
    single = micro.get("lease", 0.0) + micro.get("finish", 0.0) + micro.get("commit", 0.0)
    together = micro.get("batched", 0.0) + micro.get("finish", 0.0) + micro.get("commit", 0.0)
    return {
        "groups": steps * STEP,
        "lease_us": round(micro.get("lease", 0.0), 1),
        "lease_batched_us": round(micro.get("batched", 0.0), 1),
        "finish_us": round(micro.get("finish", 0.0), 1),
        "commit_us": round(micro.get("commit", 0.0), 1),
        "group_us": round(single, 1),
        "group_batched_us": round(together, 1),
        "memory_mib": round(memory, 1),
        "file_mib": round(path.stat().st_size / 2**20, 1),
        "backup_s": round(backup_s, 2),
        "restart_s": round(restart_s, 2),
        "verify_s": round(verify_s, 2),
    }


def one_step(ledger: Ledger, uids: list[GroupUid], step: int, batched: bool, spent: dict[str, list[float]]) -> None:
    """Lease, finish and commit one step's groups; adds the seconds of each part."""
    start = time.perf_counter()
    if batched:
        with ledger.transaction():
            for uid in uids:
                ledger.lease(uid, step)
    else:
        for uid in uids:
            ledger.lease(uid, step)
    spent["batched" if batched else "lease"].append(time.perf_counter() - start)
    start = time.perf_counter()
    for uid in uids:
        ledger.finish(uid, 1)
    spent["finish"].append(time.perf_counter() - start)
    start = time.perf_counter()
    ledger.commit(uids, step, step + 1)
    spent["commit"].append(time.perf_counter() - start)


def resident_mib() -> float:
    """Memory of this process: now where Linux tells, else the most it ever had."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return pages * resource.getpagesize() / 2**20


if __name__ == "__main__":
    sys.exit(main())
