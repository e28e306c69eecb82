"""Tiny models for the tests of conversations, and a task for those of options."""

from __future__ import annotations

import asyncio
import functools
import json
import ssl
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import uvicorn.server

from harness.agent_play import user
from harness.engine_fixtures import model_folder as model_folder

TICK_S = 0.005


@pytest.fixture(scope="package", autouse=True)
def quick_clients_and_servers() -> Iterator[None]:
    """Each of hundreds of clients would load certificates, which none here needs, and each server would take two tenths
    of a second to end: uvicorn looks so often whether it should."""
    own = {**vars(asyncio), "sleep": lambda seconds: asyncio.sleep(min(seconds, TICK_S))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        patch.setattr(uvicorn.server, "asyncio", SimpleNamespace(**own))
        yield


@pytest.fixture(scope="session")
def tiny_task(tmp_path_factory: pytest.TempPathFactory, model_folder: Callable[..., str]) -> dict[str, str]:
    """Values of the options that every command needs."""
    rows = tmp_path_factory.mktemp("task") / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": user("go"), "label": "1"}) + "\n", encoding="utf-8")
    return {
        "hf-checkpoint": model_folder("qwen3"),
        "prompt-data": str(rows),
        "custom-rm-path": "harness.agent_play:one",
    }
