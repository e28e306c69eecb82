"""What the schedules' benchmark compares a step with, and when it ends with status 1."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from buffer_rl.observe.timeline import WorkSpan
from buffer_rl.observe.timeline_stats import Overlap, step_stats

GROUPS = st.lists(st.tuples(st.floats(0.01, 5.0), st.integers(1, 50_000)), min_size=1, max_size=8)
KINDS = {
    "lockstep": Overlap.LOCKSTEP,
    "pipelined": Overlap.PIPELINED,
    "streamed gradients": Overlap.STREAMED_GRADIENTS,
}


def span(name: str, start: float, end: float, version: int = 0) -> WorkSpan:
    return WorkSpan(name=name, rollout_id=version, start=start, end=end)


@pytest.fixture
def module(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("schedules")


@pytest.mark.parametrize("name", KINDS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(groups=GROUPS)
def test_the_formula_is_the_bound_of_the_timeline_and_the_critical_path_the_step_that_it_belongs_to(
    module: ModuleType, name: str, groups: list[tuple[float, int]]
) -> None:
    known = [module.KnownGroup(finished=finished, tokens=tokens) for finished, tokens in groups]
    found = module.bounds(name, known)
    trained, forward = module.SECONDS_PER_TRAINED_TOKEN, module.SECONDS_PER_FORWARD_TOKEN
    rate = forward + trained if name == "streamed gradients" else 2 * forward
    generation, tokens = max(groups)[0], sum(tokens for _, tokens in groups)
    passes, free = [], generation if name == "lockstep" else 0.0
    for group in sorted(known, key=lambda group: group.finished):
        start = max(free, group.finished)
        free = start + rate * group.tokens
        passes.append(span("train", start, free))
    update = module.OPTIMIZER_S + (0.0 if name == "streamed gradients" else trained * tokens)
    spans: dict[str, Any] = {
        "rollout": [span("rollout", 0.0, generation)],
        "train": [*passes, span("update", free, free + update)],
        "publish": [span("publish", free + update, free + update + module.PUBLISH_S, 1)],
    }
    stats = step_stats(spans, 0, kind=KINDS[name])
    assert found.formula == pytest.approx(stats.bound)
    assert found.path == pytest.approx(stats.wall)
    assert found.formula <= found.path + 1e-9


def test_a_row_whose_median_is_too_far_above_its_bound_ends_in_status_1(
    module: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    path = module.Bounds(generation=1.0, streamed=1.0, path=2.0, formula=2.0)
    assert module.of_bound([(2.0, path), (2.06, path), (4.0, path)]) == pytest.approx(1.03)
    assert module.verdict({"lockstep at sigma 1": 1.03, "pipelined at sigma 1": 1.05}) == 0
    assert capsys.readouterr().out == ""
    assert module.verdict({"lockstep at sigma 1": 1.03, "pipelined at sigma 1": 1.06}) == 1
    assert capsys.readouterr().out == "wall/bound 1.060, above 1.05: pipelined at sigma 1\n"
    assert module.verdict({"lockstep at sigma 1": float("nan")}) == 1
