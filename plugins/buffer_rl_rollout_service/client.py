"""The callers of the service: agents, which write, and the rollout function, which reads.

A call that meets a dead or busy service is tried again until its deadline. Every call may be repeated: the service
knows a trajectory by its ``uid``, and a reader by its name and position.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Self

import aiohttp
import orjson

from buffer_rl.errors import ConfigError, DeadlineError, RolloutError
from buffer_rl.options.redaction import mask_url
from buffer_rl_rollout_service.store import MAX_GROUPS

_log = logging.getLogger(__name__)
RETRY_S = 0.5
AGAIN = frozenset((408, 429, 500, 502, 503, 504))
READ_WAIT_S = 20.0
MARGIN_S = 15.0
"""What a try may take beyond the time that the service may wait."""


class ServiceClient:
    """``async with ServiceClient(url, token) as service: await service.write({...})``.

    Every method takes ``timeout_s``, the deadline of all its tries together; the first that fails is a warning. Raises
    DeadlineError when it is over, RolloutError with the service's own words and ``status`` for what it refuses."""

    def __init__(self, url: str | None, token: str | None) -> None:
        if not url:
            raise ConfigError("it is not given", where="--rollout-service-url", expected="http://HOST:PORT")
        if not token:
            what, where = "there is no token for the rollout service", "BUFFER_RL_ROLLOUT_SERVICE_TOKEN"
            expected = "that of the service, which says at its start which file has it"
            raise ConfigError(what, where=where, expected=expected)
        self._url = url.rstrip("/")
        self._token = token
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(headers={"Authorization": f"Bearer {self._token}"})
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def write(self, trajectory: Mapping[str, Any], *, timeout_s: float = 300.0) -> dict[str, Any]:
        """Write one trajectory; without a ``uid`` it gets one, the same for all tries. Returns the service's answer,
        with ``weight_version``, the newest weights that a reader told the service; None before a run reads."""
        return await self._call("POST", "/write", {"uid": uuid.uuid4().hex, **trajectory}, timeout_s)

    async def read(
        self,
        reader: str,
        num_groups: int,
        *,
        position: int | None = None,
        again_from: int | None = None,
        keep_from: int = 0,
        have: Sequence[int] = (),
        weight_version: int | None = None,
        timeout_s: float,
    ) -> dict[str, Any]:
        """Lease groups, at most ``MAX_GROUPS``: ``store``, and ``groups``, none if none is ready in ``READ_WAIT_S``."""
        asked: dict[str, Any] = {"reader": reader, "num_groups": min(num_groups, MAX_GROUPS), "have": list(have)}
        asked |= {"position": position, "again_from": again_from, "keep_from": keep_from}
        asked |= {"wait_s": max(0.0, min(READ_WAIT_S, timeout_s)), "weight_version": weight_version}
        return await self._call("POST", "/read", asked, timeout_s + MARGIN_S)

    async def acknowledge(
        self, reader: str, *, delivered: Sequence[int] = (), dropped: Mapping[int, str] | None = None, timeout_s: float
    ) -> None:
        """End leases."""
        asked = {"delivered": list(delivered), "dropped": {str(n): reason for n, reason in (dropped or {}).items()}}
        await self._call("POST", "/ack", {"reader": reader, **asked}, timeout_s)

    async def peek(self, *, timeout_s: float) -> list[dict[str, Any]]:
        """The groups, at most one, that a reader would get next. Nothing changes."""
        answer = await self._call("GET", "/peek", None, timeout_s)
        return list(answer["groups"])

    async def statistics(self, *, timeout_s: float) -> dict[str, Any]:
        """Counts of groups and trajectories, and ``weight_version`` as in the answer of ``write``."""
        return await self._call("GET", "/stats", None, timeout_s)

    async def _call(self, method: str, path: str, payload: Any, timeout_s: float) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        is_logged = False
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    status, answer = await self._try(method, path, payload)
                if status == 200 and answer:
                    return answer
                problem: Exception = self._refusal(status, answer, path)
                if status not in AGAIN:
                    raise problem
            except aiohttp.InvalidURL as error:
                raise ConfigError(f"it is no address: {error}", where="--rollout-service-url") from error
            except (aiohttp.ClientError, OSError) as error:  # also of the deadline
                problem = error
            place, why = f"{mask_url(self._url)}{path}", str(problem) or type(problem).__name__
            if loop.time() + RETRY_S > deadline:
                what = f"the call was not done within {timeout_s:g} s: {why}"
                hint = "is it running? python -m buffer_rl_rollout_service --help"
                raise DeadlineError(what, where=place, hint=hint) from problem
            if not is_logged:
                is_logged = True
                _log.warning("%s: %s; it is tried again for up to %.1f s", place, why, deadline - loop.time())
            await asyncio.sleep(RETRY_S)

    async def _try(self, method: str, path: str, payload: Any) -> tuple[int, dict[str, Any]]:
        assert self._session is not None, "the client is used outside of its `async with`"
        body = None if payload is None else orjson.dumps(payload)
        longest = aiohttp.ClientTimeout(total=READ_WAIT_S + 4 * MARGIN_S)
        async with self._session.request(method, self._url + path, data=body, timeout=longest) as response:
            raw = await response.read()
        try:
            answer = orjson.loads(raw)
        except orjson.JSONDecodeError:  # of some other server
            answer = None
        return response.status, answer if isinstance(answer, dict) else {}

    def _refusal(self, status: int, answer: Mapping[str, Any], path: str) -> RolloutError:
        error = answer.get("error")
        said: Mapping[str, Any] = error if isinstance(error, Mapping) else {"what": "no service of rollouts answered"}
        return RolloutError(
            str(said.get("what")),
            where=f"{mask_url(self._url)}{path}, HTTP {status}",
            expected=str(said.get("expected", "")),
            hint=str(said.get("hint", "")),
            status=status,
        )


def write_trajectory(
    url: str, token: str, trajectory: Mapping[str, Any], *, timeout_s: float = 300.0
) -> dict[str, Any]:
    """Write one trajectory from synchronous code; see ``ServiceClient.write``."""

    async def write() -> dict[str, Any]:
        async with ServiceClient(url, token) as service:
            return await service.write(trajectory, timeout_s=timeout_s)

    return asyncio.run(write())
