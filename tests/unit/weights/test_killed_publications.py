"""A process is killed at every point of a publication: no engine ever answers with, or serves, a mixed version."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from buffer_rl.errors import BufferRLError, WorkerDiedError
from buffer_rl.testing.tiny import make_tiny_model
from harness.killed_publications import Trial, buckets_of

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
DISTRIBUTED = "buffer_rl.weights.distributed:DistributedTransport"
SENDS = {"disk": "write", "tensor": "share", DISTRIBUTED: "broadcast"}
TRANSPORTS = [
    ("disk", False),
    ("tensor", False),
    pytest.param(DISTRIBUTED, False, id="distributed"),
    pytest.param("disk", True, id="disk, delta"),
    pytest.param(DISTRIBUTED, True, id="distributed, delta"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, forked_processes: None) -> tuple[str, str]:
    base = tmp_path_factory.mktemp("models")
    return make_tiny_model(base / "even", seed=0), make_tiny_model(base / "odd", seed=1)


@pytest.fixture(scope="module")
def near_folders(folders: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Of the odd versions each eighth element is another one."""
    near = Path(shutil.copytree(folders[0], tmp_path_factory.mktemp("models") / "near")) / "model.safetensors"
    weights, others = load_file(near), load_file(Path(folders[1], near.name))
    for name, tensor in weights.items():
        tensor.view(-1)[::8] = 2 * others[name].view(-1)[::8]
    save_file(weights, near, metadata={"format": "pt"})
    return folders[0], str(near.parent)


@pytest.fixture
def start(folders: tuple[str, str], near_folders: tuple[str, str], tmp_path: Path) -> Iterator[Callable[..., Trial]]:
    trials: list[Trial] = []

    def start_trial(transport: str, publish_delta: bool, *, own: bool) -> Trial:
        chosen = near_folders if publish_delta else folders
        trials.append(Trial(transport, chosen, tmp_path, own=own, publish_delta=publish_delta))
        return trials[-1]

    yield start_trial
    for trial in trials:
        trial.close()


@pytest.mark.parametrize(("transport", "delta"), TRANSPORTS)
def test_a_sender_that_is_killed_at_any_bucket_or_between_any_calls_costs_no_whole_version(
    start: Callable[..., Trial], folders: tuple[str, str], transport: str, delta: bool
) -> None:
    trial = start(transport, delta, own=False)
    num_buckets = len(list(buckets_of(folders[0])))
    assert num_buckets >= 3
    for bucket in range(num_buckets + 1):
        trial.sender.kill = ("encode" if delta else SENDS[transport], bucket)
        with pytest.raises(WorkerDiedError):
            trial.publish()
        trial.check()
        trial.repair()
        trial.check()
    assert kill_before_every_call(trial, lambda: trial.sender.end()) >= 5


@pytest.mark.parametrize(
    ("transport", "delta", "own"),
    [
        pytest.param("disk", False, False, id="disk"),
        pytest.param("disk", False, True, id="disk, replaced", marks=pytest.mark.campaign),
        pytest.param("tensor", False, False, id="tensor", marks=pytest.mark.campaign),
        pytest.param("tensor", False, True, id="tensor, replaced"),
        pytest.param(DISTRIBUTED, False, False, id="distributed", marks=pytest.mark.campaign),
        pytest.param(DISTRIBUTED, False, True, id="distributed, replaced", marks=pytest.mark.campaign),
        pytest.param("disk", True, True, id="disk, delta, replaced"),
        pytest.param(DISTRIBUTED, True, True, id="distributed, delta, replaced", marks=pytest.mark.campaign),
    ],
)
def test_an_engine_that_is_killed_before_any_call_costs_the_others_no_whole_version(
    start: Callable[..., Trial], transport: str, delta: bool, own: bool
) -> None:
    trial = start(transport, delta, own=own)
    assert kill_before_every_call(trial, trial.kill_engine, survives=own) >= 5


def kill_before_every_call(trial: Trial, victim: Callable[[], None], *, survives: bool | None = None) -> int:
    """Publish with a kill before the first call, before the second and so on, until there is none left. Returns how
    many calls there are. survives: whether the publications succeed; None: some do."""
    number = 1
    while True:
        trial.reopen()
        trial.kill_before_call(number, victim)
        failure: BufferRLError | None = None
        try:
            trial.publish()
        except BufferRLError as error:
            failure = error
        if trial.control.num_calls < number:
            assert failure is None
            return number - 1
        assert survives is None or (failure is None) is survives, failure
        trial.check()
        trial.repair()
        trial.check()
        number += 1
