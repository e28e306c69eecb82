"""A rollout engine for tests: a real HTTP server that answers ``/generate`` as a function tells it to."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

from aiohttp import web

from buffer_rl.engine.rows import row_rid, row_seeds
from buffer_rl.errors import DeadlineError

START_TIMEOUT_S = 30.0

Respond = Callable[[list[int], int], Sequence[int]]
"""``(input_ids, sampling_seed) -> output_ids``."""


class Fault(StrEnum):
    """What a request may meet in place of its answer."""

    SERVER_ERROR = "server_error"  # HTTP 500
    RESET = "reset"  # the connection is closed without an answer
    GARBAGE = "garbage"  # HTTP 200 with a body that is not JSON
    ABORT = "abort"  # HTTP 200, finish reason abort, no tokens
    KILL = "kill"  # the engine is gone with all its connections; see ``back_after_s``
    HANG = "hang"  # the engine accepts everything and answers nothing, as after SIGSTOP; see ``back_after_s``


class FaultPoint(StrEnum):
    """How far a request has come when it meets its fault."""

    ACCEPT = "accept"  # it was read, and nothing done about it
    MID_STREAM = "mid_stream"  # half of the answer is on its way; ``ABORT`` has no such point
    BEFORE_ACK = "before_ack"  # the answer is made, and nothing of it sent


CONTROL_PATHS = ("/pause_generation", "/continue_generation", "/flush_cache", "/update_weights_from_disk")


@dataclass(slots=True, kw_only=True)
class FakeEngineLog:
    """What the engine was asked. requests: bodies of ``/generate`` in order of arrival, where a request of several rows
    is as many (``rows_of``); num_posts: how many there were; updates: bodies of ``/update_weights_from_disk``."""

    requests: list[dict[str, Any]] = field(default_factory=list)
    num_posts: int = 0
    aborted: list[dict[str, Any]] = field(default_factory=list)
    updates: list[dict[str, Any]] = field(default_factory=list)
    answered: int = 0
    disconnected: int = 0
    in_flight: int = 0


def rows_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a request as requests of their own, with ids and seeds as an embedded engine gives them."""
    if not isinstance(body["input_ids"][0], list):
        return [body]
    params, prompts = body.get("sampling_params", {}), body["input_ids"]
    own = [params] * len(prompts)
    if params.get("sampling_seed") is not None:
        own = [{**params, "sampling_seed": seed} for seed in row_seeds(params["sampling_seed"], len(prompts))]
    return [
        {**body, "rid": row_rid(body.get("rid", ""), row), "input_ids": prompt, "sampling_params": one}
        for row, (prompt, one) in enumerate(zip(prompts, own, strict=True))
    ]


def echo(input_ids: list[int], seed: int) -> Sequence[int]:
    """The prompt backwards."""
    return input_ids[::-1]


def decode_as_text(output_ids: Sequence[int]) -> str:
    """Token ids separated by spaces."""
    return " ".join(str(token) for token in output_ids)


class FakeEngine:
    """Serves SGLang's ``/generate`` on 127.0.0.1 in a thread of its own. Use it as a context manager.

    respond: computes the answer's tokens; more than ``max_new_tokens`` are cut (finish reason ``length``).
    latency: seconds before the answer, by body. slots: how many it works on at a time, in the order in which they came;
    the latency of the others begins when an answer before them is due, however late this process notices, so that the
    time of a queue is known. A request of several rows (``rows_of``) is answered when all of them are; respond,
    latency, slots and aborts are of each row. fault: what happens instead of an answer, by request body and number of
    the request (from 0). version: of the weights of every token, whose log-probability is ``log_prob``.
    aborted_after: how many tokens a row has that is aborted before its answer.
    update_s: seconds that ``/update_weights_from_disk`` takes; it sets ``version`` and reads nothing.
    point: where faults strike. control_fault: by path, what a control call (``CONTROL_PATHS``) meets in place of its
    effect. back_after_s: seconds until a killed or hung engine is replaced at the same URL, with ``back_version`` or
    else the version that it had. ``GET /strike`` has all requests in flight meet ``strike_fault``, once.
    """

    def __init__(
        self,
        respond: Respond = echo,
        *,
        decode: Callable[[Sequence[int]], str] = decode_as_text,
        latency: Callable[[dict[str, Any]], float] | None = None,
        slots: int | None = None,
        fault: Callable[[dict[str, Any], int], Fault | None] | None = None,
        version: int = 0,
        log_prob: float = -0.5,
        aborted_after: int = 0,
        update_s: float = 0.0,
        point: FaultPoint = FaultPoint.ACCEPT,
        control_fault: Callable[[str], Fault | None] | None = None,
        strike_fault: Fault | None = None,
        back_after_s: float = 0.2,
        back_version: int | None = None,
    ) -> None:
        self.respond = respond
        self.decode = decode
        self.latency = latency
        self._slots = Slots(slots)
        self.fault = fault
        self.version = version
        self.log_prob = log_prob
        self.aborted_after = aborted_after
        self.update_s = update_s
        self.point = point
        self.control_fault = control_fault
        self.strike_fault = strike_fault
        self.back_after_s = back_after_s
        self.back_version = back_version
        self._hung = False
        self._in_flight: set[int] = set()
        self._struck: dict[int, Fault] = {}
        self._returning: asyncio.Task[None] | None = None
        self._aborts: dict[str, asyncio.Event] = {}
        self.log = FakeEngineLog()
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)

    def __enter__(self) -> FakeEngine:
        self._thread.start()
        if not self._ready.wait(START_TIMEOUT_S) or not self.url:
            raise DeadlineError("the fake engine did not start", where="FakeEngine")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(START_TIMEOUT_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._ready.set()
            self._loop.close()

    async def _serve(self) -> None:
        app = web.Application(client_max_size=64 << 20, middlewares=[self._guarded])
        app.router.add_get("/strike", self._strike)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_post("/update_weights_from_disk", self._update)
        for path in ("/pause_generation", "/continue_generation", "/flush_cache"):
            app.router.add_post(path, self._ok)
        for path in ("/health", "/ready", "/model_info", "/get_model_info", "/server_info", "/get_server_info"):
            app.router.add_get(path, self._info)
        runner = self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        self._site = web.TCPSite(runner, "127.0.0.1", 0)
        await self._site.start()
        host, self._port = runner.addresses[0][:2]
        self.url = f"http://{host}:{self._port}"
        self._ready.set()
        try:
            await self._stop.wait()
        finally:
            await runner.cleanup()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await request.json()
        number = self.log.num_posts
        self.log.num_posts += 1
        rows = rows_of(body)
        self.log.requests += rows
        self.log.in_flight += 1
        self._in_flight.add(number)
        try:
            aborted = await asyncio.gather(*(self._aborted(row) for row in rows))
            fault = None if all(aborted) else self._struck.pop(number, self.fault(body, number) if self.fault else None)
            success = partial(self._success, body, aborted, fault)
            if fault is None or fault is Fault.ABORT:
                answer: web.StreamResponse = success()
            else:
                answer = await self._failed(request, fault, success)
            self.log.answered += 1
            return answer
        except asyncio.CancelledError:
            self.log.disconnected += 1
            raise
        finally:
            self.log.in_flight -= 1
            self._in_flight.discard(number)

    async def _aborted(self, row: dict[str, Any]) -> bool:
        """Wait for the latency of the row's answer; whether an abort came first."""
        if self.latency is None:
            return False
        abort = self._aborts.setdefault(row.get("rid", ""), asyncio.Event())
        arrived = self._loop.time()
        try:
            free_at = await self._slots.acquire(abort)
            return free_at is None or await self._aborted_in_slot(row, abort, max(arrived, free_at))
        finally:
            self._aborts.pop(row.get("rid", ""), None)

    async def _aborted_in_slot(self, row: dict[str, Any], abort: asyncio.Event, begun: float) -> bool:
        due, is_due = begun, False
        try:
            due += self.latency(row) if self.latency else 0.0
            async with asyncio.timeout_at(due):
                await abort.wait()
            return True
        except TimeoutError:
            is_due = True
            return False
        finally:
            self._slots.release(due if is_due else self._loop.time())

    def _success(self, body: dict[str, Any], aborted: list[bool], fault: Fault | None = None) -> web.Response:
        rows = [self._row(row, early, fault) for row, early in zip(rows_of(body), aborted, strict=True)]
        return web.json_response(rows if isinstance(body["input_ids"][0], list) else rows[0])

    def _row(self, row: dict[str, Any], aborted: bool, fault: Fault | None) -> dict[str, Any]:
        if fault is Fault.ABORT:
            reason = {"type": "abort", "message": "scripted", "status_code": 400, "err_type": "Scripted"}
            return self._payload(row, [], reason)
        params = row.get("sampling_params", {})
        output_ids = list(self.respond(list(row["input_ids"]), int(params.get("sampling_seed", 0))))
        if aborted:
            return self._payload(row, output_ids[: self.aborted_after], {"type": "abort"})
        limit = int(params.get("max_new_tokens", len(output_ids)))
        if len(output_ids) > limit:
            return self._payload(row, output_ids[:limit], {"type": "length", "length": limit})
        matched = output_ids[-1] if output_ids else None
        return self._payload(row, output_ids, {"type": "stop", "matched": matched})

    def _payload(self, body: dict[str, Any], output_ids: list[int], finish_reason: dict[str, Any]) -> dict[str, Any]:
        span = {"version": str(self.version), "start": 0, "end": len(output_ids)}
        meta: dict[str, Any] = {
            "id": body.get("rid", ""),
            "finish_reason": finish_reason,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(output_ids),
            "cached_tokens": 0,
            "weight_version": str(self.version),
            "weight_versions": [span] if output_ids else [],
            "e2e_latency": 0.0,
        }
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [[self.log_prob, token, None] for token in output_ids]
            meta["output_token_logprobs_length"] = len(output_ids)
        return {"text": self.decode(output_ids), "output_ids": output_ids, "meta_info": meta}

    async def _abort(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        self.log.aborted.append(body)
        if body.get("abort_all") or body["rid"] in self._aborts:  # as SGLang: by prefix, where it has such a row
            for rid, abort in self._aborts.items():
                if body.get("abort_all") or rid.startswith(body["rid"]):
                    abort.set()
        return web.Response()

    async def _update(self, request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await request.json()
        await asyncio.sleep(self.update_s)
        self.log.updates.append(body)
        self.version = int(body["weight_version"])
        return web.json_response({"success": True, "message": "done"})

    async def _ok(self, request: web.Request) -> web.Response:
        return web.json_response({"message": "done", "status": "ok"})

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "fake", "weight_version": str(self.version), "status": "ok"})

    # -- faults --------------------------------------------------------------------------------------

    @web.middleware
    async def _guarded(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """What happens to every request, before anything else looks at it."""
        if self._hung:
            await asyncio.Event().wait()  # until the connection is cut
        if request.path in CONTROL_PATHS and self.control_fault and (fault := self.control_fault(request.path)):
            return await self._effect(request, fault)
        answer = await handler(request)
        if self._hung:
            await asyncio.Event().wait()
        return answer

    async def _failed(self, request: web.Request, fault: Fault, make: Callable[[], web.Response]) -> web.StreamResponse:
        if self.point is FaultPoint.MID_STREAM:
            whole = json.dumps(json.loads(make().body or b"")).encode()  # type: ignore[arg-type]
            half = len(whole) // 2
            response = web.StreamResponse(status=500 if fault is Fault.SERVER_ERROR else 200)
            response.content_length = len(whole)
            await response.prepare(request)
            await response.write(whole[:half])
            if fault in (Fault.GARBAGE, Fault.SERVER_ERROR):
                await response.write(b"\0" * (len(whole) - half))
                return response
        elif self.point is FaultPoint.BEFORE_ACK:
            make()
        return await self._effect(request, fault)

    async def _effect(self, request: web.Request, fault: Fault) -> web.StreamResponse:
        if fault is Fault.SERVER_ERROR:
            return web.json_response({"error": {"message": "scripted failure"}}, status=500)
        if fault is Fault.GARBAGE:
            return web.Response(text="<html>not JSON", content_type="application/json")
        if fault in (Fault.KILL, Fault.HANG):
            await self._leave(fault)
        elif request.transport is not None:
            request.transport.abort()
        if fault is Fault.HANG:
            await asyncio.Event().wait()
        return web.Response()

    async def _strike(self, request: web.Request) -> web.StreamResponse:
        fault, self.strike_fault = self.strike_fault, None
        if fault in (Fault.KILL, Fault.HANG):
            asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(self._leave(fault)))
        elif fault is not None:
            self._struck.update(dict.fromkeys(self._in_flight, fault))
        return web.Response()

    async def _leave(self, fault: Fault) -> None:
        if fault is Fault.HANG:
            self._hung = True
        else:
            await self._site.stop()
            self._cut()
        self._returning = asyncio.create_task(self._return(fault))

    async def _return(self, fault: Fault) -> None:
        """Another engine takes its place: what the old one had in flight is gone."""
        await asyncio.sleep(self.back_after_s)
        self._cut()
        self.version = self.version if self.back_version is None else self.back_version
        self._hung = False
        if fault is Fault.KILL:
            self._site = web.TCPSite(self._runner, "127.0.0.1", self._port)
            await self._site.start()

    def _cut(self) -> None:
        server = self._runner.server
        for connection in list(server.connections) if server is not None else ():
            if connection.transport is not None:
                connection.transport.abort()


class Slots:
    """``number`` slots, given out in the order in which they are asked for; unlimited where it is None.

    A slot remembers when it became free, so that the time that a queue takes does not grow with how late this process
    notices. Belongs to one event loop.
    """

    def __init__(self, number: int | None) -> None:
        self._free: asyncio.PriorityQueue[float] | None = None if number is None else asyncio.PriorityQueue()
        for _ in range(number or 0):
            self.release(0.0)

    async def acquire(self, unless: asyncio.Event) -> float | None:
        """A slot, as the time since which it is free; None if ``unless`` is set before there is one."""
        if self._free is None:
            return 0.0
        slot, never = asyncio.ensure_future(self._free.get()), asyncio.ensure_future(unless.wait())
        try:
            await asyncio.wait((slot, never), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if slot.done():
                self.release(slot.result())
            raise
        finally:
            never.cancel()
            if not slot.done():
                slot.cancel()
        return slot.result() if slot.done() else None

    def release(self, free_at: float) -> None:
        """The slot is free since ``free_at``, on the clock of the event loop."""
        if self._free is not None:
            self._free.put_nowait(free_at)
