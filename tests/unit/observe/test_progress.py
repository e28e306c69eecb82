from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from buffer_rl.observe.progress import Progress, format_count, format_duration

STEP = {
    "rollout/raw_reward": 0.4125,
    "rollout/response_len/mean": 7.25,
    "rollout/drop_zero_std": 3.0,
    "rollout/drop_too_long": 0.0,
    "train/loss": -0.01234,
    "perf/tokens_per_s": 21340.0,
    "perf/step_time": 0.64,
}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _console(terminal=False):
    return Console(file=io.StringIO(), force_terminal=terminal, width=80, color_system=None)


def _rendered(progress):
    console = _console()
    console.print(progress.render())
    return console.file.getvalue()


def test_plain_mode_writes_one_line_a_step_and_one_an_evaluation():
    console = _console()
    with Progress("auto", 150, "my run", console=console) as progress:
        progress.phase("generate")
        progress.groups(3, 32, {})
        progress.step(STEP, 11)
        progress.eval({"eval/dev": 0.25, "eval/dev/response_len": 7.0}, 12)
    assert console.file.getvalue().splitlines() == [
        "my run",
        "step 12/150  reward 0.412  loss -0.0123  length 7.2  dropped 3 zero_std  21.3k tokens/s  0.6 s",
        "evaluation after 12 steps: dev 0.250",
    ]


def test_the_reward_with_dropped_groups_shows_where_it_is_another_one():
    console = _console()
    with Progress("plain", 2, "my run", console=console) as progress:
        progress.step({**STEP, "rollout/raw_reward_all": 0.2}, 0)
        assert "0.200 with dropped groups" in _rendered(progress)
        progress.step({**STEP, "rollout/raw_reward_all": STEP["rollout/raw_reward"]}, 1)
        assert "with dropped groups" not in _rendered(progress)
    first, second = console.file.getvalue().splitlines()[1:]
    assert "reward 0.412 (0.200 with dropped groups)  loss" in first
    assert "reward 0.412  loss" in second


def test_drops_of_the_running_rollout_show_at_once_and_count_once():
    progress = Progress("rich", 10, "my run", console=_console())
    progress.groups(0, 32, {"zero_std": 2})
    assert "2 zero_std" in _rendered(progress)
    progress.step(STEP, 0)
    assert "3 zero_std" in _rendered(progress)
    progress.groups(1, 32, {"zero_std": 4})
    assert "7 zero_std" in _rendered(progress)


@pytest.mark.parametrize(("mode", "shown"), [("plain", True), ("rich", True), ("none", False)])
def test_a_notice_from_any_thread_stays_on_the_screen(mode, shown):
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=mode == "rich")
    with Progress(mode, 10, "run", console=console) as progress:
        thread = threading.Thread(target=progress.notice, args=("engine [1] was lost",))
        thread.start()
        thread.join()
        progress.phase("train")
    assert ("engine [1] was lost" in out.getvalue()) is shown


def test_mode_none_writes_nothing():
    console = _console(terminal=True)
    with Progress("none", 10, "my run", console=console) as progress:
        progress.step(STEP, 0)
        progress.eval({"eval/dev": 0.25}, 1)
    assert console.file.getvalue() == ""


def test_the_panel_shows_steps_groups_phase_reward_drops_speed_and_evaluation():
    clock = Clock()
    progress = Progress("rich", 10, "my run", console=_console(terminal=True), clock=clock)
    clock.now = 8.0
    progress.step({**STEP, "perf/step_time": 8.0}, 0)
    progress.eval({"eval/dev": 0.25}, 1)
    progress.phase("generate")
    progress.groups(5, 32, {})
    clock.now = 10.0
    text = _rendered(progress)
    for shown in ("1 of 10", "5 of 32", "generate 0:02", "0.412", "dev 0.250  (after 1 steps)", "3 zero_std", "21.3k"):
        assert shown in text
    assert "0:10 elapsed, about 1:30 to go" in text


def test_a_phase_that_has_ended_has_all_its_groups_unless_the_run_was_stopped():
    progress = Progress("rich", 10, "my run", console=_console(terminal=True))
    progress.phase("generate")
    progress.groups(5, 32, {})
    progress.phase("train")
    assert "32 of 32" in _rendered(progress)
    progress.phase("evaluate")
    progress.groups(269, 400, {})
    progress.phase("stopped")
    assert "269 of 400" in _rendered(progress)


def test_drops_add_up_over_the_run():
    progress = Progress("rich", 10, "my run", console=_console(terminal=True))
    progress.step(STEP, 0)
    progress.step(STEP, 1)
    assert "6 zero_std" in _rendered(progress)


def test_a_resumed_run_estimates_from_its_own_steps():
    clock = Clock()
    progress = Progress("rich", 10, "my run", console=_console(terminal=True), clock=clock)
    clock.now = 4.0
    progress.step({"perf/step_time": 4.0}, 7)
    assert "8 of 10" in _rendered(progress)
    assert "about 0:08 to go" in _rendered(progress)


def test_the_live_display_leaves_a_last_panel_and_restores_the_cursor():
    console = _console(terminal=True)
    with Progress("auto", 2, "my run", console=console) as progress:
        progress.step(STEP, 0)
    text = console.file.getvalue()
    assert "done" in text
    assert text.endswith("\x1b[?25h") or "\x1b[?25h" in text


def test_an_exception_passes_through_and_the_display_says_stopped():
    console = _console(terminal=True)
    with pytest.raises(KeyError), Progress("rich", 2, "my run", console=console):
        raise KeyError("x")
    assert "stopped" in console.file.getvalue()


def test_many_threads_may_report_while_the_panel_is_drawn():
    progress = Progress("rich", None, "my run", console=_console(terminal=True))

    def report(worker):
        for step in range(50):
            progress.step({"rollout/drop_zero_std": 1.0, f"eval/{worker}": 0.0, "rollout/raw_reward": 0.1}, step)
            progress.render()

    workers = [threading.Thread(target=report, args=(n,)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    assert "200 zero_std" in _rendered(progress)


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (75.2, "1:15"), (3599.6, "1:00:00"), (3725, "1:02:05")])
def test_durations_read_as_clock_times(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(("number", "text"), [(950, "950"), (21340, "21.3k"), (2.5e6, "2.5M")])
def test_counts_are_shortened(number, text):
    assert format_count(number) == text
