"""A rollout engine for tests: a real HTTP server that answers ``/generate`` as a function tells it to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from functools import partial
from typing import Any

from aiohttp import web

from buffer_rl.engines.protocol import EMBEDDED, row_rid, row_seeds
from buffer_rl.testing.decoding import DecodeClock, Decoding, SglangRules, Slots, refusal
from buffer_rl.testing.faulty_server import Fault, FaultyServer

Respond = Callable[[list[int], int], Sequence[int]]
"""``(input_ids, sampling_seed) -> output_ids``."""


@dataclass(slots=True, kw_only=True)
class FakeEngineLog:
    """What the engine was asked. requests: bodies of ``/generate`` in order of arrival, where a request of several rows
    is as many (``rows_of``); num_posts: how many there were; routing_keys: of each, what the router chose this engine
    by; updates: bodies of ``/update_weights_from_disk``; pauses: modes of ``/pause_generation``; memory: ``release`` or
    ``resume``, and its tags."""

    requests: list[dict[str, Any]] = field(default_factory=list)
    num_posts: int = 0
    routing_keys: list[str] = field(default_factory=list)
    aborted: list[dict[str, Any]] = field(default_factory=list)
    updates: list[dict[str, Any]] = field(default_factory=list)
    pauses: list[str] = field(default_factory=list)
    memory: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    answered: int = 0
    disconnected: int = 0
    in_flight: int = 0


def is_batch(body: Mapping[str, Any]) -> bool:
    """Whether a request is for several prompts."""
    prompts = body["input_ids"]
    return bool(prompts) and isinstance(prompts[0], list)


def rows_of(body: dict[str, Any], *, one_seed: bool = False) -> list[dict[str, Any]]:
    """The rows of a request as requests of their own, with ids and seeds as an embedded engine gives them; one_seed:
    with the seed of the request, as SGLang does."""
    if not is_batch(body):
        return [body]
    params, prompts = body.get("sampling_params", {}), body["input_ids"]
    own = [params] * len(prompts)
    if params.get("sampling_seed") is not None and not one_seed:
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


@dataclass(eq=False, repr=False)
class FakeEngine(FaultyServer):
    """Serves SGLang's ``/generate`` on 127.0.0.1 in a thread of its own. Use it as a context manager.

    respond: computes the answer's tokens; more than ``max_new_tokens`` are cut (finish reason ``length``).
    latency: seconds before the answer, by body. slots: how many it works on at a time, in the order in which they came;
    the latency of the others begins when an answer before them is due, however late this process notices, so that the
    time of a queue is known. A request of several rows (``rows_of``) is answered when all of them are; respond,
    latency, slots and aborts are of each row. fault: what happens instead of an answer, by request body and number of
    the request (from 0). version: of the weights that tokens are drawn from now; their log-probability is ``log_prob``.
    adapter_log_prob: that of tokens with an adapter; None: adapters are loaded, and change nothing. ``adapters``: the
    names of those that are loaded.
    aborted_after: how many tokens a row has that is aborted before its answer.
    In a pause the time of latencies stands still, and new rows wait; ``abort`` ends those that there are.
    update_s: seconds that ``/update_weights_from_disk`` takes; it sets ``version`` and reads nothing. Rows that a pause
    holds continue with the new version: their tokens come evenly over their latency, and a span says which version drew
    which. Rows that run, without a pause, end with the version that they began with; the update does not wait for them.
    ``/flush_cache`` is refused as by an engine: while rows run, or are paused in place.
    point, control_fault, back_after_s: see ``FaultyServer``; the engine that comes back has ``back_version``, or else
    the version that it had. ``GET /strike`` has all requests in flight meet ``strike_fault``, once.
    sglang: the rules of a real server, which it keeps then. server_info: more fields of ``/server_info``.
    """

    respond: Respond = echo
    _: KW_ONLY
    decode: Callable[[Sequence[int]], str] = decode_as_text
    latency: Callable[[dict[str, Any]], float] | None = None
    slots: InitVar[int | None] = None
    fault: Callable[[dict[str, Any], int], Fault | None] | None = None
    version: int = 0
    log_prob: float = -0.5
    adapter_log_prob: float | None = None
    aborted_after: int = 0
    update_s: float = 0.0
    strike_fault: Fault | None = None
    back_version: int | None = None
    sglang: SglangRules | None = None
    server_info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self, slots: int | None) -> None:
        FaultyServer.__post_init__(self)
        self._slots = Slots(slots)
        self._clock = DecodeClock(self._loop.time)
        self._decoding: set[Decoding] = set()
        self._holds_memory = False
        self.adapters: list[str] = []
        self._in_flight: set[int] = set()
        self._struck: dict[int, Fault] = {}
        self._aborts: dict[str, asyncio.Event] = {}
        self.released: set[str] = set()
        self.log = FakeEngineLog()

    def routes(self) -> list[web.RouteDef]:
        """Those of a SGLang server that a rollout and a publication by disk need, and ``/strike``."""
        infos = ("/health", "/model_info", "/get_model_info", "/server_info", "/get_server_info")
        return [
            web.get("/strike", self._strike),
            web.post("/generate", self._generate),
            web.post("/abort_request", self._abort),
            web.post("/update_weights_from_disk", self._update),
            web.post("/pause_generation", self._pause),
            web.post("/continue_generation", self._resume),
            web.post("/flush_cache", self._flush),
            web.post("/release_memory_occupation", self._release_memory),
            web.post("/resume_memory_occupation", self._resume_memory),
            web.post("/load_lora_adapter", self._load_adapter),
            web.post("/unload_lora_adapter", self._unload_adapter),
            web.post("/update_weight_version", self._set_version),
            web.get("/ready", self._is_ready),
            *(web.get(path, self._info) for path in infos),
        ]

    def replaced(self) -> None:
        """The engine in its place has the version ``back_version``."""
        self.version = self.version if self.back_version is None else self.back_version
        self.released.clear()
        self._clock.resume()
        self.adapters.clear()
        if self.sglang is not None:
            self.sglang.forget()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await request.json()
        number = self.log.num_posts
        self.log.num_posts += 1
        self.log.routing_keys.append(request.headers.get("X-SMG-Routing-Key", ""))
        rows = rows_of(body, one_seed=self.sglang is not None)
        self.log.requests += rows
        if (name := body.get("lora_path")) and name not in self.adapters:
            what = f"Got LoRA adapter that has never been loaded: {name}"
            return web.json_response({"error": {"message": what}}, status=400)
        if self.sglang is None:
            return (await self._answer(request, body, rows, number))[0]
        if any(self.sglang.is_deadly(row["input_ids"]) for row in rows):
            await self._leave(Fault.KILL, returns=False)
            return web.Response()
        rids = [row["rid"] for row in rows if "rid" in row]
        if taken := [rid for rid in rids if self.sglang.has(rid)]:
            return web.json_response(refusal(taken), status=400)
        self.sglang.hold(rids)
        fault: Fault | None = Fault.RESET
        try:
            await self.sglang.admitted()
            answer, fault = await self._answer(request, body, rows, number)
            return answer
        finally:
            self.sglang.release(rids, lost=fault is Fault.RESET)

    async def _answer(
        self, request: web.Request, body: dict[str, Any], rows: Sequence[dict[str, Any]], number: int
    ) -> tuple[web.StreamResponse, Fault | None]:
        """The answer to request ``number``, and the fault that it met."""
        self.log.in_flight += 1
        self._in_flight.add(number)
        try:
            decoded = await asyncio.gather(*(self._decoded(row) for row in rows))
            own = self.fault(body, number) if self.fault and not all(row.aborted for row in decoded) else None
            fault = self._struck.pop(number, own)
            success = partial(self._success, body, rows, decoded, fault)
            if fault is None or fault is Fault.ABORT:
                answer: web.StreamResponse = success()
            else:
                answer = await self._failed(request, fault, success)
            self.log.answered += 1
            return answer, fault
        except asyncio.CancelledError:
            self.log.disconnected += 1
            raise
        finally:
            self.log.in_flight -= 1
            self._in_flight.discard(number)

    async def _decoded(self, row: dict[str, Any]) -> Decoding:
        """Wait for the latency of the row's answer, or for an abort."""
        decoding = Decoding()
        if self.latency is None and not self._clock.paused:
            decoding.begin(self._clock.time(), 0.0, self.version)
            return decoding
        abort = self._aborts.setdefault(row.get("rid", ""), asyncio.Event())
        arrived = self._clock.time()
        self._decoding.add(decoding)
        try:
            free_at = await self._slots.acquire(abort)
            begun = max(arrived, free_at or 0.0)
            decoding.aborted = free_at is None or await self._aborted_in_slot(row, abort, begun, decoding)
            return decoding
        finally:
            self._decoding.discard(decoding)
            self._aborts.pop(row.get("rid", ""), None)

    async def _aborted_in_slot(
        self, row: dict[str, Any], abort: asyncio.Event, begun: float, decoding: Decoding
    ) -> bool:
        due, is_due = begun, False
        try:
            if not await self._clock.runs(abort):
                return True
            decoding.begin(begun, self.latency(row) if self.latency else 0.0, self.version)
            due += decoding.latency
            is_due = await self._clock.reaches(due, abort)
            return not is_due
        finally:
            self._slots.release(due if is_due else self._clock.time())

    def _success(
        self, body: dict[str, Any], rows: Sequence[dict[str, Any]], decoded: list[Decoding], fault: Fault | None = None
    ) -> web.Response:
        answers = [self._row(row, decoding, fault) for row, decoding in zip(rows, decoded, strict=True)]
        return web.json_response(answers if is_batch(body) else answers[0])

    def _row(self, row: dict[str, Any], decoding: Decoding, fault: Fault | None) -> dict[str, Any]:
        if fault is Fault.ABORT:
            reason = {"type": "abort", "message": "scripted", "status_code": 400, "err_type": "Scripted"}
            return self._payload(row, [], reason, decoding, 0)
        params = row.get("sampling_params", {})
        seed = self.sglang.seed(params) if self.sglang is not None else int(params.get("sampling_seed", 0))
        output_ids = list(self.respond(list(row["input_ids"]), seed))
        num_tokens = min(len(output_ids), int(params.get("max_new_tokens", len(output_ids))))
        if decoding.aborted:
            return self._payload(row, output_ids[: self.aborted_after], {"type": "abort"}, decoding, num_tokens)
        if len(output_ids) > num_tokens:
            reason = {"type": "length", "length": num_tokens}
        else:
            reason = {"type": "stop", "matched": output_ids[-1] if output_ids else None}
        return self._payload(row, output_ids[:num_tokens], reason, decoding, num_tokens)

    def _payload(
        self,
        body: dict[str, Any],
        output_ids: list[int],
        finish_reason: dict[str, Any],
        decoding: Decoding,
        num_tokens: int,
    ) -> dict[str, Any]:
        """num_tokens: of the answer to a row that is not aborted, which its tokens' times are shares of."""
        meta: dict[str, Any] = {
            "id": body.get("rid", ""),
            "finish_reason": finish_reason,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(output_ids),
            "cached_tokens": 0,
            "num_retractions": decoding.num_retractions,
            "weight_version": str(self.version),
            "weight_versions": decoding.spans(num_tokens, len(output_ids), self.version),
            "e2e_latency": 0.0,
        }
        if body.get("return_logprob"):
            meta["input_token_logprobs"] = []
            has_adapter = bool(body.get("lora_path")) and self.adapter_log_prob is not None
            log_prob = self.adapter_log_prob if has_adapter else self.log_prob
            meta["output_token_logprobs"] = [[log_prob, token, None] for token in output_ids]
            meta["output_token_logprobs_length"] = len(output_ids)
        return {"text": self.decode(output_ids), "output_ids": output_ids, "meta_info": meta}

    async def _abort(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        self.log.aborted.append(body)
        prefix = "" if body.get("abort_all") else body["rid"]
        rules = self.sglang
        if not prefix or prefix in self._aborts or (rules is not None and rules.has(prefix)):
            for rid, abort in self._aborts.items():  # as SGLang: by prefix, where it has such a row
                if rid.startswith(prefix) and rules is not None:
                    self._loop.call_later(rules.abort_s, abort.set)
                elif rid.startswith(prefix):
                    abort.set()
            if rules is not None:
                rules.abort(prefix)
        return web.Response()

    async def _update(self, request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await request.json()
        await asyncio.sleep(self.update_s)
        self.log.updates.append(body)
        self.version = int(body["weight_version"])
        for decoding in self._decoding if self._clock.paused else ():
            decoding.mark(self.version, self._clock.time())
        return web.json_response({"success": True, "message": "done"})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        name: str = (await request.json())["lora_name"]
        if name in self.adapters:
            return self._refused_adapter(f"Failed to load LoRA adapter {name} because it is already loaded")
        self.adapters.append(name)
        return web.json_response({"success": True, "error_message": ""})

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        name: str = (await request.json())["lora_name"]
        if name not in self.adapters:
            return self._refused_adapter(f"LoRA with name {name} does not exist")
        self.adapters.remove(name)
        return web.json_response({"success": True, "error_message": ""})

    def _refused_adapter(self, why: str) -> web.Response:
        return web.json_response({"success": False, "error_message": why}, status=400)

    async def _set_version(self, request: web.Request) -> web.Response:
        self.version = int((await request.json())["new_version"])
        for decoding in self._decoding:
            decoding.mark(self.version, self._clock.time())
        return web.json_response({"success": True})

    async def _pause(self, request: web.Request) -> web.Response:
        mode: str = (await request.json()).get("mode", "abort")
        self.log.pauses.append(mode)
        if mode == "abort":
            for abort in self._aborts.values():
                abort.set()
        if mode == "retract" and (self._holds_memory or not self._clock.paused):
            for decoding in self._decoding:
                decoding.num_retractions += decoding.begun is not None
        self._holds_memory = mode == "in_place"
        self._clock.pause()
        if self.sglang is not None:
            self.sglang.pause()
        return await self._ok(request)

    async def _flush(self, request: web.Request) -> web.Response:
        running = any(decoding.begun is not None for decoding in self._decoding)
        if running and (self._holds_memory or not self._clock.paused):
            return web.json_response({"error": {"message": "requests hold the cache"}}, status=400)
        return await self._ok(request)

    async def _resume(self, request: web.Request) -> web.Response:
        self._clock.resume()
        if self.sglang is not None:
            self.sglang.resume()
        return await self._ok(request)

    async def _release_memory(self, request: web.Request) -> web.Response:
        return await self._memory(request, "release", lambda tags: not tags & self.released and not self._in_flight)

    async def _resume_memory(self, request: web.Request) -> web.Response:
        return await self._memory(request, "resume", lambda tags: tags <= self.released)

    async def _memory(self, request: web.Request, verb: str, may: Callable[[set[str]], bool]) -> web.Response:
        """A SGLang server whose memory is not as the call expects does not survive it."""
        tags: list[str] = (await request.json())["tags"]
        if not may(set(tags)):
            return web.Response(status=500)
        self.released ^= set(tags)
        self.log.memory.append((verb, tuple(tags)))
        return web.json_response(None)

    async def _is_ready(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.sglang is not None and self.sglang.paused else 200)

    async def _ok(self, request: web.Request) -> web.Response:
        return web.json_response({"message": "done", "status": "ok"})

    async def _info(self, request: web.Request) -> web.Response:
        more: dict[str, Any] = {}
        if request.path.endswith("server_info"):
            rules = self.sglang
            more = {"engine": EMBEDDED} if rules is None else {"enable_deterministic_inference": rules.deterministic}
        info = {"model_path": "fake", "weight_version": str(self.version), "status": "ok"}
        return web.json_response({**info, **more, **self.server_info})

    async def _strike(self, request: web.Request) -> web.StreamResponse:
        fault, self.strike_fault = self.strike_fault, None
        if fault in (Fault.KILL, Fault.HANG):
            asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(self._leave(fault)))
        elif fault is not None:
            self._struck.update(dict.fromkeys(self._in_flight, fault))
            for abort in self._aborts.values():  # they meet it at once
                abort.set()
        return web.Response()
