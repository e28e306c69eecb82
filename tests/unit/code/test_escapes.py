"""What a program in the sandbox of bubblewrap cannot do, tried for real: as root, if the tests run as root, and as a
user. Neither a process nor a changed setting of the machine may be left."""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import pytest

from buffer_rl_code.bubblewrap import Bubblewrap
from buffer_rl_code.sandbox import Ended, Program, ProgramRun
from harness.escapes import ENDLESS, ESCAPES, HARMS, PROLOGUE

pytestmark = [
    pytest.mark.skipif(not shutil.which("bwrap"), reason="no bwrap: apt-get install bubblewrap"),
    pytest.mark.slow,
]

Value = TypeVar("Value")
USER = 54321
CHANGING = ("ns_last_pid", "random/", "/pty/nr", "route/", "neigh/", "conf/", "tcp_fastopen_key", "nf_conntrack")


@pytest.fixture(params=["root", "user"])
def identity(request: pytest.FixtureRequest) -> str:
    who: str = request.param
    if who == "root" and os.geteuid() != 0:
        pytest.skip("the tests do not run as root")
    return who


def as_identity(who: str, act: Callable[[], Value]) -> Value:
    """What ``act`` returns, in a child that is an ordinary user if ``who`` is "user" and this process is root."""
    if who == "root" or os.geteuid() != 0:
        return act()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(USER)
            os.setuid(USER)
            os.write(writer, pickle.dumps(act()))
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with open(reader, "rb") as stream:
        answer = stream.read()
    assert os.waitpid(child, 0)[1] == 0
    value: Value = pickle.loads(answer)
    return value


def run(who: str, code: str, *, names: Mapping[str, str] | None = None) -> ProgramRun:
    for name, value in (names or {}).items():
        code = code.replace(name, value)
    program = Program(code=PROLOGUE + code)
    return as_identity(who, lambda: Bubblewrap().run(program))


@pytest.fixture(autouse=True, scope="module")
def settings_of_the_machine() -> Iterator[None]:
    before = settings()
    yield
    changed = {path: (before.get(path), value) for path, value in settings().items() if before.get(path) != value}
    assert changed == {}


def settings() -> dict[str, bytes]:
    """Every setting of the kernel that its owner may write."""
    found = {}
    for path in Path("/proc/sys").rglob("*"):
        if any(part in str(path) for part in CHANGING) or not path.is_file() or not path.stat().st_mode & 0o200:
            continue
        try:
            found[str(path)] = path.read_bytes()
        except OSError:
            continue
    return found


def left_over(namespace: str) -> list[str]:
    """Processes of the machine in this process namespace."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "ns" / "pid") == namespace:
                found.append(process.name)
        except OSError:
            continue
    return found


def assert_nothing_is_left(result: ProgramRun) -> None:
    namespace = result.stdout.decode().partition("\n")[0]
    assert namespace.startswith("pid:["), result
    deadline = time.monotonic() + 5
    while (left := left_over(namespace)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left == []


def reached(result: ProgramRun) -> list[str]:
    return [line for line in result.stdout.decode(errors="replace").splitlines() if line.startswith("REACHED")]


@pytest.mark.parametrize("name", ESCAPES)
def test_an_escape_reaches_nothing(name: str, identity: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SECRET_KEY", "abc")
    with ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        abstract, by_path = (stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
        names = {
            "PORT": str(tcp.getsockname()[1]),
            "ABSTRACT": f"escape{os.getpid()}",
            "UNIX_PATH": str(tmp_path / "s"),
        }
        abstract.bind("\0" + names["ABSTRACT"])
        by_path.bind(names["UNIX_PATH"])
        abstract.listen()
        by_path.listen()
        result = run(identity, ESCAPES[name] + "\nprint('done')\n", names=names)
    assert reached(result) == []
    assert result.ended is Ended.EXITED
    assert result.stdout.endswith(b"done\n"), result  # the attempt was made to its end
    assert_nothing_is_left(result)


@pytest.mark.parametrize("name", HARMS)
def test_a_harm_ends_at_a_limit(name: str, identity: str) -> None:
    result = run(identity, HARMS[name])
    assert reached(result) == []
    assert_nothing_is_left(result)


@pytest.mark.parametrize("name", ENDLESS)
def test_what_does_not_end_is_ended(name: str, identity: str) -> None:
    code, ended = ENDLESS[name]
    began = time.monotonic()
    program = Program(code=PROLOGUE + code, timeout_s=5.0 if ended == "memory" else 1.0, memory_mb=512)
    result = as_identity(identity, lambda: Bubblewrap().run(program))
    assert result.ended is Ended(ended)
    assert time.monotonic() - began < 15
    assert len(result.stdout) <= 1 << 20
    assert_nothing_is_left(result)
