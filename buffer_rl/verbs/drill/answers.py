"""The run's own engine behind a proxy that falsifies some of its answers, each once: launcher ``launch``.

What it needs is in the environment variable ``PLAN``, which reaches every process of the run.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from buffer_rl.engines.http import LoopThread
from buffer_rl.kinds.engine import EngineLauncher, EngineProcess
from buffer_rl.plugin.registry import PluginRegistry

PLAN = "DRILL_ANSWERS_PLAN"
"""JSON: ``folder`` for notes, ``every``: one of how many answers is falsified, ``engine``: the run's own, ``plugins``.
"""
TIMEOUT_S = 600.0
MOST_OF_A_KIND = 5
"""False answers of one engine: an agent's group takes many requests, and none of them may meet one."""
MOST_BYTES = 1 << 40
"""Of a request: weights are sent in them."""
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


KINDS: Mapping[str, Callable[[Any], bytes]] = {
    "token lost": lambda answer: _changed(answer, lambda row: row["meta_info"]["output_token_logprobs"].pop()),
    "impossible token": lambda answer: _changed(answer, _other_token),
    "impossible log-probability": lambda answer: _changed(answer, _likelier_than_certain),
    "version that was never published": lambda answer: _changed(answer, _later_version),
    "cut in its middle": lambda answer: json.dumps(answer).encode()[: len(json.dumps(answer)) // 2],
    "status 500": lambda _: b"{}",
}
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
        self._engine, self._plan = engine, json.loads(os.environ[PLAN])
        self._number = itertools.count(1)
        self._thread = LoopThread("drill-answers")
        self.url = self._thread.run(self._start(host))
        self.wait_ready, self.check = engine.wait_ready, engine.check

    def stop(self) -> None:
        self._engine.stop()
        self._thread.run(self._end())
        self._thread.stop()

    async def _start(self, host: str) -> str:
        timeout, left_out = aiohttp.ClientTimeout(total=TIMEOUT_S), ["Accept-Encoding"]
        self._session = aiohttp.ClientSession(timeout=timeout, auto_decompress=False, skip_auto_headers=left_out)
        app = web.Application(client_max_size=MOST_BYTES)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, 0).start()
        return f"http://{host}:{self._runner.addresses[0][1]}"

    async def _end(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _pass_on(self, request: web.Request) -> web.Response:
        """Have the engine answer the request, and falsify the answer if it is its turn."""
        body, target = await request.read(), self._engine.url + request.path_qs
        kept = {name: value for name, value in request.headers.items() if name.lower() not in _DROPPED}
        try:
            async with self._session.request(request.method, target, data=body or None, headers=kept) as answer:
                status, found, headers = answer.status, await answer.read(), answer.headers
        except (OSError, aiohttp.ClientError, TimeoutError):
            if request.transport is not None:
                request.transport.abort()  # as an engine that is gone
            return web.Response(status=502)
        if request.path == "/generate" and status == 200:
            status, found = self._falsified(json.loads(body), found)
        own = {name: value for name, value in headers.items() if name.lower() not in _DROPPED}
        return web.Response(status=status, body=found, headers=own)

    def _falsified(self, asked: dict[str, Any], found: bytes) -> tuple[int, bytes]:
        """Status and body of the answer to ``asked``: false if it is its turn, and noted then."""
        path, rid = Path(self._plan["folder"], "false.jsonl"), str(asked.get("rid", ""))
        if not rid.startswith("train_"):  # of an evaluation, which is not in the ledger, or a check of the run's own
            return 200, found
        if path.exists() and json.dumps(rid) in path.read_text():
            _note(path, {"again": rid})
            return 200, found
        answer = json.loads(found)
        rows = answer if isinstance(answer, list) else [answer]
        turn, rest = divmod(next(self._number), self._plan["every"])
        if rest or turn > MOST_OF_A_KIND * len(KINDS) or not rows[0].get("output_ids"):
            return 200, found
        name = list(KINDS)[turn % len(KINDS)]
        _note(path, {"kind": name, "rid": rid})
        return 500 if name == "status 500" else 200, KINDS[name](answer)


def notes(folder: Path) -> tuple[Counter[str], list[tuple[str, str]]]:
    """By kind, how many falsified requests were asked again under their own id; and uid and kind of each."""
    path = folder / "false.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    kinds = {line["rid"]: line["kind"] for line in lines if "kind" in line}
    again = Counter(kinds[line["again"]] for line in lines if "again" in line)
    return again, [(rid.partition(":")[2].rsplit("/", 1)[0], kind) for rid, kind in kinds.items()]


def _note(path: Path, line: dict[str, str]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


@functools.cache
def _own() -> EngineLauncher:
    plan = json.loads(os.environ[PLAN])
    launcher: EngineLauncher = PluginRegistry.from_flags(plan["plugins"]).resolve("engine", plan["engine"])
    return launcher
