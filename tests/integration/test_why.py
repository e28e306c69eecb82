"""``why`` and ``rescore`` on runs that have ended: groups as the ledger has them, rewards as another run has them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer_rl.buffer.ledger_audit import LedgerAudit
from buffer_rl.cli import main
from buffer_rl.files.row_file import read_rollout

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

FUNCTIONS = """
import os
import signal
from pathlib import Path

from buffer_rl.rollout import generate as default


def count_a(args, sample):
    if sample.prompt == "bb=":
        raise ValueError("no reward for bb")
    return 1.0 if sample.prompt == "cc=" else 0.1 * sample.response.count("a")


def count_b(args, sample):
    return sample.response.count("b") / 3


def broken(args, sample):
    if sample.prompt == "ab=":
        raise SystemExit("out")
    return count_b(args, sample)


async def generate(args, sample, sampling_params):
    marker = Path(args.run_dir) / "killed"
    if sample.group_index >= 4 and sample.sample_index == 0 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return await default.generate(args, sample, sampling_params)
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("functions") / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def asked(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*map(str, argv), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert isinstance(facts, dict)
    return facts


def test_every_group_and_step_of_a_run_is_told_as_the_ledger_has_it(
    train: Callable[[Any], Any], make_options: Callable[..., Any], functions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = make_options(
        custom_rm_path=f"{functions}:count_a",
        custom_generate_function_path=f"{functions}:generate",
        dynamic_sampling_filter_path="nonzero_std",
        role_max_restarts=3,
        deterministic=True,
    )
    train(args)
    audit = LedgerAudit(Path(args.run_dir) / "ledger.sqlite")
    states, fates, num_recorded = audit.states(), set[str](), 0
    for uid, state in states:
        facts, history = asked(capsys, "why", args.run_dir, uid), audit.history(uid)
        told = "\n".join(facts["sentences"])
        assert facts["state"] == state
        assert [a["attempt"] for a in facts["attempts"]] == [h.attempt for h in history if h.after == "leased"]
        assert told.count("went back to the queue") == sum(h.after == "pending" for h in history)
        assert told.count("was finished, kept by the filter") == sum(
            h.before == "leased" and h.after == "finished" for h in history
        )
        assert ("trained on it" in told) == (state == "trained")
        fates |= {state, *(a["why"] for a in facts["attempts"] if a["end"] == "pending")}
        if state == "trained":
            # A worker that died leaves no samples of what it had finished.
            assert (facts["record"] is None) == any("its rewards" in what for what in facts["not_recorded"])
        if state == "trained" and facts["record"]:
            num_recorded += 1
            assert len(facts["record"]["rewards"]) == 4
            assert facts["record"]["versions"] == [facts["attempts"][-1]["ticket"]]
    assert {"trained", "rejected", "quarantined", "begun again"} <= fates
    assert num_recorded >= 6
    for rollout, step, num_groups in audit.commits():
        facts = asked(capsys, "why", args.run_dir, rollout)
        assert (len(facts["trained"]), facts["weight_version"], facts["not_recorded"]) == (num_groups, step, [])
        assert sum(facts["phases"].values()) == pytest.approx(facts["seconds"])
        assert facts["waits"]["train"]["rollout"] > 0
    first = json.loads((Path(args.run_dir) / "samples.jsonl").read_text().splitlines()[0])
    facts = asked(capsys, "why", args.run_dir, first["uid"])
    assert (facts["kind"], facts["evaluations"][0]["rewards"]) == ("evaluation", [first["reward"]])
    audit.close()


@pytest.fixture(scope="module")
def two_runs(
    train: Callable[[Any], Any],
    options_in: Callable[..., Any],
    functions: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Any]:
    """One step each on the same samples, with two rewards."""
    folder = tmp_path_factory.mktemp("two_runs")
    runs = []
    for reward in ("count_b", "count_len"):
        functions.write_text(FUNCTIONS + "\n\ndef count_len(args, sample):\n    return 0.3 * len(sample.response)\n")
        args = options_in(
            folder / reward,
            custom_rm_path=f"{functions}:{reward}",
            deterministic=True,
            num_rollout=1,
            eval_prompt_data=[],
            dump_samples=100,
            save_debug_rollout_data=str(folder / reward / "rows_{rollout_id}.safetensors"),
        )
        train(args)
        runs.append(args)
    return runs


def columns_of(args: Any, *names: str) -> list[Any]:
    batch = read_rollout(Path(args.save_debug_rollout_data.replace("{rollout_id}", "0")))
    return [batch.row_ids, *(np.asarray(batch.columns[name]).tolist() for name in names)]


@pytest.mark.parametrize("has_rows", [True, False])
def test_the_runs_own_reward_gives_what_was_recorded_and_another_what_another_run_has(
    two_runs: list[Any], functions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], has_rows: bool
) -> None:
    one, other = two_runs
    rows, raw, trained_on = columns_of(one, "raw_reward", "reward")
    other_rows, other_raw, other_trained_on = columns_of(other, "raw_reward", "reward")
    assert rows == other_rows
    assert raw != other_raw
    kept = Path(one.save_debug_rollout_data.replace("{rollout_id}", "0"))
    aside = kept.rename(tmp_path / "aside") if not has_rows else kept
    try:
        own = asked(capsys, "rescore", one.run_dir, "--output", tmp_path / "own.jsonl")["all"]
        assert (own["groups"], own["of"], own["equal_rewards"], own["equal_best"], own["signs"]) == (3, 3, 1.0, 1.0, 0)
        reward = f"{functions}:count_len"
        asked(capsys, "rescore", one.run_dir, "--custom-rm-path", reward, "--output", tmp_path / "new.jsonl")
    finally:
        aside.rename(kept)
    for name, new_raw, new_trained_on in (("own", raw, trained_on), ("new", other_raw, other_trained_on)):
        lines = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        by_row = {(line["uid"], line["sample_index"]): line for line in lines}
        found = [by_row[str(row.uid), row.sample_index] for row in rows]
        assert [np.float32(line["new_reward"]) for line in found] == [np.float32(value) for value in new_raw]
        assert [np.float32(line["old_reward"]) for line in found] == [np.float32(value) for value in raw]
        # GRPO: each token's advantage is the normalised reward.
        assert [line["new_advantage"] for line in found] == new_trained_on
        assert [line["old_advantage"] for line in found] == trained_on


def test_what_a_reward_raises_is_counted_and_the_other_groups_are_compared(
    two_runs: list[Any], functions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uids = {row.uid for row in columns_of(two_runs[0])[0]}
    facts = asked(capsys, "rescore", two_runs[0].run_dir, "--custom-rm-path", f"{functions}:broken")
    failed = sum(facts["all"]["failed"].values())
    assert facts["all"]["groups"] + failed == len(uids)
    assert set(facts["all"]["failed"]) <= {"reward_failed:exception"}
