"""Distributed checkpoints of Megatron's: written in one layout, continued in another."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer_rl.files.checkpoint import open_checkpoint
from buffer_rl.testing.tiny import make_tiny_model
from harness import megatron_training
from harness.checkpoints import write_checkpoint
from harness.megatron_continued import check_that_it_goes_on
from harness.megatron_ranks import HAS_MEGATRON, REASON, Layout, RankError, RankPool
from harness.megatron_training import WRITERS, Kind
from harness.processes import Process, descendants, holds_within

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(not HAS_MEGATRON, reason=REASON),
    pytest.mark.timeout(300),
]

Weights = dict[str, np.ndarray]
LAYOUTS = {
    "tp1": (1, Layout()),
    "dp2": (2, Layout()),
    "tp2": (2, Layout(tp=2)),
    "pp2": (2, Layout(pp=2)),
    "pp2 vpp2": (2, Layout(pp=2, vpp=2)),
}
OVERLAPPED = Kind(overlap=True)
FUSED = Kind(fused=True)
BOUND = 2e-5
"""Largest difference of weights after two steps that sum in another order, at a learning rate of 1e-2."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", num_hidden_layers=4)


@pytest.fixture(scope="module")
def tp2(ranks: RankPool, model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """A checkpoint of two tensor ranks, and what ``saved`` returned."""
    target = str(tmp_path_factory.mktemp("checkpoints") / "tp2")
    return target, ranks.run(2, megatron_training.saved, LAYOUTS["tp2"][1], model, target)[0]


def difference(one: Weights, other: Weights) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_of_two_tensor_ranks_goes_on_in_any_layout(
    ranks: RankPool, model: str, tp2: tuple[str, dict[str, Any]], layout: str
) -> None:
    source, uninterrupted = tp2
    world, sizes = LAYOUTS[layout]
    found = ranks.run(world, megatron_training.resumed, sizes, model, source)
    for answer in found:
        assert answer["step"] == 2
        assert difference(answer["weights"], uninterrupted["weights"]) == 0.0
        assert difference(answer["after"], uninterrupted["after"]) <= (0.0 if layout == "tp2" else BOUND)
    assert difference(uninterrupted["after"], uninterrupted["weights"]) > 100 * BOUND, (
        "the steps changed next to nothing"
    )


@pytest.mark.parametrize("how", ["save", "start"])
def test_a_checkpoint_under_a_manifest_holds_the_state_at_its_time(
    ranks: RankPool, model: str, tmp_path: Path, how: str
) -> None:
    """ "start" writes while two more steps are taken, which must not be in it."""
    found: list[dict[str, Any]] = []

    def fill(folder: Path) -> None:
        found.extend(ranks.run(2, megatron_training.saved, Layout(pp=2), model, str(folder / "ranks"), how))

    sealed = open_checkpoint(write_checkpoint(tmp_path, 2, fill, {}))  # checks every hash
    assert (sealed.folder / "ranks" / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert (sealed.folder / "ranks" / "iter_0000002" / "metadata.json").is_file()
    answers = ranks.run(2, megatron_training.resumed, Layout(pp=2), model, str(sealed.folder / "ranks"))
    for saved, answer in zip(found, answers, strict=True):
        assert difference(answer["weights"], saved["weights"]) == 0.0
        assert all(np.array_equal(one, other) for one, other in zip(answer["moments"], saved["moments"], strict=True))
        assert difference(answer["after"], saved["after"]) == 0.0


@pytest.mark.parametrize("room", [50, 8192], ids=["no room for what rank 0 writes", "no room for tensors"])
def test_a_full_disk_is_an_error_on_the_ranks(ranks: RankPool, model: str, tmp_path: Path, room: int) -> None:
    with pytest.raises(RankError, match=r"CheckpointError: .*the checkpoint cannot be written"):
        ranks.run(2, megatron_training.saved, Layout(), model, str(tmp_path / "full"), "start", Kind(), room)
    assert not list((tmp_path / "full").rglob("metadata.json"))
    assert not (tmp_path / "full" / "latest_checkpointed_iteration.txt").exists()


def test_overlapped_gathering_leaves_no_stale_weight_in_exports_and_checkpoints(
    ranks: RankPool, model: str, tp2: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    target = str(tmp_path / "overlapped")
    found = ranks.run(2, megatron_training.saved, Layout(), model, target, "save", OVERLAPPED)
    for answer in found:
        assert difference(answer["weights"], tp2[1]["weights"]) <= BOUND
        assert difference(answer["after"], tp2[1]["after"]) <= BOUND
    (loaded,) = ranks.run(1, megatron_training.resumed, Layout(), model, target)
    assert difference(loaded["weights"], found[0]["weights"]) == 0.0


def test_layers_that_have_a_state_of_their_own_take_the_weights_of_others(
    ranks: RankPool, model: str, tp2: tuple[str, dict[str, Any]]
) -> None:
    source, uninterrupted = tp2
    for answer in ranks.run(2, megatron_training.resumed, LAYOUTS["tp2"][1], model, source, Kind(extra_state=True)):
        assert difference(answer["weights"], uninterrupted["weights"]) == 0.0
        assert difference(answer["after"], uninterrupted["after"]) == 0.0


# ranks, layout, whether the optimizer is distributed, how it is saved, steps before
KINDS = {
    "distributed": (2, Layout(), True, "save", 2),
    "distributed, at the start": (2, Layout(), True, "save", 0),
    "distributed, in Megatron-LM's format": (2, Layout(), True, "dp_reshardable", 2),
    "whole": (1, Layout(), False, "save", 2),
    "whole, at the start": (1, Layout(), False, "save", 0),
    "experts": (2, Layout(ep=2), True, "save", 2),
}


@pytest.mark.parametrize("fused", [False, True], ids=["torch", "fused"])
@pytest.mark.parametrize("kind", KINDS)
def test_either_adam_goes_on_from_the_others_checkpoint(
    ranks: RankPool, model: str, tmp_path: Path, kind: str, fused: bool
) -> None:
    world, layout, distributed, how, first = KINDS[kind]
    folder = make_tiny_model(tmp_path / "moe", "qwen3_moe") if layout.ep > 1 else model
    target = str(tmp_path / "saved")
    source = Kind(fused=fused, distributed=distributed)
    saved = ranks.run(world, megatron_training.saved, layout, folder, target, how, source, 0, first)
    for other in (fused, not fused):
        own = Kind(fused=other, distributed=distributed)
        found = ranks.run(world, megatron_training.resumed, layout, folder, target, own)
        for before, answer in zip(saved, found, strict=True):
            assert answer["step"] == first
            assert difference(answer["weights"], before["weights"]) == 0.0
            assert difference(answer["after"], before["after"]) <= (0.0 if other == fused else BOUND)


def test_a_whole_optimizer_goes_on_from_a_distributed_ones_checkpoint_and_not_the_other_way(
    ranks: RankPool, model: str, tp2: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    (answer,) = ranks.run(1, megatron_training.resumed, Layout(), model, tp2[0], Kind(distributed=False))
    assert difference(answer["after"], tp2[1]["after"]) <= BOUND
    ranks.run(1, megatron_training.saved, Layout(), model, str(tmp_path), "save", Kind(distributed=False))
    with pytest.raises(RankError, match="was written without --use-distributed-optimizer"):
        ranks.run(1, megatron_training.resumed, Layout(), model, str(tmp_path))


def test_settings_of_adam_are_those_of_the_run(ranks: RankPool, model: str, tp2: tuple[str, dict[str, Any]]) -> None:
    (answer,) = ranks.run(1, megatron_training.resumed, Layout(), model, tp2[0], Kind(eps=1e-2))
    assert answer["eps"] == {1e-2}
    assert difference(answer["weights"], tp2[1]["weights"]) == 0.0
    assert difference(answer["after"], tp2[1]["after"]) > 100 * BOUND


def test_a_checkpoint_in_float32_goes_on_in_bfloat16(model: str, tmp_path: Path) -> None:
    check_that_it_goes_on(model, tmp_path, {})


def test_a_rank_that_is_killed_takes_its_writers_along(ranks: RankPool, model: str, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as executor:
        saving = executor.submit(ranks.run, 1, megatron_training.stuck_in_a_save, Layout(), model, str(tmp_path))
        assert holds_within(60.0, (tmp_path / "pid").exists)
        rank = int((tmp_path / "pid").read_text())
        # Beside the writers, one that has forked those, and one that collects what they report.
        started = holds_within(60.0, lambda: len(descendants(rank)) >= 2 + WRITERS)
        found = descendants(rank)
        try:
            assert started
            os.kill(rank, signal.SIGKILL)
            assert holds_within(10.0, lambda: not any(process.alive() for process in found))
        finally:
            for process in filter(Process.alive, found):
                os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(RankError, match="rank 0 ended"):
            saving.result()


def test_copies_of_the_state_are_kept_until_they_are_written(ranks: RankPool, model: str, tmp_path: Path) -> None:
    ((made, during, after),) = ranks.run(1, megatron_training.copies_during_a_save, Layout(), model, str(tmp_path))
    assert (during, after) == (made, 0)
    assert made > 0


def test_a_checkpoint_that_all_replicas_gathered_goes_on(ranks: RankPool, model: str, tmp_path: Path) -> None:
    found = ranks.run(2, megatron_training.saved, Layout(), model, str(tmp_path), "everywhere")
    for saved, answer in zip(
        found, ranks.run(2, megatron_training.resumed, Layout(), model, str(tmp_path)), strict=True
    ):
        assert difference(answer["weights"], saved["weights"]) == 0.0
        assert difference(answer["after"], saved["after"]) == 0.0


EXPERT_LAYOUTS = {
    "ep2": (2, Layout(ep=2)),
    "one rank": (1, Layout()),
    "dp2": (2, Layout()),
    "tp2 sp": (2, Layout(tp=2, sp=True)),
    "ep2 pp2": (4, Layout(ep=2, pp=2)),
    "ep4": (4, Layout(ep=4)),
}


@pytest.fixture(scope="module")
def experts(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Callable[..., Any]]:
    """A model, and a checkpoint of it on two ranks with what ``saved`` returned: its optimizer is distributed or whole,
    its experts are spread or not."""
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "moe", "qwen3_moe")

    @cache
    def save(ep: int, distributed: bool = True, how: str = "save") -> tuple[str, dict[str, Any]]:
        target = str(tmp_path_factory.mktemp("experts"))
        kind = Kind(distributed=distributed)
        return target, ranks.run(2, megatron_training.saved, Layout(ep=ep), folder, target, how, kind)[0]

    return folder, save


@pytest.mark.parametrize("distributed", [True, False], ids=["distributed", "whole"])
@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_a_checkpoint_of_experts_goes_on_wherever_they_are(
    ranks: RankPool, experts: tuple[str, Callable[..., Any]], layout: str, ep: int, distributed: bool
) -> None:
    """Megatron gives experts an optimizer of their own where they are spread over ranks."""
    (folder, save), (world, sizes) = experts, EXPERT_LAYOUTS[layout]
    source, uninterrupted = save(ep, distributed)
    kind = Kind(distributed=distributed)
    for answer in ranks.run(world, megatron_training.resumed, sizes, folder, source, kind):
        assert answer["step"] == 2
        assert difference(answer["weights"], uninterrupted["weights"]) == 0.0
        assert difference(answer["after"], uninterrupted["after"]) <= BOUND
    assert difference(uninterrupted["after"], uninterrupted["weights"]) > 100 * BOUND


def test_weights_of_experts_alone_are_taken_in_any_layout_and_optimizers_in_other_formats_in_their_own(
    ranks: RankPool, experts: tuple[str, Callable[..., Any]]
) -> None:
    folder, save = experts
    release, saved = save(2, how="release")
    (answer,) = ranks.run(1, megatron_training.resumed, Layout(), folder, release)
    assert difference(answer["weights"], saved["weights"]) == 0.0
    assert difference(answer["after"], saved["after"]) > 100 * BOUND, "the optimizer's state makes no difference"
    source, saved = save(2, how="dp_reshardable")
    for answer in ranks.run(2, megatron_training.resumed, Layout(ep=2), folder, source):
        assert difference(answer["after"], saved["after"]) == 0.0
    with pytest.raises(RankError, match=r"CheckpointError: .* one optimizer for experts and one for the rest"):
        ranks.run(1, megatron_training.resumed, Layout(), folder, source)


def test_weights_alone_begin_a_new_run(ranks: RankPool, model: str, tmp_path: Path) -> None:
    """A folder ``release``, as slime's converter leaves it: no step is taken over."""
    target = str(tmp_path / "release")
    saved = ranks.run(1, megatron_training.saved, Layout(), model, target, "release")[0]
    assert Path(target, "latest_checkpointed_iteration.txt").read_text() == "release"
    (answer,) = ranks.run(1, megatron_training.resumed, Layout(), model, target)
    assert answer["step"] == 0
    assert not any(tensor.any() for tensor in answer["moments"])
    assert difference(answer["weights"], saved["weights"]) == 0.0


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_checkpoint_in_the_format_of_megatron_lm_goes_on_in_its_layout(
    ranks: RankPool, model: str, tmp_path: Path, layout: str
) -> None:
    target, (world, sizes) = str(tmp_path / "saved"), LAYOUTS[layout]
    found = ranks.run(world, megatron_training.saved, sizes, model, target, "dp_reshardable")
    for saved, answer in zip(found, ranks.run(world, megatron_training.resumed, sizes, model, target), strict=True):
        assert answer["step"] == 2
        assert difference(answer["weights"], saved["weights"]) == 0.0
        assert difference(answer["after"], saved["after"]) == 0.0


class Marker:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path) -> None:
        self._file = str(file)

    def __reduce__(self) -> Any:
        return os.mkdir, (self._file,)


@pytest.mark.parametrize("where", ["index", "state of all ranks", "object"])
def test_a_checkpoint_runs_nothing(ranks: RankPool, model: str, tmp_path: Path, where: str) -> None:
    ranks.run(1, megatron_training.saved, Layout(), model, str(tmp_path), "dp_reshardable")
    assert ranks.run(1, megatron_training.resumed, Layout(), model, str(tmp_path))[0]["step"] == 2
    folder, ran = tmp_path / "iter_0000002", tmp_path / "ran"
    hostile = pickle.dumps(Marker(ran))
    if where == "index":
        (folder / ".metadata").write_bytes(hostile)
    elif where == "state of all ranks":
        (folder / "common.pt").write_bytes(hostile)
    else:
        index = pickle.loads((folder / ".metadata").read_bytes())
        (key,) = (key for key in index.storage_data if "per_bucket_numel/" in key.fqn)
        place = index.storage_data[key]
        content = bytearray((folder / place.relative_path).read_bytes())
        content[place.offset : place.offset + place.length] = hostile.ljust(place.length, b".")
        (folder / place.relative_path).write_bytes(content)
    with pytest.raises(RankError, match=r"CheckpointError: .*iter_0000002: it does not load"):
        ranks.run(1, megatron_training.resumed, Layout(), model, str(tmp_path))
    assert not ran.exists()


def test_checkpoints_that_cannot_be_loaded_are_named(ranks: RankPool, model: str, tp2: Any, tmp_path: Path) -> None:
    source = Path(tp2[0])
    other = make_tiny_model(tmp_path / "other", "qwen3", num_hidden_layers=4, intermediate_size=64)
    with pytest.raises(RankError, match=r"CheckpointError: .*iter_0000002: it does not load.*"):
        ranks.run(1, megatron_training.resumed, Layout(), other, str(source))
    damaged = tmp_path / "damaged"
    shutil.copytree(source, damaged)
    largest = max(damaged.rglob("*.distcp"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    with pytest.raises(RankError, match=r"CheckpointError: .*iter_0000002: it does not load.*"):
        ranks.run(1, megatron_training.resumed, Layout(), model, str(damaged))
    (damaged / "iter_0000002" / "metadata.json").unlink()
    with pytest.raises(RankError, match=r"iter_0000002: the checkpoint is not whole"):
        ranks.run(1, megatron_training.resumed, Layout(), model, str(damaged))
    with pytest.raises(RankError, match=r"this is no torch_dist checkpoint"):
        ranks.run(1, megatron_training.resumed, Layout(), model, str(tmp_path))
