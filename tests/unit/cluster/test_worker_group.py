"""What is refused of a worker's class, a pool and a group before any process is started."""

from __future__ import annotations

from typing import Any

import pytest

from buffer_rl.cluster.worker_group import ClassWithArgs, ResourcePool, WorkerGroup, register
from buffer_rl.errors import ConfigError


async def coroutine(self: Any) -> None: ...


def by_name_alone(self: Any, *, rows: list[int]) -> None: ...


def with_any_names(self: Any, **rows: list[int]) -> None: ...


@pytest.mark.parametrize("method", [coroutine, by_name_alone, with_any_names])
def test_a_method_that_cannot_be_called_by_place_is_not_registered(method: Any) -> None:
    with pytest.raises(ConfigError, match=f"{method.__name__}: a worker's method is a coroutine, or has"):
        register()(method)


def test_a_pool_has_processes_on_each_node_and_numbers_them_there() -> None:
    pool = ResourcePool([2, 1])
    assert (pool.size, pool.local_ranks()) == (3, [(0, 0), (0, 1), (1, 0)])
    for processes in ([], [2, 0]):
        with pytest.raises(ConfigError, match="ResourcePool: a pool has"):
            ResourcePool(processes)


class Silent:
    def work(self) -> None: ...


class Taken:
    @register()
    def stop(self) -> None: ...

    @register()
    def ready(self) -> None: ...


class Worker:
    @register()
    def work(self) -> None: ...


@pytest.mark.parametrize(
    ("worker_class", "message"),
    [
        (Silent, "Silent: no method is registered"),
        (Taken, r"Taken: the group has \['ready', 'stop'\] itself"),
        (Worker, "w: Ray is not started"),
    ],
)
def test_a_group_that_cannot_start_says_why(worker_class: type, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # other tests of the session may have started it
    with pytest.raises(ConfigError, match=message):
        WorkerGroup(ClassWithArgs(worker_class), ResourcePool([1]), name="w")
