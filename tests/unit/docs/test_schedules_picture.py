"""The picture of the schedules: up to date, and its step times are those of the costs it is drawn from."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from buffer_rl.observe.timeline_stats import Overlap, step_stats

DOCS = Path(__file__).resolve().parents[3] / "docs"


@pytest.fixture
def timelines() -> ModuleType:
    spec = importlib.util.spec_from_file_location("timelines", DOCS / "timelines.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_is_up_to_date(timelines: ModuleType) -> None:
    assert timelines.PICTURE.read_text(encoding="utf-8") == timelines.render(), "run python docs/timelines.py"


def test_the_picture_is_well_formed_and_fetches_nothing(timelines: ModuleType) -> None:
    text = timelines.render()
    ElementTree.fromstring(text)
    assert text.count("http") == 1  # the name of the SVG namespace


def test_the_three_steps_take_as_long_as_their_critical_paths(timelines: ModuleType) -> None:
    steps = [step_stats(case(), 0) for case in (timelines.lockstep, timelines.pipelined, timelines.streamed_gradients)]
    assert [step.kind for step in steps] == [Overlap.LOCKSTEP, Overlap.PIPELINED, Overlap.STREAMED_GRADIENTS]
    # Eight groups, the last finished after 8 s; 0.25 s of log-probabilities and 0.5 s of gradients each, then the
    # optimizer (0.3 s) and publishing (0.4 s).
    assert [step.wall for step in steps] == pytest.approx([8 + 2 + 4.7, 8 + 0.25 + 4.7, 8 + 0.75 + 0.7])
    assert [step.wall_to_bound for step in steps] == pytest.approx([1, 1, 1])
