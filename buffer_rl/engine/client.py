"""The HTTP client of the rollout: generation through the router, aborts at every engine directly.

The router knows nothing of aborts (it answers 404), so those go to the engines. Its own retries are off;
``EngineClient`` repeats a request that got lost, under the same ``rid`` and with the same seed, after aborting what may
be left of the first try.
"""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Any

import aiohttp
import numpy as np
import orjson

from buffer_rl.engine.control import CONTROL_TIMEOUT_S, EngineFanOut, HttpSession, decode_json, status_error
from buffer_rl.engine.rows import ROWS, row_rid
from buffer_rl.errors import DeadlineError, EngineError
from buffer_rl.types import Status, VersionSpan, tile

_STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateResult:
    """One answer. ``log_probs[i]``, in nats, belongs to ``output_ids[i]``; finish_reason: stop, length or abort.

    matched: the token id or the string that stopped it, if any. cached_tokens: prompt tokens that another request
    had computed. spans: which weight version sampled which tokens; they tile ``output_ids``. kept: see
    ``Sample.rollout_kept_tokens``; None where the engine does not return them.
    """

    output_ids: list[int]
    text: str
    log_probs: list[float]
    finish_reason: str
    spans: list[VersionSpan]
    matched: int | str | None = None
    cached_tokens: int = 0
    kept: list[bytes] | None = None

    @property
    def status(self) -> Status:
        """The status of a sample with this answer."""
        return _STATUS[self.finish_reason]


def parse_answer(answer: Any, url: str) -> GenerateResult:
    """Read one answer of ``/generate``. Raises EngineError if it breaks the protocol.

    Empty spans, which SGLang sends for an answer without tokens, say nothing and are left out.
    """
    try:
        meta = answer["meta_info"]
        reason = meta["finish_reason"]
        pairs = meta["output_token_logprobs"]
        result = GenerateResult(
            output_ids=list(answer["output_ids"]),
            text=answer.get("text") or "",
            log_probs=[float(pair[0]) for pair in pairs],
            finish_reason=reason["type"],
            spans=[
                VersionSpan(int(span["version"]), int(span["start"]), int(span["end"]))
                for span in meta["weight_versions"]
                if span["start"] != span["end"]
            ],
            matched=reason.get("matched"),
            cached_tokens=int(meta.get("cached_tokens", 0)),
            kept=_kept(meta),
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise EngineError(
            f"an answer of /generate breaks the protocol: {type(error).__name__}: {error}",
            where=url,
            expected="output_ids and meta_info with finish_reason, output_token_logprobs, weight_versions",
            hint="start the engine with a whole number as --weight-version",
        ) from error
    if [pair[1] for pair in pairs] != result.output_ids:
        raise EngineError("output_token_logprobs does not belong to output_ids", where=url)
    if not tile(result.spans, len(result.output_ids)):
        raise EngineError(
            f"weight_versions {meta['weight_versions']} of {len(result.output_ids)} output tokens",
            where=url,
            expected="spans {version, start, end} that cover every output token once, in order",
            hint="the engine has to report which weights sampled each token, as a current SGLang does",
        )
    if result.finish_reason not in _STATUS:
        raise EngineError(
            f"unknown finish reason {result.finish_reason!r}", where=url, expected=f"one of {', '.join(_STATUS)}"
        )
    return result


def _kept(meta: Any) -> list[bytes] | None:
    if meta.get("top_p_token_ids") is None:
        return None
    raw = binascii.a2b_base64(meta["top_p_token_ids"])
    offsets = np.frombuffer(binascii.a2b_base64(meta["top_p_token_offsets"]), dtype="<i4").tolist()
    return [raw[4 * start : 4 * end] for start, end in pairwise(offsets)]


ROUTING_KEY_HEADER = "X-SMG-Routing-Key"
# The first retries are for a lost connection; all of them, about 11 s, outlast the time until a dead engine is noticed
# and taken off the router's list, which is a second or two on an idle machine.
MAX_RETRIES = 8
BACKOFF_S = 0.2
MAX_BACKOFF_S = 2.0
_RETRYABLE_STATUS = (429, 500, 502, 503, 504)
# The sampling parameters that sglang-router 0.3.2 forwards. It drops all others in silence.
_FORWARDED = frozenset(
    (
        *("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "n", "sampling_seed"),
        *("stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "no_stop_trim"),
        *("json_schema", "regex", "ebnf", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    )
)
_OF_TEXT_ALONE = ("spaces_between_special_tokens", "stream_interval")  # dropped, too, but no token depends on them


class EngineClient:
    """Generates through the router and aborts at every engine behind it. Belongs to one event loop.

    engine_urls: the engines that an abort goes to; where there are none, those that the router lists at the time, so
    that a client lives longer than an engine. timeout_s: deadline of one generation, retries included.
    control_timeout_s: deadline of one abort. api_key: see ``EngineFanOut``.
    """

    def __init__(
        self,
        router_url: str,
        engine_urls: Sequence[str],
        *,
        timeout_s: float = 600.0,
        control_timeout_s: float = CONTROL_TIMEOUT_S,
        max_retries: int = MAX_RETRIES,
        api_key: str | None = None,
    ) -> None:
        self.router_url = router_url.rstrip("/")
        self.timeout_s = timeout_s
        self.max_retries = max_retries
        self._generate_url = f"{self.router_url}/generate"
        self._http = HttpSession(timeout_s, api_key)
        urls = tuple(url.rstrip("/") for url in engine_urls)
        self._engines = EngineFanOut(lambda: urls, control_timeout_s, router_url=self.router_url, api_key=api_key)

    @classmethod
    def from_args(cls, args: Any) -> EngineClient:
        """From ``args.router_url``, ``args.engine_urls``, ``args.engine_api_key`` and ``args.generate_timeout_s``."""
        return cls(args.router_url, args.engine_urls, timeout_s=args.generate_timeout_s, api_key=args.engine_api_key)

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections; requests in flight are aborted by their engines."""
        await self._http.close()
        await self._engines.close()

    async def agenerate(self, rid: str, input_ids: Sequence[int], sampling_params: Mapping[str, Any]) -> GenerateResult:
        """Generate one answer for ``input_ids``; ``sampling_params`` under SGLang's names.

        A lost connection and the statuses 429 and 5xx are retried, at most ``max_retries`` times; other 4xx are not.
        Raises EngineError naming a sampling parameter that the router would drop, or the URL, the status and the
        answer's text, and DeadlineError when time is up; the request is aborted at the engines then.
        """
        prompt = list(input_ids)
        return parse_answer(await self._ask(rid, [rid], prompt, prompt, sampling_params), self._generate_url)

    async def agenerate_rows(
        self, rid: str, input_ids: Sequence[int], num_rows: int, sampling_params: Mapping[str, Any]
    ) -> list[GenerateResult]:
        """Generate ``num_rows`` answers for ``input_ids`` with one request, in order; see ``buffer_rl.engine.rows`` for
        their ids and seeds. They arrive together. Retries and errors are those of ``agenerate``, of all rows at once.
        """
        if not 1 < num_rows <= ROWS:
            raise EngineError(f"{num_rows} rows in a request", expected=f"2 to {ROWS}", where=f"request {rid!r}")
        prompt = list(input_ids)
        # A server aborts by the ids of rows that it has: that of the request is none of them.
        rows = [row_rid(rid, row) for row in range(num_rows)]
        answers = await self._ask(rid, rows, [prompt] * num_rows, prompt, sampling_params)
        if not isinstance(answers, list) or len(answers) != num_rows:
            found = f"{len(answers)} answers" if isinstance(answers, list) else "one answer"
            raise EngineError(f"{found} to a request of {num_rows} rows", where=self._generate_url)
        return [parse_answer(answer, self._generate_url) for answer in answers]

    async def _ask(
        self, rid: str, rows: list[str], input_ids: list[Any], prompt: list[int], sampling_params: Mapping[str, Any]
    ) -> Any:
        """The parsed body of the answer to ``input_ids``, a prompt or several. rows: the ids that an abort names.
        prompt: the one that they share."""
        if sampling_params.get("n", 1) != 1:
            raise EngineError("agenerate asks for one answer", expected="n = 1", hint="send one request a sample")
        self._check_forwarded(sampling_params)
        body = orjson.dumps(
            {"rid": rid, "input_ids": input_ids, "sampling_params": dict(sampling_params), "return_logprob": True}
        )
        # Samples of one prompt share a key, so that one engine runs the prompt once for all of them.
        headers = {ROUTING_KEY_HEADER: format(zlib.crc32(orjson.dumps(prompt)), "08x")}
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self._with_retries(rid, rows, body, headers)
        except TimeoutError as error:
            await self._abort_quietly(rows)
            raise DeadlineError(
                f"no answer for request {rid!r} within {self.timeout_s:g} s",
                where=self._generate_url,
                hint="lower the response length, add engines, or raise --generate-timeout-s",
            ) from error

    def _check_forwarded(self, sampling_params: Mapping[str, Any]) -> None:
        """Refuse, as an engine would, what the router drops; None, False and what is empty change nothing."""
        for name, value in sampling_params.items():
            if name in _FORWARDED or name in _OF_TEXT_ALONE or value is None or value is False or value in ("", [], {}):
                continue
            error = EngineError(
                f"the router does not forward the sampling parameter {name!r}",
                where=self._generate_url,
                expected=f"one of {', '.join(sorted(_FORWARDED))}",
            )
            error.status = 400
            raise error

    async def _with_retries(self, rid: str, rows: list[str], body: bytes, headers: Mapping[str, str]) -> Any:
        attempt = 0
        while True:
            failure: EngineError
            try:
                async with self._http.session().post(self._generate_url, data=body, headers=headers) as response:
                    raw = await response.read()
                    status = response.status
                if status == 200:
                    return decode_json(raw, self._generate_url)
                failure = status_error(self._generate_url, status, raw)
                if status not in _RETRYABLE_STATUS:
                    raise failure
            except aiohttp.ClientError as error:
                failure = EngineError(f"{type(error).__name__}: {error}", where=self._generate_url)
                failure.__cause__ = error
            if attempt >= self.max_retries:
                failure.hint = f"request {rid!r} failed {attempt + 1} times; see the logs of the engines and the router"
                raise failure
            await self._abort_quietly(rows)
            await asyncio.sleep(min(BACKOFF_S * 2**attempt, MAX_BACKOFF_S))
            attempt += 1

    async def _abort_quietly(self, rows: list[str]) -> None:
        with contextlib.suppress(EngineError):  # what cannot be aborted ends on its own; the retry will tell
            await self.abort(rows)

    async def abort(self, rids: Iterable[str] | None = None) -> None:
        """Finish the requests ``rids``, or rows of shared ones, or all where it is None, with what they have. An engine
        out of reach has nothing to abort and is passed over."""
        bodies = [{"abort_all": True}] if rids is None else [{"rid": rid} for rid in rids]
        for body in bodies:
            await self._engines.post("/abort_request", body, reachable_only=True)
