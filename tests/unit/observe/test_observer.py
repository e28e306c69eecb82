"""What the driver reports of the roles' work becomes the trace and metrics of the step."""

from __future__ import annotations

import signal
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.errors import ConfigError, EndedBySignal
from buffer_rl.observe.metrics import read_metrics
from buffer_rl.observe.observer import MAX_REASON, RunObserver
from buffer_rl.observe.progress import Progress
from buffer_rl.observe.report import read_report, write_report
from buffer_rl.observe.run_folder import read_facts
from buffer_rl.observe.timeline import TRACE_FILE, WorkSpan, read_trace
from buffer_rl.options.section import compose
from buffer_rl.plan.schedule import RunResult
from buffer_rl.plugin.registry import PluginRegistry


def observer_of(folder: Path, resume_step: int | None = None, **options: Any) -> RunObserver:
    args: Any = compose(CORE_SECTIONS)(run_dir=str(folder), progress="none", logger=[], **options)
    return RunObserver(args, PluginRegistry(), resume_step)


def test_a_resumed_run_notes_the_step_after_which_each_part_began(tmp_path: Path) -> None:
    for step in (None, 3):
        with observer_of(tmp_path, step):
            pass
    assert [part["from_step"] for part in read_facts(tmp_path).parts] == [0, 3]


def report_step(observer: RunObserver, step: int, start: float, train: float) -> None:
    """Eight seconds of generation, then ``train`` seconds of the update and one of publishing."""
    ends = (start, start + 8, start + 8 + train, start + 9 + train)
    for role, name, number in (
        ("rollout", "rollout", step),
        ("train", "update", step),
        ("publish", "publish", step + 1),
    ):
        place = ("rollout", "train", "publish").index(role)
        span = WorkSpan(name=name, rollout_id=number, start=ends[place], end=ends[place + 1])
        observer.worked(role, [span])
    observer.step(step, {"train/loss": 0.5})


def perf_of(folder: Path) -> dict[int, dict[str, float]]:
    return {record["step"]: record for record in read_metrics(folder) if record["kind"] == "perf"}


def test_each_step_logs_the_idle_shares_of_its_own_work(tmp_path: Path) -> None:
    with observer_of(tmp_path) as observer:
        observer.worked("publish", [WorkSpan(name="publish", rollout_id=0, start=1.0, end=2.0)])
        report_step(observer, 0, 10.0, train=1.0)
        observer.worked("rollout", [WorkSpan(name="evaluate", rollout_id=1, start=20.0, end=30.0)])
        report_step(observer, 1, 30.0, train=7.0)
    perf = perf_of(tmp_path)
    assert (perf[0]["perf/idle/rollout"], perf[0]["perf/idle/train"]) == pytest.approx((0.2, 0.9))
    assert (perf[1]["perf/idle/rollout"], perf[1]["perf/idle/train"]) == pytest.approx((0.5, 9 / 16))
    assert perf[1]["perf/wall_to_bound"] == pytest.approx(1.0)
    assert len(read_trace(tmp_path)["rollout"]) == 3
    assert "Who worked when" in write_report(read_report(tmp_path), tmp_path).read_text()


def test_work_on_the_next_rollout_that_is_known_early_counts_for_its_own_step(tmp_path: Path) -> None:
    with observer_of(tmp_path) as observer:
        observer.worked("ref", [WorkSpan(name="ref", rollout_id=1, start=22.0, end=27.0)])
        report_step(observer, 0, 10.0, train=1.0)
        report_step(observer, 1, 20.0, train=1.0)
    perf = perf_of(tmp_path)
    assert perf[1]["perf/idle/ref"] == pytest.approx(0.5)
    assert "perf/overlap" not in perf[0]
    assert perf[1]["perf/overlap"] == 1.0


def test_without_a_trace_the_metrics_stay(tmp_path: Path) -> None:
    with observer_of(tmp_path, trace=False) as observer:
        report_step(observer, 0, 10.0, train=1.0)
    assert perf_of(tmp_path)[0]["perf/idle/train"] == pytest.approx(0.9)
    assert not (tmp_path / TRACE_FILE).exists()
    assert "Who worked when" not in write_report(read_report(tmp_path), tmp_path).read_text()


def test_a_resumed_run_continues_the_trace(tmp_path: Path) -> None:
    with observer_of(tmp_path) as observer:
        report_step(observer, 0, 10.0, train=1.0)
        report_step(observer, 1, 20.0, train=1.0)
    with observer_of(tmp_path, resume_step=1) as observer:
        report_step(observer, 1, 3.0, train=1.0)
    assert [(span.rollout_id, span.start) for span in read_trace(tmp_path)["rollout"]] == [(0, 0.0), (1, 10.0)]


def test_a_run_that_failed_leaves_its_trace(tmp_path: Path) -> None:
    observer = observer_of(tmp_path).__enter__()
    report_step(observer, 0, 10.0, train=1.0)
    observer.__exit__(RuntimeError, RuntimeError("stop"), None)
    assert (tmp_path / TRACE_FILE).read_text().endswith("\n]\n")


def test_a_step_that_is_saved_has_metrics_before_it_ends_and_each_of_them_once(tmp_path: Path) -> None:
    of_step = {"rollout/raw_reward": 2.0, "train/loss": 0.5, "perf/reward_time": 3.0}
    first = [{"step": 4, "kind": kind, f"{kind}/{name}": value} for kind, name, value in (
        ("rollout", "raw_reward", 2.0), ("train", "loss", 0.5),
    )]  # fmt: skip
    with observer_of(tmp_path) as observer:
        observer.known(4, of_step)
        assert read_metrics(tmp_path) == first
        observer.step(4, of_step | {"perf/save_time": 1.0})
        last = {"step": 4, "kind": "perf", "perf/reward_time": 3.0, "perf/save_time": 1.0}
        assert read_metrics(tmp_path) == [*first, last]
        observer.step(5, {"train/loss": 0.25})
    assert read_metrics(tmp_path)[3:] == [{"step": 5, "kind": "train", "train/loss": 0.25}]


def test_a_run_that_went_back_has_the_files_of_one_that_did_not(tmp_path: Path) -> None:
    def steps(observer: RunObserver, first: int, start: float) -> None:
        for step in range(first, 3):
            report_step(observer, step, start + 20.0 * step, train=1.0)
            observer.rollout_ended(step, False, {}, [{"uid": f"{step}"}])
            observer.evaluation(step + 1, {"eval/held": float(step)})

    for name, back in (("quiet", None), ("checkpoint", 2), ("start", -1)):
        with observer_of(tmp_path / name, trace=True) as observer:
            steps(observer, 0, 10.0)
            if back is not None:
                observer.went_back(None if back < 0 else back)
                assert observer.evaluated == back
                steps(observer, max(0, back), 500.0)
            assert observer.evaluated == 3

    def content(name: str) -> list[Any]:
        folder = tmp_path / name
        spans = [(role, span.name, span.rollout_id) for role, of_role in read_trace(folder).items() for span in of_role]
        return [read_metrics(folder), (folder / "samples.jsonl").read_text(), spans]

    assert content("checkpoint") == content("start") == content("quiet")


def test_the_progress_of_a_run_that_went_back_is_that_of_its_checkpoint(tmp_path: Path) -> None:
    progress = Progress("none", 10, "run", clock=lambda: 0.0)
    for step in range(4):
        progress.step({"rollout/raw_reward": float(step), "rollout/drop_easy": 1.0}, step)
    progress.went_back(2)
    board = progress._board
    assert board.drops == {0: {"easy": 1}, 1: {"easy": 1}}
    assert (board.steps_done, board.rewards, board.remaining_s(1.0)) == (2, [0.0, 1.0], None)
    progress.step({"rollout/raw_reward": 2.0}, 2)
    assert (board.steps_done, board.rewards) == (3, [0.0, 1.0, 2.0])
    progress.went_back(0)
    assert (board.steps_done, board.rewards) == (0, [])


def end_of(folder: Path) -> dict[str, str]:
    end = dict(read_facts(folder).end)
    assert datetime.fromisoformat(end.pop("at")).utcoffset() == timedelta(0)
    return end


def test_a_run_notes_how_it_ended(tmp_path: Path) -> None:
    with observer_of(tmp_path):
        assert read_facts(tmp_path).end == {}
    assert end_of(tmp_path) == {"how": "done", "why": ""}
    with observer_of(tmp_path) as observer:
        assert read_facts(tmp_path).end == {}  # of the run before
        observer.ended(RunResult(steps=1, signal=signal.SIGTERM, stopped_early=True, why="no prompts"))
    assert end_of(tmp_path) == {"how": "stopped", "why": "SIGTERM"}
    with observer_of(tmp_path) as observer:
        observer.ended(RunResult(steps=1, stopped_early=True, why="no prompts"))
    assert end_of(tmp_path) == {"how": "stopped early", "why": "no prompts"}
    with observer_of(tmp_path) as observer:
        observer.ended(RunResult(steps=1))
    assert end_of(tmp_path) == {"how": "done", "why": ""}
    with pytest.raises(EndedBySignal), observer_of(tmp_path):
        raise EndedBySignal(signal.SIGINT)
    assert end_of(tmp_path) == {"how": "stopped", "why": "SIGINT"}
    with pytest.raises(ValueError, match="s3"), observer_of(tmp_path):
        raise ValueError("s3://user:secret@bucket")
    assert end_of(tmp_path) == {"how": "failed", "why": "ValueError: s3://***@bucket"}
    with pytest.raises(ConfigError), observer_of(tmp_path) as observer:
        raise ConfigError("x" * 5000, where="--lr")
    end = end_of(tmp_path)
    assert end["how"] == "failed"
    assert end["why"].startswith("ConfigError: ")
    assert len(end["why"]) == MAX_REASON


def test_an_end_that_cannot_be_noted_leaves_the_error_as_it_is(tmp_path: Path) -> None:
    observer = observer_of(tmp_path)
    (tmp_path / "run.json").write_text("no JSON")
    with pytest.raises(ConfigError, match="first"), observer:
        raise ConfigError("first")
