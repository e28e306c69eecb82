"""A run whose rollout function leases half of each step's groups, and makes the other half itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.buffer.ledger_audit import LedgerAudit
from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.cli import main
from harness.checkpoints import final_weights

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(240)]

STEPS = 4
ROLLOUT = """
import asyncio

from buffer_rl.rollout.generate import generate, sampling_params_for
from buffer_rl.records.groups import GroupUid, Sample, SampleGroup

IDS = {character: 3 + index for index, character in enumerate("abc=")}


def from_elsewhere(prompt, responses, **fields):
    samples = [
        Sample(
            tokens=[IDS[character] for character in prompt + response],
            response=response,
            response_length=len(response),
            reward=response.count("a"),
            status="completed",
        )
        for response in responses
    ]
    return SampleGroup(samples=samples, **fields)


async def half_of_each(args, rollout_id, buffer, evaluation=False):
    leased = await buffer.aget_samples(2)
    params = sampling_params_for(args, evaluation)
    await asyncio.gather(*[generate(args, sample, params) for group in leased for sample in group])
    for group in leased:
        for sample in group:
            sample.reward = sample.response.count("a")
    mine = from_elsewhere("ab=", ["aaa", "bc", "ab"], uid=GroupUid("my-env", rollout_id, 0))
    await buffer.afinish(mine)
    return [*leased, from_elsewhere("ba=", ["ca", "a" * (1 + rollout_id)])]
"""


def foreign_states(path: Path) -> dict[str, GroupState]:
    """Of a run, or of a checkpoint, whose accounts must hold."""
    audit = LedgerAudit(path / "ledger.sqlite")
    try:
        assert audit.faults() == []
        return {str(uid): state for uid, state in audit.states() if uid.source in ("my-env", "foreign")}
    finally:
        audit.close()


def metrics_of(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    kept = [line for line in lines if line["kind"] in ("rollout", "train")]
    return [{k: v for k, v in line.items() if not k.startswith(("perf/", "time"))} for line in kept]


def test_foreign_groups_are_trained_once_also_over_a_resume(
    train: Callable[[Any], Any],
    options_in: Callable[..., Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    function = tmp_path / "half.py"
    function.write_text(ROLLOUT)
    common = {
        "rollout_function_path": f"{function}:half_of_each",
        "rollout_batch_size": 4,
        "deterministic": True,
        "eval_prompt_data": [],
        "eval_interval": None,
        "lr_decay_iters": STEPS,
    }
    whole = options_in(tmp_path / "whole", num_rollout=STEPS, **common)
    assert train(whole).steps == STEPS
    saves = str(tmp_path / "saves")
    train(options_in(tmp_path / "parts", num_rollout=STEPS // 2, save=saves, **common))
    assert train(options_in(tmp_path / "parts", num_rollout=STEPS, load=saves, **common)).steps == STEPS

    uids = [f"my-env:{step}:0" for step in range(STEPS)] + [f"foreign:0:{step}" for step in range(STEPS)]
    for name in ("whole", "parts"):
        assert foreign_states(tmp_path / name) == dict.fromkeys(uids, GroupState.TRAINED)
    assert final_weights(tmp_path / "whole") == final_weights(tmp_path / "parts")
    metrics = metrics_of(tmp_path / "whole")
    assert metrics_of(tmp_path / "parts") == metrics
    assert [line["rollout/num_groups"] for line in metrics if line["kind"] == "rollout"] == [4.0] * STEPS
    for line in metrics:  # the leased half is still compared with the engine
        assert line["kind"] != "train" or line["train/train_rollout_logprob_abs_diff"] < 1e-5
    capsys.readouterr()
    assert main(["ledger", str(tmp_path / "parts"), "--verify"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for source in ("my-env", "foreign"):
        assert [source, "foreign", "?", "0", "0", "0", str(STEPS), "0", "0"] in lines
