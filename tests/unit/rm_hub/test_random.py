from __future__ import annotations

from types import SimpleNamespace

from buffer_rl.records.groups import GroupUid, Sample
from rm_hub.random import score


def drawn(seed: int = 0, epoch: int = 0, response: str = "x") -> list[float]:
    uids = [GroupUid("data", row, epoch) for row in range(100)]
    samples = [Sample(uid=uid, sample_index=at, response=response) for uid in uids for at in range(10)]
    return [score(SimpleNamespace(seed=seed), sample) for sample in samples]


def test_half_of_the_samples_have_1_the_others_0_whatever_they_say() -> None:
    rewards = drawn()
    assert set(rewards) == {0.0, 1.0}
    assert 437 <= sum(rewards) <= 563  # four standard deviations of 1,000 fair draws
    assert len({tuple(rewards[at : at + 10]) for at in range(0, 1000, 10)}) > 80  # groups differ


def test_a_repeated_run_has_the_same_rewards_and_another_seed_epoch_or_response_others() -> None:
    assert drawn() == drawn()
    assert len({tuple(each) for each in (drawn(), drawn(seed=1), drawn(epoch=1), drawn(response="y"))}) == 4
