"""Over-sampling with partial rollouts in a whole run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.buffer.ledger_audit import LedgerAudit

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]


@pytest.mark.slow
def test_with_twice_the_groups_in_flight_no_group_is_lost_or_trained_twice(
    train: Callable[[Any], Any], make_options: Callable[..., Any], tmp_path: Path
) -> None:
    args = make_options(
        rollout_batch_size=2,
        over_sampling_batch_size=4,
        partial_rollout=True,
        mask_offpolicy_in_partial_rollout=True,
        rollout_max_response_len=40,
        eval_prompt_data=[],
        eval_interval=None,
        save=str(tmp_path / "saves"),
    )
    assert train(args).steps == 3
    lines = [json.loads(line) for line in (Path(args.run_dir) / "metrics.jsonl").read_text().splitlines()]
    rollouts = [line for line in lines if "rollout/num_groups" in line]
    assert [line["rollout/num_groups"] for line in rollouts] == [2.0] * 3
    for line in rollouts:
        assert line["rollout/aborted_groups"] + line["rollout/surplus_groups"] == 2.0
        assert not any(name.startswith("rollout/drop_") for name in line)
    (saved,) = (tmp_path / "saves").rglob("buffer.json")
    state = json.loads(saved.read_text())
    queued = [group["uid"] for group in state["queue"]]
    assert len(set(queued)) == len(queued) == 2
    ledger = LedgerAudit(saved.with_name("ledger.sqlite"))
    try:
        assert Counter(state for _, state in ledger.states()) == {"trained": 6, "pending": 2}
        assert ledger.faults() == []
    finally:
        ledger.close()
