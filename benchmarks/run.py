"""All benchmarks in one run: steps by phase and process, publications of weights, the engine against ``generate``.

    python benchmarks/run.py            # about three minutes

Exit status 1 if the engine is less than 4 times as fast as ``generate``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
BENCHMARKS = (("step_time.py", ()), ("publication.py", ("--sizes", "10,100")), ("engine_decode.py", ("--http",)))


def main() -> int:
    """Run each in a process of its own, one after another; the first exit status that is not 0."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    statuses = []
    for name, flags in BENCHMARKS:
        print(f"== {name}", flush=True)
        statuses.append(subprocess.run([sys.executable, str(HERE / name), *flags], env=environment).returncode)
    return next((status for status in statuses if status), 0)


if __name__ == "__main__":
    sys.exit(main())
