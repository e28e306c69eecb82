from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from buffer_rl.observe.curve import CURVE_FILE, curves_of, draw_curves, moving_mean, sparkline

RECORDS = [
    {"step": 0, "kind": "eval", "eval/heldout": 0.25, "eval/heldout/response_len": 7.0},
    *({"step": r, "kind": "rollout", "rollout/raw_reward": 0.2 + 0.01 * r} for r in range(30)),
    {"step": 10, "kind": "eval", "eval/heldout": 0.5, "eval/dev": None},
    {"step": 20, "kind": "eval", "eval/heldout": 0.75},
]


def test_curves_hold_the_rewards_and_the_evaluations_by_step():
    curves = curves_of(RECORDS)
    assert curves.reward.steps == list(range(30))
    assert curves.reward.values[3] == pytest.approx(0.23)
    assert set(curves.evals) == {"heldout"}
    assert (curves.evals["heldout"].steps, curves.evals["heldout"].values) == ([0, 10, 20], [0.25, 0.5, 0.75])


def test_after_a_resume_the_later_line_of_a_step_counts():
    again = [*RECORDS, {"step": 10, "kind": "eval", "eval/heldout": 0.625}]
    assert curves_of(again).evals["heldout"].values == [0.25, 0.625, 0.75]


def test_the_figure_holds_both_curves():
    axes = draw_curves(curves_of(RECORDS), "title").axes[0]
    lines = {line.get_label(): line for line in axes.lines}
    assert set(lines) == {
        "_each step",
        "training reward (mean of 9 steps)",
        "evaluation: heldout (0.25 → 0.75)",
    }
    assert list(lines["evaluation: heldout (0.25 → 0.75)"].get_xdata()) == [0, 10, 20]
    assert list(lines["evaluation: heldout (0.25 → 0.75)"].get_ydata()) == [0.25, 0.5, 0.75]
    assert list(lines["_each step"].get_xdata()) == list(range(30))
    # The rewards lie on a straight line, which a centred mean leaves as it is.
    smooth = lines["training reward (mean of 9 steps)"].get_ydata()
    assert list(smooth) == pytest.approx([0.2 + 0.01 * r for r in range(30)])
    assert {text.get_text() for text in axes.get_legend().get_texts()} == set(lines) - {"_each step"}
    assert axes.get_ylim() == (0, 1)


def test_the_reward_with_dropped_groups_is_drawn_where_a_filter_made_it_another_one():
    both = [{**r, "rollout/raw_reward_all": r["rollout/raw_reward"] / 2} for r in RECORDS if r["kind"] == "rollout"]
    lines = {line.get_label(): line for line in draw_curves(curves_of([*RECORDS, *both]), "t").axes[0].lines}
    everything = lines["training reward with dropped groups (mean of 9 steps)"]
    assert list(everything.get_ydata()) == pytest.approx([0.1 + 0.005 * r for r in range(30)])
    assert everything.get_linestyle() == "--"
    equal = [{**r, "rollout/raw_reward_all": r["rollout/raw_reward"]} for r in RECORDS if r["kind"] == "rollout"]
    labels = [line.get_label() for line in draw_curves(curves_of(equal), "t").axes[0].lines]
    assert labels == ["_each step", "training reward (mean of 9 steps)"]


def test_rewards_outside_0_and_1_are_inside_the_axes():
    axes = draw_curves(curves_of([{"step": s, "rollout/raw_reward": v} for s, v in ((0, -3.0), (1, 8.0))]), "t").axes[0]
    low, high = axes.get_ylim()
    assert low <= -3.0
    assert high >= 8.0


def test_the_file_is_a_png_of_legible_size(tmp_path):
    path = tmp_path / CURVE_FILE
    draw_curves(curves_of([{"step": 0, "rollout/raw_reward": 0.5}]), "t").savefig(path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    height, width = imread(path).shape[:2]
    assert (width, height) == (1152, 662)


def test_a_run_without_rewards_still_gets_a_picture_that_says_so():
    axes = draw_curves(curves_of([]), "t").axes[0]
    assert [text.get_text() for text in axes.texts] == ["no rewards were logged"]


def test_a_sparkline_runs_from_the_lowest_to_the_highest_block():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([]) == ""
    assert sparkline([0, 0, 8, 8], width=2) == "▁█"


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200), st.integers(1, 60))
def test_a_sparkline_is_never_wider_than_asked(values, width):
    assert len(sparkline(values, width)) == min(width, len(values))


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=50), st.sampled_from([1, 3, 9]))
def test_a_moving_mean_stays_between_the_extremes_and_window_1_changes_nothing(values, window):
    smooth = moving_mean(values, window)
    assert len(smooth) == len(values)
    assert min(values) - 1e-9 <= min(smooth)
    assert max(smooth) <= max(values) + 1e-9
    assert moving_mean(values, 1) == values


def test_steps_are_whole_on_the_axis_of_a_short_run():
    ticks = draw_curves(curves_of([{"step": s, "rollout/raw_reward": 0.5} for s in range(4)]), "t").axes[0].get_xticks()
    assert all(tick == int(tick) for tick in ticks)


def test_in_an_asynchronous_run_the_reward_with_dropped_groups_is_of_tickets():
    records = [
        {"step": 0, "rollout/raw_reward": 0.5},
        {"step": 0, "production/raw_reward": 0.25, "production/raw_reward_all": 0.25},
    ]
    assert curves_of(records).all_rewards.values == []  # no filter dropped any
    filtered = [*records, {"step": 1, "production/raw_reward": 0.5, "production/raw_reward_all": 0.125}]
    assert curves_of(filtered).all_rewards.values == [0.25, 0.125]
    assert curves_of(filtered).reward.values == [0.5]
