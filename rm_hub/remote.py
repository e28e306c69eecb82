"""Rewards from a server: one JSON request a sample, or one a prompt group.

The request and the answer of a sample are those of slime's ``remote_rm`` (https://github.com/THUDM/slime), with
two more fields. Addresses come from ``--rm-url`` and ``--rm-servers`` alone: a row of data may choose one of their
names, never where requests go.
"""

from __future__ import annotations

import asyncio
import json
import random
import zlib
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from buffer_rl.errors import ConfigError, RewardError
from buffer_rl.kinds.marks import rows_may_choose
from buffer_rl.records.groups import Sample, SampleGroup
from rm_hub.answers import where

ATTEMPTS = 3
FIRST_PAUSE_S = 0.2  # doubled after each attempt, and drawn from half to the whole of it
DEADLINE_SHARE = 0.9  # of --rm-timeout-s, so that the server's last failure is reported and not a bare timeout
MAX_ANSWER_BYTES = 1 << 20
RETRIED = frozenset({429, 500, 502, 503, 504})  # another 4xx says that the request is wrong, and stays so


class _RetryableError(Exception):
    """Worth another attempt."""


@rows_may_choose
async def score(args: Any, sample: Sample) -> Any:
    """What a server answers for one sample: a number, or a mapping of names to numbers. The server is that of
    ``--rm-url``, or one of those that ``--rm-servers`` gives the name in ``metadata["rm_server"]``.

    Request: ``{"prompt", "response", "label", "metadata", "status"}``. Refused connections and the statuses of
    ``RETRIED`` are tried up to three times, and at each server of the name, all within 90% of ``--rm-timeout-s``.
    Raises ConfigError without an address, RewardError for another name and for a server without a usable answer.
    """
    return await _ask(args, _payload(sample), where(sample, "rm_hub.remote"), sample)


async def score_group(args: Any, group: SampleGroup) -> list[Any]:
    """The same for all samples of a prompt in one request, ``{"samples": [...]}``; answered by a list, in order."""
    place = str(group.uid)
    answer = await _ask(args, {"samples": [_payload(sample) for sample in group]}, place, group[0])
    if not isinstance(answer, list) or len(answer) != len(group):
        expected = f"a list of {len(group)} rewards"
        raise RewardError(f"the reward server answered {answer!r:.120}", where=place, expected=expected)
    return answer


def _payload(sample: Sample) -> dict[str, Any]:
    fields = {name: getattr(sample, name) for name in ("prompt", "response", "label", "metadata")}
    return {**fields, "status": str(sample.status)}


async def _ask(args: Any, payload: dict[str, Any], place: str, sample: Sample) -> Any:
    urls = _addresses(args, sample, place)
    flag = "--rm-url" if sample.metadata.get("rm_server") is None else "--rm-servers"
    failure = "no answer"
    try:
        async with asyncio.timeout(DEADLINE_SHARE * args.rm_timeout_s), aiohttp.ClientSession() as session:
            for attempt in range(max(ATTEMPTS, len(urls))):
                url = urls[attempt % len(urls)]
                if attempt:
                    await asyncio.sleep(FIRST_PAUSE_S * 2 ** ((attempt - 1) // len(urls)) * random.uniform(0.5, 1.0))
                try:
                    return await _post(session, url, payload, place)
                except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, _RetryableError) as error:
                    failure = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                    failure = failure.removeprefix("_RetryableError: ")
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError):  # their text is the address
        expected = "http://HOST:PORT/PATH"
        raise ConfigError(f"{_shown(url)!r} is no address", where=flag, expected=expected) from None
    except TimeoutError:
        failure = f"{failure} within {DEADLINE_SHARE * args.rm_timeout_s:g} s"
    raise RewardError(f"the reward server failed: {failure}", where=f"{place}, {flag} {_shown(url)}")


def _addresses(args: Any, sample: Sample, place: str) -> list[str]:
    """Of the servers that the row's name stands for, each row beginning with another one; at least one address."""
    name = sample.metadata.get("rm_server")
    if name is None and args.rm_url:
        return [args.rm_url]
    servers: dict[str, list[str]] = {}
    for entry in args.rm_servers:
        known, _, url = entry.partition("=")
        servers.setdefault(known, []).append(url)
    if name is None:
        expected = "--rm-url http://HOST:PORT/PATH, or metadata.rm_server with a name of --rm-servers"
        raise ConfigError("there is no address of a reward server", expected=expected)
    if not isinstance(name, str) or name not in servers:
        expected = f"one of --rm-servers: {', '.join(servers) or 'none'}"
        raise RewardError(f"the row names the reward server {name!r:.80}", where=place, expected=expected)
    urls = servers[name]
    first = zlib.crc32(f"{sample.uid} {sample.sample_index}".encode()) % len(urls)
    return urls[first:] + urls[:first]


def _shown(url: str) -> str:
    """The address without user, password, query and fragment, which may be secret."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "..."
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


async def _post(session: aiohttp.ClientSession, url: str, payload: dict[str, Any], place: str) -> Any:
    async with session.post(url, json=payload, allow_redirects=False) as response:
        body = bytearray()
        async for block in response.content.iter_chunked(1 << 16):
            body += block
            if len(body) > MAX_ANSWER_BYTES:
                raise RewardError(f"the reward server sent more than {MAX_ANSWER_BYTES} bytes", where=place)
        text = body.decode(errors="replace")
        if response.status in RETRIED:
            raise _RetryableError(f"HTTP {response.status}: {text:.200}")
        if response.status != 200:
            refusal = RewardError(f"the reward server answered HTTP {response.status}: {text:.200}", where=place)
            refusal.status = response.status
            raise refusal
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RewardError(f"the reward server answered no JSON: {text:.200}", where=place) from error
