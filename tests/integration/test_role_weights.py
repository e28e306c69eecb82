"""Weights of a role by broadcast: those of the trainer to the last bit, whatever dies while they are sent."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import ray
import torch

from buffer_rl.cluster.actor_group import ActorGroup
from buffer_rl.errors import WorkerDiedError
from buffer_rl.observe.metrics import read_metrics
from buffer_rl.options.section import dump_args
from buffer_rl.testing.tiny import make_tiny_model
from buffer_rl.trainer.model import Model, weight_buckets
from buffer_rl.trainer.pretrained import load_model
from buffer_rl.trainer.role_worker import RoleWorker
from buffer_rl.weights.distributed import DistributedSender, DistributedTransport
from buffer_rl.weights.role_weights import FolderUpdates, RoleBroadcasts
from harness.fake_roles import local_senders

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240), pytest.mark.slow]

BUCKET_BYTES, NUM_BUCKETS = 110_000, 3
CONVERTER = """
from buffer_rl.trainer.converter import NameMap


class Doubled(NameMap):
    '''The model's weights are twice the folder's.'''

    def to_trainer(self, name, tensor):
        yield name, 2 * tensor

    def to_hf(self, name, tensor):
        yield name, tensor / 2
"""

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two models of one shape: the first is what the role starts with."""
    base = tmp_path_factory.mktemp("models")
    return [make_tiny_model(base / str(seed), seed=seed) for seed in range(2)]


def weights_of(folder: str) -> Weights:
    return dict(Model(load_model(folder, torch.device("cpu"), "folder")).weights())


class Trainer:
    """A trainer of one rank, whose weights are those of a folder."""

    def __init__(self, folder: str) -> None:
        self.weights = weights_of(folder)

    def export(self) -> Iterator[Weights]:
        buckets = list(weight_buckets(self.weights.items(), BUCKET_BYTES))
        assert len(buckets) == NUM_BUCKETS
        yield from buckets


class DisturbedSender(DistributedSender):
    """Does ``before[number]`` before it sends that bucket."""

    before: dict[int, Callable[[], None]]

    def broadcast(self, buckets: Iterator[Mapping[str, Any]], name: str) -> None:
        super().broadcast(self._disturbed(buckets), name)

    def _disturbed(self, buckets: Iterator[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        for number, bucket in enumerate([*buckets, None]):
            self.before.pop(number, lambda: None)()
            if bucket is not None:
                yield bucket


class Disturbed(DistributedTransport):
    sender = DisturbedSender


@pytest.fixture
def start(ray_cluster: None, make_options: Callable[..., Any], folders: list[str], tmp_path: Path) -> Iterator[Any]:
    """Starts a role of two processes with the model of the first folder, and what broadcasts the second's to it."""
    groups: list[ActorGroup] = []

    def start(**options: Any) -> tuple[ActorGroup, RoleBroadcasts, dict[int, Callable[[], None]]]:
        args = make_options(hf_checkpoint=folders[0], num_actor_fwd_workers=2, **options)
        texts = [(dump_args(args), None, "actor_fwd", rank, 2, str(tmp_path / f"{rank}.log")) for rank in range(2)]
        role = ActorGroup.of("actor_fwd", RoleWorker, lambda rank: texts[rank], 2)
        groups.append(role)
        before: dict[int, Callable[[], None]] = {}
        sender = type("Sender", (DisturbedSender,), {"before": before})
        factory = type("Transport", (Disturbed,), {"sender": sender})
        trainer = local_senders(factory, args, Trainer(folders[1]).export)
        role.call(RoleWorker.ready, timeout_s=120)
        return role, RoleBroadcasts(role, factory(args), trainer, timeout_s=30.0), before

    yield start
    for group in groups:
        group.stop()


def of_members(role: ActorGroup, look: Callable[[Any], Any]) -> list[Any]:
    calls = [cast("Any", actor).__ray_call__.remote(look) for actor in role.actors]
    return list(ray.get(calls, timeout=60))


def weights_in(role: ActorGroup) -> list[Weights]:
    """Of each process; tied weights under each of their names."""
    return of_members(role, lambda self: {n: t.clone() for n, t in self._model.model.module.state_dict().items()})


def versions_in(role: ActorGroup) -> list[str]:
    return of_members(role, lambda self: self.version())


def equal(found: Weights, wanted: Weights) -> bool:
    return found.keys() >= wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_the_weights_are_those_of_the_trainer_and_of_a_folder_to_the_last_bit_and_stay_in_their_memory(
    start: Any, folders: list[str], tmp_path: Path
) -> None:
    def place(self: Any) -> list[int]:
        return [tensor.data_ptr() for tensor in self._model.model.module.state_dict().values()]

    role, broadcasts, _ = start()
    initial, new = weights_of(folders[0]), weights_of(folders[1])
    assert not equal(initial, new)
    assert all(equal(found, initial) for found in weights_in(role))
    before = of_members(role, place)
    assert broadcasts.update(1)
    sent = weights_in(role)
    assert all(equal(found, new) for found in sent)
    assert of_members(role, place) == before
    assert versions_in(role) == ["1", "1"]

    def load(path: str, version: int) -> bool:
        return role.call_and_keep(RoleWorker.update_weights_from_disk, path, version)

    for version, (folder, wanted) in enumerate(zip(folders, (initial, sent[0]), strict=True), start=2):
        updates = FolderUpdates(lambda path, folder=folder: Path(path).symlink_to(folder), load, tmp_path / "f")  # type: ignore[misc]
        assert updates.update(version)
        assert all(equal(found, wanted) for found in weights_in(role))


def test_a_model_that_is_no_copy_of_its_folder_loads_what_is_broadcast_as_it_loads_a_folder(
    start: Any, folders: list[str], tmp_path: Path
) -> None:
    (tmp_path / "doubled.py").write_text(CONVERTER)
    role, broadcasts, _ = start(model_converter_path=f"{tmp_path / 'doubled.py'}:Doubled")
    assert broadcasts.update(1)
    wanted = {name: 2 * tensor for name, tensor in weights_of(folders[1]).items()}
    assert all(equal(found, wanted) for found in weights_in(role))


@pytest.mark.parametrize("bucket", range(NUM_BUCKETS + 1))
def test_a_process_that_is_killed_at_any_bucket_is_passed_over_and_the_replacements_get_the_version(
    start: Any, folders: list[str], bucket: int
) -> None:
    role, broadcasts, before = start()
    assert broadcasts.update(1)
    pids = of_members(role, lambda self: os.getpid())
    before[bucket] = lambda: os.kill(pids[1], signal.SIGKILL)
    arrived = broadcasts.update(2)
    assert not before
    assert not arrived or bucket == NUM_BUCKETS, "the last bucket may have arrived"
    left = ray.get(cast("Any", role.actors[0]).version.remote(), timeout=60)
    assert left == "2" if arrived else left in ("", "2"), "weights of no whole version have none"
    with pytest.raises(WorkerDiedError, match="actor_fwd 1"):
        role.call(RoleWorker.ready, timeout_s=120)
    role.restart()
    assert versions_in(role) == ["2", "2"]
    assert all(equal(found, weights_of(folders[1])) for found in weights_in(role))
    assert broadcasts.update(3)
    assert versions_in(role) == ["3", "3"]


KILLED = """
import os, signal
from pathlib import Path

import torch, transformers

HERE = Path(__file__).parent


def model(args):
    # That of the folder; the first process of actor_fwd that works with other weights than its first ones ends itself.
    model = transformers.AutoModelForCausalLM.from_pretrained(args.hf_checkpoint)
    weight = model.get_input_embeddings().weight
    initial = weight.detach().clone()

    def die(_model, _args, inputs):
        if not torch.equal(weight, initial) and not (HERE / "killed").exists():
            (HERE / "killed").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)

    if "actor_fwd" in os.readlink("/proc/self/fd/1"):
        model.register_forward_pre_hook(die, with_kwargs=True)
    return model
"""


Run = Callable[..., Path]


@pytest.fixture(scope="module")
def run(train: Callable[[Any], Any], options_in: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Trains for three steps with two processes of ``actor_fwd`` and returns the run's folder."""
    folder = tmp_path_factory.mktemp("runs")

    def run(name: str, mode: str, **options: Any) -> Path:
        same = {"deterministic": True, "num_actor_fwd_workers": 2, "eval_prompt_data": [], "eval_interval": None}
        buckets = {"weight_sync_mode": mode, "update_weight_buffer_size": 20_000}
        args = options_in(folder / name, **same, **buckets, **options)
        assert train(args).steps == 3
        assert (folder / name / "weights_actor_fwd").exists() == (mode == "disk")
        return folder / name

    return run


def trained(run_dir: Path) -> bytes:
    return (run_dir / "hf" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def by_folder(run: Run) -> Path:
    """A run in lockstep whose role reads folders."""
    return run("folder", "disk")


def losses(run_dir: Path) -> list[float]:
    return [record["train/loss"] for record in read_metrics(run_dir) if "train/loss" in record]


def test_a_run_whose_role_takes_broadcasts_ends_as_one_whose_role_reads_folders(run: Run, by_folder: Path) -> None:
    lockstep = run("lockstep", "distributed")
    assert trained(lockstep) == trained(by_folder)
    assert losses(lockstep) == losses(by_folder)
    assert len(set(losses(lockstep))) == 3


def test_a_pipelined_run_ends_so_too_though_a_process_of_the_role_dies_at_work_on_a_published_version(
    run: Run, by_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    provider = {"custom_model_provider_path": f"{tmp_path / 'killed.py'}:model", "progress": "plain"}
    pipelined = run("pipelined", "distributed", schedule="pipelined", num_train_ranks=2, **provider)
    assert (tmp_path / "killed").exists()
    assert "".join(capfd.readouterr()).count("actor_fwd died and is replaced (1 of 2)") == 1
    assert trained(pipelined) == trained(by_folder)
