"""Continuous batching: a request joins and leaves the running batch at any step.

Plain, synchronous and single-threaded: the engine thread calls ``step`` in a loop and handles commands between
steps. Who waits for what: a waiting request waits for a free slot (freed by a finish, an abort or a retraction),
and everything waits while paused (ended by ``resume``).
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from buffer_rl.embedded.cache import CacheShape, Prefix, PrefixCache, Row, SlotCache
from buffer_rl.embedded.sampling import LogProbDetails, SamplingParams, draw, uniforms
from buffer_rl.errors import EngineError

PREFIX_CACHE_TOKENS = 65536
"""Of the prefixes that the base model, and each adapter, keeps."""

_LOG = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """prompt and the tokens drawn so far; ``log_probs[i]`` and ``kept[i]`` (see ``draw``) belong to ``output_ids[i]``.

    version_marks: (version, number of tokens drawn before it): the weights that later tokens come from.
    adapter: the name of the adapter that it runs with; empty: none.
    experts_start: of how many tokens the caller knows the experts.
    tag: whatever the caller wants to find the request by; the engine never looks at it.
    """

    rid: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    adapter: str = ""
    details: LogProbDetails | None = None
    experts_start: int = 0
    tag: Any = None
    output_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    kept: list[bytes] = field(default_factory=list)
    version_marks: list[tuple[str, int]] = field(default_factory=list)
    finish_reason: dict[str, Any] | None = None
    cached_tokens: int = 0
    num_retractions: int = 0
    row: Row = field(default_factory=Row)
    created: float = field(default_factory=time.perf_counter)
    finished: float = 0.0

    @property
    def sequence(self) -> tuple[int, ...]:
        """Prompt and output so far."""
        return (*self.prompt_ids, *self.output_ids) if self.output_ids else self.prompt_ids

    def mark_version(self, version: str) -> None:
        """Tokens drawn from now on come from the weights ``version``."""
        if self.version_marks and self.version_marks[-1][1] == len(self.output_ids):
            self.version_marks.pop()
        if not self.version_marks or self.version_marks[-1][0] != version:
            self.version_marks.append((version, len(self.output_ids)))

    def version_spans(self) -> list[dict[str, Any]]:
        """``[{"version", "start", "end"}]`` over the output tokens, without empty spans."""
        ends = [*(start for _, start in self.version_marks[1:]), len(self.output_ids)]
        return [
            {"version": version, "start": start, "end": end}
            for (version, start), end in zip(self.version_marks, ends, strict=False)
            if end > start
        ]

    def finish(self, reason: dict[str, Any]) -> None:
        """Set the reason and the time; the first reason stays."""
        if self.finish_reason is None:
            self.finish_reason = reason
            self.finished = time.perf_counter()


class Decoder(Protocol):
    """What the scheduler needs of a model; ``FastDecoder`` and ``FallbackDecoder`` are the two there are."""

    shape: CacheShape
    vocab_size: int

    def prefill(self, sequences: list[tuple[int, ...]]) -> list[Prefix]: ...
    def decode(self, cache: SlotCache) -> torch.Tensor: ...
    def prompt_logits(self, sequence: Sequence[int], start: int) -> Iterator[torch.Tensor]: ...


class Lane:
    """An adapter, whose requests run beside those of others: its decoder, what was computed with it, its version."""

    def __init__(self, decoder: Decoder, version: str) -> None:
        self.decoder, self.version = decoder, version
        self.cache = SlotCache(decoder.shape)
        self.prefixes = PrefixCache(PREFIX_CACHE_TOKENS)


class Scheduler(Lane):
    """The requests of one engine and the memory that they hold. By itself it is the lane of the model without adapters.

    stop_string: called for requests with stop strings after each token; returns the one that was found.
    version: the name of the weights that tokens are drawn from now; set it with ``weights_changed``.
    lacks: what was released and is not back yet; until it is, requests wait.
    return_kept: see ``draw``.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        max_running_requests: int,
        eos_token_ids: Iterable[int] = (),
        stop_string: Callable[[Request], str | None] | None = None,
        version: str = "0",
        return_kept: bool = False,
    ) -> None:
        super().__init__(decoder, version)
        self.return_kept = return_kept
        self.max_running_requests = max_running_requests
        self.eos_token_ids = frozenset(eos_token_ids)
        self.paused = False
        self.lacks: set[str] = set()
        self.draining = False  # an unpaused weight update waits for the running requests; nothing new is admitted
        self._adapters: dict[str, Lane] = {}
        self._stop_string = stop_string
        self._waiting: deque[Request] = deque()
        self._running: OrderedDict[int, Request] = OrderedDict()  # id(row) -> request

    # ------------------------------------------------------------------ state

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests with a slot."""
        return len(self._running)

    @property
    def running_tokens(self) -> int:
        """Tokens of the requests with a slot, prompts included: what a retraction has run through the model again."""
        return sum(len(request.prompt_ids) + len(request.output_ids) for request in self._running.values())

    @property
    def idle(self) -> bool:
        """Nothing is waiting or running."""
        return not self._waiting and not self._running

    @property
    def cache_bytes(self) -> int:
        """Of keys and values: of running requests, and of prefixes."""
        return sum(lane.cache.num_bytes + lane.prefixes.num_bytes for lane in self._lanes())

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters, the oldest first."""
        return tuple(self._adapters)

    @property
    def has_work(self) -> bool:
        """``step`` would do something."""
        admits = bool(self._waiting) and not self.draining
        return not self.paused and not self.lacks and (bool(self._running) or admits)

    # ------------------------------------------------------------------ commands, between steps

    def add_adapter(self, name: str, decoder: Decoder, version: str) -> None:
        """Requests may run with the adapter ``name`` from now on, which ``decoder`` has; their tokens are of
        ``version``. Raises EngineError if there is one of that name."""
        if name in self._adapters:
            raise EngineError(f"Failed to load LoRA adapter {name} because it is already loaded")
        self._adapters[name] = Lane(decoder, version)

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter. Raises EngineError if there is none of that name, or if requests have it."""
        if name not in self._adapters:
            raise EngineError(f"LoRA with name {name} does not exist", expected=", ".join(self._adapters))
        if any(request.adapter == name for request in (*self._running.values(), *self._waiting)):
            raise EngineError(f"requests run with the adapter {name}", hint="unload it once they have ended")
        del self._adapters[name]

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._lane(request).prefixes.pin(request.sequence)
        self._waiting.append(request)

    def abort(self, chosen: Callable[[Request], bool], message: str = "aborted by request") -> list[Request]:
        """Finish the chosen requests with what they have; returns them."""
        running = [r for r in self._running.values() if chosen(r)]
        waiting = [r for r in self._waiting if chosen(r)]
        self._release(running)
        for request in waiting:
            self._waiting.remove(request)
            self._lane(request).prefixes.unpin(request.sequence)
        for request in (gone := running + waiting):
            request.finish({"type": "abort", "message": message, "status_code": None, "err_type": None})
        return gone

    def pause(self, mode: str) -> list[Request]:
        """Stop stepping. ``in_place`` keeps running requests and their memory; ``retract`` sends them back to the
        queue with their tokens, to be run through the model again; ``abort`` finishes everything and returns it."""
        self.paused = True
        if mode == "abort":
            return self.abort(lambda _: True, "aborted by a pause")
        if mode == "retract":
            running = list(reversed(self._running.values()))
            self._release(running)
            for request in running:
                request.num_retractions += 1
                self._lane(request).prefixes.pin(request.sequence)
                self._waiting.appendleft(request)
        return []

    def resume(self) -> None:
        """End a pause."""
        self.paused = False

    def flush(self, *, releases: bool = False) -> bool:
        """Forget prefixes and give back memory that was not used since the last flush, or if it ``releases`` all.
        False, and nothing happens, while requests hold memory or, unless paused, wait for it."""
        if self._running or (self._waiting and not self.paused):
            return False
        for lane in self._lanes():
            lane.prefixes.clear()
            lane.cache.drop_empty(all_of_them=releases)
        return True

    def weights_changed(self, version: str) -> None:
        """Prefixes of the old weights are dropped; running requests keep their entries and go on under ``version``."""
        self.version = version
        self.prefixes.clear()
        for request in self._running.values():
            if not request.adapter:
                request.mark_version(version)

    def _lanes(self) -> list[Lane]:
        return [self, *self._adapters.values()]

    def _lane(self, request: Request) -> Lane:
        return self._adapters[request.adapter] if request.adapter else self

    def _by_lane(self, requests: Iterable[Request]) -> Iterator[tuple[Lane, list[Request]]]:
        own: dict[str, list[Request]] = {}
        for request in requests:
            own.setdefault(request.adapter, []).append(request)
        return ((self._lane(each[0]), each) for each in own.values())

    def _release(self, requests: list[Request]) -> None:
        for request in requests:
            del self._running[id(request.row)]
        for lane, own in self._by_lane(requests):
            lane.cache.leave([request.row for request in own])

    # ------------------------------------------------------------------ one step

    def step(self) -> list[Request]:
        """Admit what fits, draw one token for every running request; returns the requests that finished."""
        if self.paused:
            return []
        finished = [] if self.draining else self._admit()
        for lane in self._lanes():
            if len(lane.cache):
                logits = lane.decoder.decode(lane.cache)
                finished += self._draw(logits, [self._running[id(row)] for row in lane.cache.rows()])
        return finished

    def _admit(self) -> list[Request]:
        free = self.max_running_requests - len(self._running)
        joining = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        for request in joining:
            if request.details is not None and request.details.start is not None:
                blocks = self._lane(request).decoder.prompt_logits(request.prompt_ids, request.details.start)
                request.details.read_prompt(request.prompt_ids, blocks)
        finished = [request for request in joining if not request.params.max_new_tokens]
        for request in finished:
            lane = self._lane(request)
            lane.prefixes.unpin(request.sequence)
            request.mark_version(lane.version)
            request.finish({"type": "length", "length": 0})
        for lane, own in self._by_lane(request for request in joining if request.finish_reason is None):
            finished += self._begin(lane, own)
        return finished

    def _begin(self, lane: Lane, joining: list[Request]) -> list[Request]:
        groups: dict[tuple[int, ...], list[Request]] = {}
        for request in joining:
            groups.setdefault(request.sequence, []).append(request)
        logits = []
        prefixes = self._prefill(lane, groups)
        lane.cache.reserve(zip(prefixes, map(len, groups.values()), strict=True))
        for prefix, requests in zip(prefixes, groups.values(), strict=True):
            lane.cache.join(prefix, [request.row for request in requests])
            logits.append(prefix.logits.expand(len(requests), -1))
        batch = [request for requests in groups.values() for request in requests]
        for request in batch:
            lane.prefixes.unpin(request.sequence)
            self._running[id(request.row)] = request
            request.mark_version(lane.version)
        return self._draw(torch.cat(logits), batch)

    def _prefill(self, lane: Lane, groups: dict[tuple[int, ...], list[Request]]) -> list[Prefix]:
        found = {key: lane.prefixes.get(key) for key in groups}
        missing = [key for key, prefix in found.items() if prefix is None]
        for key, requests in groups.items():
            for request in requests[found[key] is None :]:
                request.cached_tokens = len(key)
        for key, prefix in zip(missing, lane.decoder.prefill(missing) if missing else [], strict=True):
            lane.prefixes.put(key, prefix)
            found[key] = prefix
        return [prefix for prefix in found.values() if prefix is not None]

    def _draw(self, logits: torch.Tensor, batch: list[Request]) -> list[Request]:
        """One token for each request; returns those that finished. What goes wrong here fails the batch alone: the same
        request, sent again, would end engine after engine."""
        finished: list[Request] = []
        try:
            for request, token, log_prob, kept in zip(batch, *self._drawn(logits, batch), strict=True):
                if (end := self._take(request, token, log_prob, kept)) is not None:
                    request.finish(end)
                    finished.append(request)
        except Exception as error:  # fault boundary: between what requests ask for and the engine
            if logits.is_cuda:
                torch.cuda.synchronize(logits.device)  # raises if the device has failed, which ends the engine
            reason = f"no token could be drawn: {type(error).__name__}: {error}"
            _LOG.exception("%s; requests %s", reason, ", ".join(repr(request.rid) for request in batch))
            for request in batch:
                request.finish(_failed(reason))
            finished = batch
        self._release(finished)
        return finished

    def _drawn(self, logits: torch.Tensor, batch: list[Request]) -> tuple[list[int], list[float], list[bytes]]:
        # A token's absolute position names, with the seed, the random number behind it.
        uniform = uniforms([r.seed for r in batch], [len(r.prompt_ids) + len(r.output_ids) for r in batch])
        held = [i for i, r in enumerate(batch) if len(r.output_ids) < r.params.min_new_tokens]
        if held:
            logits = logits.clone()
            for i in held:
                stops = self.eos_token_ids | batch[i].params.stop_token_ids
                logits[i, sorted(t for t in stops if 0 <= t < self.decoder.vocab_size)] = float("-inf")
        for i, r in enumerate(batch):
            if r.details is not None:
                r.details.read_output(logits[i], 1.0 if r.params.greedy else r.params.temperature)
        return draw(logits, [r.params for r in batch], uniform, return_kept=self.return_kept)

    def _take(self, request: Request, token: int, log_prob: float, kept: bytes) -> dict[str, object] | None:
        """Add a drawn token; why the request ends with it, or None."""
        if not math.isfinite(log_prob):
            lane = self._lane(request)
            lane.prefixes.drop(request.sequence)  # nothing computed for its prompt is used again
            return _failed(
                f"request {request.rid!r}: the log-probability of its output token {len(request.output_ids)} is "
                f"{log_prob}; the weights (version {lane.version}) or what they compute for this input are not finite"
            )
        request.output_ids.append(token)
        request.log_probs.append(log_prob)
        request.kept.append(kept)
        request.row.token = token
        return self._finish_reason(request, token)

    def _finish_reason(self, request: Request, token: int) -> dict[str, object] | None:
        params, count = request.params, len(request.output_ids)
        # Before the tokens, as SGLang: ``<eos>`` may be both.
        matched = self._stop_string(request) if params.stop and self._stop_string is not None else None
        if matched is not None:
            return {"type": "stop", "matched": matched}
        if not params.ignore_eos and (token in self.eos_token_ids or token in params.stop_token_ids):
            return {"type": "stop", "matched": token}
        if count >= params.max_new_tokens:
            return {"type": "length", "length": params.max_new_tokens}
        if len(request.prompt_ids) + count >= self.decoder.shape.context_length:
            return {"type": "length", "length": count}
        return None


def _failed(message: str) -> dict[str, object]:
    """The end of a request that the engine cannot answer."""
    return {"type": "abort", "message": message, "status_code": 500, "err_type": "InternalServerError"}
