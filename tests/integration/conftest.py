"""One Ray session, one tiny model and one small task for all integration tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.cluster.session import ray_session
from buffer_rl.driver.launch import launch_training
from buffer_rl.options.section import compose
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.testing.tiny import make_tiny_model
from harness.metric_names import check_metrics
from harness.scripts import forked_from

METRICS_OF_TESTS = ("train/difficulty", "rollout/slime_dropped")
"""What functions of tests and examples give: a loss of examples/losses, a rollout function in the style of slime."""
WORDS = ("ab", "ba", "abc", "bca", "cab", "acb", "bb", "cc")


@pytest.fixture(scope="session")
def ray_cluster(fork_server_socket: str) -> Iterator[None]:
    """Ray as a run starts it. Its workers and the engines of runs are forked, as those of a command; commands that
    tests start have theirs forked by the same server."""
    with forked_from(fork_server_socket), ray_session(None):
        yield


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``model``, ``train.jsonl`` and a reward that a random model earns something of."""
    folder = tmp_path_factory.mktemp("task")
    make_tiny_model(folder / "model", characters="abc=", hidden_size=32, intermediate_size=48)
    rows = [{"prompt": f"{word}=", "label": word[::-1]} for word in WORDS]
    (folder / "letters.py").write_text("def count_a(args, sample):\n    return sample.response.count('a')\n")
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def options_of(task: Path, folder: Path, **changes: Any) -> Any:
    """Options of a run of seconds; ``changes`` replace any of them."""
    options: dict[str, Any] = {
        "run_dir": str(folder),
        "prompt_data": str(task / "train.jsonl"),
        "eval_prompt_data": [f"held={task / 'train.jsonl'}@[0:4]"],
        "eval_interval": 2,
        "hf_checkpoint": str(task / "model"),
        "num_rollout": 3,
        "rollout_batch_size": 3,
        "n_samples_per_prompt": 4,
        "rollout_max_response_len": 6,
        "custom_rm_path": f"{task / 'letters.py'}:count_a",
        "lr": 1e-2,
        "logger": [],
        "progress": "none",
        "engine_max_running_requests": 16,
        "engine_context_length": 64,
    }
    return compose(CORE_SECTIONS)(**{**options, **changes})


@pytest.fixture
def make_options(task: Path, tmp_path: Path) -> Callable[..., Any]:
    """``options_of`` with a folder of the test's own."""
    return lambda **changes: options_of(task, tmp_path / "run", **changes)


@pytest.fixture(scope="session")
def options_in(task: Path) -> Callable[..., Any]:
    """``options_of`` with the folder given: ``options_in(folder, **changes)``."""
    return partial(options_of, task)


@pytest.fixture(scope="session")
def train(ray_cluster: None) -> Callable[[Any], Any]:
    """Runs options to their end, in this process. Every metric of a run must be explained (``docs/metrics.md``)."""

    def run(args: Any) -> Any:
        result = launch_training(args, PluginRegistry.from_flags(args.plugin))
        check_metrics(args.run_dir, METRICS_OF_TESTS)
        return result

    return run


@pytest.fixture(scope="session")
def whole_run(train: Callable[[Any], Any], task: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The options of a deterministic run of four steps that has ended, and was saved at the end; its learning rate
    falls along a cosine."""
    schedule = {"lr_decay_style": "cosine", "lr_decay_iters": 4}
    folder = tmp_path_factory.mktemp("whole")
    args = options_of(task, folder, deterministic=True, num_rollout=4, save=str(folder / "saves"), **schedule)
    train(args)
    return args
