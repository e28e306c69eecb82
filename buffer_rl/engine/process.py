"""Server processes: they end with their parent, log to a file, are awaited with a deadline, can always be stopped.

The API key of a run's engines and router is made here, and carried by options and environment, never by an argument
list: every user of the machine can read a command line, only its owner the environment of a process.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from buffer_rl.config import env_of
from buffer_rl.errors import DeadlineError, EngineError

if TYPE_CHECKING:
    from buffer_rl.options import Args

LOG_TAIL_LINES = 20
STOP_TIMEOUT_S = 5.0
PARENT_FD_FLAG = "--parent-fd"
KEY_VARIABLE = env_of("engine_api_key")
KEY_BYTES = 32
POLL_INTERVAL_S = 0.05


def exit_with_parent(fd: int) -> None:
    """Kill this process once the parent is gone: its end of the pipe ``fd`` is then closed by the kernel.

    A pipe rather than ``PR_SET_PDEATHSIG``: that signal is sent when the *thread* that started the child ends,
    which would kill engines that were started from a worker thread, and it exists on Linux only.
    """

    def watch() -> None:
        while os.read(fd, 1):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


class ChildProcess:
    """A command in a process group of its own, its output appended to ``log_path``.

    The command gets ``--parent-fd N`` appended and must pass N to ``exit_with_parent``. Raises EngineError if it
    cannot be started.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_path: str,
        *,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.log_path = log_path
        Path(log_path).parent.mkdir(parents=True, exist_ok=True)
        read_end, self._lifeline = os.pipe()
        try:
            with open(log_path, "ab") as log:
                self._process = subprocess.Popen(
                    [*command, PARENT_FD_FLAG, str(read_end)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **(env or {})},
                    pass_fds=[read_end, *pass_fds],
                    start_new_session=True,
                )
        except OSError as error:
            os.close(self._lifeline)
            raise EngineError(f"{name} cannot be started: {error}", where=log_path) from error
        finally:
            os.close(read_end)

    @property
    def pid(self) -> int:
        """Process id, and the id of its process group."""
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self._process.poll()

    def log_tail(self) -> str:
        """The last lines of the log."""
        try:
            text = Path(self.log_path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-LOG_TAIL_LINES:])

    def check(self) -> None:
        """Raises EngineError, with the end of the log, if the process has ended."""
        status = self.exit_status
        if status is None:
            return
        how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
        tail = self.log_tail()
        log = f"the end of its log:\n{tail}" if tail else "its log is empty"
        raise EngineError(f"{self.name} {how}; {log}", where=self.log_path, hint="read the log")

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """SIGTERM, then SIGKILL for the whole group; returns when the process is gone. May be called twice."""
        if self._process.poll() is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
        self._signal(signal.SIGKILL)  # whatever else is in the group
        self._process.wait(timeout_s)
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            return


def listening_socket(host: str, backlog: int | None = None) -> socket.socket:
    """A socket that listens on a free port of the address ``host``. Raises EngineError if this machine has no such
    address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family, backlog=backlog)
    except OSError as error:
        raise EngineError(f"no port of {host} can be listened on: {error}", where="--engine-host") from error


def base_url(host: str, port: int) -> str:
    """``http://HOST:PORT``."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def wait_until_ready(url: str, process: ChildProcess, timeout_s: float) -> None:
    """Ask ``url`` until it answers 200. Raises EngineError if ``process`` ends first, DeadlineError when time is up."""
    deadline = time.monotonic() + timeout_s
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy
    while True:
        process.check()
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlineError(
                f"{process.name} did not answer {url} within {timeout_s:g} s; "
                f"the end of its log:\n{process.log_tail()}",
                where=process.log_path,
                hint="read the log, or raise --engine-start-timeout-s",
            )
        try:
            with opener.open(url, timeout=min(left, 1.0)) as response:
                if response.status == 200:
                    return
        except (http.client.HTTPException, OSError):  # urllib's errors are OSErrors
            pass
        time.sleep(min(POLL_INTERVAL_S, max(left, 0.0)))


def with_engine_key(args: Args) -> Args:
    """``args`` with a key for the engines that this run starts: the given one, or a new one.

    Without a key under ``--no-engine-auth``; unchanged under ``--router-url``, whose engines the run does not start."""
    if args.router_url is not None:
        return args
    key = args.engine_api_key or secrets.token_urlsafe(KEY_BYTES)
    return args.model_copy(update={"engine_api_key": key if args.engine_auth else None})


def auth_headers(key: str | None) -> dict[str, str]:
    """The headers of a request to an engine or the router; none without a key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def key_environment(key: str | None) -> dict[str, str]:
    """The environment variable of a server process. Empty for no key, also where this process has one."""
    return {KEY_VARIABLE: key or ""}


def pop_key(environ: MutableMapping[str, str] = os.environ) -> str | None:
    """In a server process: its key, removed from the environment that its own children inherit."""
    return environ.pop(KEY_VARIABLE, "") or None
