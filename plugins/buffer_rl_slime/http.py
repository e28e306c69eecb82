"""``post`` and ``get`` as slime's functions call them. Requests to the run's own router and engines carry its
authorization, and end when the rollout needs them no more; no other address ever sees the key."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import aiohttp
import orjson

from buffer_rl.rollout.context import current_context
from buffer_rl.rollout.lease import current_lease, lease_or_none

RETRY_S = 1.0
OUTSIDE_TIMEOUT_S = 600.0
"""Deadline of one try where no run says it (``--generate-timeout-s``)."""
RUNNING = "buffer_rl_slime.http"
ABORT_AGAIN_S = 0.2
ABORT_S = 30.0
FINAL = frozenset(range(400, 500)) - {408, 425, 429}


class RequestError(RuntimeError):
    """An answer with an error status. ``status``: that of HTTP."""

    def __init__(self, url: str, status: int, text: str) -> None:
        super().__init__(f"{url} answered {status}: {text:.500}")
        self.status = status


async def post(url: str, payload: Any, max_retries: int = 60, headers: Mapping[str, str] | None = None) -> Any:
    """The JSON, or else the text, that ``url`` answers to ``payload``.

    A failed try is repeated after a second, ``max_retries`` tries in all; an answer 4xx is final, except 408, 425 and
    429. A request for tokens of the run's engines gets an id, under which the rollout aborts it once it has enough
    groups; after that the answer is an empty one with the finish reason ``abort``. Raises RequestError, or what aiohttp
    raises, after the last try.
    """
    body = dict(payload) if isinstance(payload, Mapping) else payload or {}
    is_generation = _is_of_run(url) and url.rstrip("/").endswith("/generate") and isinstance(body, dict)
    if is_generation and current_lease().stopped:
        return ABORTED
    with running(body) if is_generation else contextlib.nullcontext():
        return await _tries(url, body, max_retries, headers, held=is_generation)


async def get(url: str, headers: Mapping[str, str] | None = None) -> Any:
    """The JSON that ``url`` answers. Raises as ``post`` after one try."""
    return await _request("GET", url, None, headers)


ABORTED: dict[str, Any] = {
    "text": "",
    "output_ids": [],
    "meta_info": {"finish_reason": {"type": "abort"}, "output_token_logprobs": [], "weight_versions": []},
}


async def _tries(url: str, body: Any, max_retries: int, headers: Mapping[str, str] | None, *, held: bool) -> Any:
    """held: with the run's own requests, by a publication that drains; they name its adapter, too."""
    engine = current_context().engine if held else None
    for left in reversed(range(max(1, max_retries))):
        try:
            async with engine.gate.passed() if engine is not None else contextlib.nullcontext():
                adapter = None if engine is None or body.get("lora_path") else engine.adapter
                asked = body if adapter is None else adapter.named_in(body)
                answer = await _request("POST", url, orjson.dumps(asked, default=_plain), headers)
                if adapter is not None:
                    adapter.set_version(answer)
                return answer
        except (aiohttp.ClientError, RequestError, TimeoutError) as error:
            if not left or (isinstance(error, RequestError) and error.status in FINAL):
                raise
        await asyncio.sleep(RETRY_S)
    raise AssertionError("the last try returns or raises")


async def _request(method: str, url: str, body: bytes | None, headers: Mapping[str, str] | None) -> Any:
    lease = lease_or_none()
    sent = {"Content-Type": "application/json", **(headers or {})}
    seconds = OUTSIDE_TIMEOUT_S
    if lease is not None:
        context = lease.context
        seconds = context.args.generate_timeout_s if context.engine is None else context.engine.timeout_s
        if context.args.engine_api_key and _is_of_run(url):
            sent.setdefault("Authorization", f"Bearer {context.args.engine_api_key}")
    timeout = aiohttp.ClientTimeout(total=seconds)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.request(method, url, data=body, headers=sent) as response,
    ):
        raw = await response.read()
        if response.status >= 400:
            raise RequestError(url, response.status, raw.decode(errors="replace"))
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return raw.decode()


def _is_of_run(url: str) -> bool:
    lease = lease_or_none()
    if lease is None:
        return False
    own = [lease.context.args.router_url, *lease.context.args.engine_urls]
    return any(address and f"{url}/".startswith(f"{address.rstrip('/')}/") for address in own)


@contextlib.contextmanager
def running(body: dict[str, Any]) -> Iterator[None]:
    """For the length of the block the request is among those that the rollout, or else ``abort_running``, ends."""
    lease = current_lease()
    rid = str(body.setdefault("rid", lease.request_id(uuid.uuid4().hex)))
    if lease.requests is not None:
        with lease.requests.running(rid):
            yield
        return
    rids: set[str] = lease.context.shared.setdefault(RUNNING, set())
    rids.add(rid)
    try:
        yield
    finally:
        rids.discard(rid)


async def abort_running() -> None:
    """End the requests that run outside of a lease: those of a rollout function of the user's. Waits until all are
    answered, at most ``ABORT_S``."""
    context = current_context()
    rids: set[str] = context.shared.setdefault(RUNNING, set())
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ABORT_S):
            while rids and context.engine is not None:
                await context.engine.abort(sorted(rids))  # a request may arrive after its abort, which is repeated
                await asyncio.sleep(ABORT_AGAIN_S)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # arrays and tensors
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON")
