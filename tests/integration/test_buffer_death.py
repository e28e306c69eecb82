"""A run whose Buffer is killed, time and again, ends with the parameters of one that nobody disturbed, bit by bit, and
every group is trained once. ``benchmarks/faults.py`` does the same at random moments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.buffer.ledger_audit import LedgerAudit
from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.files.checkpoint import opened_checkpoint
from harness.checkpoints import final_weights

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

# Kills or stops the Buffer once at each moment, and goes on.
KILLERS = """
import os, signal, time
from pathlib import Path

import numpy as np
import ray
from ray._private.internal_api import node_stats

from buffer_rl.buffer.ledger_audit import LedgerAudit
from buffer_rl.rollout.conversion import GroupConverter
from buffer_rl.train.torch_trainer import TorchTrainer
from buffer_rl.records.groups import SampleGroup


def is_first(args, moment):
    try:
        (Path(args.run_dir) / moment).touch(exist_ok=False)
    except FileExistsError:
        return False
    return not args.run_dir.endswith("undisturbed")


def send(args, moment, number):
    if is_first(args, moment):
        audit = LedgerAudit(Path(args.run_dir) / "ledger.sqlite")
        os.kill(int(audit.facts()["note:pid"].split()[0]), number)
        audit.close()


def storage_processes():
    '''Other children of this process's raylet.'''
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getppid() and b"StorageActor" in (folder / "cmdline").read_bytes():
                yield int(folder.name)
        except FileNotFoundError:
            pass


def stored_bytes():
    node = ray.nodes()[0]
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False)
    return stats.store_stats.object_store_bytes_used


def kill_storage(args):
    if is_first(args, "storage"):
        old, empty = set(storage_processes()), int((Path(args.run_dir) / "stored_at_start").read_text())
        for pid in old:
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        # Until Ray has noticed the death, the payloads of this node can be read: a sample's has 1 MiB. Payloads of a
        # production that was lost may go at any time, so that less than before is not enough.
        while not set(storage_processes()) - old or stored_bytes() > empty + (1 << 19):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def convert(args, samples):
    '''The usual columns, and one that is large enough to be lost with the storage process: Ray copies small ones.'''
    _, columns = GroupConverter(args).encode(SampleGroup(uid=samples[0].uid, samples=samples), False)
    return columns | {"ballast": [np.zeros(1 << 18, dtype=np.uint8) for _ in samples]}


def score(args, sample):
    if sample.group_index == 1 and sample.sample_index == 2:
        send(args, "in_generation", signal.SIGKILL)
    if sample.group_index == 7 and args.buffer_hang_timeout_s < 5:
        send(args, "stopped", signal.SIGSTOP)
    return sample.response.count("a")


def log(rollout_id, args, *rest):
    if rollout_id == 1:
        send(args, "after_close", signal.SIGKILL)
    if rollout_id == 2 and args.num_data_storage_units:
        kill_storage(args)
    return False


class Trainer(TorchTrainer):
    def __init__(self, args, rank, world_size, objective):
        super().__init__(args, rank, world_size, objective)
        self.args, self.steps, self.rank = args, 0, rank
        if rank == 0:
            (Path(args.run_dir) / "stored_at_start").write_text(str(stored_bytes()))

    def kill(self, moment, steps):
        if self.steps == steps and self.rank == 0:
            send(self.args, moment, signal.SIGKILL)

    def log_probs(self, model, batch):
        self.kill("in_log_probs", 1)
        return super().log_probs(model, batch)

    def optimizer_step(self, scale):
        metrics = super().optimizer_step(scale)
        self.steps += 1
        self.kill("before_commit", 3)
        return metrics

    def save(self, path):
        super().save(path)
        if self.rank == 0:  # the Buffer is asked next
            send(self.args, "stopped_in_save", signal.SIGSTOP)

    def save_hf(self, path):
        self.kill("after_commit", 4)
        super().save_hf(path)

    def export(self):
        self.kill("after_commit", 4)
        yield from super().export()
"""
STEPS, GROUPS = 5, 3

Run = Callable[..., Path]


@pytest.fixture(scope="module")
def run(
    train: Callable[[Any], Any],
    options_in: Callable[..., Any],
    task: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    """Trains and returns the run's folder: ``run(name, **options)``."""
    folder = tmp_path_factory.mktemp("deaths")
    (folder / "killers.py").write_text(KILLERS)

    def run(name: str, **options: Any) -> Path:
        options |= {key: value.format(folder=folder) for key, value in options.items() if isinstance(value, str)}
        args = options_in(
            folder / name,
            custom_rm_path=f"{folder / 'killers.py'}:score",
            custom_rollout_log_function_path=f"{folder / 'killers.py'}:log",
            train_backend=f"{folder / 'killers.py'}:Trainer",
            ref_load=str(task / "model"),
            use_kl_loss=True,
            kl_loss_coef=0.1,
            num_rollout=STEPS,
            deterministic=True,
            buffer_max_restarts=10,
            progress="plain",
            **options,
        )
        assert train(args).steps == STEPS
        return Path(args.run_dir)

    return run


@pytest.fixture(scope="module")
def undisturbed(run: Run) -> Path:
    """A run in lockstep whose Buffer nobody kills."""
    folder = run("undisturbed")
    assert restarts(folder) == 0
    return folder


def restarts(run_dir: Path) -> int:
    return int(LedgerAudit(run_dir / "ledger.sqlite").facts()["restarts"]) - 1


def check_accounts(run_dir: Path) -> None:
    """Every step's groups are trained, once, and nothing else is."""
    audit = LedgerAudit(run_dir / "ledger.sqlite")
    assert audit.faults() == []
    assert audit.commits() == [(step, step + 1, GROUPS) for step in range(STEPS)]
    trained = 0
    for epoch in audit.epochs():
        assert sum(epoch.counts.values()) == epoch.num_rows == 8
        trained += epoch.counts[GroupState.TRAINED]
    assert trained == STEPS * GROUPS


MOMENTS = {"in_generation", "after_close", "before_commit", "after_commit"}
LOCKSTEP_MOMENTS = {"in_log_probs", "stopped", "storage", "stopped_in_save"}
LOCKSTEP = {
    "buffer_hang_timeout_s": 3.0,
    "num_data_storage_units": 1,
    "data_storage_min_bytes": 1,
    "custom_convert_samples_to_train_data_path": "{folder}/killers.py:convert",
    "save": "{folder}/saves",
    "save_interval": 2,
}
STREAMED = {"schedule": "pipelined", "stream_gradients": True, "num_train_ranks": 2, "num_ref_workers": 1}


@pytest.mark.parametrize(
    ("options", "moments"),
    [(LOCKSTEP, LOCKSTEP_MOMENTS), (STREAMED, set())],
    ids=["lockstep", "streamed"],
)
@pytest.mark.slow
def test_a_run_whose_buffer_dies_at_every_moment_of_a_step_ends_as_if_it_had_not(
    run: Run,
    undisturbed: Path,
    options: dict[str, Any],
    moments: set[str],
    request: pytest.FixtureRequest,
    capfd: pytest.CaptureFixture[str],
) -> None:
    disturbed = run(request.node.callspec.id, **options)
    happened = {moment for moment in MOMENTS | LOCKSTEP_MOMENTS if (disturbed / moment).exists()}
    assert happened == MOMENTS | moments
    assert restarts(disturbed) == len(happened - {"storage"})
    # What the trainer has fetched before its first pass needs no Buffer until it is committed.
    lost = happened & {"in_generation", "after_close", "stopped", "storage"}
    said = "".join(capfd.readouterr())
    assert said.count("is produced again (") == len(lost), said
    assert final_weights(disturbed) == final_weights(undisturbed)
    check_accounts(disturbed)
    if "save" in options:
        with opened_checkpoint(disturbed.parent / "saves" / "step_000002") as checkpoint:
            audit = LedgerAudit(checkpoint.folder / "ledger.sqlite")
            assert (audit.faults(), audit.commits()) == ([], [(0, 1, GROUPS), (1, 2, GROUPS)])
