"""Runs against engines that somebody else started, with another model: behind ``--router-url``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.engines.fleet import EngineFleet
from buffer_rl.errors import TrainError
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.testing.tiny import make_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

TRANSPORT = """
class ConfirmsWithoutWriting:
    def __init__(self, args):
        pass

    class sender:
        def __init__(self, args, topology):
            pass

    staged = False

    def connect(self, trainer, engines):
        self.engines = engines

    def prepare(self, version):
        pass

    def publish(self, version):  # they take their own weights again, under the new name
        self.engines.update_weights_from_disk({other!r}, version)

    def close(self):
        pass
"""


def train_metrics(run_dir: str) -> list[dict[str, Any]]:
    """What every step of a run logged of its training."""
    lines = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "train"]


@pytest.fixture(scope="module")
def others(
    options_in: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The folder of another model of the same shape, and the options that name engines which serve it."""
    folder = tmp_path_factory.mktemp("others")
    other = str(folder / "model")
    make_tiny_model(other, characters="abc=", hidden_size=32, intermediate_size=48, seed=99, init_scale=0.3)
    args = options_in(folder / "run", hf_checkpoint=other, engine_api_key="k" * 20)
    with EngineFleet(args, str(folder), PluginRegistry()) as fleet:
        fleet.wait_ready()
        yield (
            other,
            {
                "router_url": fleet.router_url,
                "engine_urls": fleet.engine_urls,
                "engine_api_key": args.engine_api_key,
            },
        )


@pytest.mark.slow
def test_engines_of_others_get_the_run_s_weights_before_the_first_rollout(
    train: Callable[[Any], Any],
    make_options: Callable[..., Any],
    others: tuple[str, dict[str, Any]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    args = make_options(num_rollout=1, eval_prompt_data=[], eval_interval=None, progress="plain", **others[1])
    assert train(args).steps == 1
    assert "engine and trainer agree" in capfd.readouterr().out


@pytest.mark.slow
def test_of_truncated_samples_engine_and_trainer_agree_where_the_kept_tokens_are_replayed(
    train: Callable[[Any], Any], make_options: Callable[..., Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recorded = str(tmp_path / "{rollout_id}.safetensors")
    options = {
        "rollout_top_p": 0.7,
        "replay_kept_tokens": True,
        "max_logprob_diff": 1e-5,
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "num_steps_per_rollout": 3,
        "num_rollout": 2,
        "eval_prompt_data": [],
        "eval_interval": None,
        "progress": "plain",
        "save_debug_rollout_data": recorded,
    }
    args = make_options(**options)
    assert train(args).steps == 2
    assert "engine and trainer agree" in capfd.readouterr().out
    metrics = train_metrics(args.run_dir)
    assert max(line["train/train_rollout_logprob_abs_diff"] for line in metrics) < 1e-5
    alone = {"load_debug_rollout_data": recorded, "save_debug_rollout_data": None, "prompt_data": []}
    args = make_options(**options | alone | {"run_dir": str(tmp_path / "again"), "custom_rm_path": None})
    assert train(args).steps == 2
    assert train_metrics(args.run_dir) == metrics


def test_engines_that_confirm_weights_without_taking_them_end_the_run_in_its_first_step(
    train: Callable[[Any], Any], make_options: Callable[..., Any], others: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    other, addresses = others
    (tmp_path / "transports.py").write_text(TRANSPORT.format(other=other))
    transport = f"{tmp_path / 'transports.py'}:ConfirmsWithoutWriting"
    args = make_options(eval_prompt_data=[], eval_interval=None, weight_sync_mode=transport, **addresses)
    with pytest.raises(TrainError, match=r"nats a token away(.|\n)*1\. other weights") as caught:
        train(args)
    assert "--max-logprob-diff" in caught.value.expected
    assert not (Path(args.run_dir) / "metrics.jsonl").read_text()
