"""The progress display of a run: a live panel on a terminal, one line a step elsewhere, or nothing.

The driver calls it from its own thread; rich redraws from another, so every access to the board holds the lock.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType, TracebackType
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from buffer_rl.observe.board import Board, eval_line, format_count, format_duration, reward_of_all, step_line
from buffer_rl.observe.curve import sparkline

Mode = Literal["auto", "rich", "plain", "none"]
_REFRESH_HZ = 4
_BAR_WIDTH = 32
_ROLLOUT_PHASES = ("generate", "evaluate")  # those that the bar of groups is of
_STOPPED = "stopped"


class Progress:
    """Shows how far a run is. Use it as a context manager.

    mode: ``auto`` is ``rich`` on a terminal and ``plain`` elsewhere. total_steps: None where it is not known.
    console, clock: for tests and for callers that own a terminal; ``clock`` returns seconds.
    """

    def __init__(
        self,
        mode: Mode,
        total_steps: int | None,
        title: str,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console(file=sys.stdout)
        self._mode = ("rich" if self._console.is_terminal else "plain") if mode == "auto" else mode
        self._clock = clock
        self._lock = threading.Lock()
        now = clock()
        self._board = Board(title=title, total_steps=total_steps, started_at=now, phase_since=now)
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        if self._mode == "rich":
            self._live = Live(
                get_renderable=self.render, console=self._console, refresh_per_second=_REFRESH_HZ, transient=False
            )
            self._live.start()
        else:
            self._say(self._board.title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.phase("done" if kind is None else _STOPPED)
        if self._live is not None:
            self._live.stop()
            self._live = None

    def phase(self, name: str) -> None:
        """What the run does now: ``generate``, ``train``, ``publish``, ``evaluate`` …"""
        with self._lock:
            if name != self._board.phase:
                if self._board.phase in _ROLLOUT_PHASES and name != _STOPPED:
                    self._board.groups_done = self._board.groups_wanted  # the last groups end between two looks
                self._board.phase, self._board.phase_since = name, self._clock()

    def planned(self, total_steps: int) -> None:
        """How many training steps the run has."""
        with self._lock:
            self._board.total_steps = total_steps

    def groups(self, done: int, wanted: int, drops: Mapping[str, int] = MappingProxyType({})) -> None:
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
            self._board.record_eval(metrics, step)
        self._say(eval_line(metrics, step))

    def notice(self, line: str) -> None:
        """One line that stays on the screen; may be called from any thread."""
        if self._mode != "none":
            self._console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)

    def render(self) -> RenderableType:
        """The panel as it is now."""
        with self._lock:
            return _panel(self._board, self._clock())

    def _say(self, line: str) -> None:
        if self._mode == "plain":
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _panel(board: Board, now: float) -> Panel:
    left = f"{format_duration(now - board.started_at)} elapsed"
    remaining = board.remaining_s(now)
    if remaining is not None and board.phase not in ("done", _STOPPED):
        left += f", about {format_duration(remaining)} to go"
    return Panel(
        Group(_bars(board, now), Text(""), _figures(board)),
        title=Text(board.title, style="bold"),
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
    grid.add_row("steps", _bar(board.steps_done, board.total_steps), _count(board.steps_done, board.total_steps))
    grid.add_row("groups", _bar(board.groups_done, board.groups_wanted), _count(board.groups_done, board.groups_wanted))
    grid.add_row("phase", Text(phase, style="bold"), "")
    return grid


def _bar(done: int, total: int | None) -> RenderableType:
    if not total:
        return Text("")
    return ProgressBar(total=total, completed=min(done, total), width=_BAR_WIDTH)


def _count(done: int, total: int | None) -> str:
    return f"{done} of {total}" if total else str(done)


def _figures(board: Board) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(width=9, style="dim")
    grid.add_column()
    metrics = board.metrics
    if board.rewards:
        grid.add_row("reward", Text(f"{board.rewards[-1]:.3f}  {sparkline(board.rewards, 40)}"))
        if more := reward_of_all(metrics):
            grid.add_row("", Text(more.strip(" ()")))
    if board.evals:
        scores = "  ".join(f"{name} {score:.3f}" for name, score in board.evals.items())
        grid.add_row("eval", Text(f"{scores}  (after {board.eval_step} steps)"))
    training = [
        f"{label} {metrics[name]:.3f}"
        for label, name in (("loss", "train/loss"), ("entropy", "train/entropy"), ("grad norm", "train/grad_norm"))
        if name in metrics
    ]
    if training:
        grid.add_row("train", Text("  ".join(training)))
    if "perf/tokens_per_s" in metrics or "perf/step_time" in metrics:
        speed = []
        if "perf/tokens_per_s" in metrics:
            speed.append(f"{format_count(metrics['perf/tokens_per_s'])} tokens/s")
        if "perf/step_time" in metrics:
            speed.append(f"{metrics['perf/step_time']:.1f} s a step")
        grid.add_row("speed", Text("  ".join(speed)))
    if drops := Counter(board.drops) + Counter(board.running_drops):
        dropped = "  ".join(f"{count} {reason}" for reason, count in sorted(drops.items()))
        grid.add_row("dropped", Text(f"{dropped}  (groups, whole run)"))
    return grid
