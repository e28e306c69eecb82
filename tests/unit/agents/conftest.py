"""Tiny models for the tests of conversations, and a task for those of options."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from harness.agent_play import user
from harness.engine_fixtures import model_folder as model_folder
from harness.quick_http import quick_clients_and_servers as quick_clients_and_servers


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
