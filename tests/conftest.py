"""What holds for all tests."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from buffer_rl.cluster.fork_server import SOCKET_VARIABLE, fork_server
from buffer_rl.cluster.process import settle_garbage_collector
from harness.scripts import forked_from

# An example that takes long says something of the machine, and nothing of the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# Servers of tests are on this machine, which a user's proxy does not reach. A run says the same to its processes.
for _name in ("no_proxy", "NO_PROXY"):
    os.environ[_name] = ",".join(filter(None, (os.environ.get(_name), "127.0.0.1", "localhost")))


@pytest.fixture(scope="session")
def fork_server_socket() -> Iterator[str]:
    """The socket of a process that has imported torch, which is started with the first test that asks for it; empty
    where this system has none."""
    with fork_server():
        yield os.environ.pop(SOCKET_VARIABLE, "")


@pytest.fixture(scope="module")
def forked_processes(fork_server_socket: str) -> Iterator[None]:
    """Engines, Ray's workers and reward processes that the tests of the module start are forked, as those of a run;
    and so are those of commands that they start."""
    with forked_from(fork_server_socket):
        yield


@pytest.fixture(autouse=True)
def restored_import_path() -> Iterator[None]:
    """Plugins named by file put their folder on the import path of the process; the next test must not see it."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    added = set(sys.path) - set(path)
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        origin = getattr(sys.modules[name], "__file__", None) or ""
        if any(origin.startswith(f"{folder}/") for folder in added):
            del sys.modules[name]


def pytest_sessionstart(session: pytest.Session) -> None:
    """What tests import stays: looking through all of it again and again would take a twentieth of their time. And
    Ctrl-C means what it does on a terminal, though a job that a shell starts in the background ignores it."""
    settle_garbage_collector()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    settle_garbage_collector()
