"""Runs whose trainer and engines hold their memory in turn end with the parameters of one in which both keep it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

WATCHING = """
import json, os, signal, urllib.request
from pathlib import Path

from buffer_rl.embedded import launcher
from buffer_rl.cluster.process import auth_headers
from buffer_rl.train.torch_trainer import TorchTrainer


def noted(args, index, log_path):
    '''The embedded engine; its process and URL are written down.'''
    engine = launcher.launch(args, index, log_path)
    with open(f"{args.run_dir}/engines", "a") as file:
        print(engine.process.pid, engine.url, file=file)
    return engine


class Watching(TorchTrainer):
    '''Writes down what engines lack when it sleeps and when it is awake again. Kills the last one in rollout 1, or
    itself.'''

    def __init__(self, args, rank, world_size, objective):
        super().__init__(args, rank, world_size, objective)
        self.args = args
        self._note("built")

    def sleep(self):
        super().sleep()
        self._note("sleeps")

    def wake_up(self):
        self._note("awake")
        super().wake_up()

    def accumulate(self, batch):
        chosen, killed = Path(self.args.run_dir, "kill"), Path(self.args.run_dir, "killed")
        if batch.rollout_id == 1 and chosen.exists() and not killed.exists():
            killed.touch()
            pid = os.getpid() if chosen.read_text() == "trainer" else self._engines()[-1][0]
            os.kill(int(pid), signal.SIGKILL)
        return super().accumulate(batch)

    def _engines(self):
        return [line.split() for line in Path(self.args.run_dir, "engines").read_text().splitlines()]

    def _note(self, moment):
        found = []
        for _, url in self._engines():
            request = urllib.request.Request(f"{url}/server_info", headers=auth_headers(self.args.engine_api_key))
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    info = json.load(answer)
            except OSError:  # it was killed
                continue
            found.append([info["lacks"], info["cache_bytes"] > 0])
        with open(f"{self.args.run_dir}/moments", "a") as file:
            print(json.dumps([moment, found]), file=file)
"""
CACHE, WEIGHTS = ["cuda_graph", "kv_cache"], ["weights"]
BUILT = ("built", [[[*CACHE, *WEIGHTS], False]])
SLEEPS = ("sleeps", [[CACHE, False]])
AWAKE = ("awake", [[[*CACHE, *WEIGHTS], False]])


def metrics_of(run_dir: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] != "perf"]


def require_equal(run_dir: str, other: str) -> None:
    assert metrics_of(run_dir) == metrics_of(other)
    found, wanted = (load_file(Path(run) / "hf" / "model.safetensors") for run in (run_dir, other))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.fixture
def offloaded(
    train: Callable[[Any], Any], whole_run: Any, make_options: Callable[..., Any], tmp_path: Path
) -> Callable[..., Any]:
    """Runs what ``whole_run`` ran, with both sides offloaded and watched; kill: what dies in rollout 1."""

    def run(*, kill: str = "", **changes: Any) -> Any:
        (tmp_path / "watching.py").write_text(WATCHING)
        same = ("deterministic", "num_rollout", "lr_decay_style", "lr_decay_iters")
        args = make_options(
            **{name: getattr(whole_run, name) for name in same},
            offload_train=True,
            offload_rollout=True,
            train_backend=f"{tmp_path / 'watching.py'}:Watching",
            rollout_engine=f"{tmp_path / 'watching.py'}:noted",
            **changes,
        )
        Path(args.run_dir).mkdir(parents=True)
        if kill:
            Path(args.run_dir, "kill").write_text(kill)
        train(args)
        assert Path(args.run_dir, "killed").exists() == bool(kill)
        return args

    return run


def moments_of(args: Any) -> list[tuple[str, Any]]:
    return [tuple(json.loads(line)) for line in Path(args.run_dir, "moments").read_text().splitlines()]


def test_a_run_whose_sides_take_turns_ends_as_one_in_which_both_keep_their_memory(
    offloaded: Callable[..., Any], whole_run: Any
) -> None:
    args = offloaded()
    require_equal(args.run_dir, whole_run.run_dir)
    # The evaluation at the start and rollout 0; then a turn for each rollout, and one for the evaluation at the end.
    assert moments_of(args) == [BUILT, *[SLEEPS, AWAKE] * 5]


@pytest.mark.slow
@pytest.mark.parametrize("engines", [1, 2])
def test_an_engine_that_dies_while_it_has_no_memory_is_replaced_when_the_others_have_it_back(
    offloaded: Callable[..., Any], whole_run: Any, engines: int
) -> None:
    args = offloaded(kill="engine", rollout_num_engines=engines)
    require_equal(args.run_dir, whole_run.run_dir)
    log = (Path(args.run_dir) / "logs" / "fleet.log").read_text()
    assert f"engine {engines - 1}: restarting -> loading" in log


@pytest.mark.slow
def test_a_run_whose_trainer_dies_goes_on_from_its_checkpoint_with_the_memory_where_a_run_begins(
    offloaded: Callable[..., Any], whole_run: Any, tmp_path: Path
) -> None:
    args = offloaded(kill="trainer", save=str(tmp_path / "saves"), save_interval=1)
    require_equal(args.run_dir, whole_run.run_dir)
    # It dies in the second step; after the restart come three rollouts, and the evaluation at the end.
    assert moments_of(args) == [BUILT, *[SLEEPS, AWAKE] * 2, BUILT, *[SLEEPS, AWAKE] * 4]
