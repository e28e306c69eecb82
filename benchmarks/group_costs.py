"""What one group costs in the Buffer as more and more groups were in it, and whether another commit does it cheaper.

    python benchmarks/group_costs.py                                # 10^3, 10^4 and 10^5 groups: about five minutes
    python benchmarks/group_costs.py --against HEAD~1               # both commits in turn, three rounds of each
    python benchmarks/group_costs.py --groups 1000000 --parts queue # up to 10^6 groups

Parts: "ledger", its transitions, and "steps", whole steps of 64 groups, after as many groups, with a ledger in a file;
"process", steps of a Buffer that made all groups itself; "pool", one step of all groups; "queue", with as many pending
groups; "evaluation", of one as large. The last three and "process" take time or memory for every group, so --most-held
ends them earlier. Each part, size and round is a process of its own.

Exit status 1 if an operation takes more than twice as long per group at the most groups as at the fewest, or, in each
round, longer than in every round of the other commit, and by more than a tenth.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import group_cost_parts

import buffer_rl

HERE = Path(__file__).resolve().parent
SIZES = (10**3, 10**4, 10**5, 10**6)
HELD = ("process", "pool", "queue", "evaluation")
MOST_GROWTH = 2.0
WORSE = 1.1
LEAST_US = 1.0
"""Growth and differences of operations that stay below this are not judged."""

Found = dict[tuple[str, str], dict[int, list[float]]]
"""Microseconds a group in each round, by part and operation, and by size."""


def main() -> int:
    """Print a table for each part; the exit status is 1 if something grows or became slower."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", help="measure this commit as well, in turn with this tree")
    parser.add_argument("--parts", nargs="+", choices=group_cost_parts.PARTS, default=list(group_cost_parts.PARTS))
    parser.add_argument("--groups", type=int, default=10**5, help="the largest size (default: 100000)")
    parser.add_argument("--most-held", type=int, help="the same for parts that hold all groups (default: --groups)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the files go: a local disk (default: the system's)")
    parser.add_argument("--one", nargs=4, metavar=("PART", "SIZE", "PATH", "TREE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        part, size, path, tree = options.one
        assert Path(buffer_rl.__file__).is_relative_to(tree), f"{buffer_rl.__file__} is not of {tree}"
        print(json.dumps(group_cost_parts.measure(part, int(size), Path(path))))
        return 0
    most = dict.fromkeys(HELD, options.most_held or options.groups)
    plan = {part: [size for size in SIZES if size <= most.get(part, options.groups)] for part in options.parts}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, _trees(options.against, Path(folder)) as trees:
        found = measure_trees(trees, plan, options.rounds, Path(folder))
    ours, *others = found.values()
    for part, sizes in plan.items():
        print_part(part, sizes, found)
    faults = [*grown(ours), *(slower(ours, others[0]) if others else ())]
    print(*faults or ["nothing grows, and nothing is slower"], sep="\n")
    return 1 if faults else 0


@contextmanager
def _trees(commit: str | None, folder: Path) -> Iterator[dict[str, Path]]:
    """This tree, and a checkout of ``commit``, by what the tables call them."""
    trees = {"this": HERE.parent}
    if commit is None:
        yield trees
        return
    tree = folder / "against"
    git = ["git", "-C", str(HERE.parent), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
    try:
        yield trees | {commit: tree}
    finally:
        subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def measure_trees(trees: dict[str, Path], plan: dict[str, list[int]], rounds: int, folder: Path) -> dict[str, Found]:
    """Every part at its sizes in each tree, one process after another, the trees in turn."""
    found: dict[str, Found] = {name: defaultdict(dict) for name in trees}
    for part, size in [(part, size) for part, sizes in plan.items() for size in sizes]:
        for _ in range(rounds):
            for number, (name, tree) in enumerate(trees.items()):
                path = folder / f"{number}-{part}-{size}.sqlite"
                command = [sys.executable, __file__, "--one", part, str(size), str(path), str(tree)]
                environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
                done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
                for operation, micro in json.loads(done.stdout).items():
                    found[name][part, operation].setdefault(size, []).append(micro)
        for file in folder.glob("*.sqlite*"):
            file.unlink()
        print(f"{part}, {size:,} groups: measured", file=sys.stderr, flush=True)
    return found


def print_part(part: str, sizes: Sequence[int], found: dict[str, Found]) -> None:
    """Median and range of the rounds, a line for each tree, and their ratio."""
    what = (group_cost_parts.PARTS[part].__doc__ or "").splitlines()[0]
    print(f"\n{part}: microseconds a group. {what}")
    print(f"{'operation':<18}{'tree':<12}" + "".join(f"{size:>26,}" for size in sizes) + f"{'last / first':>14}")
    ours, *others = found.values()
    for key in [key for key in ours if key[0] == part]:
        for name, tree in found.items():
            cells = [f"{_middle(t):.1f} ({min(t):.1f} - {max(t):.1f})" for size in sizes if (t := tree[key][size])]
            line = f"{key[1]:<18}{name[:11]:<12}" + "".join(f"{cell:>26}" for cell in cells)
            print(line + f"{_middle(tree[key][sizes[-1]]) / _middle(tree[key][sizes[0]]):>14.2f}")
        for other in others:
            ratios = [f"{_middle(ours[key][size]) / _middle(other[key][size]):.2f}" for size in sizes]
            print(f"{'':<18}{'ratio':<12}" + "".join(f"{ratio:>26}" for ratio in ratios))


def grown(found: Found) -> list[str]:
    """A line for each operation that costs much more per group at the most groups than at the fewest."""
    lines = []
    for (part, operation), sizes in found.items():
        first, last = _middle(sizes[min(sizes)]), _middle(sizes[max(sizes)])
        if last > MOST_GROWTH * first and last > LEAST_US:
            lines.append(f"GROWS   {part}, {operation}: {first:.1f} to {last:.1f}, most {MOST_GROWTH:g} times")
    return lines


def slower(ours: Found, other: Found) -> list[str]:
    """A line for each operation and size that takes longer than in the other tree."""
    lines = []
    for (part, operation), sizes in ours.items():
        for size, times in sizes.items():
            before = other[part, operation][size]
            here, there = _middle(times), _middle(before)
            if here > WORSE * there and min(times) > max(before) and here > LEAST_US:
                lines.append(f"SLOWER  {part}, {operation}, {size:,} groups: {there:.1f} before, {here:.1f} now")
    return lines


def _middle(times: Sequence[float]) -> float:
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
