"""The schedules on many devices, in virtual time: time to 100, 200 and 300 steps, half of the devices generating.

    python benchmarks/many_devices.py                # 64 and 128 devices, both sets of costs: 20 minutes
    python benchmarks/many_devices.py --devices 1024 --costs ours --steps 20
    python benchmarks/many_devices.py --quick        # seconds: does everything work?

Two sets of costs:

ours    those of ``asynchrony.py``, with P growing with the number of devices. The trainer takes twice as long on half
        of the devices.
verl    seconds that verl published of its runs of a 7B model (``VERL``). Its trainer takes about as long on half of the
        devices, where it makes no pass of old log-probabilities. P and the number of samples are smaller than there
        (16 x 16 in place of 512 x 16); lengths are lognormal with a sigma of 1, cut at 12 times their mean; a step's
        samples have places on all devices together, half of them on half.

Columns: seconds a step; of these, waiting (for groups, or before a publication for the end of requests) and training,
beside which there is the publication, ``PUBLISH`` s; time to so many steps, and how many times as fast as colocated
lockstep; the largest staleness of a group.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean

from schedule_bounds import MEAN_LENGTH, response_length
from virtual_runs import PUBLISH, Costs, Figures, virtual, write_rows

COLOCATED = "colocated lockstep"
SHOWN = (COLOCATED, "one-step-off", "async, S 1, M 1", "async, S 1, M 2", "async, S 2, M 2", "async, S 2, M 4")
MILESTONES = (100, 200, 300)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Seconds of a step that verl published: generation and training (with old log-probabilities) on all devices, and
    training on half of them; how many times as fast its asynchronous run was after 100, 200 and 300 steps."""

    generation: float
    trained: float
    trained_on_half: float
    gains: tuple[float, float, float]


VERL: Mapping[int, Published] = {
    64: Published(generation=150.72, trained=203.67, trained_on_half=156.98, gains=(2.09, 2.03, 1.83)),
    128: Published(generation=177.85, trained=167.73, trained_on_half=113.16, gains=(2.67, 2.65, 2.67)),
}
"""By number of devices: Qwen2.5-Math-7B, at most 28K response tokens, 512 prompts with 16 samples, H20."""
PROMPTS, SAMPLES = 16, 16
DEVICES = (*VERL, 1024)
"""Of the last, no seconds are published."""


def costs_of(kind: str, mode: str, devices: int, sigma: float) -> Costs:
    """Of a mode with half of the devices for each side, or with all of them in turn."""
    if kind == "ours":
        return Costs.of(mode, devices, devices // 2, sigma)
    published, colocated = VERL[devices], mode == COLOCATED
    trained = published.trained if colocated else published.trained_on_half
    rows = PROMPTS * SAMPLES
    return Costs(
        slots=rows if colocated else rows // 2,
        trained=trained / (rows * MEAN_LENGTH),
        sigma=1.0,
        groups=PROMPTS,
        samples=SAMPLES,
        decoded=published.generation / longest_response(),
    )


@cache
def longest_response() -> float:
    """Mean length of the longest response of a step, for which colocated lockstep waits."""
    rows = PROMPTS * SAMPLES
    steps = (range(first, first + rows) for first in range(0, 100 * rows, rows))
    return fmean(max(response_length(seed, 1.0) for seed in seeds) for seeds in steps)


def lines(kind: str, devices: int, sigma: float, num_steps: int, data: Path) -> Iterator[str]:
    """The rows of a table."""
    base: Figures | None = None
    for mode in SHOWN:
        found = virtual(mode, costs_of(kind, mode, devices, sigma), num_steps, data)
        base = base or found
        split = str(devices) if mode == COLOCATED else f"{devices // 2}:{devices // 2}"
        step = found.ends[-1] / num_steps
        trained = found.worked / num_steps
        cells = [mode, split, f"{step:.1f}", f"{step - trained - PUBLISH:.1f}", f"{trained:.1f}"]
        for steps in milestones(num_steps):
            gain = "" if mode == COLOCATED else f" ({base.ends[steps - 1] / found.ends[steps - 1]:.2f})"
            cells.append(duration(found.ends[steps - 1]) + gain)
        cells.append(f"{max(found.staleness or [0])}")
        yield f"| {' | '.join(cells)} |"


def milestones(num_steps: int) -> list[int]:
    """The steps that times are shown to: the last one, if a run has fewer than the first of ``MILESTONES``."""
    return [steps for steps in MILESTONES if steps <= num_steps] or [num_steps]


def duration(seconds: float) -> str:
    """Hours and minutes."""
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d}" if hours else f"{minutes} min"


def main() -> int:
    """Run and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", choices=DEVICES, default=list(VERL))
    parser.add_argument("--costs", nargs="+", choices=["ours", "verl"], default=["ours", "verl"])
    parser.add_argument("--sigma", type=float, nargs="+", default=[0.5, 1.0], help="of our costs")
    parser.add_argument("--steps", type=int, default=MILESTONES[-1])
    parser.add_argument("--quick", action="store_true", help="does everything work?")
    flags = parser.parse_args()
    if flags.quick:
        flags.steps, flags.devices, flags.sigma = 2, [64], [0.5]
    reached = [f"{steps} steps" for steps in milestones(flags.steps)]
    headings = ["mode", "devices", "s a step", "waiting", "training", *reached, "oldest"]
    with tempfile.TemporaryDirectory() as name:
        data = write_rows(Path(name))
        for kind in flags.costs:
            for devices in flags.devices if kind == "ours" else [number for number in flags.devices if number in VERL]:
                for sigma in flags.sigma if kind == "ours" else [1.0]:
                    print(f"\n{devices} devices, costs: {kind}, sigma {sigma:g}\n")
                    print(f"| {' | '.join(headings)} |\n{'|---' * len(headings)}|")
                    for line in lines(kind, devices, sigma, flags.steps, data):
                        print(line, flush=True)
                if kind == "verl":
                    gains = ", ".join(f"{gain:.2f}" for gain in VERL[devices].gains)
                    print(f"\nverl's asynchronous run on {devices // 2}:{devices // 2}: {gains} times as fast")
    return 0


if __name__ == "__main__":
    sys.exit(main())
