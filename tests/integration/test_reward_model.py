"""Whole runs whose rewards are the scores of a reward model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.observe.metrics import read_metrics
from buffer_rl.testing.tiny import make_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A reward model with random weights and the policy's tokenizer."""
    return make_tiny_model(
        tmp_path_factory.mktemp("classifier"),
        characters="abc=",
        hidden_size=32,
        intermediate_size=48,
        seed=1,
        auto_class="AutoModelForSequenceClassification",
        num_labels=1,
    )


def test_a_run_trains(train: Callable[[Any], Any], options_in: Any, classifier: str, tmp_path: Path) -> None:
    args = options_in(tmp_path / "run", custom_rm_path=None, rm_model=classifier)
    train(args)
    print([m.get("rollout/raw_reward") for m in read_metrics(args.run_dir)])
