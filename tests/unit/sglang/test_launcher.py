"""A server as a child process: what it is told, that nothing of it is left, and that it finds a port."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.errors import EngineError
from buffer_rl_sglang.launcher import SglangServer, _arguments, launch
from harness.processes import descendants, holds_within, is_running

pytestmark = pytest.mark.slow


@pytest.fixture
def start(options: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[..., SglangServer]]:
    with ExitStack() as stack:

        def make(index: int = 0, **changes: Any) -> SglangServer:
            server = launch(options(**changes), index, str(tmp_path / "server.log"))
            stack.callback(server.stop)
            server.wait_ready(60)
            return server

        yield make


def told(server: SglangServer) -> dict[str, Any]:
    """The arguments that the server was started with, its environment, and its file in shared memory."""
    with urllib.request.urlopen(f"{server.url}/", timeout=10) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


def test_the_server_gets_the_options_of_the_run_and_its_own_and_a_folder_that_sockets_fit_below(
    start: Callable[..., SglangServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (long := tmp_path / ("t" * 90)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    server = start(
        index=2,
        rollout_num_gpus_per_engine=4,
        engine_dtype="bfloat16",
        engine_context_length=100,
        engine_max_running_requests=7,
        seed=40,
        engine_api_key="-secret",
        sglang_args={"mem_fraction_static": "0.25", "log_level": "error"},
    )
    found = told(server)
    expected = {"tp_size": 4, "dtype": "bfloat16", "context_length": 108, "max_running_requests": 7, "random_seed": 42}
    expected |= {"weight_version": "0", "mem_fraction_static": 0.25, "log_level": "error", "api_key": "-secret"}
    assert {name: found[name] for name in expected} == expected
    command = Path(f"/proc/{server.process.pid}/cmdline").read_text()
    assert "secret" not in command
    assert "-secret" not in found["environ"].values()  # what its own children inherit
    assert found["environ"]["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"
    assert len(f"{found['environ']['TMPDIR']}/tmp01234567") <= 107  # AF_UNIX on Linux


def test_on_a_gpu_its_memory_can_be_released_and_on_a_cpu_it_would_not_start_so(options: Callable[..., Any]) -> None:
    def saves(**changes: Any) -> bool:
        return "--enable-memory-saver" in _arguments(options(**changes), 0, 1)

    assert saves(offload_rollout=True)
    assert not saves(offload_rollout=True, engine_device="cpu")
    assert not saves(offload_train=True)


def test_it_returns_experts_where_they_are_replayed(options: Callable[..., Any]) -> None:
    def returns(**changes: Any) -> bool:
        return "--enable-return-routed-experts" in _arguments(options(**changes), 0, 1)

    assert returns(replay_routed_experts=True)
    assert not returns()


def test_it_takes_adapters_where_they_are_published_alone(options: Callable[..., Any]) -> None:
    def after(flag: str, number: int, **changes: Any) -> list[str]:
        words = _arguments(options(lora_rank=8, **changes), 0, 1)
        return words[words.index(flag) + 1 :][:number] if flag in words else []

    alone = {"lora_publish": "adapter", "engine_device": "cpu"}
    assert after("--max-lora-rank", 1, **alone) == ["8"]
    assert after("--lora-target-modules", 2, **alone) == ["all", "--max-loaded-loras"]
    chosen = after("--lora-target-modules", 2, **alone, target_modules=["q_proj", "v_proj"])
    assert chosen == ["q_proj", "v_proj"]
    for flag in "--max-loaded-loras", "--max-loras-per-batch":  # two, and one that is being loaded
        assert after(flag, 1, **alone) == ["3"]
        assert after(flag, 1, **alone, schedule="async", max_staleness=2) == ["5"]
    assert after("--lora-backend", 1, **alone) == ["torch_native"]
    assert not after("--lora-backend", 1, lora_publish="adapter", engine_device="cuda")
    assert not after("--max-lora-rank", 1)


def test_without_a_limit_of_its_own_it_is_the_models(start: Callable[..., SglangServer]) -> None:
    server = start()
    model = Path(told(server)["model_path"], "config.json")
    assert told(server)["context_length"] == json.loads(model.read_text())["max_position_embeddings"] + 8


@pytest.mark.parametrize("how", ["stopped", "killed", "hung"])
def test_nothing_of_a_server_is_left(how: str, start: Callable[..., SglangServer]) -> None:
    before = set(Path("/dev/shm").glob("sem.mp-*"))
    server = start()
    found, pid = told(server), server.process.pid
    processes = [pid, *(child.pid for child in descendants(pid))]
    assert len(processes) == 2  # it and multiprocessing's resource tracker
    left = [Path(found["shared"]), Path(found["environ"]["TMPDIR"])]
    (semaphore,) = set(Path("/dev/shm").glob("sem.mp-*")) - before
    assert all(path.exists() for path in left)
    if how != "stopped":
        os.kill(pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    if how == "killed":
        assert holds_within(60, lambda: server.process.exit_status is not None)
        with pytest.raises(EngineError, match="killed by signal 9"):
            server.check()
    server.stop()
    assert [path for path in left if path.exists()] == []
    assert holds_within(60, lambda: not semaphore.exists())
    assert holds_within(60, lambda: not any(map(is_running, processes)))


def test_a_server_that_ends_says_why(options: Callable[..., Any], tmp_path: Path) -> None:
    server = launch(options(sglang_args={"nonsense": "1"}), 0, str(tmp_path / "server.log"))
    with pytest.raises(
        EngineError, match=r"(?s)SGLang server 0 exited with status 2.*unrecognized arguments: --nonsense"
    ):
        server.wait_ready(60)
    server.stop()
