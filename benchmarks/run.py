"""All benchmarks in one run: steps by phase and process, publications of weights, the engine against ``generate``.

    python benchmarks/run.py            # about three minutes
    python benchmarks/run.py --quick    # the shortest form of each: does everything work?

Exit status 1 if the engine is less than 4 times as fast as ``generate``, which ``--quick`` does not judge.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
BENCHMARKS = (("step_time.py", ()), ("publication.py", ("--sizes", "10,100")), ("engine_decode.py", ("--http",)))
QUICK = (
    ("step_time.py", ("--steps", "1")),
    ("publication.py", ("--sizes", "10", "--repeats", "1")),
    ("engine_decode.py", ("--http", "--groups", "1", "--require", "0")),
)


def main() -> int:
    """Run each in a process of its own, one after another; the first exit status that is not 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the shortest form of each: does everything work?")
    flags = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    statuses = []
    for name, options in QUICK if flags.quick else BENCHMARKS:
        print(f"== {name}", flush=True)
        # Forked, so that a process that has imported torch, as that of a test, has done so for each.
        process = multiprocessing.get_context("fork").Process(target=run_script, args=([str(HERE / name), *options],))
        process.start()
        process.join()
        statuses.append(process.exitcode)
    return next((abs(status) for status in statuses if status), 0)


def run_script(words: list[str]) -> None:
    """A script and its arguments, in this process."""
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    sys.exit(main())
