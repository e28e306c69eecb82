"""CPU-seconds of a run by process and part: a logger that reads them at the end of each step, and a timed trainer.

What a process has used is from ``/proc``; it is exact to 0.01 s, so means over many steps are shown. The mathematics
inside the engine and the trainer is the CPU time of the one thread that does it; that of other threads of torch would
not be seen, so both have one thread. The parts of a step:

- engine forward and sampling: the steps of the engine's scheduler;
- trainer forward: making micro-batches, forward pass and loss; old log-probabilities, where there is a pass of them;
- trainer backward; trainer optimizer: sum, clip, step;
- everything else: what is left of all processes (HTTP, JSON, tasks, rewards, Buffer, ledger, driver, router, Ray).
"""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FILE = "cpu_times.jsonl"
HERE = Path(__file__).resolve()
OPTIONS: Mapping[str, Any] = {"logger": [f"{HERE}:CpuLogger"], "train_backend": f"{HERE}:make_trainer"}
"""Options of a run whose CPU times are read."""
ENGINE, TRAINER, REWARDS, RAY = "engine", "trainer", "reward processes", "Ray"
ROLES = {
    "buffer_rl.embedded.server": ENGINE,
    "router": "router",
    "ray::BufferActor": "Buffer",
    "ray::RolloutWorker": "rollout worker",
    "ray::TrainRank": TRAINER,
}
"""The process of a command line that contains the key; below the rollout worker are reward processes, and any other
process of the run is Ray's."""
PARTS = ("engine forward and sampling", "old log-probabilities", "trainer forward", "trainer backward", "optimizer")
ELSE = "everything else"
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
CPU_METRIC = "cpu_s/{}"


class CpuLogger:
    """A logger of ``--logger``: appends to ``RUN_DIR/cpu_times.jsonl`` one line a step: ``step``, ``time`` (monotonic,
    seconds, without the time that reading takes), ``cpu`` (seconds so far by process) and ``parts`` (seconds so far by
    part of the mathematics)."""

    def __init__(self, args: Any, run_dir: str) -> None:
        self._key = args.engine_api_key
        self._parts: dict[str, float] = defaultdict(float)
        self._own = self._seconds = 0.0  # what reading has cost the driver: of its processor, and by the clock
        self._file = (Path(run_dir) / FILE).open("w", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Read everything at the end of a step; evaluations are not steps."""
        if "perf/step_time" not in metrics:
            return
        came, began = time.monotonic(), time.thread_time()
        processes = list(run_processes(os.getpid()))
        cpu: dict[str, float] = defaultdict(float)
        for _, role, seconds in processes:
            cpu[role] += seconds
        cpu["driver"] -= self._own
        for part in PARTS[1:]:
            self._parts[part] += metrics.get("train/" + CPU_METRIC.format(part), 0.0)
        router = router_url(pid for pid, _, _ in processes)
        urls = [worker["url"] for worker in self._get(f"{router}/workers")["workers"]] if router else []
        if not urls and ENGINE in cpu:
            raise RuntimeError("the engine's CPU-seconds cannot be read: no router of this run names an engine")
        self._parts[PARTS[0]] = sum(float(self._get(f"{url}/server_info")["compute_cpu_s"]) for url in urls)
        line = {"step": step, "time": came - self._seconds, "cpu": cpu, "parts": self._parts}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._own += time.thread_time() - began
        self._seconds += time.monotonic() - came

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _get(self, url: str) -> Any:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return json.load(answer)


def run_processes(root: int) -> Iterator[tuple[int, str, float]]:
    """Process id, role and CPU-seconds so far of the driver ``root`` and of all below it."""
    found: dict[int, tuple[int, float]] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:  # it has just ended
                continue
            parent, ticks = int(fields[1]), int(fields[11]) + int(fields[12])
            found[int(entry.name)] = parent, ticks * TICK_S
            children[parent].append(int(entry.name))
    below = [(root, "driver")]
    while below:
        pid, role = below.pop()
        yield pid, role, found[pid][1]
        below += [(child, role_of(_command(child), role)) for child in children[pid]]


def role_of(command: str, parent: str) -> str:
    """The role of a process by its command line and the role of its parent."""
    if parent in ("rollout worker", REWARDS):
        return REWARDS
    return next((role for part, role in ROLES.items() if part in command), RAY)


def router_url(pids: Iterable[int]) -> str:
    """Of the router, from the arguments of its watcher: the router's own process has another title. Empty where the run
    has none."""
    words = next((line for pid in pids if "router_process" in (line := _command(pid))), "").split()
    if "--port" not in words:
        return ""
    host, port = (words[words.index(flag) + 1] for flag in ("--host", "--port"))
    return f"http://{host}:{port}"


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")  # a forked process's has spaces
    except OSError:
        return ""


def make_trainer(args: Any, rank: int, world_size: int, objective: Any) -> Any:
    """A trainer backend: the default one, whose steps report their CPU-seconds as metrics."""
    import torch

    from buffer_rl.trainer.peers import summed_over_ranks
    from buffer_rl.trainer.torch_trainer import TorchTrainer

    spent: dict[str, float] = defaultdict(float)

    @contextmanager
    def timed(part: str, inside: str | None = None) -> Iterator[None]:
        began = time.thread_time()
        try:
            yield
        finally:
            seconds = time.thread_time() - began
            spent[part] += seconds
            if inside is not None:
                spent[inside] -= seconds

    backward = torch.Tensor.backward

    def timed_backward(self: torch.Tensor, *values: Any, **named: Any) -> None:
        with timed("trainer backward", inside="trainer forward"):
            backward(self, *values, **named)

    class TimedTrainer(TorchTrainer):
        def log_probs(self, model: str, batch: Any) -> Any:
            with timed("old log-probabilities"):
                return super().log_probs(model, batch)

        def accumulate(self, batch: Any) -> Any:
            with timed("trainer forward"):
                return super().accumulate(batch)

        def optimizer_step(self, scale: float) -> dict[str, float]:
            with timed("optimizer"):
                metrics = super().optimizer_step(scale)
            seconds = summed_over_ranks([spent[part] for part in PARTS[1:]])
            found = {CPU_METRIC.format(part): of_part for part, of_part in zip(PARTS[1:], seconds, strict=True)}
            spent.clear()
            return {**metrics, **found}

    torch.Tensor.backward = timed_backward  # type: ignore[method-assign]
    return TimedTrainer(args, rank, world_size, objective)


make_trainer.reads_old_log_probs = False  # type: ignore[attr-defined]


def read_steps(run_dir: str | Path) -> list[dict[str, Any]]:
    """The lines that a run's logger wrote."""
    return [json.loads(line) for line in (Path(run_dir) / FILE).read_bytes().split(b"\n") if line]


def budget(steps: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], dict[str, float]]:
    """CPU-seconds a step, by process and by part, as means over all steps but the first; the parts add up to the
    processes."""
    first, last = steps[0], steps[-1]
    count = last["step"] - first["step"]
    cpu, parts = (
        {name: (last[key][name] - first[key].get(name, 0.0)) / count for name in last[key]} for key in ("cpu", "parts")
    )
    parts = {name: parts.get(name, 0.0) for name in PARTS}
    parts[ELSE] = sum(cpu.values()) - sum(parts.values())
    return cpu, parts


def budget_table(cpu: Mapping[str, float], parts: Mapping[str, float]) -> list[str]:
    """One line a process, with its part that is not mathematics; one line a part; shares of all."""
    whole = sum(cpu.values())
    mathematics = {ENGINE: parts[PARTS[0]], TRAINER: sum(parts[part] for part in PARTS[1:])}
    lines = [f"{'process':30}{'CPU s a step':>14}{'share':>8}{'not mathematics':>18}"]
    for name, seconds in sorted(cpu.items(), key=lambda item: -item[1]):
        other = seconds - mathematics.get(name, 0.0)
        lines.append(f"{name:30}{seconds:>14.3f}{seconds / whole:>8.1%}{other:>18.3f}")
    lines.append(f"{'part':30}{'CPU s a step':>14}{'share':>8}")
    lines += [f"{name:30}{seconds:>14.3f}{seconds / whole:>8.1%}" for name, seconds in parts.items()]
    lines.append(f"{'all':30}{whole:>14.3f}{1:>8.1%}")
    return lines
