"""What validating a large JSONL file costs.

``python benchmarks/preflight.py --gb 1`` writes the file into a temporary folder, and removes it. Each start is a
process of its own. The factor is the CPU time of a start over that of ``orjson.loads`` alone for the same lines.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import orjson

START = """
import json, os, resource, sys, time
from buffer_rl.data import files
from buffer_rl.data.reader import read_dataset
files.MIN_BYTES = int(sys.argv[2])
begin, cpu = time.perf_counter(), os.times()
dataset = read_dataset(sys.argv[1])
seconds = time.perf_counter() - begin
cpu_seconds = sum(os.times()[:2]) - sum(cpu[:2])
begin = time.perf_counter()
for number in range(0, len(dataset), max(1, len(dataset) // 1000)):
    dataset[number]
row_us = (time.perf_counter() - begin) / min(len(dataset), 1000) * 1e6
peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"rows": len(dataset), "seconds": seconds, "cpu_seconds": cpu_seconds, "row_us": row_us,
                  "peak_mb": peak_mb, "hash": dataset.source_hash}))
"""


def write_file(path: Path, size: int) -> None:
    """Rows of some 600 bytes, as mathematics problems have: a chat, a label, metadata, an id."""
    rng = random.Random(0)
    words = [f"word{number}" for number in range(2000)]
    written = number = 0
    with path.open("wb") as file:
        while written < size:
            text = " ".join(rng.choices(words, k=50))
            row = {
                "id": f"row-{number}",
                "prompt": [{"role": "system", "content": "Reason step by step."}, {"role": "user", "content": text}],
                "label": str(rng.randrange(10**6)),
                "metadata": {"rm_type": "math", "level": rng.randrange(5), "source": "generated"},
            }
            line = json.dumps(row).encode() + b"\n"
            file.write(line)
            written += len(line)
            number += 1


def start(path: Path, min_bytes: int) -> dict[str, Any]:
    """One start in a process of its own."""
    command = [sys.executable, "-c", START, str(path), str(min_bytes)]
    answer: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return answer


def parse_seconds(path: Path) -> float:
    """The CPU time of ``orjson.loads`` for each line of the file, reading included."""
    begin = time.process_time()
    with path.open("rb") as file:
        for line in file:
            orjson.loads(line)
    return time.process_time() - begin


def main() -> None:
    """Write the file, and print a line for each start."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the file, in 10^9 bytes")
    parser.add_argument("--in-memory", action="store_true", help="also with all rows in memory")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="buffer-rl-preflight-") as folder:
        path = Path(folder, "rows.jsonl")
        write_file(path, round(options.gb * 1e9))
        print(f"{path.stat().st_size / 1e9:.2f} GB, {os.cpu_count()} CPUs")
        parsing = min(parse_seconds(path) for _ in range(3))
        print(f"orjson.loads of its lines: {parsing:.2f} s")
        starts = [("on access", 1), ("on access", 1)] + ([("in memory", 1 << 60)] if options.in_memory else [])
        for name, min_bytes in starts:
            found = start(path, min_bytes)
            print(
                f"{name:>9}: {found['seconds']:7.2f} s, {found['cpu_seconds'] / parsing:.1f} times orjson.loads, "
                f"{found['rows']} rows, peak {found['peak_mb']:.0f} MB, {found['row_us']:.0f} us to read a row, "
                f"{found['hash']}"
            )


if __name__ == "__main__":
    main()
