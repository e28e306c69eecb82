"""The line that says when each part of a run was ready."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from buffer_rl.observe.progress import Progress
from buffer_rl.observe.run_folder import RUN_FILE, add_facts, read_facts
from buffer_rl.observe.startup import StartUp, text_of


def clock_of(*times: float) -> Iterator[float]:
    yield from times


def test_the_line_grows_with_each_part_and_counts_from_the_command() -> None:
    times, out = clock_of(100.8, 101.94, 104.0), io.StringIO()
    start = StartUp("buffer-rl · run", 100.0, out, lambda: next(times))
    start.ready("checks")
    assert out.getvalue() == "buffer-rl · run  checks 0.8 s"
    start.ready("Ray")
    start.ready("Ray")  # once more, after a global restart
    start.ready("engine")
    start.end_line()
    start.end_line()
    assert out.getvalue() == "buffer-rl · run  checks 0.8 s · Ray 1.9 s · engine 4.0 s\n"
    assert text_of(start.times) == "checks 0.8 s · Ray 1.9 s · engine 4.0 s"


def test_what_is_shown_in_between_stands_on_a_line_of_its_own() -> None:
    times, out = clock_of(0.5, 1.0), io.StringIO()
    start = StartUp("buffer-rl · run", 0.0, out, lambda: next(times))
    with Progress("plain", 3, "buffer-rl · run", startup=start, console=Console(file=out, width=200)) as progress:
        progress.ready("Ray")
        progress.notice("a notice")
        progress.ready("engine")
        progress.phase("generate")
        progress.step({}, 0)
    lines = out.getvalue().splitlines()
    assert lines[0] == "buffer-rl · run"  # nothing was ready before
    assert lines[1:] == ["buffer-rl · run  Ray 0.5 s", "a notice", "buffer-rl · run  engine 1.0 s", "step 1/3"]


def test_a_panel_goes_on_with_the_line() -> None:
    times, out = clock_of(0.5, 1.0), io.StringIO()
    start = StartUp("buffer-rl · run", 0.0, out, lambda: next(times))
    start.ready("checks")
    screen = Console(file=io.StringIO(), force_terminal=True, width=100)
    with Progress("rich", 3, "buffer-rl · run", startup=start, console=screen) as progress:
        progress.ready("Ray")
        assert out.getvalue() == "buffer-rl · run  checks 0.5 s\n"
        with screen.capture() as captured:
            screen.print(progress.render())
        assert "checks 0.5 s · Ray 1.0 s" in captured.get()
        progress.phase("generate")
        with screen.capture() as captured:
            screen.print(progress.render())
        assert "Ray" not in captured.get()


def test_the_run_keeps_it(tmp_path: Path) -> None:
    add_facts(tmp_path, start={"Ray": 1.0})
    assert not (tmp_path / RUN_FILE).exists()  # a run that writes no facts
    (tmp_path / RUN_FILE).write_text(json.dumps({"started": "", "version": "1", "changed": {"--lr": 1}}))
    add_facts(tmp_path, start={"Ray": 1.0})
    facts = read_facts(tmp_path)
    assert (facts.start, facts.version, facts.changed) == ({"Ray": 1.0}, "1", {"--lr": 1})
