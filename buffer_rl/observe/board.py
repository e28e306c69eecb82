"""What is known of a run at one moment, for display: plain state, and its lines of text. No terminal here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

DROP_PREFIX = "rollout/drop_"


@dataclass(slots=True, kw_only=True)
class Board:
    """The state of a progress display.

    steps_done counts training steps since ``first_step`` (a resumed run starts above 0). Times are in seconds of
    the display's clock.
    """

    title: str
    total_steps: int | None
    started_at: float
    phase: str = "starting"
    phase_since: float = 0.0
    first_step: int | None = None
    last_step: int | None = None
    groups_done: int = 0
    groups_wanted: int = 0
    running_drops: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    drops: dict[str, int] = field(default_factory=dict)
    evals: dict[str, float] = field(default_factory=dict)
    eval_step: int | None = None
    rewards: list[float] = field(default_factory=list)
    training_started_at: float | None = None

    @property
    def steps_done(self) -> int:
        """Training steps that this run, resumed or not, has behind it."""
        return 0 if self.last_step is None else self.last_step + 1

    def record_step(self, metrics: Mapping[str, float], step: int, now: float) -> None:
        """Take over the metrics of training step ``step``, which has just ended."""
        if self.first_step is None:
            self.first_step = step
            duration = metrics.get("perf/step_time", 0.0)
            self.training_started_at = now - duration
        self.last_step = step
        self.metrics = dict(metrics)
        for name, count in drops_of(metrics).items():
            self.drops[name] = self.drops.get(name, 0) + count
        if "rollout/raw_reward" in metrics:
            self.rewards.append(float(metrics["rollout/raw_reward"]))
        self.groups_done = 0
        self.running_drops = {}

    def record_eval(self, metrics: Mapping[str, float], step: int) -> None:
        """Take over the results of the evaluation after ``step`` training steps."""
        self.evals = eval_scores(metrics)
        self.eval_step = step

    def remaining_s(self, now: float) -> float | None:
        """Expected time to the end, from the mean time of this run's steps, evaluations included."""
        if self.total_steps is None or self.last_step is None or self.first_step is None:
            return None
        if self.training_started_at is None:
            return None
        done = self.last_step - self.first_step + 1
        return (now - self.training_started_at) / done * max(0, self.total_steps - self.steps_done)


def drops_of(metrics: Mapping[str, float]) -> dict[str, int]:
    """Dropped groups by reason, from ``rollout/drop_REASON``; reasons with no group are left out."""
    return {
        name.removeprefix(DROP_PREFIX): int(value)
        for name, value in metrics.items()
        if name.startswith(DROP_PREFIX) and value
    }


def eval_scores(metrics: Mapping[str, float]) -> dict[str, float]:
    """Mean reward of each evaluation set, from ``eval/NAME``; finer metrics (``eval/NAME/...``) are left out."""
    return {
        name.removeprefix("eval/"): float(value)
        for name, value in metrics.items()
        if name.startswith("eval/") and name.count("/") == 1 and value is not None
    }


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
    drops = drops_of(metrics)
    if drops:
        parts.append("dropped " + ", ".join(f"{count} {reason}" for reason, count in sorted(drops.items())))
    if "perf/tokens_per_s" in metrics:
        parts.append(f"{format_count(metrics['perf/tokens_per_s'])} tokens/s")
    if "perf/step_time" in metrics:
        parts.append(f"{metrics['perf/step_time']:.1f} s")
    return "  ".join(parts)


def reward_of_all(metrics: Mapping[str, float]) -> str:
    """``" (0.250 with dropped groups)"`` where a filter made the mean reward another one, else an empty text."""
    everything = metrics.get("rollout/raw_reward_all")
    if everything is None or everything == metrics.get("rollout/raw_reward"):
        return ""
    return f" ({everything:.3f} with dropped groups)"


def eval_line(metrics: Mapping[str, float], step: int) -> str:
    """One line of text for one evaluation."""
    scores = ", ".join(f"{name} {score:.3f}" for name, score in eval_scores(metrics).items())
    return f"evaluation after {step} steps: {scores or 'no scores'}"
