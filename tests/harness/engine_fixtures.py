"""Tiny models with random weights, one of each architecture, made once a test session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from buffer_rl.testing.tiny import make_tiny_model


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """``model_folder("qwen3", seed=1)``: the folder of a tiny model."""
    base = tmp_path_factory.mktemp("models")
    made: dict[tuple[str, int], str] = {}

    def make(architecture: str = "qwen3", seed: int = 0) -> str:
        key = (architecture, seed)
        if key not in made:
            made[key] = make_tiny_model(Path(base, f"{architecture}-{seed}"), architecture, seed=seed)
        return made[key]

    return make


@pytest.fixture(scope="module")
def engine_args(model_folder: Callable[..., str], forked_processes: None) -> Callable[..., Any]:
    """Options as the launcher and the fleet read them."""

    def make(**changes: Any) -> Any:
        args = {
            "hf_checkpoint": model_folder("qwen3"),
            "engine_host": "127.0.0.1",
            "router_url": None,
            "router": "sglang",
            "router_policy": "manual",
            "router_args": {},
            "rollout_external_engine_addrs": [],
            "engine_urls": [],
            "engine_api_key": None,
            "plugin": [],
            "trust_remote_code": False,
            "rollout_engine": "embedded",
            "rollout_num_engines": 1,
            "engine_device": "cpu",
            "engine_dtype": "float32",
            "engine_num_threads": 1,
            "engine_max_running_requests": 16,
            "engine_context_length": None,
            "engine_start_timeout_s": 120.0,
            "rollout_health_check_timeout": 60.0,
            "engine_max_restarts": 2,
            "update_weights_timeout_s": 60.0,
            "generate_timeout_s": 60.0,
            "schedule": "lockstep",
            "max_staleness": None,
            "target_staleness": None,
            "publication": None,
            "stream_gradients": False,
            "deterministic": True,
            "replay_kept_tokens": False,
            "replay_routed_experts": False,
        }
        return SimpleNamespace(**{**args, **changes})

    return make
