"""The progress display of a run: a live panel on a terminal, one line a step elsewhere, or nothing.

The driver calls it from its own thread; rich redraws from another, so every access to the board holds the lock.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from buffer_rl.observe.curve import sparkline
from buffer_rl.observe.metrics import drops_of, eval_scores, reward_with_dropped
from buffer_rl.observe.startup import StartUp, text_of
from buffer_rl.observe.terminal import printable

Mode = Literal["auto", "rich", "plain", "none"]
_REFRESH_HZ = 4
_BAR_WIDTH = 32
ROLLOUT_PHASES = ("generate", "evaluate")  # those that the bar of groups is of
_STOPPED = "stopped"
_STARTING = "starting"


@dataclass(slots=True, kw_only=True)
class Board:
    """The state of a progress display.

    steps_done counts training steps since ``first_step`` (a resumed run starts above 0). Times are in seconds of
    the display's clock.
    """

    title: str
    total_steps: int | None
    started_at: float
    phase: str = _STARTING
    start: str = ""
    phase_since: float = 0.0
    first_step: int | None = None
    last_step: int | None = None
    groups_done: int = 0
    groups_wanted: int = 0
    running_drops: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    drops: dict[int, Counter[str]] = field(default_factory=dict)  # of each training step
    evals: dict[str, float] = field(default_factory=dict)
    eval_step: int | None = None
    rewards: list[float] = field(default_factory=list)
    training_started_at: float = 0.0

    @property
    def steps_done(self) -> int:
        """Training steps done, those before a resume included."""
        return 0 if self.last_step is None else self.last_step + 1

    def record_step(self, metrics: Mapping[str, float], step: int, now: float) -> None:
        """Store the metrics of training step ``step``, which has just ended."""
        if self.first_step is None:
            self.first_step, self.training_started_at = step, now - metrics.get("perf/step_time", 0.0)
        self.last_step = step
        self.metrics = dict(metrics)
        self.drops.setdefault(step, Counter()).update(drops_of(metrics))
        if "rollout/raw_reward" in metrics:
            self.rewards.append(float(metrics["rollout/raw_reward"]))
        self.groups_done = 0
        self.running_drops = {}

    def go_back(self, step: int) -> None:
        """The training steps from ``step`` on are done again."""
        if self.last_step is not None and (again := self.last_step + 1 - step) > 0:
            del self.rewards[-again:]
            self.last_step = step - 1 if step else None
        self.drops = {done: drops for done, drops in self.drops.items() if done < step}
        self.first_step = None

    def remaining_s(self, now: float) -> float | None:
        """Expected time to the end, from the mean time of this run's steps, evaluations included."""
        if self.total_steps is None or self.last_step is None or self.first_step is None:
            return None
        done = self.last_step - self.first_step + 1
        return (now - self.training_started_at) / done * max(0, self.total_steps - self.steps_done)


class Progress:
    """Shows how far a run is. Use it as a context manager.

    mode: ``auto`` is ``rich`` on a terminal and ``plain`` elsewhere. total_steps: None if it is not known. startup:
    what is shown until the first rollout; the panel goes on with its line.
    console, clock: for tests and for callers that own a terminal; ``clock`` returns seconds.
    """

    def __init__(
        self,
        mode: Mode,
        total_steps: int | None,
        title: str,
        *,
        startup: StartUp | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._startup = startup or StartUp()
        self._console = console or Console(file=sys.stdout)
        self._mode = ("rich" if self._console.is_terminal else "plain") if mode == "auto" else mode
        self._clock = clock
        self._lock = threading.Lock()
        now = clock()
        self._board = Board(title=title, total_steps=total_steps, started_at=now, phase_since=now)
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        if self._mode == "rich":
            self._startup.silence()
            self._live = Live(get_renderable=self.render, console=self._console, refresh_per_second=_REFRESH_HZ)
            self._live.start()
        elif not self._startup.times:
            self._say(self._board.title)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.phase("done" if kind is None else _STOPPED)
        if self._live is not None:
            self._live.stop()
            self._live = None

    def phase(self, name: str) -> None:
        """What the run does now: ``generate``, ``train``, ``publish``, ``evaluate`` …"""
        with self._lock:
            self._startup.end_line()
            if name != self._board.phase:
                if self._board.phase in ROLLOUT_PHASES and name != _STOPPED:
                    self._board.groups_done = self._board.groups_wanted  # the last groups end between two looks
                self._board.phase, self._board.phase_since = name, self._clock()

    def ready(self, part: str) -> None:
        """A part of the run is ready; see ``StartUp``."""
        with self._lock:
            self._startup.ready(part)
            self._board.start = text_of(self._startup.times)

    def went_back(self, step: int) -> None:
        """The run does training step ``step`` and later ones again."""
        with self._lock:
            self._board.go_back(step)

    def planned(self, total_steps: int) -> None:
        """How many training steps the run has."""
        with self._lock:
            self._board.total_steps = total_steps

    def groups(self, done: int, wanted: int, drops: Mapping[str, int]) -> None:
        """How many of the current rollout's groups are finished, and how many were dropped, by reason."""
        with self._lock:
            self._board.groups_done, self._board.groups_wanted = done, wanted
            self._board.running_drops = dict(drops)

    def step(self, metrics: Mapping[str, float], step: int) -> None:
        """Training step ``step`` (counted from 0) has ended with these metrics."""
        with self._lock:
            self._board.record_step(metrics, step, self._clock())
        self._say(step_line(metrics, step, self._board.total_steps))

    def eval(self, metrics: Mapping[str, float], step: int) -> None:
        """The evaluation after ``step`` training steps has ended with these metrics."""
        with self._lock:
            self._board.evals, self._board.eval_step = eval_scores(metrics), step
        self._say(eval_line(metrics, step))

    def notice(self, line: str) -> None:
        """One line that stays on the screen; may be called from any thread."""
        if self._mode != "none":
            self._startup.end_line()
            self._console.print(printable(line), style="yellow", markup=False, highlight=False, soft_wrap=True)

    def render(self) -> RenderableType:
        """The panel as it is now."""
        with self._lock:
            return _panel(self._board, self._clock())

    def _say(self, line: str) -> None:
        if self._mode == "plain":
            self._console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


def _panel(board: Board, now: float) -> Panel:
    left = f"{format_duration(now - board.started_at)} elapsed"
    remaining = board.remaining_s(now)
    if remaining is not None and board.phase not in ("done", _STOPPED):
        left += f", about {format_duration(remaining)} to go"
    return Panel(
        Group(_bars(board, now), Text(""), _figures(board)),
        title=Text(printable(board.title), style="bold"),
        subtitle=Text(left, style="dim"),
        title_align="left",
        subtitle_align="right",
        border_style="cyan",
        width=78,
    )


def _bars(board: Board, now: float) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(width=9, style="dim")
    grid.add_column(width=_BAR_WIDTH)
    grid.add_column()
    phase = f"{board.phase} {format_duration(now - board.phase_since)}"
    counts = {"steps": (board.steps_done, board.total_steps), "groups": (board.groups_done, board.groups_wanted)}
    for name, (done, total) in counts.items():
        bar = ProgressBar(total=total, completed=min(done, total), width=_BAR_WIDTH) if total else ""
        grid.add_row(name, bar, f"{done} of {total}" if total else str(done))
    grid.add_row("phase", Text(phase, style="bold"), "")
    return grid


def _figures(board: Board) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(width=9, style="dim")
    grid.add_column()
    metrics = board.metrics
    if board.phase == _STARTING:
        grid.add_row("start", Text(printable(board.start)))
    if board.rewards:
        grid.add_row("reward", Text(f"{board.rewards[-1]:.3f}  {sparkline(board.rewards, 40)}"))
        if more := reward_of_all(metrics):
            grid.add_row("", Text(more.strip(" ()")))
    if board.evals:
        scores = "  ".join(f"{name} {score:.3f}" for name, score in board.evals.items())
        grid.add_row("eval", Text(printable(f"{scores}  (after {board.eval_step} steps)")))
    named = {"loss": "train/loss", "entropy": "train/entropy", "grad norm": "train/grad_norm"}
    if training := [f"{label} {metrics[name]:.3f}" for label, name in named.items() if name in metrics]:
        grid.add_row("train", Text("  ".join(training)))
    if speed := _speed(metrics, "s a step"):
        grid.add_row("speed", Text("  ".join(speed)))
    if drops := sum(board.drops.values(), Counter(board.running_drops)):
        dropped = "  ".join(f"{count} {reason}" for reason, count in sorted(drops.items()))
        grid.add_row("dropped", Text(printable(f"{dropped}  (groups, whole run)")))
    return grid


def format_duration(seconds: float) -> str:
    """``75.2`` as ``1:15``, ``3725`` as ``1:02:05``."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_count(number: float) -> str:
    """``950`` as ``950``, ``21340`` as ``21.3k``, ``2.5e6`` as ``2.5M``."""
    if abs(number) < 1000:
        return f"{number:.0f}"
    return f"{number / 1e3:.1f}k" if abs(number) < 1e6 else f"{number / 1e6:.1f}M"


def step_line(metrics: Mapping[str, float], step: int, total_steps: int | None) -> str:
    """One line of text for one training step; figures that the step did not report are left out."""
    total = "" if total_steps is None else f"/{total_steps}"
    parts = [f"step {step + 1}{total}"]
    shown = (
        ("reward", "rollout/raw_reward", "{:.3f}"),
        ("loss", "train/loss", "{:.4f}"),
        ("entropy", "train/entropy", "{:.3f}"),
        ("grad norm", "train/grad_norm", "{:.3f}"),
        ("length", "rollout/response_len/mean", "{:.1f}"),
    )
    for label, name, form in shown:
        if name in metrics:
            more = reward_of_all(metrics) if label == "reward" else ""
            parts.append(f"{label} {form.format(metrics[name])}{more}")
    if drops := drops_of(metrics):
        parts.append("dropped " + ", ".join(f"{count} {reason}" for reason, count in sorted(drops.items())))
    return "  ".join([*parts, *_speed(metrics, "s")])


def _speed(metrics: Mapping[str, float], unit: str) -> list[str]:
    """Tokens per second, and the time of the step in ``unit``, as far as they were measured."""
    tokens, seconds = metrics.get("perf/tokens_per_s"), metrics.get("perf/step_time")
    speed = [] if tokens is None else [f"{format_count(tokens)} tokens/s"]
    return speed if seconds is None else [*speed, f"{seconds:.1f} {unit}"]


def reward_of_all(metrics: Mapping[str, float]) -> str:
    """``" (0.250 with dropped groups)"`` where a filter made the mean reward another one, else an empty text."""
    everything = reward_with_dropped(metrics)
    return "" if everything is None else f" ({everything:.3f} with dropped groups)"


def eval_line(metrics: Mapping[str, float], step: int) -> str:
    """One line of text for one evaluation."""
    scores = ", ".join(f"{name} {score:.3f}" for name, score in eval_scores(metrics).items())
    return f"evaluation after {step} steps: {scores or 'no scores'}"
