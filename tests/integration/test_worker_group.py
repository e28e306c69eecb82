"""Groups of workers for programs of the user's own, on Ray: dispatches, answers passed on, deadlines, failures."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray

from buffer_rl.cluster.worker_group import ClassWithArgs, ResourcePool, To, WorkerGroup, register
from buffer_rl.errors import ConfigError, DeadlineError, TrainError, WorkerDiedError, WorkerError
from buffer_rl.plan.layout import Layout
from buffer_rl.records.groups import Topology
from harness.processes import holds_within

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(120)]

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import a test module
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "worker_group" / "best_of.py"


def to_last(places: Sequence[Topology], value: int) -> Mapping[int, tuple[Any, ...]]:
    return {len(places) - 1: (10 * value,)}


class Adder:
    def __init__(self, base: int, *, exits: bool = False) -> None:
        if exits:
            sys.exit("no licence")
        self.base = base
        self.rank = int(os.environ["RANK"])

    @register()
    def places(self) -> list[str]:
        return [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]

    @register(dispatch=To.HEADS)
    def head(self) -> int:
        return self.rank

    @register(dispatch=To.ONE)
    def next(self) -> int:
        return self.rank

    @register(dispatch=To.SCATTER)
    def add(self, rows: list[int], more: Sequence[int] = (), factor: int = 1) -> list[int]:
        return [sum(pair) for pair in zip(rows, more, strict=True)] if more else [self.base + factor * x for x in rows]

    @register(dispatch=(to_last, sum))
    def own(self, value: int) -> int:
        return self.base + value

    @register()
    def length(self, rows: list[int]) -> int:
        return len(rows)

    @register()
    def pid(self) -> int:
        return os.getpid()

    @register()
    def fail(self, victim: int, kind: str) -> None:
        if self.rank != victim:
            threading.Event().wait()
        if kind == "named":
            raise TrainError("the loss is not finite")
        if kind == "exit":
            sys.exit(3)
        os.kill(os.getpid(), signal.SIGKILL)

    @register(dispatch=To.ONE)
    def rows_or_exit(self, count: int) -> list[int]:
        if count < 0:
            sys.exit(4)
        return list(range(count))

    @register(dispatch=To.ONE)
    def hang(self) -> None:
        threading.Event().wait()

    def not_registered(self) -> None: ...


@pytest.fixture(scope="module")
def adders(ray_cluster: None) -> Iterator[WorkerGroup]:
    """Two replicas of two ranks, the pipeline stages of each apart: ranks 2 and 3 are the heads."""
    layout = Layout(dp_size=2, pp_size=2)
    with WorkerGroup(ClassWithArgs(Adder, base=100), ResourcePool([2, 2]), layout=layout, timeout_s=60) as group:
        yield group


def test_a_call_goes_where_its_method_says(adders: WorkerGroup) -> None:
    assert adders.places() == [["0", "4", "0"], ["1", "4", "1"], ["2", "4", "0"], ["3", "4", "1"]]
    assert adders.head() == [2, 3]
    assert [adders.next() for _ in range(5)] == [0, 1, 2, 3, 0]
    assert adders.add([1, 2, 3]) == [101, 102, 103]
    assert adders.add(rows=[1, 2, 3], factor=2) == [102, 104, 106]
    assert adders.add([]) == []
    assert adders.own(7) == 170
    assert len(set(adders.pid())) == 4


def test_what_a_call_will_answer_is_an_argument_of_the_next(adders: WorkerGroup) -> None:
    first = adders.add.start([1, 2, 3])
    second = adders.add.start(first)
    assert adders.add([1, 2, 3], second) == [202, 204, 206]  # 1 + (100 + 100 + 1), …
    assert adders.add(first, first) == [202, 204, 206]
    assert adders.length(first) == [3, 3, 3, 3]
    assert second.wait(60) == [201, 202, 203]


def test_answers_of_other_lengths_than_the_rows_reach_no_worker(adders: WorkerGroup) -> None:
    # Of 3 and of 4 rows each replica would get 2.
    for late in (adders.rows_or_exit.start(4), adders.places.start()):
        with pytest.raises(WorkerError, match=r"(?s)Adder \d\.add: ValueError: .*lengths \[4, 3\]"):
            adders.add([1, 2, 3], late)
    with pytest.raises(WorkerError, match=r"(?s)Adder \d\.add: ValueError: .*lengths \['int', 3\]"):
        adders.add([1, 2, 3], adders.next.start())
    with pytest.raises(ConfigError, match=r"Adder\.add: arguments to scatter have the lengths \[3, 1\]"):
        adders.add([1, 2, 3], [1])
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'rowz'"):
        adders.add([1], rowz=1)
    with pytest.raises(AttributeError, match=r"no method 'not_registered'.*'add'"):
        adders.not_registered()


def test_the_call_that_failed_is_named_also_by_those_that_wait_for_its_answer(adders: WorkerGroup) -> None:
    for call in (adders.length, adders.add):
        with pytest.raises(WorkerError, match=r"^Adder\ \d\.rows_or_exit: it raised SystemExit: 4"):
            call(adders.rows_or_exit.start(-1))
    assert adders.add([1]) == [101]  # no process ended


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("named", TrainError, r"sums 1\.fail: the loss is not finite"),
        ("exit", WorkerError, r"sums 1\.fail: it raised SystemExit: 3"),
        ("death", WorkerDiedError, r"sums 1\.fail: the process died"),
    ],
)
def test_a_worker_that_fails_is_named_and_a_restart_replaces_all(
    ray_cluster: None, kind: str, error: type[Exception], message: str
) -> None:
    with WorkerGroup(ClassWithArgs(Adder, 1), ResourcePool([2]), name="sums", timeout_s=60) as group:
        before = group.pid()
        with pytest.raises(error, match=message):
            group.fail(1, kind)
        group.restart()
        assert not set(group.pid()) & set(before)
        assert group.add([1, 2]) == [2, 3]


def test_a_worker_that_hangs_is_named_at_the_deadline_and_ends_with_its_group(ray_cluster: None) -> None:
    with WorkerGroup(ClassWithArgs(Adder, 1), ResourcePool([1]), timeout_s=60) as group:
        (pid,) = group.pid()
        late = group.hang.start()
        with pytest.raises(DeadlineError, match=r"Adder\.hang: no answer within 0\.1 s"):
            late.wait(0.1)
    assert holds_within(30, lambda: not Path(f"/proc/{pid}").exists())


def test_a_constructor_that_ends_its_process_and_a_pool_without_room_are_told(ray_cluster: None) -> None:
    with pytest.raises(WorkerError, match=r"(?s)Adder.*it raised SystemExit: no licence"):
        WorkerGroup(ClassWithArgs(Adder, 1, exits=True), ResourcePool([1]), timeout_s=60)
    with pytest.raises(DeadlineError, match=r"no node has \{'GPU': 1\} free for each of 2 workers"):
        WorkerGroup(ClassWithArgs(Adder, 1), ResourcePool([2], gpus=1, timeout_s=0.2))
    with pytest.raises(ConfigError, match="a layout of 4 ranks"):
        WorkerGroup(ClassWithArgs(Adder, 1), ResourcePool([2]), layout=Layout(dp_size=4))


def test_the_example(ray_cluster: None, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[:-1]] == ["buffer", "rollout", "trainer", "policy", "reward"]
    assert lines[-1].endswith("[3, 3]")
