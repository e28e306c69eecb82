"""Agents elsewhere (``--agent-path remote``): they lease samples from a rollout worker's gateway, and finish them.

A sample is offered until an agent leases it. A lease ends with ``finish``, with its session, or if its agent has sent
no heartbeat for ``--agent-heartbeat-s``. ``remote_client`` is a client in one file. An agent of a plugin that is a
``Remote`` has programs of its own, which each worker starts (``programs``).
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import os
import secrets
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from buffer_rl.agents.command import sample_json
from buffer_rl.agents.programs import Program, Programs
from buffer_rl.agents.runner import AgentTimeoutError
from buffer_rl.agents.session import AgentKilledError, Session, SessionHandle
from buffer_rl.args import Args
from buffer_rl.cluster.process import base_url
from buffer_rl.data.json_text import JSONError, read_json
from buffer_rl.engines.http_server import json_response
from buffer_rl.errors import BufferRLError, ConfigError, RolloutError
from buffer_rl.records.groups import Sample

MAX_WAIT_S = 60.0
"""For which an agent may wait for a sample in one request."""
LOOK_S = 5.0
"""Between two looks at whether an agent that waits is still there."""
FOLDER = "agents"
STARTS_S = 120.0
"""For a program to start, though it has to load its data."""
EVERYWHERE = ("0.0.0.0", "::")


class Remote:
    """Stands for agents elsewhere, which lease the samples."""

    def programs(self, args: Any) -> Sequence[Program]:
        """Those that each rollout worker starts to lease its samples."""
        return ()

    async def __call__(self, args: Any, sample: Sample, session: Any) -> None:
        raise RolloutError("it is not called", where="--agent-path remote", expected="agents that lease samples")


remote = Remote()


@dataclass(slots=True, eq=False, kw_only=True)
class _Offer:
    """A sample for agents elsewhere. leased: done with its lease, its result is the number of the program that has it;
    -1 for another agent. lost: cancelled once this program has ended. heard: when its agent was heard last."""

    session: Session
    sample: dict[str, Any]
    leased: asyncio.Future[int]
    lost: asyncio.Future[None]
    heard: float = 0.0


class Leases:
    """The samples that a worker offers. Belongs to the worker's event loop.

    file: where agents find address and key; None for none. programs: those that this worker starts. log: see
    ``Programs``."""

    blocking = True

    def __init__(self, args: Args, file: Path | None, programs: Sequence[Program] = (), log: str | None = None) -> None:
        self._args = args
        self._file = file
        self._key = args.agent_api_key or _key_in(file) or secrets.token_urlsafe(32)
        self._offers: dict[str, _Offer] = {}
        self._queue: deque[str] = deque()
        self._offered = asyncio.Event()
        self._url = ""
        self._seen = -math.inf  # when an agent was here last: it asked for a sample, or its lease ended
        self._programs = Programs(programs, args, log, lost=self._has_ended, failed=self._fail)
        self._has_programs = bool(programs)
        self._failure: BufferRLError | None = None
        self._closed = False

    def listens(self, host: str, port: int) -> None:
        """Called once the gateway listens: writes address and key to the file, for its owner alone."""
        from socket import gethostname

        self._url = base_url(gethostname() if host in EVERYWHERE else host, port)
        self._programs.start(self._url, self._key)
        if self._file is None:
            return
        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = self._file.with_suffix(".new")
        temporary.unlink(missing_ok=True)
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump({"url": self._url, "key": self._key}, file)
        temporary.replace(self._file)

    async def aclose(self) -> None:
        """Remove the file, so that agents which read it end, and end the programs. Who waits for a sample gets none."""
        self._closed = True
        self._offered.set()
        if self._file is not None:
            self._file.unlink(missing_ok=True)
        await self._programs.aclose()

    def allows(self, authorization: bytes) -> bool:
        """Whether a header is that of the run's key."""
        return hmac.compare_digest(authorization, b"Bearer " + self._key.encode())

    def lease_routes(self) -> list[Route]:
        """``/lease`` asks for the run's key, the others for the session's."""
        return [
            Route("/lease", self._lease, methods=["POST"]),
            Route("/programs/{number:int}/lease", self._lease, methods=["POST"]),
            Route("/sessions/{name}/heartbeat", self._heartbeat, methods=["POST"]),
            Route("/sessions/{name}/v1/heartbeat", self._heartbeat, methods=["POST"]),
        ]

    async def run(self, session: Session, handle: SessionHandle, prompt: Sample, *, name: str) -> None:
        """Offer the sample, and return at the end of its session. The deadline is counted from the lease.

        Raises AgentTimeoutError at the deadline, and AgentKilledError if the heartbeat is lost. If no agent comes, the
        session has failed, with an error that ends the run."""
        sample = sample_json(prompt, handle.base_url, handle.api_key, evaluation=session.evaluation)
        session_name = handle.base_url.split("/")[-2]
        loop = asyncio.get_running_loop()
        offer = _Offer(session=session, sample=sample, leased=loop.create_future(), lost=loop.create_future())
        self._offers[session_name] = offer
        self._queue.append(session_name)
        self._offered.set()
        try:
            if await self._until_leased(offer):
                await self._until_ended(offer, name)
        finally:
            del self._offers[session_name]
            self._seen = loop.time() if offer.leased.done() else self._seen

    async def _until_leased(self, offer: _Offer) -> bool:
        """Whether it is leased; else its session has ended. It waits as long as there are agents: as some hold leases,
        or did so or asked for one within the last ``--agent-timeout-s``. This worker's programs have time to start."""
        clock = asyncio.get_running_loop().time
        limit_s = max(self._args.agent_timeout_s, STARTS_S if self._has_programs else 0.0)
        since = clock()
        while not offer.leased.done():
            if self._failure is not None:
                offer.session.fail(self._failure)
                return False
            is_held = any(each.leased.done() for each in self._offers.values())
            left = limit_s if is_held else max(since, self._seen) + limit_s - clock()
            if left <= 0:
                there = f"; address and key are in {self._file}" if self._file is not None else ""
                hint = f"start agents that lease samples there (buffer_rl/agents/remote_client.py){there}"
                if self._has_programs:
                    hint = "the programs of this run hang: see what they print in its logs/agents_*.log"
                what = f"no agent has leased a sample for {limit_s:g} s"
                where = f"--agent-path {self._args.agent_path}, POST {self._url}/lease"
                offer.session.fail(ConfigError(what, where=where, hint=hint))
            if offer.session.end is not None:
                return False
            ends = {offer.leased, offer.session.ended, offer.lost}
            await asyncio.wait(ends, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        return True

    async def _until_ended(self, offer: _Offer, name: str) -> None:
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._args.agent_timeout_s
        while offer.session.end is None:
            now, lost = clock(), offer.heard + self._args.agent_heartbeat_s
            if now >= deadline:
                raise AgentTimeoutError(name, self._args.agent_timeout_s)
            if offer.lost.done():
                raise AgentKilledError("its program has ended", hint="its log is among those of the run")
            if now >= lost:
                what = f"its agent has sent no heartbeat for {self._args.agent_heartbeat_s:g} s"
                hint = "it has ended, its machine is gone, or --agent-heartbeat-s is too short"
                raise AgentKilledError(what, hint=hint)
            ends = {offer.session.ended, offer.lost}
            await asyncio.wait(ends, timeout=min(deadline, lost) - now, return_when=asyncio.FIRST_COMPLETED)

    def _has_ended(self, number: int) -> None:
        """A program has ended: what it had leased is lost."""
        for offer in self._offers.values():
            if offer.leased.done() and offer.leased.result() == number:
                offer.lost.cancel()

    def _fail(self, error: BufferRLError) -> None:
        """A program cannot be started: no sample is played any more."""
        self._failure = error
        for offer in self._offers.values():
            offer.lost.cancel()

    async def _lease(self, request: Request) -> Response:
        try:
            wait_s = _wait_s(await request.body())
        except (JSONError, ValueError) as error:
            return json_response({"error": {"message": f"{error}; expected: {{'wait_s': 0 to {MAX_WAIT_S:g}}}"}}, 400)
        clock = asyncio.get_running_loop().time
        until = clock() + wait_s
        while True:
            self._seen = clock()
            if await request.is_disconnected():
                return Response(status_code=204)
            if (offer := self._next()) is not None:
                offer.heard = clock()
                number = request.path_params.get("number", -1)
                if number >= 0:
                    self._programs.has_leased(number)
                offer.leased.set_result(number)
                body = self._as_reached(offer, request) | {"heartbeat_s": self._args.agent_heartbeat_s}
                return Response(json.dumps(body, default=str), media_type="application/json")
            if (left := until - clock()) <= 0 or self._closed:
                return Response(status_code=204)
            self._offered.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._offered.wait(), min(left, LOOK_S))

    def _next(self) -> _Offer | None:
        """The offer that waits longest."""
        while self._queue:
            offer = self._offers.get(self._queue.popleft())
            if offer is not None and offer.session.end is None:
                return offer
        return None

    def _as_reached(self, offer: _Offer, request: Request) -> dict[str, Any]:
        """The sample with the session's address as this client has reached the gateway, perhaps through a proxy."""
        path, scheme = offer.sample["base_url"].split("/", 3)[3], request.headers.get("x-forwarded-proto", "http")
        return offer.sample | {"base_url": f"{scheme}://{request.headers['host']}/{path}"}

    async def _heartbeat(self, request: Request) -> Response:
        offer = self._offers.get(request.path_params["name"])
        if offer is None or offer.session.end is not None or not offer.leased.done():
            return json_response({"error": {"message": "the session has ended", "code": "session_ended"}}, 410)
        offer.heard = asyncio.get_running_loop().time()
        return json_response({"status": "running"})


def file_of(run_dir: Path | None, worker: int) -> Path | None:
    """The file with address and key of rollout worker number ``worker``."""
    return None if run_dir is None else run_dir / FOLDER / f"worker_{worker}.json"


def _key_in(file: Path | None) -> str:
    """The key that the worker before this one wrote, so that its agents go on; empty if there is none."""
    try:
        return "" if file is None else str(json.loads(file.read_text(encoding="utf-8"))["key"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def _wait_s(body: bytes) -> float:
    given = read_json(body) if body.strip() else {}
    wait_s = given.get("wait_s", 0) if isinstance(given, dict) else None
    if not isinstance(wait_s, int | float) or not 0 <= wait_s <= MAX_WAIT_S:
        raise ValueError(f"the body is {given!r:.80}")
    return float(wait_s)
