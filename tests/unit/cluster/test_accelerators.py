"""Which processes have an accelerator each, and what is said where there are too few."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from buffer_rl.cluster.session import role_gpus, train_gpus
from buffer_rl.config import compose
from buffer_rl.errors import ConfigError
from buffer_rl.options import CORE_SECTIONS

PPO = {"advantage_estimator": "ppo"}


def gpus_of(monkeypatch: pytest.MonkeyPatch, found: int, **options: Any) -> tuple[float, float]:
    """Of each trainer rank and of each worker of a role, where the cluster has ``found``."""
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": float(found)})
    args: Any = compose(CORE_SECTIONS)(**options)
    return train_gpus(args), role_gpus(args)


def test_a_critics_ranks_have_accelerators_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpus_of(monkeypatch, 2, **PPO) == (1.0, 1.0)
    assert gpus_of(monkeypatch, 1, **PPO) == (0.5, 1.0)  # policy and critic share it
    assert gpus_of(monkeypatch, 3, **PPO, num_train_ranks=2) == (0.0, 0.0)
    assert gpus_of(monkeypatch, 0, **PPO) == (0.0, 0.0)
    assert gpus_of(monkeypatch, 1) == (1.0, 1.0)


def test_a_critic_that_would_wait_for_an_accelerator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--train-device, .*: 4 trainer ranks \(half of .*critic's\).* there are 3"):
        gpus_of(monkeypatch, 3, **PPO, num_train_ranks=2, train_device="cuda")
    with pytest.raises(ConfigError, match=r"1 trainer ranks and 1 workers .* there are 1"):
        gpus_of(monkeypatch, 1, **PPO, num_ref_workers=1)
    with pytest.raises(ConfigError, match=r"--num-ref-workers, .*: 1 trainer ranks and 1 workers .* there are 1"):
        gpus_of(monkeypatch, 1, num_ref_workers=1, train_device="cuda")


def test_each_process_of_a_reward_model_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    reward = {"rm_model": "classifier", "num_reward_workers": 2}
    assert gpus_of(monkeypatch, 3, **reward) == (1.0, 1.0)
    with pytest.raises(ConfigError, match=r"--num-reward-workers, .*: 1 trainer ranks and 2 workers .* there are 2"):
        gpus_of(monkeypatch, 2, **reward)
    assert gpus_of(monkeypatch, 1, num_reward_workers=1) == (1.0, 1.0)  # of no model


def test_an_evaluation_has_no_critic_to_give_one_to(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpus_of(monkeypatch, 1, **PPO, num_rollout=0) == (1.0, 1.0)
