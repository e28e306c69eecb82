"""Groups that a rollout function made itself, by way of the real Buffer: marked, named, encoded and trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.buffer.state import BufferState
from buffer_rl.errors import RolloutError
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import GroupUid, RolloutOutput, RowId, Sample, SampleGroup, Status, VersionSpan
from buffer_rl.rollout.conversion import GroupConverter
from buffer_rl.rollout.user_rollout import run_user_rollout
from harness.local_buffer import local_client, local_state
from harness.tickets import close_rollout

MINE = GroupUid("my-env", 7, 0)
MINE_THAT_NEEDS = """
from buffer_rl.kinds.marks import loss_unit, scoped

loss = loss_unit("token", needs=("rollout_log_probs",))(lambda args, inputs: None)
estimator = scoped("row", needs=("rollout_log_probs",))(lambda args, batch: None)
"""


def filled(sample: Sample, engine: bool) -> Sample:
    """With a prompt token, two response tokens and a reward; ``engine``: as an engine of version 0 answers."""
    sample.tokens, sample.response_length = [1, 2, 3], 2
    sample.reward, sample.status = float(sample.sample_index), Status.COMPLETED
    if engine:
        sample.rollout_log_probs, sample.weight_versions = [-0.5, -1.0], [VersionSpan(0, 0, 2)]
    return sample


def samples(count: int = 2, **fields: Any) -> list[Sample]:
    """As they come from elsewhere; the rewards differ."""
    made = [filled(Sample(prompt="p", **fields), engine=False) for _ in range(count)]
    for number, sample in enumerate(made):
        sample.reward = float(number)
    return made


class Bench:
    """One rollout of a function of the user's into a Buffer's state."""

    def __init__(self, kit: Any, folder: Path, **options: Any) -> None:
        data = folder / "rows.jsonl"
        data.write_text("".join(json.dumps({"prompt": f"p{row}"}) + "\n" for row in range(4)))
        self.args = kit.make_args(
            rollout_batch_size=4, n_samples_per_prompt=2, rollout_shuffle=False, prompt_data=str(data), **options
        )
        self.ledger = Ledger.in_memory()
        self.state: BufferState = local_state(self.args, self.ledger)
        self.converter = GroupConverter.from_args(self.args, PluginRegistry())

    async def roll(self, function: Any, evaluation: bool = False) -> RolloutOutput:
        """As a rollout worker does it."""
        self.ticket = self.state.generate(0, evaluation)
        self.buffer = local_client(self.state, self.ticket, self.converter)
        output = await run_user_rollout(function, self.args, self.buffer, where="mine")
        for group in output.groups:
            if group.uid not in self.buffer.finished:
                await self.buffer.afinish(group)
        return output


def half_and_half(args: Any, rollout_id: int, buffer: Any, evaluation: bool = False) -> list[Any]:
    leased = buffer.get_samples(2)
    for group in leased:
        for sample in group:
            filled(sample, engine=True)
    named = SampleGroup(uid=MINE, samples=samples())
    buffer.finish(named, buffer.encode(named))
    return [named, SampleGroup(samples=samples()), *leased]


async def test_half_leased_and_half_foreign_groups_are_one_step(kit: Any, tmp_path: Path) -> None:
    bench = Bench(kit, tmp_path)
    output = await bench.roll(half_and_half)
    assert [group.foreign for group in output.groups] == [True, True, False, False]
    report = close_rollout(bench.state, bench.ticket)
    assert (report.num_groups, report.num_rows, report.drops) == (4, 8, {})
    batch = bench.state.get_data(0)
    without = {row for row, values in zip(batch.row_ids, batch.columns["rollout_log_probs"], strict=True)
               if np.isnan(values).all() and len(values) == 2}  # fmt: skip
    theirs = [RowId(uid, index) for uid in (MINE, GroupUid("foreign", 0, 0)) for index in range(2)]
    assert without == set(theirs)
    old = dict(zip(batch.row_ids, batch.columns["weight_version"], strict=True))
    assert {old[row] for row in theirs} == {-1}
    assert sorted(old.values()) == [-1, -1, -1, -1, 0, 0, 0, 0]
    bench.state.commit(0, 1)
    assert all(bench.ledger.entry(row.uid).state is GroupState.TRAINED for row in theirs)
    assert output.metrics["raw_reward"] == 0.5


async def test_lists_of_samples_without_uids_are_foreign_groups_with_names_of_the_rollout(
    kit: Any, tmp_path: Path
) -> None:
    bench = Bench(kit, tmp_path)
    await bench.roll(lambda args, rollout_id, buffer, evaluation=False: [samples(3), samples(1), samples(2, part=1)])
    assert [group.uid for group in bench.buffer.finished.values()] == [GroupUid("foreign", i, 0) for i in range(3)]
    rows = [[(s.sample_index, s.part) for s in group] for group in bench.buffer.finished.values()]
    assert rows == [[(0, 0), (1, 0), (2, 0)], [(0, 0)], [(0, 1), (1, 1)]]


async def test_versions_of_a_foreign_group_are_checked_where_it_has_some(kit: Any, tmp_path: Path) -> None:
    bench = Bench(kit, tmp_path)
    older = samples(2, weight_versions=[VersionSpan(3, 0, 2)])
    with pytest.raises(RolloutError, match="my-env:7:0/0"):
        await bench.roll(lambda *_, **__: [SampleGroup(uid=MINE, samples=older)])


@pytest.mark.parametrize(
    ("flag", "options"),
    [
        ("--use-rollout-logprobs", {"use_rollout_logprobs": True}),
        ("--use-tis", {"use_tis": True}),
        ("--use-tis", {"use_tis": True, "custom_tis_function_path": "mine:weights"}),
        ("--loss-type decoupled_ppo", {"loss_type": "decoupled_ppo"}),
        ("--custom-loss-function-path .*/mine.py:loss", {"custom_loss_function_path": "LOSS"}),
        ("--custom-advantage-function-path", {"custom_advantage_function_path": "ESTIMATOR"}),
        (
            "--advantage-estimator",
            {"stream_gradients": True, "kl_coef": 0.1, "advantage_estimator": "reinforce_plus_plus"},
        ),
    ],
)
async def test_where_training_reads_the_engines_log_probabilities_a_group_without_them_is_refused(
    kit: Any, tmp_path: Path, flag: str, options: dict[str, Any]
) -> None:
    (tmp_path / "mine.py").write_text(MINE_THAT_NEEDS)
    own = {"LOSS": f"{tmp_path}/mine.py:loss", "ESTIMATOR": f"{tmp_path}/mine.py:estimator"}
    bench = Bench(kit, tmp_path, **{name: own.get(value, value) for name, value in options.items()})
    with pytest.raises(RolloutError, match=f"{flag} reads rollout_log_probs, and this foreign group has none"):
        await bench.roll(lambda *_, **__: [samples()])
    given = SampleGroup(uid=MINE, samples=samples(1, uid=MINE, rollout_log_probs=[-0.5, -1.0]), foreign=True)
    assert bench.converter.encode(given, False)[1]["rollout_log_probs"][0].tolist() == [-0.5, -1.0]


async def test_supervised_groups_from_elsewhere_have_no_log_probabilities_as_the_others(
    kit: Any, tmp_path: Path
) -> None:
    bench = Bench(kit, tmp_path, loss_type="sft_loss", disable_rewards_normalization=True)
    await bench.roll(lambda *_, **__: [samples()])
    close_rollout(bench.state, bench.ticket)
    assert "rollout_log_probs" not in bench.state.get_data(0).columns
