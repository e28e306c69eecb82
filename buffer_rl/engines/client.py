"""The HTTP client of the rollout: generation through the router, aborts at every engine directly.

The router knows nothing of aborts (it answers 404), so those go to the engines. Its own retries are off;
``EngineClient`` repeats a request that got lost, under the same ``rid`` and with the same seed, after aborting what may
be left of the first try.

Who waits for whom: a publication that drains waits for the requests inside the ``RequestGate``; those that come then
wait at it for the end of the publication, and their deadlines with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Any

import aiohttp
import numpy as np
import orjson

from buffer_rl.args import Args
from buffer_rl.engines.http import EngineFanOut, HttpSession, RequestGate, decode_json, status_error
from buffer_rl.engines.protocol import GENERATE, ROWS, Adapter, RowSeeds, is_neutral, row_rid
from buffer_rl.errors import DeadlineError, EngineError
from buffer_rl.files.hf_config import expert_sizes, read_config, vocab_size
from buffer_rl.options.section import required
from buffer_rl.plan.schedule import Schedule
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.experts import ExpertSizes
from buffer_rl.records.groups import Status, VersionSpan, tile
from buffer_rl.records.ids import version_number
from buffer_rl.records.sample import STATUS_OF_REASON, kept_tokens
from buffer_rl.records.utf8 import encodable


@dataclass(slots=True, kw_only=True)
class GenerateResult:
    """One answer. ``log_probs[i]``, in nats, belongs to ``output_ids[i]``; finish_reason: stop, length or abort.

    matched: the token id or the string that stopped it, if any. cached_tokens: prompt tokens that another request
    had computed. spans: which weight version sampled which tokens; they tile ``output_ids``. kept: see
    ``Sample.rollout_kept_tokens``; None where the engine does not return them. experts: likewise, see
    ``Sample.rollout_routed_experts``; of the tokens of prompt and answer from ``experts_start`` on.
    """

    output_ids: list[int]
    text: str
    log_probs: list[float]
    finish_reason: str
    spans: list[VersionSpan]
    matched: int | str | None = None
    cached_tokens: int = 0
    kept: list[bytes] | None = None
    experts: np.ndarray | None = None
    experts_start: int = 0

    @property
    def status(self) -> Status:
        """The status of a sample with this answer."""
        return STATUS_OF_REASON[self.finish_reason]


def parse_answer(
    answer: Any,
    url: str,
    vocab_size: int | None = None,
    *,
    experts: ExpertSizes | None = None,
    num_prompt_tokens: int = 0,
    experts_start: int = 0,
) -> GenerateResult:
    """Read one answer of ``/generate``. Raises EngineError if it breaks the protocol, or has a token of none of the
    ``vocab_size`` rows of the model or a log-probability that is none. experts: without it, those in the answer, of the
    tokens of prompt and answer from ``experts_start`` on, are not read.

    Empty spans, which SGLang sends for an answer without tokens, say nothing and are left out.
    """
    try:
        meta = answer["meta_info"]
        reason = meta["finish_reason"]
        pairs = meta["output_token_logprobs"]
        token_ids = [pair[1] for pair in pairs]
        # With the kept tokens a SGLang server sends log-probabilities over them besides those over the vocabulary.
        log_probs = meta.get("output_token_sampling_logprobs") or [pair[0] for pair in pairs]
        result = GenerateResult(
            output_ids=list(answer["output_ids"]),
            text=answer.get("text") or "",
            log_probs=list(map(float, log_probs)),
            finish_reason=reason["type"],
            spans=[
                VersionSpan(version_number(span["version"]), int(span["start"]), int(span["end"]))
                for span in meta["weight_versions"]
                if span["start"] != span["end"]
            ],
            matched=reason.get("matched"),
            cached_tokens=int(meta.get("cached_tokens", 0)),
            kept=kept_tokens(meta),
        )
        if experts is not None:
            num_tokens = num_prompt_tokens + len(token_ids)
            result.experts, result.experts_start = experts.read(meta, num_tokens, experts_start)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        what = f"an answer of /generate breaks the protocol: {type(error).__name__}: {error}"
        expected = "output_ids and meta_info with finish_reason, output_token_logprobs, weight_versions"
        raise EngineError(what, where=url, expected=expected) from error
    _check_answer(result, token_ids, url, vocab_size, meta["weight_versions"])
    return result


def _check_answer(result: GenerateResult, logged: list[int], url: str, vocab_size: int | None, versions: Any) -> None:
    """logged: the token ids that the log-probabilities are of."""
    token_ids, what, expected, hint = result.output_ids, "", "", ""
    least, most, highest = min(token_ids, default=0), max(token_ids, default=0), max(result.log_probs, default=0.0)
    if logged != token_ids or len(result.log_probs) != len(token_ids):
        what = "output_token_logprobs does not belong to output_ids"
    elif not tile(result.spans, len(token_ids)):
        what = f"weight_versions {versions} of {len(token_ids)} output tokens"
        expected = "spans {version, start, end} that cover every output token once, in order"
        hint = "the engine has to report which weights sampled each token, as a current SGLang does"
    elif least < 0 or (vocab_size is not None and most >= vocab_size):
        what = f"token {least if least < 0 else most} in an answer"
        expected = f"0 to {vocab_size - 1}, the rows of the model's embedding" if vocab_size else "a token id"
    elif not highest <= MAX_LOG_PROB:
        what, expected = f"the log-probability {highest:g} in an answer", "at most 0, rounded"
    elif result.finish_reason not in STATUS_OF_REASON:
        what, expected = f"unknown finish reason {result.finish_reason!r}", f"one of {', '.join(STATUS_OF_REASON)}"
    if what:
        raise EngineError(what, where=url, expected=expected, hint=hint)


def request_timeout_s(args: Args) -> float:
    """Deadline of one request, in seconds: ``--generate-timeout-s``. While S tickets more share the engines, a response
    may take S + 1 times as long, and publications pause it: each load of weights takes at most
    ``--update-weights-timeout-s``, and of all that a response may see one is allowed for at its slowest."""
    schedule = Schedule.of(args)
    if not schedule.max_staleness:
        return args.generate_timeout_s
    return (schedule.target + 1) * args.generate_timeout_s + args.update_weights_timeout_s


ROUTING_KEY_HEADER = "X-SMG-Routing-Key"
# The first retries are for a lost connection; all of them, about 11 s, outlast the time until a dead engine is noticed
# and taken off the router's list, which is a second or two on an idle machine. Then the router says that it has none.
NO_ENGINE = {503: b"no_available_workers", 404: b"model_not_found"}  # the latter: smg, if it lists none at all
MAX_RETRIES = 8
BACKOFF_S = 0.2
ABORT_TIMEOUT_S = 20.0
"""Less than the time that samples have to end at the end of a rollout: an engine that hangs must not take it all."""
MAX_BACKOFF_S = 2.0
REFUSED = 400
"""The status of an engine that refuses a request, for one that is not sent."""
MAX_LOG_PROB = 0.1
"""What rounding may make of a log-probability of 0."""
_RETRYABLE_STATUS = (429, 500, 502, 503, 504)
# A real engine refuses a rid that it has: some milliseconds after an abort still, a second after a lost connection, and
# one that came in a pause, which no abort reaches, until the pause ends.
_TAKEN = b"Duplicate request ID"
# It replaced one that had the adapter which the request named: the next try names the newest.
_NO_ADAPTER = (b"LoRA adapter that has never been loaded", b"requested LoRA adapters are not loaded")
# The sampling parameters that sglang-router 0.3.2 forwards. It drops all others in silence.
_FORWARDED = frozenset(
    (
        *("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "n", "sampling_seed"),
        *("stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "no_stop_trim"),
        *("json_schema", "regex", "ebnf", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    )
)
_OF_TEXT_ALONE = ("spaces_between_special_tokens", "stream_interval")  # dropped, too, but no token depends on them


def passes_fields(args: Args) -> bool:
    """Whether the router forwards what sglang-router drops. Of a router that the run does not start this is not known,
    and taken for no. Raises PluginError if there is no such router."""
    if args.engine_urls:
        return False
    return bool(getattr(PluginRegistry.from_flags(args.plugin).resolve("router", args.router), "passes_fields", False))


@dataclass(eq=False)
class EngineClient(contextlib.AbstractAsyncContextManager["EngineClient"]):
    """Generates through the router and aborts at every engine behind it. Belongs to one event loop.

    engine_urls: the engines that an abort goes to; where there are none, those that the router lists at the time, so
    that a client lives longer than an engine. timeout_s: deadline of one generation, retries included.
    control_timeout_s: deadline of one abort. api_key: see ``EngineFanOut``. vocab_size: rows of the model's embedding;
    None if that is not known. waits_for_engine: a router without an engine is asked until ``timeout_s``, since the run
    replaces its engines; its retries do not count. passes_fields: whether the router forwards what sglang-router drops,
    which is refused otherwise. asks_kept: have a SGLang server send the tokens that sampling kept, which it does for
    requests with a ``top_k``. experts: have answers give the experts of their tokens, of a model with these sizes.
    ``gate``: closed, requests are held back, and running ones end.
    ``adapter``: what requests name from now on; None: none.
    """

    router_url: str
    engine_urls: InitVar[Sequence[str]]
    _: KW_ONLY
    timeout_s: float = 600.0
    control_timeout_s: InitVar[float] = ABORT_TIMEOUT_S
    max_retries: int = MAX_RETRIES
    api_key: InitVar[str | None] = None
    vocab_size: int | None = None
    waits_for_engine: bool = False
    passes_fields: bool = False
    asks_kept: bool = False
    experts: ExpertSizes | None = None

    def __post_init__(self, engine_urls: Sequence[str], control_timeout_s: float, api_key: str | None) -> None:
        self.router_url = self.router_url.rstrip("/")
        self._row_seeds: asyncio.Task[RowSeeds] | None = None
        self._generate_url = self.router_url + GENERATE
        self.gate = RequestGate()
        self.adapter: Adapter | None = None
        self._http = HttpSession(self.timeout_s, api_key)
        urls = tuple(url.rstrip("/") for url in engine_urls)
        self._engines = EngineFanOut(lambda: urls, control_timeout_s, router_url=self.router_url, api_key=api_key)

    @classmethod
    def from_args(cls, args: Args) -> EngineClient:
        """From ``args.router_url``, ``args.engine_urls``, ``args.engine_api_key``, ``request_timeout_s`` and the
        configuration in ``args.hf_checkpoint``."""
        passes = passes_fields(args)
        config = read_config("--hf-checkpoint", required(args.hf_checkpoint, "hf_checkpoint"))
        return cls(
            required(args.router_url, "router_url"),
            args.engine_urls,
            timeout_s=request_timeout_s(args),
            api_key=args.engine_api_key,
            vocab_size=vocab_size(config),
            waits_for_engine=not args.engine_urls,
            passes_fields=passes,
            asks_kept=passes and args.replay_kept_tokens,
            experts=expert_sizes(args),
        )

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections; requests in flight are aborted by their engines."""
        if self._row_seeds is not None:
            self._row_seeds.cancel()
        await self._http.close()
        await self._engines.close()

    async def agenerate(
        self,
        rid: str,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        routing_key: str | None = None,
        experts_start: int = 0,
    ) -> GenerateResult:
        """Generate one answer for ``input_ids``; ``sampling_params`` under SGLang's names. routing_key: requests with
        equal ones go to one engine, where the router's policy looks at them; those without, by ``input_ids``.
        experts_start: of so many tokens the experts are known; those of the others come with the answer, or all.

        A lost connection and the statuses 429 and 5xx are retried, at most ``max_retries`` times; other 4xx are not,
        but for that of an engine that still has the request under this ``rid``: it is asked again until time is up.
        Raises EngineError naming a token id that the model has no row for or a sampling parameter that the router would
        drop, which are not sent, or the URL, the status and the answer's text, and DeadlineError when time is up; the
        request is aborted at the engines then.
        """
        prompt = list(input_ids)
        answer = await self._ask(rid, prompt, sampling_params, routing_key, experts_start=experts_start)
        return self._parsed(answer, prompt, experts_start)

    async def agenerate_rows(
        self,
        rid: str,
        input_ids: Sequence[int],
        num_rows: int,
        sampling_params: Mapping[str, Any],
        *,
        routing_key: str | None = None,
    ) -> list[GenerateResult]:
        """Generate ``num_rows`` answers for ``input_ids`` with one request, in order. For their ids and seeds see
        ``buffer_rl.engines.protocol``. They arrive together. Retries and errors are those of ``agenerate``, of all rows
        at once.
        """
        if not 1 < num_rows <= ROWS:
            raise EngineError(f"{num_rows} rows in a request", expected=f"2 to {ROWS}", where=f"request {rid!r}")
        prompt = list(input_ids)
        answers = await self._ask(rid, prompt, sampling_params, routing_key, num_rows=num_rows)
        if not isinstance(answers, list) or len(answers) != num_rows:
            found = f"{len(answers)} answers" if isinstance(answers, list) else "one answer"
            raise EngineError(f"{found} to a request of {num_rows} rows", where=self._generate_url)
        return [self._parsed(answer, prompt) for answer in answers]

    def _parsed(self, answer: Any, prompt: Sequence[int], experts_start: int = 0) -> GenerateResult:
        of_experts: dict[str, Any] = {"num_prompt_tokens": len(prompt), "experts_start": experts_start}
        return parse_answer(answer, self._generate_url, self.vocab_size, experts=self.experts, **of_experts)

    async def row_seeds(self) -> RowSeeds:
        """How the rows of a request draw at the engines, which are asked once. Raises EngineError where none answers.

        Of engines that differ, what holds for all: rows that share a seed, or have none, are not to be given one."""
        task = self._row_seeds
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._row_seeds = asyncio.create_task(self._ask_row_seeds())
        return await asyncio.shield(task)

    async def _ask_row_seeds(self) -> RowSeeds:
        deadline = time.monotonic() + (self.timeout_s if self.waits_for_engine else 0.0)
        while True:
            answering = await self._engines.server_info(reachable_only=True)
            if found := {info.row_seeds for info in answering.values()}:
                break
            if time.monotonic() >= deadline:
                raise EngineError("no engine answers", where=self.router_url)
            await asyncio.sleep(MAX_BACKOFF_S)
        if RowSeeds.SHARED in found:
            return RowSeeds.SHARED
        return found.pop() if len(found) == 1 else RowSeeds.NONE

    async def _ask(
        self,
        rid: str,
        prompt: list[int],
        sampling_params: Mapping[str, Any],
        routing_key: str | None,
        *,
        experts_start: int = 0,
        num_rows: int = 0,
    ) -> Any:
        """The parsed body of the answer to a prompt, or to ``num_rows`` rows of it."""
        if sampling_params.get("n", 1) != 1:
            raise EngineError("agenerate asks for one answer", expected="n = 1", hint="send one request a sample")
        self._check_prompt(rid, prompt)
        self._check_forwarded(sampling_params)
        # A server aborts by the ids of rows that it has: that of the request is none of them.
        rows = [row_rid(rid, row) for row in range(num_rows)] or [rid]
        input_ids: list[Any] = [prompt] * num_rows or prompt
        request = {"rid": rid, "input_ids": input_ids, "sampling_params": dict(sampling_params), "return_logprob": True}
        if self.asks_kept and sampling_params.get("top_k", -1) > 0:
            request["return_sampling_mask"] = True
        if self.experts is not None and self.passes_fields:  # an engine of ours sends them with every answer
            request |= {"return_routed_experts": True, "routed_experts_start_len": experts_start}
        try:
            orjson.dumps(request)
        except TypeError as error:
            expected = "sampling parameters of JSON values, and text that UTF-8 can encode"
            what = f"it cannot be sent as JSON: {error}"
            raise EngineError(what, where=f"request {rid!r}", expected=expected, status=REFUSED) from error
        key = orjson.dumps(prompt) if routing_key is None else encodable(routing_key).encode()
        headers = {ROUTING_KEY_HEADER: format(zlib.crc32(key), "08x")}
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                return await self._with_retries(rid, rows, request, headers, limit)
        except TimeoutError as error:
            await self._abort_quietly(rows)
            what = f"no answer for request {rid!r} within {self.timeout_s:g} s"
            hint = "lower the response length, add engines, or raise --generate-timeout-s"
            raise DeadlineError(what, where=self._generate_url, hint=hint) from error

    def _check_prompt(self, rid: str, prompt: list[int]) -> None:
        """Refuse what an engine may die of: the retry would kill the next one."""
        where = f"request {rid!r}"
        if not prompt:
            raise EngineError("the prompt is empty", where=where, expected="at least one token", status=REFUSED)
        least, most, size = min(prompt), max(prompt), self.vocab_size
        if least < 0 or (size is not None and most >= size):
            rows = "a token id" if size is None else f"0 to {size - 1}, the rows of the model's embedding"
            what = f"token id {least if least < 0 else most} in the prompt"
            hint = "a tokenizer may have more tokens than its model"
            raise EngineError(what, where=where, expected=rows, hint=hint, status=REFUSED)

    def _check_forwarded(self, sampling_params: Mapping[str, Any]) -> None:
        """Refuse, as an engine would, what the router drops; None, False and what is empty change nothing."""
        if self.passes_fields:
            return
        for name, value in sampling_params.items():
            if name in _FORWARDED or name in _OF_TEXT_ALONE or is_neutral(value, ()):
                continue
            what = f"the router does not forward the sampling parameter {name!r}"
            expected, hint = f"one of {', '.join(sorted(_FORWARDED))}", "add --router smg, which forwards all"
            raise EngineError(what, where=self._generate_url, expected=expected, hint=hint, status=REFUSED)

    async def _with_retries(
        self, rid: str, rows: list[str], request: Mapping[str, Any], headers: Mapping[str, str], limit: asyncio.Timeout
    ) -> Any:
        attempt = num_refused = 0
        while True:
            failure: EngineError
            try:
                async with self.gate.passed(limit):
                    adapter = self.adapter
                    body = orjson.dumps(request if adapter is None else adapter.named_in(request))
                    async with self._http.session().post(self._generate_url, data=body, headers=headers) as response:
                        raw = await response.read()
                        status = response.status
                if status == 200:
                    answer = decode_json(raw, self._generate_url)
                    if adapter is not None:
                        adapter.set_version(answer)
                    return answer
                failure = status_error(self._generate_url, status, raw)
                if self.waits_for_engine and status in NO_ENGINE and NO_ENGINE[status] in raw:
                    await asyncio.sleep(MAX_BACKOFF_S)
                    continue
                is_taken = status == 400 and _TAKEN in raw
                lacks_adapter = status == 400 and any(text in raw for text in _NO_ADAPTER)
                if status not in _RETRYABLE_STATUS and not is_taken and not lacks_adapter:
                    raise failure
            except aiohttp.ClientError as error:
                failure = EngineError(f"{type(error).__name__}: {error}", where=self._generate_url)
                failure.__cause__ = error
                is_taken = False
            if attempt >= self.max_retries and not is_taken:
                failure.hint = f"request {rid!r} failed {attempt + 1} times; see the logs of the engines and the router"
                raise failure
            await self._abort_quietly(rows)
            await asyncio.sleep(min(BACKOFF_S * 2 ** min(attempt + num_refused, 10), MAX_BACKOFF_S))
            num_refused += is_taken
            attempt += not is_taken

    async def _abort_quietly(self, rows: list[str]) -> None:
        with contextlib.suppress(EngineError):  # what cannot be aborted ends on its own; the retry will tell
            await self.abort(rows)

    async def abort(self, rids: Iterable[str] | None = None) -> None:
        """Finish the requests ``rids``, or rows of shared ones, or all where it is None, with what they have. An engine
        out of reach has nothing to abort and is passed over."""
        bodies = [{"abort_all": True}] if rids is None else [{"rid": rid} for rid in rids]
        await asyncio.gather(*(self._engines.ask("/abort_request", body, reachable_only=True) for body in bodies))
