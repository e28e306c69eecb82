"""Server processes: they end with their parent, log to a file, are awaited with a deadline, can always be stopped.

The API key of a run's engines and router is made here, and carried by options and environment, never by an argument
list: every user of the machine can read a command line, only its owner the environment of a process.
"""

from __future__ import annotations

import contextlib
import gc
import http.client
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from buffer_rl.args import Args
from buffer_rl.cluster.fork_server import start_process
from buffer_rl.errors import ConfigError, DeadlineError, EngineError, raised_as
from buffer_rl.options.redaction import is_secret
from buffer_rl.options.section import env_of

LOG_TAIL_LINES = 20
LOG_TAIL_BYTES = 65536
STOP_TIMEOUT_S = 5.0
PARENT_FD_FLAG = "--parent-fd"
KEY_VARIABLE = env_of("engine_api_key")
KEY_BYTES = 32
POLL_INTERVAL_S = 0.05
ENGINE_HOST = "--engine-host"
CONNECT_TIMEOUT_S = 0.2
START_ATTEMPTS = 3
NO_ANSWER = (http.client.HTTPException, OSError, ValueError)
"""urllib's own errors are OSErrors."""
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
PORT_IS_TAKEN = "address already in use"
"""In the log of a server whose port another process has, whatever the case; SGLang says it and goes on living."""


def settle_garbage_collector() -> None:
    """For a process before it imports torch, and once it is set up: what it has by then is never looked through again,
    and collections are rarer.

    With Python's usual thresholds, torch and transformers take a fourth longer to import, and with these and Ray
    imported a rollout worker loses a quarter of its CPU time. Collections come with net allocations, and a step frees
    what it allocates, so each step ends with ``gc.collect()``: what is left in cycles may hold tensors."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 10, 10)


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
                self._log_start = log.tell()
                command = [*command, PARENT_FD_FLAG, str(read_end)]
                streams, given = (log.fileno(), log.fileno()), {**os.environ, **(env or {})}
                self._process = start_process(command, streams=streams, env=given, pass_fds=[read_end, *pass_fds])
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
        """The last lines that the process wrote to the log."""
        try:
            with open(self.log_path, "rb") as log:
                log.seek(max(self._log_start, os.fstat(log.fileno()).st_size - LOG_TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(_COLOR.sub("", text).splitlines()[-LOG_TAIL_LINES:])

    def log_end(self) -> str:
        """``log_tail`` as the last part of an error's text."""
        return f"the end of its log:\n{tail}" if (tail := self.log_tail()) else "its log is empty"

    def check(self) -> None:
        """Raises EngineError, with the end of the log, if the process has ended."""
        status = self.exit_status
        if status is None:
            return
        how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
        raise EngineError(f"{self.name} {how}; {self.log_end()}", where=self.log_path, hint="read the log")

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """SIGTERM, then SIGKILL for the whole group; returns when all of it is gone, so that its memory and devices are
        free. May be called twice."""
        if self._process.poll() is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
        self._signal(signal.SIGKILL)  # whatever else is in the group
        self._process.wait(timeout_s)
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(ProcessLookupError):  # it was never there
            while _lives_in_group(self.pid) and time.monotonic() < deadline:
                time.sleep(POLL_INTERVAL_S)
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def _lives_in_group(leader: int) -> bool:
    """Whether a process of the group ``leader`` runs; a zombie, which its parent has not asked for yet, does not. False
    where the system has no ``/proc``."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, _, group = entry.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(group) == leader and state != "Z":
                return True
    return False


def listening_socket(host: str, port: int = 0, *, backlog: int, where: str = ENGINE_HOST) -> socket.socket:
    """A socket that listens on ``port`` of the address ``host``, or on a free one for 0. Raises EngineError if this
    machine has no such address, or another process has the port. where: the options that say so."""
    with _naming_address(host, port, where):
        return socket.create_server((host, port), family=_family(host), backlog=backlog)


def reserved_port(host: str) -> socket.socket:
    """A socket that has a free port of the address ``host`` and does not listen: the system gives the port to no other
    process, and a server can listen on it that sets SO_REUSEADDR, as usual. Raises EngineError as above."""
    with _naming_address(host):
        held = socket.socket(_family(host), socket.SOCK_STREAM)
        try:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind((host, 0))
        except OSError:
            held.close()
            raise
        return held


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _naming_address(host: str, port: int = 0, where: str = ENGINE_HOST) -> AbstractContextManager[None]:
    what = f"port {port} of {host} cannot" if port else f"no port of {host} can"
    return raised_as(EngineError, f"{what} be listened on", OSError, where=where)


def base_url(host: str, port: int) -> str:
    """``http://HOST:PORT``."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def wait_until_ready(
    url: str, process: ChildProcess, timeout_s: float, check: Callable[[], None] | None = None
) -> None:
    """Ask ``url`` until it answers 200. Raises EngineError if ``process`` ends first, DeadlineError when time is up,
    and what ``check`` raises, which is called meanwhile; where absent, that of the process."""
    deadline = time.monotonic() + timeout_s
    check = check or process.check
    while True:
        check()
        left = deadline - time.monotonic()
        if left <= 0:
            what = f"{process.name} did not answer {url} within {timeout_s:g} s; {process.log_end()}"
            raise DeadlineError(what, where=process.log_path, hint="read the log, or raise --engine-start-timeout-s")
        if answers(url, min(left, 1.0)):
            return
        time.sleep(min(POLL_INTERVAL_S, max(left, 0.0)))


def answers(url: str, timeout_s: float) -> bool:
    """Whether ``url`` answers 200 within ``timeout_s`` seconds."""
    with contextlib.suppress(*NO_ANSWER):
        return fetch(url, timeout_s)[0] == 200
    return False


def fetch(
    url: str, timeout_s: float, *, key: str | None = None, method: str = "GET", body: Any = None
) -> tuple[int, bytes]:
    """Status and body of an answer. body: sent as JSON. Raises one of ``NO_ANSWER`` if there is none."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **auth_headers(key)}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy
    try:
        with opener.open(urllib.request.Request(url, data, headers, method=method), timeout=timeout_s) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def refuses_connections(url: str) -> bool:
    """Whether the machine at ``url`` answers that nothing listens there. False where it does not answer at once."""
    parts = urlsplit(url)
    with contextlib.suppress(OSError):
        try:
            socket.create_connection((parts.hostname or "", parts.port or 80), timeout=CONNECT_TIMEOUT_S).close()
        except ConnectionRefusedError:
            return True
    return False


@dataclass(eq=False, repr=False)
class ServerProcess:
    """A child process that opens its ports itself. They are reserved until it is ready; where another process takes one
    all the same, it is started again on others. ``url`` is that of the first port, and final after ``wait_ready``.
    A server that can inherit a socket that listens (``listening_socket``) does not need this. Meets
    ``buffer_rl.kinds.engine.EngineProcess``.

    command: the command for free ports of ``hosts``, one each. ready_path: what it answers with 200 once it is ready.
    The others: see ``ChildProcess``.
    """

    name: str
    command: Callable[[Sequence[int]], Sequence[str]]
    log_path: str
    hosts: Sequence[str]
    ready_path: str = "/health"
    env: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        self._held = contextlib.ExitStack()
        self._start()

    def _start(self) -> None:
        with contextlib.ExitStack() as held:
            ports = [held.enter_context(reserved_port(host)).getsockname()[1] for host in self.hosts]
            self.url = base_url(self.hosts[0], ports[0])
            self.process = ChildProcess(self.name, self.command(ports), self.log_path, env=self.env)
            self._held = held.pop_all()

    def wait_ready(self, timeout_s: float) -> None:
        """Return once it is ready. Raises EngineError, with the end of its log, if it ends, DeadlineError if it is not
        within ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                left = max(deadline - time.monotonic(), 0.0)
                wait_until_ready(self.url + self.ready_path, self.process, left, self._check_start)
                self._check_start()  # what answered may be the process that has its port
                self._held.close()
                return
            except EngineError:
                if attempt == START_ATTEMPTS or not self._has_no_port():
                    raise
                ServerProcess.stop(self)  # a subclass may free more in ``stop``, which the next start needs
                self._start()

    def check(self) -> None:
        """Raises EngineError, with the end of the log, if the process has ended."""
        self.process.check()

    def stop(self) -> None:
        """End the process; returns when it is gone."""
        self.process.stop()
        self._held.close()

    def _check_start(self) -> None:
        self.process.check()
        if self._has_no_port():
            raise EngineError(f"{self.name} has no port; {self.process.log_end()}", where=self.log_path)

    def _has_no_port(self) -> bool:
        return PORT_IS_TAKEN in self.process.log_tail().lower()


def arguments_of(items: Mapping[str, Any], prefix: str, own: Mapping[str, str]) -> list[str]:
    """Items of a mapping (``option(prefix=…)``) as arguments of a server: ``{"page_size": 8}`` is ``--page-size 8``.
    True is a flag alone, a list several values, a mapping JSON; False and None are nothing.

    own: those that the run sets itself, with the option for each that has one. Raises ConfigError for one of these,
    and for a secret: every user of the machine can read a command line."""
    found = []
    for given, value in items.items():
        name = given.replace("-", "_")
        flag = f"--{prefix}-{name.replace('_', '-')}"
        if name in own:
            hint = f"use {own[name]}" if own[name] else ""
            raise ConfigError("the run sets this argument of the server itself", where=flag, hint=hint)
        if is_secret(name):
            raise ConfigError("a secret would be in the server's command line, which every user can read", where=flag)
        if value is not False and value is not None:
            values = value if isinstance(value, list) else [] if value is True else [value]
            texts = [json.dumps(each) if isinstance(each, Mapping) else str(each) for each in values]
            found += [f"--{name.replace('_', '-')}", *texts]
    return found


def starts_engines(args: Args) -> bool:
    """Whether the run starts its engines; else others run them."""
    return args.router_url is None and not args.rollout_external_engine_addrs


def with_engine_key(args: Args) -> Args:
    """``args`` with a key for the engines that this run starts: the given one, or a new one.

    Without a key under ``--no-engine-auth``; unchanged where the run does not start them."""
    if not starts_engines(args):
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
