"""The checks of the sandboxes before a run starts, and the form of requests to a sandbox server."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from buffer_rl.errors import ConfigError, RewardError
from buffer_rl.records.groups import Sample, Status
from buffer_rl_code import bubblewrap
from buffer_rl_code.bubblewrap import Bubblewrap
from buffer_rl_code.options import buffer_rl_configure, sandbox_of
from buffer_rl_code.reward import score
from buffer_rl_code.sandbox import Ended, Program
from buffer_rl_code.seccomp import ABSENT, ARCHITECTURES, NONE, REFUSED, filter_program
from buffer_rl_code.server import SandboxServer

needs_bwrap = pytest.mark.skipif(not shutil.which("bwrap"), reason="no bwrap: apt-get install bubblewrap")
HEADERS = {
    "x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h",
    "aarch64": "/usr/include/asm-generic/unistd.h",
}
OPTIONS: dict[str, Any] = {
    "code_sandbox": None, "plugin": [], "code_timeout_s": 3.0, "code_memory_mb": 2048, "rm_timeout_s": 30.0,
    "rm_type": None, "custom_rm_path": None, "custom_group_rm_path": None, "row_rm_types": [],
    "eval_config": None, "eval_prompt_data": [],
}  # fmt: skip


def args_of(**changes: Any) -> Any:
    return SimpleNamespace(**{**OPTIONS, **changes})


@needs_bwrap
def test_the_check_passes_in_two_seconds_where_bwrap_works() -> None:
    began = time.monotonic()
    Bubblewrap().check()
    assert time.monotonic() - began < 2.0


def test_a_run_with_the_reward_is_refused_without_bwrap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("buffer_rl.data.eval_sets.eval_sets_of", lambda args: [])
    for chosen in ({"rm_type": "code"}, {"row_rm_types": ["math", "code_fraction"]}, {"code_sandbox": "bubblewrap"},
                   {"custom_rm_path": "buffer_rl_code.reward:score"}):  # fmt: skip
        with pytest.raises(ConfigError, match=r"bwrap is not installed(.|\n)*apt-get install bubblewrap"):
            buffer_rl_configure(args_of(**chosen))
    buffer_rl_configure(args_of(rm_type="math"))


@pytest.mark.skipif(sys.platform != "linux", reason="bwrap is of Linux")
def test_a_machine_that_forbids_namespaces_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    for folder in (tmp_path, *list(tmp_path.parents)[:3]):
        folder.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="No permissions to create new namespace") as caught:
        Bubblewrap().check()
    assert "--code-sandbox URL" in caught.value.hint


@needs_bwrap
@pytest.mark.parametrize(
    ("option", "count", "said"),
    [("--remount-ro", 2, "write"), ("--seccomp", 2, "no seccomp filter")],
)
def test_a_sandbox_that_does_not_hold_is_refused(
    monkeypatch: pytest.MonkeyPatch, option: str, count: int, said: str
) -> None:
    """Each protection that the check tries is left out once."""

    def without(*given: Any) -> Iterator[str]:
        words = list(inside(*given))
        while option in words:
            del words[words.index(option) : words.index(option) + count]
        yield from words

    inside = bubblewrap._inside
    monkeypatch.setattr(bubblewrap, "_inside", without)
    with pytest.raises(ConfigError, match=f"does not hold: .*{said}"):
        Bubblewrap().check()


def test_the_deadline_of_rewards_must_leave_time_for_the_candidate() -> None:
    with pytest.raises(ConfigError, match="--rm-timeout-s"):
        buffer_rl_configure(args_of(code_sandbox="bubblewrap", code_timeout_s=30.0))


def test_what_is_no_sandbox_is_refused() -> None:
    with pytest.raises(ConfigError, match="is no sandbox"):
        sandbox_of(args_of(code_sandbox="types:SimpleNamespace.__class__"))
    with pytest.raises(ConfigError, match="is no sandbox"):
        sandbox_of(args_of(code_sandbox="buffer_rl_code.probe:PROBE"))


@needs_bwrap
def test_nothing_is_left_if_the_process_that_watches_is_killed() -> None:
    code = (
        "import sys; from buffer_rl_code.bubblewrap import Bubblewrap; from buffer_rl_code.sandbox import Program\n"
        "Bubblewrap().run(Program(code='import time; time.sleep(61.25)', timeout_s=60))"
    )
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as child:
        deadline = time.monotonic() + 60
        while not (found := running("time.sleep(61.25)", child.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert found
        os.killpg(child.pid, signal.SIGKILL)
    while any(Path("/proc", str(pid)).exists() for pid in found) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path("/proc", str(pid)).exists() for pid in found)


def running(text: str, root: int) -> list[int]:
    """The processes below ``root``, as soon as there is one in the sandbox."""
    from buffer_rl_code.watch import descendants

    found = descendants(root)[1:]
    return found if len(found) >= 3 else []


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_the_filter_has_the_numbers_of_the_kernel(machine: str) -> None:
    program = filter_program(machine)
    assert len(program) % 8 == 0
    assert len(program) // 8 <= 4096
    if not Path(HEADERS[machine]).exists():
        pytest.skip("no headers of the kernel here")
    words = [
        line.split() for line in Path(HEADERS[machine]).read_text().splitlines() if line.startswith("#define __NR")
    ]
    known = {word[1].removeprefix("__NR3264_").removeprefix("__NR_"): word[2] for word in words if len(word) > 2}
    column = list(ARCHITECTURES).index(machine)
    for name, numbers in {**REFUSED, **ABSENT}.items():
        if name in known or numbers[column] == NONE:
            assert known.get(name, str(NONE)) == str(numbers[column]), name


@contextmanager
def served(answers: list[tuple[int, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that gives ``answers`` in turn, the last one again and again, and the requests to it."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append({"path": self.path, "authorization": self.headers["Authorization"], **body})
            status, answer = answers[min(len(asked), len(answers)) - 1]
            answer = ran(body) if answer == "run" else answer
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Location", "http://127.0.0.1:1/")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def ran(body: dict[str, Any]) -> dict[str, Any]:
    """What SandboxFusion answers; the program is one of this file's."""
    done = subprocess.run([sys.executable, "-c", body["code"]], input=body["stdin"].encode(), capture_output=True)
    return finished(done.stdout.decode(), done.returncode)


def finished(stdout: str, code: int = 0, status: str = "Finished") -> dict[str, Any]:
    result = {"status": status, "execution_time": 0.1, "return_code": code, "stdout": stdout, "stderr": ""}
    return {"status": "Success" if not code else "Failed", "message": "", "compile_result": None, "run_result": result}


def test_candidates_are_judged_through_a_sandbox_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUFFER_RL_CODE_SANDBOX_TOKEN", "abc")
    with served([(200, "run")]) as (url, asked):
        args = args_of(code_sandbox=url)
        sandbox_of(args).check()
        metadata = {"tests": ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"]}
        for code, reward in (("def add(a, b): return a + b", 1.0), ("def add(a, b): return 3", 0.0)):
            sample = Sample(prompt="p", response=code, metadata=metadata, status=Status.COMPLETED)
            assert score(args, sample) == reward
    assert {request["path"] for request in asked} == {"/run_code"}
    assert {request["authorization"] for request in asked} == {"Bearer abc"}
    assert all("expected" not in request["stdin"] for request in asked)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((404, {}), "HTTP 404"),
        ((302, {}), "HTTP 302"),
        ((200, b"no JSON"), "no JSON"),
        ((200, {"status": "Success", "run_result": None}), "expected: an answer of /run_code"),
        ((503, {}), "failed 3 times: HTTP 503"),
        ((200, {"status": "SandboxError", "message": "no room"}), "failed 3 times: SandboxError: no room"),
    ],
)
def test_a_server_that_fails_is_an_error_and_no_zero(answer: tuple[int, Any], said: str) -> None:
    with served([answer]) as (url, _):
        sandbox = SandboxServer(args_of(code_sandbox=url))
        with pytest.raises(RewardError, match=said):
            sandbox.run(Program(code="print(1)"))
        with pytest.raises(ConfigError, match="sandbox server does not work"):
            sandbox.check()


def test_a_busy_server_is_asked_again_and_limits_are_named() -> None:
    with served([(429, {}), (200, finished("1\n"))]) as (url, asked):
        assert SandboxServer(args_of(code_sandbox=url)).run(Program(code="print(1)")).stdout == b"1\n"
        assert len(asked) == 2
    with served([(200, finished("", 1, "TimeLimitExceeded"))]) as (url, _):
        assert SandboxServer(args_of(code_sandbox=url)).run(Program(code="")).ended is Ended.TIMEOUT
    with served([(200, finished("x" * 1000))]) as (url, _):
        run = SandboxServer(args_of(code_sandbox=url)).run(Program(code="", output_bytes=100))
        assert (run.ended, len(run.stdout)) == (Ended.OUTPUT, 100)
