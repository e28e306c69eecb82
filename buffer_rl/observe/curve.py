"""The learning curve of a run, from its metrics: a picture, and a line of blocks for a terminal.

``rollout/raw_reward`` at step r and ``eval/NAME`` at step r both speak of weight version r, so they share the axis. A
dynamic filter selects the groups of the former; ``rollout/raw_reward_all`` is over the groups that it dropped too. In
an asynchronous run this is ``production/raw_reward_all``, of the tickets that ended before the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from typing import TYPE_CHECKING, Any

from buffer_rl.observe.metrics import PARTS_OF_ROLLOUTS, eval_scores, reward_with_dropped, steps_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVE_FILE = "learning_curve.png"
REWARD_NAME = "training reward"
ALL_NAME = "training reward with dropped groups"
_BLOCKS = "▁▂▃▄▅▆▇█"
SMOOTHING_STEPS = 9
# Blue and orange of Okabe and Ito's palette, which people with common colour-vision deficiencies tell apart.
_EVAL_COLOURS = ("#0072B2", "#009E73", "#CC79A7", "#56B4E9")
_REWARD_COLOUR = "#D55E00"
_ALL_COLOUR = "#555555"


@dataclass(slots=True, kw_only=True)
class Series:
    """Values over training steps, steps ascending."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    @property
    def points(self) -> list[tuple[float, float]]:
        """Step and value."""
        return list(zip(map(float, self.steps), self.values, strict=True))


@dataclass(slots=True, kw_only=True)
class Curves:
    """Training reward, and mean reward of each evaluation set by name.

    all_rewards: that of kept and dropped groups together; without steps where no filter made it another one."""

    reward: Series
    all_rewards: Series
    evals: dict[str, Series]


def curves_of(records: Iterable[Mapping[str, Any]]) -> Curves:
    """The curves of a run's metric lines; where a step occurs twice (after a resume) the later line counts."""
    lines = list(records)
    steps, evals = steps_of(lines), dict[str, dict[int, float]]()
    for line in lines:
        for name, score in eval_scores(line).items():
            evals.setdefault(name, {})[int(line["step"])] = score
    differs = any(reward_with_dropped(metrics) is not None for metrics in steps.values())
    of_all = [f"{part}/raw_reward_all" for part in PARTS_OF_ROLLOUTS if differs]
    return Curves(
        reward=_series(_values(steps, "rollout/raw_reward")),
        all_rewards=_series({step: value for name in of_all for step, value in _values(steps, name).items()}),
        evals={name: _series(points) for name, points in evals.items()},
    )


def _values(steps: Mapping[int, Mapping[str, float]], name: str) -> dict[int, float]:
    return {step: float(metrics[name]) for step, metrics in steps.items() if name in metrics}


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """``values`` as a line of at most ``width`` block characters, lowest to highest; each shows a run's mean."""
    if not values or width < 1:
        return ""
    means = neighbour_means(values, width)
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((mean - low) * scale)] for mean in means)


def edges(length: int, most: int) -> list[int]:
    """Where at most ``most`` runs of neighbours begin, and where the last one ends, of ``length`` values."""
    count = min(length, most)
    return [round(i * length / count) for i in range(count + 1)] if count else []


def neighbour_means(values: Sequence[float], most: int) -> list[float]:
    """The means of at most ``most`` runs of neighbours."""
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges(len(values), most))]


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean over a window centred at each value, cut short symmetrically at both ends. ``window`` is odd."""
    reaches = [min(window // 2, i, len(values) - 1 - i) for i in range(len(values))]
    return [sum(values[i - reach : i + reach + 1]) / (2 * reach + 1) for i, reach in enumerate(reaches)]


def draw_curves(curves: Curves, title: str) -> Figure:
    """The figure: evaluations as marked lines, their first and last value in the legend; training reward behind."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.6), dpi=144, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_reward(axes, curves.reward, REWARD_NAME, _REWARD_COLOUR, "-")
    _draw_reward(axes, curves.all_rewards, ALL_NAME, _ALL_COLOUR, "--")
    for (name, curve), colour in zip(curves.evals.items(), cycle(_EVAL_COLOURS), strict=False):
        label = f"evaluation: {name} ({curve.values[0]:.2f} → {curve.values[-1]:.2f})"
        axes.plot(curve.steps, curve.values, color=colour, linewidth=2, marker="o", markersize=5, label=label)
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    axes.set_xlabel("training steps")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("mean reward")
    series = (curves.reward, curves.all_rewards, *curves.evals.values())
    everything = [value for each in series for value in each.values]
    if everything and min(everything) >= 0 and max(everything) <= 1:
        axes.set_ylim(0, 1)
    axes.margins(x=0.03)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if everything:
        axes.legend(loc="lower right", frameon=False)
    else:
        axes.text(0.5, 0.5, "no rewards were logged", transform=axes.transAxes, ha="center", color="#666666")
    return figure


def _series(points: Mapping[int, float]) -> Series:
    steps = sorted(points)
    return Series(steps=steps, values=[points[step] for step in steps])


def _draw_reward(axes: Axes, series: Series, name: str, colour: str, style: str) -> None:
    if not series.steps:
        return
    if len(series.steps) <= SMOOTHING_STEPS:
        axes.plot(series.steps, series.values, style, color=colour, linewidth=1.6, label=name)
        return
    axes.plot(series.steps, series.values, color=colour, linewidth=0.8, alpha=0.35, label="_each step")
    smooth = moving_mean(series.values, SMOOTHING_STEPS)
    label = f"{name} (mean of {SMOOTHING_STEPS} steps)"
    axes.plot(series.steps, smooth, style, color=colour, linewidth=1.8, label=label)
