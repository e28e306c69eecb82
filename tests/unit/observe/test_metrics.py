from __future__ import annotations

import json
import logging
from collections.abc import Mapping

import pytest

from buffer_rl.errors import DataError
from buffer_rl.observe.metrics import MetricHub, MetricsFile, drop_metrics, drops_of, read_metrics


class ListLogger:
    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.seen.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed += 1


class FailingLogger(ListLogger):
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        super().log(metrics, step)
        raise OSError("disk full")


def test_one_line_a_kind_with_step_and_flat_numbers(tmp_path):
    file = MetricsFile(tmp_path)
    file.write({"rollout/raw_reward": 0.5, "train/loss": -1, "train/lr": 3e-4}, step=7)
    file.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 7, "kind": "rollout", "rollout/raw_reward": 0.5},
        {"step": 7, "kind": "train", "train/loss": -1.0, "train/lr": 3e-4},
    ]


def test_every_line_can_be_read_before_the_file_is_closed(tmp_path):
    file = MetricsFile(tmp_path)
    file.write({"eval/dev": 0.25}, step=0)
    assert read_metrics(tmp_path) == [{"step": 0, "kind": "eval", "eval/dev": 0.25}]
    file.close()


def test_a_file_that_is_removed_ends_the_writing_with_its_name(tmp_path):
    file = MetricsFile(tmp_path)
    file.write({"eval/dev": 0.25}, step=0)
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(DataError, match=r"metrics.jsonl: the file was removed while the run writes to it"):
        file.write({"eval/dev": 0.5}, step=1)
    file.close()


def test_numbers_that_are_not_finite_become_null_with_a_warning_naming_them(tmp_path, caplog):
    file = MetricsFile(tmp_path)
    with caplog.at_level(logging.WARNING):
        file.write({"train/loss": float("nan"), "train/grad_norm": float("inf"), "train/lr": 1.0}, step=3)
    file.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 3, "kind": "train", "train/loss": None, "train/grad_norm": None, "train/lr": 1.0}
    ]
    assert "train/loss" in caplog.text
    assert "step 3" in caplog.text


def test_a_logger_that_fails_is_named_once_closed_and_dropped_while_the_others_go_on(tmp_path, caplog):
    good, bad = ListLogger(), FailingLogger()
    hub = MetricHub(tmp_path, {"bad": bad, "good": good})
    with caplog.at_level(logging.WARNING):
        hub.log({"train/loss": 1.0}, 0)
        hub.log({"train/loss": 0.5}, 1)
    assert (good.closed, bad.closed) == (0, 1)
    hub.close()
    assert [step for step, _ in good.seen] == [0, 1]
    assert len(bad.seen) == 1
    assert (good.closed, bad.closed) == (1, 1)
    assert caplog.text.count("'bad'") == 1
    assert "disk full" in caplog.text
    assert [record["train/loss"] for record in read_metrics(tmp_path)] == [1.0, 0.5]


def test_a_fresh_run_keeps_the_earlier_file_aside_and_a_resumed_one_appends(tmp_path):
    for step, resume in ((0, None), (1, 1), (0, None)):
        file = MetricsFile(tmp_path, resume_step=resume)
        file.write({"train/loss": float(step)}, step)
        file.close()
    assert [record["step"] for record in read_metrics(tmp_path)] == [0]
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.1.jsonl")] == [0, 1]


def test_a_resumed_run_replaces_what_was_done_beyond_its_checkpoint(tmp_path):
    file = MetricsFile(tmp_path)
    for step in range(5):
        file.write({"eval/dev": 0.1}, step)
        file.write({"train/loss": 1.0}, step)
    file.close()
    file = MetricsFile(tmp_path, resume_step=3)
    file.write({"train/loss": 2.0}, 3)
    file.close()
    records = [(record["kind"], record["step"]) for record in read_metrics(tmp_path)]
    train = [("train", 0), ("train", 1), ("train", 2)]
    assert [record for record in records if record[0] == "train"] == [*train, ("train", 3)]
    assert [record for record in records if record[0] == "eval"] == [("eval", step) for step in range(4)]
    assert read_metrics(tmp_path)[-1]["train/loss"] == 2.0


def test_a_line_that_a_killed_run_left_unfinished_is_neither_read_nor_kept_on_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "kind": "train"}\n{"step": 1, "ki')
    assert [record["step"] for record in read_metrics(path)] == [0]
    file = MetricsFile(tmp_path, resume_step=9)
    file.write({"train/loss": 2.0}, 1)
    file.close()
    assert [record["step"] for record in read_metrics(path)] == [0, 1]


@pytest.mark.parametrize("bad", ["{'step': 1}", "[1, 2]"])
def test_a_damaged_line_is_named_with_file_and_line(tmp_path, bad):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 0}}\n{bad}\n{{"step": 2}}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2"):
        read_metrics(path)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read_metrics(tmp_path)


def test_dropped_groups_are_counted_under_names_that_hold_no_data():
    of_slime = {f"zero_std_{round(reward / 10, 1)}": 1 for reward in range(-5, 6)}  # a reason of each rounded reward
    assert drop_metrics(of_slime | {"too_long": 2, "baseline_aborted": 3, "7": 1}) == {
        "rollout/drop_zero_std": 11.0,
        "rollout/drop_too_long": 2.0,
        "rollout/drop_baseline_aborted": 3.0,
        "rollout/drop_7": 1.0,
    }


def test_groups_that_steps_and_tickets_dropped_are_counted_together():
    metrics = {
        "rollout/drop_too_old": 1.0,
        "production/drop_dull": 2.0,
        "production/drop_too_old": 3.0,
        "x/drop_y": 1.0,
    }
    assert drops_of({**metrics, "rollout/drop_none": 0.0}) == {"too_old": 4, "dull": 2}
