"""A process is killed at every point of a publication: no engine ever answers with, or serves, a mixed version."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from buffer_rl.errors import BufferRLError, WorkerDiedError
from buffer_rl.testing.tiny import make_tiny_model
from harness.killed_publications import Trial, buckets_of

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
DISTRIBUTED = "buffer_rl.weights.distributed:DistributedTransport"
SENDS = {"disk": "write", "tensor": "share", DISTRIBUTED: "broadcast"}
TRANSPORTS = ["disk", "tensor", pytest.param(DISTRIBUTED, id="distributed")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, forked_processes: None) -> tuple[str, str]:
    base = tmp_path_factory.mktemp("models")
    return make_tiny_model(base / "even", seed=0), make_tiny_model(base / "odd", seed=1)


@pytest.fixture
def start(folders: tuple[str, str], tmp_path: Path) -> Iterator[Callable[..., Trial]]:
    trials: list[Trial] = []

    def start_trial(transport: str, *, own: bool) -> Trial:
        trials.append(Trial(transport, folders, tmp_path, own=own))
        return trials[-1]

    yield start_trial
    for trial in trials:
        trial.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_sender_that_is_killed_at_any_bucket_or_between_any_calls_costs_no_whole_version(
    start: Callable[..., Trial], folders: tuple[str, str], transport: str
) -> None:
    trial = start(transport, own=False)
    num_buckets = len(list(buckets_of(folders[0])))
    assert num_buckets >= 3
    for bucket in range(num_buckets + 1):
        trial.sender.kill = (SENDS[transport], bucket)
        with pytest.raises(WorkerDiedError):
            trial.publish()
        trial.check()
        trial.repair()
        trial.check()
    assert kill_before_every_call(trial, lambda: trial.sender.end()) >= 5


@pytest.mark.parametrize(
    ("transport", "own"),
    [
        pytest.param("disk", False, id="disk"),
        pytest.param("disk", True, id="disk, replaced", marks=pytest.mark.campaign),
        pytest.param("tensor", False, id="tensor", marks=pytest.mark.campaign),
        pytest.param("tensor", True, id="tensor, replaced"),
        pytest.param(DISTRIBUTED, False, id="distributed", marks=pytest.mark.campaign),
        pytest.param(DISTRIBUTED, True, id="distributed, replaced", marks=pytest.mark.campaign),
    ],
)
def test_an_engine_that_is_killed_before_any_call_costs_the_others_no_whole_version(
    start: Callable[..., Trial], transport: str, own: bool
) -> None:
    trial = start(transport, own=own)
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
