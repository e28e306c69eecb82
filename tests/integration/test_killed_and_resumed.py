"""A run whose driver, and then whose trainer rank, was killed goes on from its newest checkpoint, and ends with the
parameters and the trained groups of one that nobody disturbed, also with other numbers of ranks and engines.
``benchmarks/faults.py`` cuts ten times each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.buffer.ledger_audit import LedgerAudit
from buffer_rl.observe.metrics import read_metrics
from harness.faulty_runs import GROUPS, LiveRun, Outcome, make_options, make_task, newest_step

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

STEPS = 7


@pytest.mark.slow
def test_a_lineage_of_killed_runs_ends_as_if_nothing_had_happened(train: Callable[[Any], Any], tmp_path: Path) -> None:
    make_task(tmp_path)
    saves = tmp_path / "cut" / "saves"
    save: dict[str, Any] = {"save_interval": 1, "save": str(saves), "eval_interval": 1}
    save |= {"eval_prompt_data": [f"held={tmp_path / 'train.jsonl'}@[0:2]"]}
    for victim, num_ranks in (("driver", 2), ("rank", 1)):
        start = newest_step(saves)
        load = {"load": str(saves)} if start else {}
        # Without an end: it is still at work when it is killed, however slow this test is to notice.
        sizes = {"num_train_ranks": num_ranks, "lr_decay_iters": STEPS, "max_global_restarts": 0}
        run = LiveRun(make_options(tmp_path, "cut", 1000, **sizes, **save, **load))
        try:
            assert run.wait_until(lambda start=start: newest_step(saves) > start + 1, 150), run.last_output()
            assert run.kill(victim)
            assert run.wait(60) != 0
        finally:
            run.stop()
    start = newest_step(saves)
    end = start + 2
    sizes = {"num_train_ranks": 2, "rollout_num_engines": 2, "lr_decay_iters": STEPS}
    train(make_options(tmp_path, "cut", end, **sizes, **save, load=str(saves)))
    whole = make_options(tmp_path, "whole", end, lr_decay_iters=STEPS, save=str(tmp_path / "whole_saves"))
    train(whole)
    expected = Outcome.of(Path(whole.run_dir), end * GROUPS)
    assert not expected.faults
    assert Outcome.of(tmp_path / "cut", end * GROUPS).differs(expected) == []
    assert Outcome.of(saves / f"step_{end:06d}", end * GROUPS).differs(expected) == []
    assert len(LedgerAudit(tmp_path / "cut" / "ledger.sqlite").commits()) == end
    assert (tmp_path / "cut" / "ledger.sqlite.previous").exists()
    # The same command once more: there is no step left, and the ledger is not lost. No metrics are missing or doubled.
    train(make_options(tmp_path, "cut", end, lr_decay_iters=STEPS, **save, load=str(saves)))
    assert Outcome.of(tmp_path / "cut", end * GROUPS).differs(expected) == []
    steps = [(record["kind"], record["step"]) for record in read_metrics(tmp_path / "cut")]
    assert sorted(step for kind, step in steps if kind == "eval") == list(range(end + 1))
    assert [step for kind, step in steps if kind == "train"] == list(range(end))
