"""The run's own engine behind a proxy that falsifies some of its answers, each once: launcher ``launch``.

What it needs is in the environment variable ``PLAN``, which reaches every process of the run.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import itertools
import json
import os
import threading
import urllib.parse
from collections import Counter
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any

from buffer_rl.kinds.engine import EngineLauncher, EngineProcess
from buffer_rl.plugin.registry import PluginRegistry

PLAN = "DRILL_ANSWERS_PLAN"
"""JSON: ``folder`` for notes, ``every``: one of how many answers is falsified, ``engine``: the run's own, ``plugins``.
"""
TIMEOUT_S = 600.0
MOST_OF_A_KIND = 5
"""False answers of one engine: an agent's group takes many requests, and none of them may meet one."""
LOOPBACK = "127.0.0.1"
_DROPPED = frozenset({"connection", "transfer-encoding", "content-length", "host", "server", "date", "keep-alive"})


def _changed(answer: Any, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The answer, or the first of its rows, with a change."""
    change(answer[0] if isinstance(answer, list) else answer)
    return json.dumps(answer).encode()


def _other_token(row: dict[str, Any]) -> None:
    row["output_ids"][-1] = row["meta_info"]["output_token_logprobs"][-1][1] = 10**9


def _likelier_than_certain(row: dict[str, Any]) -> None:
    row["meta_info"]["output_token_logprobs"][-1][0] = 2.0


def _later_version(row: dict[str, Any]) -> None:
    for span in row["meta_info"]["weight_versions"]:
        span["version"] = str(int(span["version"]) + 1000)


KINDS: Mapping[str, Callable[[Any], bytes]] = MappingProxyType(
    {
        "token lost": lambda answer: _changed(answer, lambda row: row["meta_info"]["output_token_logprobs"].pop()),
        "impossible token": lambda answer: _changed(answer, _other_token),
        "impossible log-probability": lambda answer: _changed(answer, _likelier_than_certain),
        "version that was never published": lambda answer: _changed(answer, _later_version),
        "cut in its middle": lambda answer: json.dumps(answer).encode()[: len(json.dumps(answer)) // 2],
        "status 500": lambda _: b"{}",
    }
)
"""How an answer of ``/generate`` is falsified. Each is a body that no sound engine sends."""


class FalseAnswers:
    """Launches the run's own engine with a proxy in front of it; meets ``buffer_rl.kinds.engine.EngineLauncher``."""

    @property
    def deterministic(self) -> bool:
        """As the own engine has it."""
        return bool(getattr(_own(), "deterministic", False))

    def check(self, args: Any) -> None:
        """Raises what the own engine's does."""
        if (check := getattr(_own(), "check", None)) is not None:
            check(args)

    def __call__(self, args: Any, index: int, log_path: str) -> EngineProcess:
        """Start the engine, without waiting for it."""
        return _Fronted(_own()(args, index, log_path), args.engine_host)


launch = FalseAnswers()


class _Fronted:
    """An engine process whose URL is the proxy's; meets ``buffer_rl.kinds.engine.EngineProcess``."""

    def __init__(self, engine: EngineProcess, host: str) -> None:
        self._engine = engine
        plan = json.loads(os.environ[PLAN])
        self._server = ThreadingHTTPServer((host, 0), _Proxy)
        self._server.daemon_threads = True
        self._server.engine, self._server.plan = engine, plan  # type: ignore[attr-defined]
        self._server.number = itertools.count(1)  # type: ignore[attr-defined]
        self.url = f"http://{host}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.wait_ready, self.check = engine.wait_ready, engine.check

    def stop(self) -> None:
        self._engine.stop()
        self._server.shutdown()
        self._server.server_close()


class _Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self._pass_on()

    def do_GET(self) -> None:
        self._pass_on()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _body(self) -> bytes:
        """Of the request; a router that passes bodies on as they come, as smg, sends them in chunks."""
        if self.headers.get("transfer-encoding", "identity").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("content-length") or 0))
        chunks = []
        while size := int(self.rfile.readline().partition(b";")[0].strip() or b"0", 16):  # nothing: who asked is gone
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():  # trailers
            pass
        return b"".join(chunks)

    def _pass_on(self) -> None:
        body = self._body()
        server: Any = self.server
        target = urllib.parse.urlsplit(server.engine.url)
        connection = http.client.HTTPConnection(target.hostname or LOOPBACK, target.port, timeout=TIMEOUT_S)
        try:
            kept = {name: value for name, value in self.headers.items() if name.lower() not in _DROPPED}
            connection.request(self.command, self.path, body, kept)
            answer = connection.getresponse()
            status, found, headers = answer.status, answer.read(), answer.getheaders()
        except (OSError, http.client.HTTPException):
            self.close_connection = True  # as an engine that is gone
            return
        finally:
            connection.close()
        if self.path == "/generate" and status == 200:
            status, found = _falsified(server, json.loads(body), found)
        with contextlib.suppress(ConnectionError):  # who asked is gone
            self.send_response(status)
            for name, value in headers:
                if name.lower() not in _DROPPED:
                    self.send_header(name, value)
            self.send_header("content-length", str(len(found)))
            self.end_headers()
            self.wfile.write(found)


def notes(folder: Path) -> tuple[Counter[str], list[tuple[str, str]]]:
    """By kind, how many falsified requests were asked again under their own id; and uid and kind of each."""
    path = folder / "false.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    kinds = {line["rid"]: line["kind"] for line in lines if "kind" in line}
    again = Counter(kinds[line["again"]] for line in lines if "again" in line)
    return again, [(rid.partition(":")[2].rsplit("/", 1)[0], kind) for rid, kind in kinds.items()]


def _falsified(server: Any, asked: dict[str, Any], found: bytes) -> tuple[int, bytes]:
    """Status and body of the answer to ``asked``: false if it is its turn, and noted then."""
    path, rid = Path(server.plan["folder"], "false.jsonl"), str(asked.get("rid", ""))
    if not rid.startswith("train_"):  # of an evaluation, which is not in the ledger, or a check of the run's own
        return 200, found
    if path.exists() and json.dumps(rid) in path.read_text():
        _note(path, {"again": rid})
        return 200, found
    answer = json.loads(found)
    rows = answer if isinstance(answer, list) else [answer]
    number = next(server.number)
    turn, rest = divmod(number, server.plan["every"])
    if rest or turn > MOST_OF_A_KIND * len(KINDS) or not rows[0].get("output_ids"):
        return 200, found
    name = list(KINDS)[turn % len(KINDS)]
    _note(path, {"kind": name, "rid": rid})
    return 500 if name == "status 500" else 200, KINDS[name](answer)


def _note(path: Path, line: dict[str, str]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


@functools.cache
def _own() -> EngineLauncher:
    plan = json.loads(os.environ[PLAN])
    launcher: EngineLauncher = PluginRegistry.from_flags(plan["plugins"]).resolve("engine", plan["engine"])
    return launcher
