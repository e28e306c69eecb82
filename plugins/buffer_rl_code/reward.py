"""``--rm-type code``: the share of a row's tests that the code of a response passes, or whether it passes all.

The candidate runs in the sandbox of ``--code-sandbox`` with the inputs of the tests. What is expected never enters
it: answers are compared here. A sandbox that fails is a RewardError, never a 0.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from buffer_rl.errors import RewardError
from buffer_rl.kinds.marks import rows_may_choose
from buffer_rl.records.groups import Sample, Status
from buffer_rl_code import driver
from buffer_rl_code.options import sandbox_of
from buffer_rl_code.row_tests import SPARE, Tests, tests_of
from buffer_rl_code.sandbox import Program, Sandbox
from rm_hub.answers import answer_of, where

MAX_CODE = 1 << 16
OUTPUT_BYTES = 1 << 24
_FENCED = re.compile(r"^([ \t]*)```[ \t]*([A-Za-z0-9+#]*)[^\n]*\n(.*?)^\1```[ \t]*$", re.MULTILINE | re.DOTALL)


@rows_may_choose
def score(args: Any, sample: Sample) -> float:
    """1.0 if the code passes every test of ``metadata["tests"]``, else 0.0. 0.0 if the sample did not end by itself.

    The code is the last fenced block of the answer, or else the whole answer. Raises RewardError for tests that cannot
    be read and for a sandbox that fails.
    """
    return float(_share(args, sample) == 1.0)


@rows_may_choose
def score_fraction(args: Any, sample: Sample) -> float:
    """The share of the tests that the code passes, 0 to 1; otherwise as ``score``."""
    return _share(args, sample)


def code_of(answer: str) -> str:
    """The last block between ``` lines, one of Python if there is one; without blocks, the whole answer. What indents
    both lines, as in a list, is no part of the code."""
    found = _FENCED.findall(answer)
    blocks = [(language, re.sub(f"(?m)^{indent}", "", body)) for indent, language, body in found]
    python = [body for language, body in blocks if language.lower() in ("python", "py", "python3")]
    return str((python or [body for _, body in blocks] or [answer])[-1])


def _share(args: Any, sample: Sample) -> float:
    place = where(sample, "code")
    tests = tests_of(sample.metadata, where=place)
    if tests.limit > OUTPUT_BYTES:
        raise RewardError("its tests expect too much text", where=place, expected=f"{OUTPUT_BYTES // SPARE} characters")
    code = code_of(answer_of(args, sample))
    if sample.status is not Status.COMPLETED or not code.strip() or len(code) > MAX_CODE:
        return 0.0
    answers = answers_to(sandbox_of(args), code, tests, timeout_s=args.code_timeout_s, memory_mb=args.code_memory_mb)
    if answers is None:
        raise RewardError("the sandbox ended before the code was loaded", where=place)
    return sum(tests.is_right(number, answer) for number, answer in enumerate(answers)) / len(tests.expected)


def answers_to(
    sandbox: Sandbox, code: str, tests: Tests, *, timeout_s: float, memory_mb: int
) -> list[Mapping[str, Any]] | None:
    """Answers of the code to the first tests, perhaps to all; None if the sandbox did not come to the code."""
    nonce = secrets.token_hex(16)
    given = json.dumps({"nonce": nonce, "limit": tests.limit, "code": code, **tests.task}).encode()
    program = Program(code=_driver(), stdin=given, timeout_s=timeout_s, memory_mb=memory_mb, output_bytes=OUTPUT_BYTES)
    printed, mark = sandbox.run(program).stdout.decode(errors="replace").splitlines(), f"{nonce} "
    lines = [line.removeprefix(mark) for line in printed if line.startswith(mark)]
    if not lines or lines[0] != "ready":
        return None
    answers: list[Mapping[str, Any]] = []
    for line in lines[1 : 1 + len(tests.expected)]:
        answers.append({})
        with suppress(ValueError, RecursionError):  # cut at a limit, or the candidate's own
            answers[-1] = json.loads(line)
    return [answer if isinstance(answer, Mapping) else {} for answer in answers]


@lru_cache(maxsize=1)
def _driver() -> str:
    return Path(driver.__file__).read_text(encoding="utf-8")
