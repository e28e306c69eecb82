"""When the comparison of schedules says that something is not as promised."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest

Weights = dict[str, np.ndarray]


def weights(*values: float) -> Weights:
    """Two tensors, the second one twice the first."""
    one = np.array(values, dtype=np.float32)
    return {"a": one, "b": 2 * one}


INITIAL, TRAINED = weights(1.0, -1.0), weights(1.1, -1.1)
CLOSE = weights(1.1 * (1 + 5e-7), -1.1)
FAR = weights(1.1 * (1 + 1e-4), -1.1)


@pytest.fixture
def module(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("schedule_equality")


def whole(module: ModuleType, *, initial: Weights = INITIAL, filtered: bool = False, dropped: int = 0, **runs: Weights):  # type: ignore[no-untyped-def]
    case = module.Case(kl=True, filtered=filtered)
    return module.whole_row(initial, TRAINED, {"pipelined": TRAINED, "roles": None, **runs}, case, dropped)


def test_a_whole_run_that_differs_in_one_bit_is_a_fault(module: ModuleType) -> None:
    good = whole(module, streamed=TRAINED)
    assert (good.cells, good.faults) == (["equal bits", "-", "equal bits", "1.0e-01", "0"], [])
    bad = whole(module, streamed=CLOSE)
    assert len(bad.faults) == 1
    assert bad.faults[0].startswith("streamed differs: ")
    one_bit = {**TRAINED, "a": np.nextafter(TRAINED["a"], np.float32(9))}
    assert len(whole(module, pipelined=one_bit).faults) == 1


def test_a_comparison_that_shows_nothing_is_a_fault(module: ModuleType) -> None:
    assert whole(module, filtered=True, dropped=3).faults == []
    assert whole(module, filtered=True).faults == ["the filter dropped nothing"]
    half = {**INITIAL, "b": TRAINED["b"]}
    assert whole(module, initial=half).faults == ["training left 1 of 2 tensors as they were, such as b"]
    still = module.recorded_row(TRAINED, TRAINED, {"streamed": TRAINED}, 1e-8)
    assert still.faults == ["training left 2 of 2 tensors as they were, such as a"]
    hardly = module.recorded_row(CLOSE, {name: 1.00001 * t for name, t in TRAINED.items()}, {}, 1e-2)
    assert len(hardly.faults) == 1
    assert hardly.faults[0].startswith("training moved no weight by more than 1.0e-05")


def test_recorded_runs_are_held_to_the_limit_where_one_is_promised_and_elsewhere_labelled(module: ModuleType) -> None:
    runs = {"pipelined": TRAINED, "streamed": CLOSE, "ranks": FAR}
    free = module.recorded_row(INITIAL, TRAINED, runs, 1e-8)
    assert free.faults == []
    assert free.cells[-1] == "nothing (for information)"
    held = module.recorded_row(INITIAL, TRAINED, runs, 1e-2)
    assert held.cells[:2] == ["0.01", "equal bits"]
    assert held.cells[-1] == "1e-06"
    assert held.faults == ["ranks differs by 1.0e-04, more than 1e-06"]
    not_a_number = module.recorded_row(INITIAL, TRAINED, {"streamed": weights(float("nan"), -1.1)}, 1e-2)
    assert len(not_a_number.faults) == 1


def test_one_fault_ends_in_status_1_and_is_said(module: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [whole(module), whole(module, filtered=True)]
    faults = module.print_table("Whole runs", module.WHOLE, iter(rows))
    assert faults == ["equal bits: the filter dropped nothing"]  # each fault with its row's first cell
    assert module.verdict(faults) == 1
    assert capsys.readouterr().out.endswith("not as promised: equal bits: the filter dropped nothing\n")
    assert module.verdict([]) == 0
