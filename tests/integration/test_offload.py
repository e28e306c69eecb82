"""Runs whose trainer and engines hold their memory in turn end with the parameters of one in which both keep it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from harness.shared_device import ROWS, STEP, TRAINED

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

WATCHING = """
import json, os, signal, urllib.request
from pathlib import Path

from buffer_rl.embedded import launcher
from buffer_rl.cluster.process import auth_headers
from buffer_rl.trainer.torch_trainer import TorchTrainer


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
TAGGED = """
import json

from buffer_rl.trainer.torch_trainer import TorchTrainer


class Noting(TorchTrainer):
    '''Writes down which parts it has given up, and which it takes back.'''

    def __init__(self, args, rank, world_size, objective):
        super().__init__(args, rank, world_size, objective)
        self.args, self.role = args, "critic" if objective.critic else "train"

    def sleep(self, tags):
        super().sleep(tags)
        self._note("-", tags)

    def wake_up(self, tags):
        self._note("+", tags)
        super().wake_up(tags)

    def _note(self, sign, tags):
        with open(f"{self.args.run_dir}/moves", "a") as file:
            print(json.dumps([self.role, sign, sorted(tags)]), file=file)
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
    assert f"starts in its place (1 of at most {args.engine_max_restarts} restarts)" in log
    # The run needs the only one; beside another one, it may end before the new one is there.
    assert engines == 2 or "engine 0: restarting -> loading" in log


@pytest.mark.slow
def test_a_run_whose_trainer_dies_goes_on_from_its_checkpoint_with_the_memory_where_a_run_begins(
    offloaded: Callable[..., Any], whole_run: Any, tmp_path: Path
) -> None:
    args = offloaded(kill="trainer", save=str(tmp_path / "saves"), save_interval=1)
    require_equal(args.run_dir, whole_run.run_dir)
    # It dies in the second step; after the restart come three rollouts, and the evaluation at the end.
    assert moments_of(args) == [BUILT, *[SLEEPS, AWAKE] * 2, BUILT, *[SLEEPS, AWAKE] * 4]


def held_after_each(run_dir: Path) -> Iterator[dict[str, frozenset[str]]]:
    """What policy and critic hold once one of them has taken something."""
    held = dict.fromkeys(("train", "critic"), TRAINED)
    for line in (run_dir / "moves").read_text().splitlines():
        role, sign, tags = json.loads(line)
        held[role] = held[role] | set(tags) if sign == "+" else held[role] - set(tags)
        if sign == "+":
            yield dict(held)


@pytest.mark.slow
def test_a_policy_and_a_critic_that_take_turns_on_one_device_end_as_if_both_kept_their_memory(
    train: Callable[[Any], Any], options_in: Callable[..., Any], tmp_path: Path
) -> None:
    """With a reference beside the policy, which is updated, and a first step that the critic takes alone."""
    (tmp_path / "tagged.py").write_text(TAGGED)
    ppo = {"advantage_estimator": "ppo", "lambd": 0.9, "num_critic_only_steps": 1, "deterministic": True}
    ppo |= {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_update_interval": 2, "save_interval": 1, "num_rollout": 4}
    own: dict[str, Any] = {"colocate": True, "offload_train": True, "offload_rollout": True}
    own["train_backend"] = f"{tmp_path / 'tagged.py'}:Noting"
    for name, more in (("kept", {}), ("turns", own)):
        assert train(options_in(tmp_path / name, save=str(tmp_path / f"{name}_saves"), **ppo, **more)).steps == 4
    require_equal(str(tmp_path / "turns"), str(tmp_path / "kept"))
    kept, turns = (tmp_path / f"{name}_saves" / "step_000004" for name in ("kept", "turns"))
    for part in ("trainer", "critic"):
        files = sorted((kept / part).iterdir())
        assert [file.read_bytes() == (turns / part / file.name).read_bytes() for file in files] == [True] * len(files)
    parts = list(held_after_each(tmp_path / "turns"))
    assert [held for held in parts if not any(all(held[r] <= row.get(r, set()) for r in held) for row in ROWS)] == []
    # Of four steps, the policy takes three, and each is saved.
    assert sum(held["critic"] == STEP for held in parts) == 4 + 4
    assert sum(held["train"] == STEP for held in parts) == 3 + 4
