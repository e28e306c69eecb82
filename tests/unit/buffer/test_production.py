"""Production and selection against a model: whatever a run does, and whatever dies, each group is trained once."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.options.section import compose
from harness.production_model import FINISHED, PENDING, QUARANTINED, REJECTED, ROWS, SAMPLES
from harness.production_trial import Trial

EVENTS: dict[str, Any] = {  # how often it comes, what it does, in which phases of a step
    "generate": (5, Trial.generate),
    "lease": (16, Trial.lease, "open"),
    "finish": (20, partial(Trial.end_lease, fate=FINISHED), "open"),
    "reject": (2, partial(Trial.end_lease, fate=REJECTED), "open"),
    "quarantine": (1, partial(Trial.end_lease, fate=QUARANTINED), "open"),
    "give back": (3, partial(Trial.end_lease, fate=PENDING), "open"),
    "finish foreign": (3, Trial.finish_foreign, "open"),
    "evaluate": (4, Trial.evaluate),
    "select": (10, Trial.select, "open", "ended"),
    "read": (14, Trial.read, "open", "ended", "closed", "empty", "trained"),
    "write": (8, Trial.write, "open", "ended", "closed", "trained"),
    "replace reader": (2, Trial.replace_reader, "open", "ended", "closed", "trained"),
    "read data": (1, Trial.read_data, "open", "ended", "closed", "empty", "trained", "lost"),
    "end ticket": (1, Trial.end_ticket, "open"),
    "close": (2, Trial.close, "open", "ended"),
    "advance": (12, Trial.advance),
    "lose buffer": (1, Trial.lose_buffer),
    "lose rollout worker": (2, Trial.lose_rollout_worker, "open"),
    "lose payloads": (1, Trial.lose_payloads),
    "call late": (2, Trial.call_late),
}
NUM_EVENTS = 120


@cache
def options(folder: Path) -> Any:
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(ROWS)))
    return compose(CORE_SECTIONS)(prompt_data=str(data), n_samples_per_prompt=SAMPLES, rollout_shuffle=False)


def run(args: Any, kind: tuple[Any, ...], events: Sequence[tuple[str, int]]) -> BaseException | None:
    """The events, of which those of a step happen to one that is in the right phase, if any; then the run goes on to
    the end of the data. After each, the states of groups and the queue are those of the model. Returns what failed."""
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(args, Path(folder), *kind)
        try:
            for name, seed in events:
                draw, (_, event, *phases) = Random(seed), EVENTS[name]
                steps = [rollout for rollout, step in trial.model.steps.items() if step.phase in phases]
                if steps or not phases:
                    event(trial, draw, *([draw.choice(steps)] if phases else []))
                    trial.check()
            trial.run_to_the_end(Random(0))
        except (Exception, pytest.fail.Exception) as error:
            return error
        finally:
            trial.end()
    return None


def check_schedule(seed: int, folder: Path) -> None:
    """Raises AssertionError with as few events as still fail."""
    draw, args = Random(seed), options(folder)
    kind = (draw.randint(1, 3), draw.randint(0, 1), draw.random() < 0.5, draw.random() < 0.5)
    names = draw.choices(list(EVENTS), [weight for weight, *_ in EVENTS.values()], k=NUM_EVENTS)
    events = [(name, draw.randrange(10_000)) for name in names]
    if (error := run(args, kind, events)) is None:
        return
    for place in reversed(range(len(events))):
        fewer = events[:place] + events[place + 1 :]
        if (found := run(args, kind, fewer)) is not None:
            error, events = found, fewer
    raise AssertionError(f"per_step, staleness, keeps, after_ref = {kind}: {events}") from error


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (30, 60))])
def test_whatever_happens_and_dies_every_group_is_trained_once_in_the_order_of_the_data(
    tmp_path: Path, seed: int
) -> None:
    for number in range(seed, seed + 30):
        check_schedule(number, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed",
    [*range(1000, 1500, 100), *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(1500, 2000, 100))],
)
def test_so_it_is_in_many_more_schedules(tmp_path: Path, seed: int) -> None:
    for number in range(seed, seed + 100):
        check_schedule(number, tmp_path)
