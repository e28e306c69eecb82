"""Thousands of random schedules in virtual time, over the real driver and Buffer: does the bound on staleness hold?

    python benchmarks/schedule_campaign.py               # 5,000 schedules: 20 minutes on one core
    python benchmarks/schedule_campaign.py --runs 20     # seconds: does everything work?

Schedules are drawn by ``harness.schedule_trial.drawn``: S 0 to 4, windows, lognormal lengths of sigma 0.5 to 1.5,
filters to 40%, failures, quarantined groups, deaths of rollout workers and of the Buffer, resumes, tickets that end
short, publications that take long. Exit status 1 unless, over all of them:

- no group that was trained on has a token older than M;
- the largest staleness is M in some run of each (S, M), which fewer than 1,000 schedules need not reach;
- each group is leased, trained, rejected, quarantined or waits, and is trained once;
- each group that was leased more than M + 1 steps before the end was trained or rejected. Of these, the mean length of
  those that were trained is within 2% of the mean length of all; the interval is a bootstrap's over schedules.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # for tests/harness

from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.errors import BufferRLError
from harness.schedule_trial import Outcome, Setting, check, drawn, run

NEEDED = 1000
MOST_BIAS = 0.02
RESAMPLES = 2000
FIRST_SEED = 10_000


@dataclass(slots=True)
class Tally:
    """What all runs did. reached: runs of each (S, M) in which the largest staleness was M. lost: groups that were
    leased long before the end, and neither trained nor rejected. lengths: of each run, of the groups that were leased
    long before the end: total length and number of those that were trained, and of all."""

    runs: Counter[tuple[int, int]] = field(default_factory=Counter)
    reached: Counter[tuple[int, int]] = field(default_factory=Counter)
    states: Counter[GroupState] = field(default_factory=Counter)
    num_leased: int = 0
    too_old: int = 0
    lost: int = 0
    lengths: list[tuple[float, int, float, int]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Count a run."""
        setting, bound = outcome.setting, outcome.setting.schedule.max_staleness
        key = setting.schedule.target, bound
        self.runs[key] += 1
        self.reached[key] += max(outcome.staleness, default=0) == bound
        self.too_old += sum(value > bound for value in outcome.staleness)
        self.states += outcome.states
        self.num_leased += len(outcome.leased)
        last = setting.num_steps - bound - 1
        early = [uid for uid, version in outcome.leased.items() if version < last]
        trained = [outcome.offered[uid] for uid in early if uid in outcome.trained]
        offered = [outcome.offered[uid] for uid in early]
        self.lost += sum(uid not in outcome.trained and uid not in outcome.rejected for uid in early)
        self.lengths.append((sum(trained), len(trained), sum(offered), len(offered)))

    def bias(self) -> tuple[float, float, float]:
        """Mean length of the trained groups over that of all, and the bounds of its interval of 95%."""
        values = np.asarray(self.lengths)
        draws = np.random.default_rng(0).multinomial(len(values), np.full(len(values), 1 / len(values)), RESAMPLES)
        sums = np.vstack([values.sum(axis=0), draws @ values])
        ratios = (sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3])
        low, high = np.quantile(ratios[1:], [0.025, 0.975])
        return float(ratios[0]), float(low), float(high)


def attempt(setting: Setting, folder: Path, tally: Tally) -> None:
    """One run; what it breaks is noted."""
    try:
        outcome = run(setting, folder)
        check(outcome)
    except (AssertionError, BufferRLError, RuntimeError) as error:
        tally.problems.append(f"seed {setting.seed}: {type(error).__name__}: {error} in {setting}")
    else:
        tally.add(outcome)
    finally:
        for file in folder.glob("*.sqlite*"):
            file.unlink()


def report(tally: Tally) -> bool:
    """Print what was found; whether all is well."""
    for problem in tally.problems:
        print(problem)
    print(f"\n{'S':>2}{'M':>3}{'runs':>7}{'M reached':>11}")
    for (target, bound), runs in sorted(tally.runs.items()):
        print(f"{target:>2}{bound:>3}{runs:>7}{tally.reached[target, bound]:>11}")
    states = tally.states
    live = states[GroupState.LEASED] + states[GroupState.FINISHED] + states[GroupState.PENDING]
    ended = {state: states[state] for state in (GroupState.TRAINED, GroupState.REJECTED, GroupState.QUARANTINED)}
    parts = " + ".join(f"{state} {number:,}" for state, number in ended.items())
    print(f"\nleased {tally.num_leased:,} = {parts} + live {live:,}")
    ratio, low, high = tally.bias()
    num_early = sum(row[3] for row in tally.lengths)
    print(f"leased more than M + 1 steps before the end: {num_early:,}; neither trained nor rejected: {tally.lost}")
    print(f"their trained / offered length: {ratio:.4f}, 95% {low:.4f} to {high:.4f}")
    num_reached = sum(tally.reached[key] > 0 for key in tally.runs)
    num_runs = tally.runs.total() + len(tally.problems)
    exact = tally.num_leased == sum(ended.values()) + live
    print(
        f"{num_runs:,} schedules: {len(tally.problems)} broken; {tally.too_old} groups older than M; M reached in "
        f"{num_reached} of {len(tally.runs)} (S, M); trained / offered length {ratio:.4f} ({low:.4f} to {high:.4f})"
    )
    well = not (tally.problems or tally.too_old or tally.lost) and exact
    return well and (num_runs < NEEDED or (num_reached == len(tally.runs) and abs(ratio - 1) <= MOST_BIAS))


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5000)
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    flags = parser.parse_args(argv)
    tally, began = Tally(), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        for seed in range(flags.first_seed, flags.first_seed + flags.runs):
            attempt(drawn(seed), Path(name), tally)
    print(f"{flags.runs:,} schedules in {(time.monotonic() - began) / 60:.1f} minutes")
    return 0 if report(tally) else 1


if __name__ == "__main__":
    sys.exit(main())
