"""Requests to the model that judges: limits, attempts, and answers that were given before.

Equal requests are one: those at the same time share an answer, and an answer that could be read is kept in the run's
folder under a digest of its request.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import sqlite3
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from buffer_rl.errors import RewardError
from buffer_rl.options.redaction import mask_url

if TYPE_CHECKING:
    from buffer_rl_judge.options import JudgeArgs

ATTEMPTS = 4
FIRST_PAUSE_S = 0.5  # doubled after each attempt, and drawn from half to the whole of it
MOST_PAUSE_S = 60.0
DEADLINE_SHARE = 0.9  # of --rm-timeout-s, so that the judge's last failure is reported and not a bare timeout
MAX_ANSWER_BYTES = 1 << 20
RETRIED = frozenset({408, 429, 500, 502, 503, 504, 529})
CHARACTERS_A_TOKEN = 3  # of a guess, until the answer says how many there were
CACHE = "judge.sqlite"
_TIMEOUT = aiohttp.ClientTimeout(sock_connect=30)  # of the answer, the caller's deadline alone

T = TypeVar("T")


class _RetryableError(Exception):
    """Worth another attempt, ``after_s`` seconds later at the earliest."""

    def __init__(self, text: str, after_s: float = 0.0) -> None:
        super().__init__(text)
        self.after_s = after_s


class Allowance:
    """A number of units per minute: full at first, and filled evenly. ``now``: a clock, in seconds."""

    def __init__(self, per_minute: float, now: Callable[[], float] = time.monotonic) -> None:
        self._size, self._rate, self._now = float(per_minute), per_minute / 60, now
        self._left, self._at = float(per_minute), now()

    def take(self, amount: float) -> float:
        """Take ``amount``; seconds to wait until it is there. One that is greater than the allowance waits until that
        is full."""
        now = self._now()
        self._left = min(self._size, self._left + (now - self._at) * self._rate) - amount
        self._at = now
        return max(0.0, -(self._left + max(0.0, amount - self._size)) / self._rate)

    def give_back(self, amount: float) -> None:
        """Return what was taken and not used; less than 0 takes more."""
        self._left += amount


class JudgeClient:
    """Asks the model of ``--judge-url``. Belongs to one event loop."""

    def __init__(self, args: JudgeArgs) -> None:
        share = max(1, args.num_rollout_workers)
        self._args = args
        self._place = f"--judge-url {mask_url(str(args.judge_url))}"
        self._at_once = asyncio.Semaphore(max(1, args.judge_concurrency // share))
        limits = (args.judge_requests_per_minute, args.judge_tokens_per_minute)
        self._requests, self._tokens = (None if limit is None else Allowance(limit / share) for limit in limits)
        self._running: dict[str, asyncio.Task[Any]] = {}
        folder = Path(args.run_dir)
        self._cache = folder / CACHE if folder.is_dir() else None

    async def ask(self, text: str, read: Callable[[str], T], *, where: str) -> T:
        """What ``read`` makes of the answer to ``text``.

        Raises RewardError for a judge that fails within 90% of ``--rm-timeout-s``, and for an answer that ``read``
        refuses by ValueError."""
        body = {**self._args.judge_params, "model": self._args.judge_model}
        body["messages"] = [{"role": "user", "content": text}]
        digest = hashlib.sha256(json.dumps([self._args.judge_url, body], sort_keys=True).encode()).hexdigest()
        if (known := self._known(digest)) is not None:
            return read(known)
        if digest not in self._running:
            task = asyncio.get_running_loop().create_task(self._answer(body, f"{where}, {self._place}"))
            self._running[digest] = task
            task.add_done_callback(lambda done: (self._running.pop(digest, None), done.cancelled() or done.exception()))
        answer = await asyncio.shield(self._running[digest])
        try:
            found = read(answer)
        except ValueError as error:
            expected = str(error)
            raise RewardError(f"the judge answered {answer[-200:]!r}", where=where, expected=expected) from error
        self._keep(digest, answer)
        return found

    async def _answer(self, body: dict[str, Any], place: str) -> str:
        limit_s, begun = DEADLINE_SHARE * self._args.rm_timeout_s, time.monotonic()
        failure = f"no place among the requests of --judge-concurrency {self._args.judge_concurrency}"
        try:
            async with asyncio.timeout(limit_s), self._at_once:
                failure = "no answer"
                for attempt in range(ATTEMPTS):
                    await self._wait_for_limits(body, limit_s - (time.monotonic() - begun), place)
                    try:
                        return await self._post(body, place)
                    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, _RetryableError) as error:
                        failure = str(error) or type(error).__name__
                        pause_s = FIRST_PAUSE_S * 2**attempt * random.uniform(0.5, 1.0)
                        await asyncio.sleep(max(pause_s, getattr(error, "after_s", 0.0)))
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError):  # their text is the address
            raise RewardError("the judge has no usable address", where=place) from None
        except TimeoutError:
            failure = f"{failure} within {limit_s:g} s"
        raise RewardError(f"the judge failed: {failure}", where=place)

    async def _wait_for_limits(self, body: Mapping[str, Any], left_s: float, place: str) -> None:
        taken = [(limit, amount) for limit, amount in ((self._requests, 1), (self._tokens, _guess(body))) if limit]
        wait_s = max([0.0, *(limit.take(amount) for limit, amount in taken)])
        if wait_s >= left_s:
            for limit, amount in taken:
                limit.give_back(amount)
            what = f"the judge's limits per minute are used up for {wait_s:.1f} s, and the reward has {left_s:.1f} s"
            raise RewardError(what, where=place, hint="a greater --rm-timeout-s, or greater limits")
        await asyncio.sleep(wait_s)

    async def _post(self, body: dict[str, Any], place: str) -> str:
        headers = {"Authorization": f"Bearer {key}"} if (key := self._args.judge_api_key) else {}
        url = f"{str(self._args.judge_url).rstrip('/')}/chat/completions"
        async with (
            aiohttp.ClientSession(headers=headers, timeout=_TIMEOUT) as session,
            session.post(url, json=body, proxy=_proxy_of(url), allow_redirects=False) as response,
        ):
            data = await response.content.read(MAX_ANSWER_BYTES + 1)
            while len(data) <= MAX_ANSWER_BYTES and (block := await response.content.read(1 << 16)):
                data += block
            shown = data[:200].decode(errors="replace")
            if response.status in RETRIED:
                raise _RetryableError(f"HTTP {response.status}: {shown}", _seconds(response.headers.get("Retry-After")))
            if response.status != 200:
                what = f"the judge answered HTTP {response.status}: {shown}"
                raise RewardError(what, where=place, status=response.status)
        try:
            answer = json.loads(data)
            (choice, *_), used = answer["choices"], (answer.get("usage") or {}).get("total_tokens")
            text, is_cut = choice["message"]["content"], choice.get("finish_reason") == "length"
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
            text = None
        if not isinstance(text, str):
            raise RewardError(f"the judge answered no completion: {shown}", where=place)
        if self._tokens and isinstance(used, int):
            self._tokens.give_back(_guess(body) - used)
        if is_cut:  # what stands in brackets may be a quotation
            hint = "a greater max_tokens in --judge-params"
            raise RewardError(f"the judge answered {text[-200:]!r}, cut at its limit of tokens", where=place, hint=hint)
        return text

    def _known(self, digest: str) -> str | None:
        if self._cache is not None and self._cache.exists():
            with suppress(sqlite3.Error), closing(sqlite3.connect(self._cache, timeout=5.0)) as cache:
                found = cache.execute("SELECT answer FROM answers WHERE digest = ?", (digest,)).fetchone()
                return None if found is None else str(found[0])
        return None  # it is being made

    def _keep(self, digest: str, answer: str) -> None:
        if self._cache is None:
            return
        with suppress(sqlite3.Error), closing(sqlite3.connect(self._cache, timeout=5.0)) as cache, cache:
            cache.execute("PRAGMA synchronous = OFF")  # waits for no disk: what a crash loses is asked for again
            cache.execute("CREATE TABLE IF NOT EXISTS answers (digest TEXT PRIMARY KEY, answer TEXT NOT NULL)")
            cache.execute("INSERT OR IGNORE INTO answers VALUES (?, ?)", (digest, answer))


def _proxy_of(url: str) -> str | None:
    """What ``http_proxy``, ``https_proxy`` and ``no_proxy`` say of an address; None: it is reached directly."""
    parts = urlsplit(url)
    direct = bool(proxy_bypass(parts.netloc.rpartition("@")[2]))
    return None if direct else getproxies().get(parts.scheme)


def _guess(body: Mapping[str, Any]) -> int:
    """Tokens of a request and its answer, at most."""
    most = body.get("max_tokens", body.get("max_completion_tokens", 0))
    return len(body["messages"][0]["content"]) // CHARACTERS_A_TOKEN + (most if isinstance(most, int) else 0)


def _seconds(retry_after: str | None) -> float:
    try:
        return min(max(0.0, float(retry_after or 0.0)), MOST_PAUSE_S)
    except ValueError:  # a date
        return 0.0
