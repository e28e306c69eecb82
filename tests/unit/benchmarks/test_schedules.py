"""What the schedules' benchmark compares a step with, and when it ends with status 1."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from buffer_rl.observe.timeline import WorkSpan
from buffer_rl.observe.timeline_stats import Overlap, step_stats
from buffer_rl.testing.tiny import make_tiny_model
from buffer_rl.weights.sender import PublishedNames

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


@pytest.mark.parametrize("kind", ["queued", "at once"])
@pytest.mark.parametrize("name", KINDS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(groups=GROUPS)
def test_the_formula_is_the_bound_of_the_timeline_and_the_critical_path_the_step_that_it_belongs_to(
    module: ModuleType, kind: str, name: str, groups: list[tuple[float, int]]
) -> None:
    setting, known_group = module.SETTINGS[kind], sys.modules["schedule_bounds"].KnownGroup
    known = [known_group(finished=finished, tokens=tokens) for finished, tokens in groups]
    found = module.bounds(name, known, setting)
    rate = setting.forward + (setting.trained if name == "streamed gradients" else setting.forward)
    generation, tokens = max(groups)[0], sum(tokens for _, tokens in groups)
    passes, free = [], generation if name == "lockstep" else 0.0
    for group in sorted(known, key=lambda group: group.finished):
        start = max(free, group.finished)
        free = start + rate * group.tokens
        passes.append(span("train", start, free))
    update = setting.optimizer + (0.0 if name == "streamed gradients" else setting.trained * tokens)
    spans: dict[str, Any] = {
        "rollout": [span("rollout", 0.0, generation)],
        "train": [*passes, span("update", free, free + update)],
        "publish": [span("publish", free + update, free + update + setting.publish, 1)],
    }
    stats = step_stats(spans, 0, kind=KINDS[name])
    assert found.formula == pytest.approx(stats.bound)
    assert found.path == pytest.approx(stats.wall)
    assert found.formula <= found.path + 1e-9


def asked(task: str, prompt: int, seed: int) -> dict[str, Any]:
    return {"rid": f"{task}:x", "input_ids": [prompt] * 6, "sampling_params": {"sampling_seed": seed}}


def test_a_response_begins_when_one_of_the_slots_is_free(module: ModuleType) -> None:
    lengths = {seed: module.response_length(seed, 0.5) for seed in range(5)}
    requests = [asked("train_2", prompt, seed) for prompt, seed in ((7, 0), (7, 1), (8, 2), (8, 3), (7, 4))]
    one = replace(module.SETTINGS["queued"], slots=1, decoded=1.0)
    found = module.known_groups([asked("train_1", 7, 0), *requests], 0.5, one)
    assert [group.finished for group in found[1]] == [lengths[0]]
    assert [group.finished for group in found[2]] == [sum(lengths.values()), sum(lengths[seed] for seed in range(4))]
    assert [group.tokens for group in found[2]] == [
        18 + lengths[0] + lengths[1] + lengths[4],
        12 + lengths[2] + lengths[3],
    ]
    together = module.known_groups(requests, 0.5, replace(one, slots=None))[2]
    assert [group.finished for group in together] == [
        max(lengths[0], lengths[1], lengths[4]), max(lengths[2], lengths[3]),
    ]  # fmt: skip


def test_a_row_whose_median_is_too_far_above_its_bound_is_named(module: ModuleType) -> None:
    bound = module.Bounds(generation=1.0, streamed=1.0, path=2.0, formula=1.0)
    steps = [(2.0, bound), (2.06, bound), (4.0, bound)]
    assert module.of_bounds(steps) == pytest.approx({"path": 1.03, "formula": 2.06})
    assert module.verdict("a row", module.SETTINGS["at once"], steps) == []
    assert module.verdict("a row", module.SETTINGS["queued"], steps) == ["wall/formula 2.060, above 1.05: a row"]
    slow = [(2.2, bound)]
    assert module.verdict("a row", module.SETTINGS["at once"], slow) == ["wall/path 1.100, above 1.05: a row"]
    assert module.verdict("a row", module.SETTINGS["at once"], [(float("nan"), bound)]) != []


def test_the_trainer_of_known_costs_publishes_the_model_that_the_engines_serve(
    script: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    args = SimpleNamespace(hf_checkpoint=make_tiny_model(tmp_path), trust_remote_code=False)
    trainer = script("known_costs").QueuedTrainer(args, 0, 1, None)
    (bucket,) = PublishedNames(args).checked(trainer.export())
    assert bucket
