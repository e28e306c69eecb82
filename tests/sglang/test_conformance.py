"""A real server answers each case of the conformance suite as its case says that SGLang does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.options.section import compose
from buffer_rl_sglang.launcher import MARGIN, launch
from buffer_rl_sglang.options import SglangOptions
from conformance.reference import CONTEXT, Reference
from conformance.run import all_cases, run_all

from .conftest import TIMEOUT_S

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(TIMEOUT_S)]


def test_every_case_is_answered_as_it_says(sglang_python: str, tmp_path: Path) -> None:
    reference = Reference(str(tmp_path / "models"))
    args: Any = compose([*CORE_SECTIONS, SglangOptions])(
        hf_checkpoint=reference.folder("0"),
        engine_device="cpu",
        engine_context_length=CONTEXT - MARGIN,
        engine_max_running_requests=16,
        sglang_python=sglang_python,
    )
    launch.check(args)
    server = launch(args, 0, str(tmp_path / "server.log"))
    try:
        server.wait_ready(300)
        cases = all_cases(reference)
        results = asyncio.run(run_all(cases, server.url, reference, is_sglang=True))
    finally:
        server.stop()
    wrong = [f"{case.topic}: {case.name}: {own.wrong}" for case, own in zip(cases, results, strict=True) if own.wrong]
    assert not wrong, "\n".join(wrong)
