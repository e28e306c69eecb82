from __future__ import annotations

from pathlib import Path

from buffer_rl.observe.observer import Incidents


def test_each_is_said_once_and_all_of_them_at_the_end(tmp_path: Path) -> None:
    incidents = Incidents(str(tmp_path))
    assert incidents.rollout(0, {"rollout/raw_reward": 1.0}) == incidents.summary() == []
    where = tmp_path / "quarantine.jsonl"
    said_once = f"rollout 1: 1 prompt group put into quarantine, with their errors: {where}"
    assert incidents.rollout(1, {"rollout/drop_quarantined": 1.0}) == [said_once]
    incidents.rollout(2, {"rollout/drop_quarantined": 2.0})
    first = ["step 2: loss or gradient not finite; the weights stay as they were"]
    totals = (0, 0, 1, 1)  # the trainer reports how many there were so far
    said = [incidents.step(step, {"train/non_finite_steps": float(total)}) for step, total in enumerate(totals)]
    assert said == [[], [], first, []]
    assert incidents.summary() == [
        f"3 prompt groups of this run in quarantine: {tmp_path / 'quarantine.jsonl'}",
        f"1 optimizer steps were not finite and were left out; their rows: {tmp_path / 'non_finite'}",
    ]


def test_the_critics_are_counted_too(tmp_path: Path) -> None:
    incidents = Incidents(str(tmp_path))
    whose = "the critic's loss or gradient not finite; the weights stay as they were"
    assert incidents.step(0, {"critic/non_finite_steps": 1.0}) == [f"step 0: {whose}"]
    both = {"critic/non_finite_steps": 2.0, "train/non_finite_steps": 1.0}
    assert len(incidents.step(1, both)) == 2
    assert incidents.step(2, both) == []
    assert incidents.summary()[0].startswith("3 optimizer steps were not finite")


def test_a_step_without_the_count_says_nothing(tmp_path: Path) -> None:
    incidents = Incidents(str(tmp_path))
    assert [
        len(incidents.step(step, metrics)) for step, metrics in enumerate([{"train/non_finite_steps": 1.0}, {}])
    ] == [1, 0]


def test_those_of_steps_that_are_done_again_are_counted_once(tmp_path: Path) -> None:
    incidents = Incidents(str(tmp_path))
    for _ in range(2):
        for step, total in enumerate((1, 1, 3)):
            incidents.rollout(step, {"rollout/drop_quarantined": 1.0})
            incidents.step(step, {"train/non_finite_steps": float(total)})
        incidents.went_back(0)
    incidents.rollout(0, {"rollout/drop_quarantined": 1.0})
    assert incidents.step(0, {"train/non_finite_steps": 1.0}) != []
    incidents.went_back(1)  # the trainer counts from 0 again
    assert incidents.step(1, {"train/non_finite_steps": 1.0}) != []
    assert [line.partition(" ")[0] for line in incidents.summary()] == ["1", "2"]


def test_steps_without_a_gradient_are_told_of_once_and_at_the_end_if_the_run_ends_with_them(tmp_path: Path) -> None:
    incidents = Incidents(str(tmp_path))
    idle = [(step, {"train/grad_norm": 0.0}) for step in range(9)]
    assert [line for at in idle for line in incidents.step(*at)] == incidents.summary() == []
    said = incidents.step(9, {"train/grad_norm": 0.0})
    assert [line.partition(",")[0] for line in said] == ["the gradient was 0 in the last 10 steps"]
    assert [line for step in (10, 11) for line in incidents.step(step, {"train/grad_norm": 0.0})] == []
    assert [line.partition(",")[0] for line in incidents.summary()] == ["the gradient was 0 in the last 12 steps"]
    incidents.step(12, {"train/grad_norm": 0.1})
    assert incidents.summary() == []
    # Steps that are done again are not counted twice; a step without the metric (a critic's alone) is none of them.
    for _ in range(2):
        assert [line for at in idle for line in incidents.step(*at)] == []
        incidents.went_back(0)
    assert [line for step in range(20) for line in incidents.step(step, {"critic/loss": 0.0})] == []
