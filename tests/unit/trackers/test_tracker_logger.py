"""A tracker gets the run's metrics in a process of its own; whatever it does there, the run goes on."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.observe.metrics import MetricHub, read_metrics
from buffer_rl.options.section import compose
from buffer_rl_trackers.options import TrackerOptions
from harness.processes import descendants, holds_within, is_running
from harness.trackers import TestedLogger, recorded


def args_of(folder: Path, **options: Any) -> Any:
    return compose([*CORE_SECTIONS, TrackerOptions])(run_dir=str(folder), **options)


def notices(capfd: pytest.CaptureFixture[str]) -> list[str]:
    prefix = "buffer-rl: notice: logger tested: "
    return [line.removeprefix(prefix) for line in capfd.readouterr().err.splitlines() if line.startswith(prefix)]


def our_children() -> set[int]:
    return {process.pid for process in descendants(os.getpid()) if "buffer_rl_trackers" in process.command}


def test_finite_metrics_arrive_with_their_step_and_a_run_that_ends_well_is_no_failure(tmp_path: Path) -> None:
    logger = TestedLogger.of("Recording")(args_of(tmp_path), str(tmp_path))
    logger.log({"train/loss": 0.5, "train/kl": math.nan}, 3)
    logger.log({"eval/dev": math.inf, "eval/other": 1.0}, 2)
    logger.close()
    assert recorded(tmp_path) == [
        {"step": 3, "metrics": {"train/loss": 0.5}},
        {"step": 2, "metrics": {"eval/other": 1.0}},
        {"failed": False},
    ]


def test_a_run_that_ends_by_an_error_is_a_failure_for_the_tracker(tmp_path: Path) -> None:
    logger = TestedLogger.of("Recording")(args_of(tmp_path), str(tmp_path))
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        logger.close()
    assert recorded(tmp_path) == [{"failed": True}]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("RaisesAtStart", "ValueError: no such project at https://***@example.org; the run goes on without it"),
        ("ExitsAtStart", "SystemExit: not logged in; the run goes on without it"),
        ("NoSuchTracker", "AttributeError: module 'harness.trackers' has no attribute 'NoSuchTracker'"),
        ("RaisesInLog", "KeyboardInterrupt: refused; the run goes on without it"),
        ("DiesInLog", "its process has ended with status 3; the run goes on without it"),
        ("HangsInLog", "step 0 is not done 2 s after it was told to end; the run goes on without it"),
        ("RaisesInClose", "OSError: connection lost; the run goes on without it"),
        pytest.param("HangsAtStart", "its start is not done 2 s after it was told to end", marks=pytest.mark.slow),
        pytest.param(
            "HangsInClose",
            "its end is not done 2 s after it was told to end; the run goes on without it",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_tracker_that_fails_or_hangs_is_named_once_and_the_run_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, why: str
) -> None:
    before = our_children()
    made = TestedLogger.of(name, close_s=2.0) if name.startswith("Hangs") else TestedLogger.of(name)
    hub = MetricHub(tmp_path, {"tested": made(args_of(tmp_path), str(tmp_path))})
    if name in ("HangsInLog", "HangsInClose"):
        assert holds_within(60, lambda: (tmp_path / "recorded.jsonl").exists())
    for step in range(3):
        hub.log({"train/loss": float(step)}, step)
    hub.close()
    said = [line for line in notices(capfd) if line != "on a file"]
    assert len(said) == 1, said
    assert said[0].startswith(why)
    assert [record["train/loss"] for record in read_metrics(tmp_path)] == [0.0, 1.0, 2.0]
    assert our_children() == before


def test_a_notice_waits_for_the_first_record_as_the_start_of_a_run_is_one_growing_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logger = TestedLogger.of("RaisesAtStart")(args_of(tmp_path), str(tmp_path))
    reads = f"tracker-{logger.name}"
    assert holds_within(60, lambda: all(thread.name != reads for thread in threading.enumerate()))
    assert notices(capfd) == []
    logger.log({"train/loss": 0.5}, 0)
    assert len(notices(capfd)) == 1
    logger.close()


def test_a_tracker_that_hangs_is_dropped_while_the_run_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logger = TestedLogger.of("HangsInLog", hang_s=1.0)(args_of(tmp_path), str(tmp_path))
    assert holds_within(30, lambda: (tmp_path / "recorded.jsonl").exists())
    (process,) = our_children()

    def dropped() -> bool:
        logger.log({"train/loss": 0.5}, 0)
        return not is_running(process)

    assert holds_within(30, dropped)
    logger.close()
    assert [line for line in notices(capfd) if "no answer for" in line] != []


@pytest.mark.slow
def test_what_the_library_prints_is_in_its_log_and_what_it_leaves_running_does_not_hold_up_the_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hangs = TestedLogger.of("HangsInClose", close_s=2.0)(args_of(tmp_path), str(tmp_path))
    assert holds_within(60, lambda: (tmp_path / "recorded.jsonl").exists())
    hangs.close()
    TestedLogger.of("LeavesThreads")(args_of(tmp_path), str(tmp_path)).close()
    captured = capfd.readouterr()
    assert "from the library" not in captured.out + captured.err
    assert "from the library" in (tmp_path / "logs" / "tracker_tested.log").read_text()
    assert recorded(tmp_path) == [{"failed": False}]
    assert captured.err.count("its end is not done") == 1


def test_a_tracker_that_cannot_be_started_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no_python"))
    logger = TestedLogger.of("Recording")(args_of(tmp_path), str(tmp_path))
    logger.log({"train/loss": 0.5}, 0)
    logger.close()
    (said,) = notices(capfd)
    assert "No such file or directory" in said


def test_the_tracker_ends_its_run_as_failed_when_the_run_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from harness.trackers import TestedLogger;"
        "from buffer_rl.args import CORE_SECTIONS; from buffer_rl.options.section import compose;"
        "made = compose([*CORE_SECTIONS, 'buffer_rl_trackers.options:TrackerOptions']); folder = sys.argv[1];"
        "logger = TestedLogger.of('Recording')(made(run_dir=folder), folder); logger.log({'a/b': 1.0}, 0);"
        "time.sleep(600)"
    )
    folders = os.pathsep.join(folder for folder in sys.path if folder)
    run = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env={**os.environ, "PYTHONPATH": folders})
    try:
        file = tmp_path / "recorded.jsonl"
        assert holds_within(60, lambda: file.exists() and '"step": 0' in file.read_text())
        (tracker,) = [process.pid for process in descendants(run.pid)]
    finally:
        run.send_signal(signal.SIGKILL)
        run.wait()
    assert holds_within(30, lambda: not is_running(tracker))
    assert recorded(tmp_path)[-1] == {"failed": True}


def test_a_resumed_run_continues_the_trackers_run_and_a_new_one_does_not(tmp_path: Path) -> None:
    def starts() -> list[str]:
        return [line for line in (tmp_path / "recorded.jsonl").read_text().splitlines() if '"start"' in line]

    kept = tmp_path / "trackers" / "tested.id"
    TestedLogger.of("Recording")(args_of(tmp_path), str(tmp_path)).close()
    assert kept.read_text() == "first\n"
    kept.write_text("second\n")
    TestedLogger.of("Recording")(args_of(tmp_path, load="checkpoint"), str(tmp_path)).close()
    TestedLogger.of("Recording")(args_of(tmp_path), str(tmp_path)).close()
    assert [line.split('"')[3] for line in starts()] == ["first", "second", "first"]


def test_the_trackers_process_gets_its_own_keys_and_none_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123")
    monkeypatch.setenv("BUFFER_RL_ENGINE_API_KEY", "4567")
    TestedLogger.of("Recording")(args_of(tmp_path), str(tmp_path)).close()
    text = (tmp_path / "recorded.jsonl").read_text()
    assert "WANDB_API_KEY" in text
    assert "BUFFER_RL_" not in text
