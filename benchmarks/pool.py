"""The pools: payloads from producers to consumers, and the time of one operation as a pool grows.

    python benchmarks/pool.py --transfer-queue-python VENV/bin/python      # about eight minutes
    python benchmarks/pool.py --quick                                      # one size, once: does everything work?

Payloads of 1 KB to 100 MB per (group, field) of 8 rows go from 1 to 8 producer processes to as many consumer
processes: through the Buffer, which owns them as it does by default, through a plain Ray actor that holds lists, by
``ray.put`` in the one and ``ray.get`` in the other, and, in an interpreter that has it, through the TransferQueue
package. All puts are done before the first get; a get sums all
numbers, so that every byte is read. A producer puts all its groups at once, as a rollout finishes groups while others
are on their way. Processes are warm: each has written to its pages of the object store before, and what the first write
costs is printed by itself. Figures are medians of five rounds, those that have a target of fifteen.

Exit status 1 if 100 MB from one producer to one consumer are below 3 GB/s put or 1 GB/s get, or take more than twice as
long, put and get together, as by ``ray.put`` and ``ray.get`` (a payload that outlives its producer is copied twice), or
if an operation takes more than twice as long in the largest pool as in the smallest. ``--quick`` judges nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from pool_operations import ROW_COUNTS, print_operations
from pool_payloads import JUDGED_ROUNDS, JUDGED_SIZE, ROUNDS, ROWS, SIZES, Found, measure_payloads

HERE = Path(__file__).resolve().parent
TARGETS = {"put": 3.0, "get": 1.0}
MOST_GROWTH = 2.0
LEAST_SHARE = 0.5
OBJECT_STORE_BYTES = 6 * 10**9


def transfer_queue(python: str | None, producers: list[int]) -> Found:
    """What the package needs for the same; empty, with a printed reason, where it cannot run."""
    if python is None:
        print("TransferQueue: skipped, --transfer-queue-python names no interpreter that has it")
        return {}
    wanted = {
        "sizes": SIZES,
        "producers": producers,
        "rows": ROWS,
        "rounds": ROUNDS,
        "object_store_bytes": OBJECT_STORE_BYTES,
    }
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, str(HERE / "pool_transfer_queue.py"), json.dumps(wanted)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"TransferQueue: skipped, {error}")
        return {}
    found: Found = {}
    for line in done.stdout.splitlines():
        if line.startswith("["):
            size, number, put, got = json.loads(line)
            found[size, number] = (put, got)
    if done.returncode:
        print(f"TransferQueue: ended with status {done.returncode}: {done.stderr.strip()[-400:]}")
    return found


def rate(found: Found, key: tuple[str, int], which: int) -> float | None:
    """GB/s of all producers or consumers together; None where it was not measured."""
    num_bytes, count = SIZES[key[0]]
    return num_bytes * count * key[1] / found[key][which] / 1e9 if key in found else None


def print_payloads(ways: dict[str, Found], producers: list[int]) -> None:
    """One table for puts and one for gets: rows/s and GB/s of each way, and how many times the others' the first is."""
    others = list(ways)[1:]
    for which, name in enumerate(TARGETS):
        print(f"\n{name}: thousand rows/s and GB/s")
        print(f"{'size':>8}{'producers':>10}" + "".join(f"{way:>22}" for way in ways), end="")
        print("".join(f"{'/ ' + way:>18}" for way in others))
        for size, (num_bytes, _) in SIZES.items():
            for number in producers:
                rates = {way: rate(found, (size, number), which) for way, found in ways.items()}
                first = next(iter(rates.values())) or 0.0
                cells = [
                    "-" if gb is None else f"{gb * 1e9 / num_bytes * ROWS / 1e3:.2f} k/s {gb:7.3f}"
                    for gb in rates.values()
                ]
                ratios = ["-" if not rates[way] else f"{first / (rates[way] or 1):.1f}" for way in others]
                print(f"{size:>8}{number:>10}" + "".join(f"{cell:>22}" for cell in cells), end="")
                print("".join(f"{ratio:>18}" for ratio in ratios))


def main() -> int:
    """Print three tables; the exit status is 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--producers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--transfer-queue-python", metavar="PATH", help="an interpreter with TransferQueue 0.1.11")
    parser.add_argument("--quick", action="store_true", help="one size, once: does everything work?")
    args = parser.parse_args()
    row_counts, sizes, judged_rounds, store_bytes = ROW_COUNTS, list(SIZES), JUDGED_ROUNDS, OBJECT_STORE_BYTES
    if args.quick:
        row_counts, sizes, judged_rounds, store_bytes, args.producers = ROW_COUNTS[:1], [JUDGED_SIZE], 1, 10**9, [1]
    growth = print_operations(row_counts)
    ways, share, cold = measure_payloads(args.producers, store_bytes, sizes, judged_rounds)
    if peer := transfer_queue(args.transfer_queue_python, args.producers):
        ways["TransferQueue"] = peer
    print_payloads(ways, args.producers)
    print(f"put of 100 MB by a process that uses the store for the first time: {0.2 / cold:.2f} GB/s")
    rates = [rate(ways["Buffer"], (JUDGED_SIZE, args.producers[0]), which) or 0.0 for which in range(len(TARGETS))]
    status = verdict(growth, dict(zip(TARGETS, rates, strict=True)), share, args.producers[0])
    return 0 if args.quick else status


def verdict(growth: float, rates: dict[str, float], share: float, producers: int) -> int:
    """Print what the targets are and what was reached. Returns the exit status."""
    print(f"an operation in the largest pool: up to {growth:.2f} times as long, target at most {MOST_GROWTH:g}")
    for name, target in TARGETS.items():
        print(f"{name} of 100 MB, {producers} producer(s): {rates[name]:.2f} GB/s, target {target:g}")
    print(f"of the rate of ray.put and ray.get together: {share:.2f}, target {LEAST_SHARE:g}")
    reached = (
        growth <= MOST_GROWTH
        and share >= LEAST_SHARE
        and all(rates[name] >= target for name, target in TARGETS.items())
    )
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
