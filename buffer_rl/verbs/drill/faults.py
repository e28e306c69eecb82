"""The faults of a drill: which process of a live run, what happens to it, in which phase of a step.

Reads ``/proc``, so Linux only.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

TITLES: Mapping[str, tuple[str, ...]] = {
    "engine": ("buffer_rl.embedded.server", "buffer_rl_sglang/server_process"),
    "rollout worker": ("ray::RolloutWorker",),
    "Buffer": ("ray::BufferActor",),
    "trainer rank": ("ray::TrainRank",),
    "role": ("ray::RoleWorker", "ray::FusedProcess"),
    "reward model": ("ray::RewardModelWorker",),
    "router": ("buffer_rl.engines.router_process", "::router"),
}
"""The parts of a run, by what the command line of their processes begins with or contains."""
KINDS = {"kill": "killed", "stop": "stopped", "slow": "ten times slower", "cut": "cut off", "disk": "on a full disk"}
"""What happens to the process, by the kind of a fault."""
SLICE_S = 0.1
PHASES = {"generation": "perf/rollout_time", "training": "perf/train_time", "publication": "perf/publish_time"}
"""The phases of a step in their order, with the metrics that tell how long each took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process as it was seen. ``command`` is its command line, or its title where it set one."""

    pid: int
    parent: int
    command: str

    def alive(self) -> bool:
        """Whether it is still there, and no zombie; a later process of the same id does not count."""
        now = read_process(Path("/proc", str(self.pid)))
        return now is not None and now.command.partition(".")[0] == self.command.partition(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that happens to a live process. kind: "kill", "stop", "slow" (it has a tenth of its time for a while,
    and is to be left alone), "cut" (the router is silent for a while) or "disk" (what the process writes meets a full
    disk)."""

    kind: str
    part: str
    phase: str

    def __str__(self) -> str:
        return f"{self.part} {KINDS[self.kind]} in {self.phase}"


def planned(parts: Sequence[str], kinds: Sequence[str], *, every_phase: bool) -> list[Fault]:
    """Each kind of fault of each part that the run has: in every phase, or in one each, in turns."""
    phases = list(PHASES)
    found = [Fault(kind=kind, part=part, phase=phase) for kind in kinds for part in parts for phase in phases]
    if every_phase:
        return found
    return [fault for number, fault in enumerate(found) if number % len(phases) == number // len(phases) % len(phases)]


def strike(fault: Fault, driver: int) -> Process | None:
    """Put the fault in, at once. Returns the process that it met; None if there is none."""
    titles = TITLES[fault.part]
    met = next((each for each in descendants(driver) if any(title in each.command for title in titles)), None)
    if met is None:
        return None
    if fault.kind == "disk":
        resource.prlimit(met.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    elif fault.kind != "slow":  # see ``hold_back``
        os.kill(met.pid, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
    return met


def hold_back(met: Process, seconds: float) -> None:
    """For so long, let the process compute for a tenth of the time."""
    end = time.monotonic() + seconds
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < end:
            os.kill(met.pid, signal.SIGSTOP)
            time.sleep(0.9 * SLICE_S)
            os.kill(met.pid, signal.SIGCONT)
            time.sleep(0.1 * SLICE_S)


def lift(fault: Fault, met: Process) -> None:
    """Take a fault back that passes by itself: the network is there again, the disk has room."""
    if fault.kind == "disk" and met.alive():
        resource.prlimit(met.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    elif fault.kind == "cut" and met.alive():
        os.kill(met.pid, signal.SIGCONT)


def moment(phase: str, step: Mapping[str, float]) -> float:
    """Seconds from the end of a step to the middle of ``phase`` in the next one, as an undisturbed step took them."""
    lengths = [step.get(metric, 0.0) for metric in PHASES.values()]
    number = list(PHASES).index(phase)
    return sum(lengths[:number]) + lengths[number] / 2


def usual_step(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each metric that tells how long a phase takes, over all steps but the first."""
    names = {*PHASES.values(), "perf/step_time"}
    later = steps[1:] or steps
    return {name: median(values) for name in names if (values := [step[name] for step in later if name in step])}


def descendants(pid: int) -> list[Process]:
    """Children of ``pid``, their children and so on, without zombies; ``pid`` itself is not among them."""
    table = [process for folder in Path("/proc").glob("[0-9]*") if (process := read_process(folder)) is not None]
    found: list[Process] = []
    parents = {pid}
    while parents:
        generation = [process for process in table if process.parent in parents]
        found += generation
        parents = {process.pid for process in generation}
    return found


def read_process(folder: Path) -> Process | None:
    """The process of a folder of ``/proc``; None if it ended, or is a zombie."""
    try:
        state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:  # it ended meanwhile
        return None
    return None if state == "Z" else Process(pid=int(folder.name), parent=int(parent), command=words)
