"""A sandbox behind an address, in the form of SandboxFusion (``POST /run_code``), for machines without user namespaces.

What the sandbox holds is the server's affair. The verdict is made here as with bubblewrap.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any

from buffer_rl.errors import ConfigError, RewardError
from buffer_rl.options.redaction import mask_url
from buffer_rl_code.sandbox import Ended, Program, ProgramRun

TOKEN = "BUFFER_RL_CODE_SANDBOX_TOKEN"
ATTEMPTS = 3
FIRST_PAUSE_S = 0.2
BUSY = frozenset({429, 500, 502, 503, 504})
QUEUE_S = 20.0  # in which the server may have the request wait, beside the program's own time
CHECK_S = 2.0
ENDED = {"Finished": Ended.EXITED, "Error": Ended.EXITED, "TimeLimitExceeded": Ended.TIMEOUT}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


class SandboxServer:
    """Runs each program by one request to the server of ``--code-sandbox URL``."""

    def __init__(self, args: Any) -> None:
        self._url = str(args.code_sandbox).rstrip("/")
        self._place = f"--code-sandbox {mask_url(self._url)}"
        self._opener = urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler({}))

    def check(self) -> None:
        """Raises ConfigError if the server does not answer, or does not run a program."""
        try:
            run = self._ask(Program(code="print(input()[::-1])", stdin=b"desrever", timeout_s=1.0), CHECK_S)
        except (RewardError, _BusyError) as error:
            reason = error.what if isinstance(error, RewardError) else str(error)
            hint = "start the server, or leave --code-sandbox out to run candidates here"
            raise ConfigError(f"the sandbox server does not work: {reason}", where=self._place, hint=hint) from error
        if run.stdout.strip() != b"reversed":
            raise ConfigError(f"the sandbox server printed {run.stdout[:80]!r}", where=self._place, expected="reversed")

    def run(self, program: Program) -> ProgramRun:
        """Raises RewardError if the server fails three times, or answers in another form."""
        for attempt in range(ATTEMPTS):
            try:
                return self._ask(program, program.timeout_s + QUEUE_S)
            except _BusyError as error:
                failure = str(error)
                time.sleep(FIRST_PAUSE_S * 2**attempt)
        raise RewardError(f"the sandbox server failed {ATTEMPTS} times: {failure}", where=self._place)

    def _ask(self, program: Program, timeout_s: float) -> ProgramRun:
        body = {
            "code": program.code,
            "language": "python",
            "stdin": program.stdin.decode(errors="replace"),
            "run_timeout": program.timeout_s,
            "memory_limit_MB": program.memory_mb,
            "files": {},
            "fetch_files": [],
        }
        headers = {"Content-Type": "application/json"}
        if token := os.environ.get(TOKEN):
            headers["Authorization"] = f"Bearer {token}"
        request = urllib.request.Request(f"{self._url}/run_code", json.dumps(body).encode(), headers)
        limit = 2 * program.output_bytes + (1 << 16)
        try:
            with self._opener.open(request, timeout=timeout_s) as response:
                data = response.read(limit + 1)
        except urllib.error.HTTPError as error:
            with error:
                if error.code in BUSY:
                    raise _BusyError(f"HTTP {error.code}") from error
                raise RewardError(f"the sandbox server answered HTTP {error.code}", where=self._place) from error
        except (OSError, HTTPException) as error:
            raise _BusyError(str(error)) from error
        if len(data) > limit:
            return ProgramRun(ended=Ended.OUTPUT, stdout=b"")
        return self._read(data, program)

    def _read(self, data: bytes, program: Program) -> ProgramRun:
        try:
            answer = json.loads(data)
        except (ValueError, RecursionError):
            answer = None
        if isinstance(answer, Mapping) and answer.get("status") == "SandboxError":
            raise _BusyError(f"SandboxError: {answer.get('message')!s:.200}")
        run = answer.get("run_result") if isinstance(answer, Mapping) else None
        if not isinstance(run, Mapping) or run.get("status") not in ENDED:
            what = f"the sandbox server answered {data[:200]!r}"
            raise RewardError(what, where=self._place, expected="an answer of /run_code")
        stdout = str(run.get("stdout") or "").encode(errors="replace")
        ended = ENDED[run["status"]] if len(stdout) <= program.output_bytes else Ended.OUTPUT
        return ProgramRun(
            ended=ended,
            exit_code=int(run.get("return_code") or 0),
            stdout=stdout[: program.output_bytes],
            stderr=str(run.get("stderr") or "")[-1000:],
        )


class _BusyError(Exception):
    """Worth another attempt."""
