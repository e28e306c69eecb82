"""What an asynchronous run says at its start."""

from __future__ import annotations

from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.options.section import compose
from buffer_rl.plan.staleness import slots_text, staleness_notice, store_text


def args_of(**options: Any) -> Any:
    return compose(CORE_SECTIONS)(**options)


STEP = {"rollout_batch_size": 8, "n_samples_per_prompt": 4, "rollout_num_engines": 2, "schedule": "async"}


@pytest.mark.parametrize(
    ("options", "end"),
    [
        (
            {"engine_max_running_requests": 32},
            "up to 16 groups (64 samples) are in flight; rollout workers send at most 512 at a time; "
            "engines have 64 slots",
        ),
        ({"engine_max_running_requests": 40}, "; engines have 80 slots, of which at least 16 stay empty"),
        (
            {"engine_max_running_requests": 40, "rollout_concurrency": 70},
            "; engines have 80 slots, of which at least 16 stay empty",
        ),
        (
            {"engine_max_running_requests": 40, "rollout_concurrency": 20},
            "of which at least 60 stay empty: --rollout-concurrency 64 fills more",
        ),
        (
            {"engine_max_running_requests": 32, "rollout_concurrency": 20},
            "send at most 20 at a time; engines have 64 slots, of which at least 44 stay empty: "
            "--rollout-concurrency 64 fills more",
        ),
        (
            {"engine_max_running_requests": 32, "rollout_concurrency": 20, "num_rollout_workers": 3},
            "send at most 60 at a time; engines have 64 slots, of which at least 4 stay empty: "
            "--rollout-concurrency 22 fills more",
        ),
        (
            {"router_url": "http://router", "engine_urls": ["http://engine"]},
            "; the slots of engines that run elsewhere are not known",
        ),
        ({"router_url": "http://router", "engine_max_running_requests": 32}, "engines have 64 slots"),  # its own
        (
            {"schedule": "one-step-off", "engine_max_running_requests": 20},
            "have 40 slots, of which at least 8 stay empty",
        ),
        ({"schedule": "lockstep", "engine_max_running_requests": 16}, "engines have 32 slots"),
    ],
)
def test_the_text_says_what_is_in_flight_and_what_stays_empty(options: dict[str, Any], end: str) -> None:
    assert slots_text(args_of(**{**STEP, **options})).endswith(end)


def test_one_text_has_staleness_bound_window_and_what_is_in_flight() -> None:
    args = args_of(**STEP, max_staleness=3, target_staleness=1, engine_max_running_requests=32)
    assert staleness_notice(args) == (
        "--schedule async: target staleness 1, at most 3; window 17: a group is trained on before 17 younger ones have "
        "passed it; up to 16 groups (64 samples) are in flight; rollout workers send at most 512 at a time; engines "
        "have 64 slots"
    )
    assert "window" not in staleness_notice(args_of(**{**STEP, "schedule": "one-step-off"}))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, ""),  # columns of a group have 4 times 4 KB, and go with the calls
        # 4 samples of 4 bytes for each of 100,000 tokens, once for prompt and response and twice for the response; 8
        # groups a step, 2 steps: 77 MB.
        (
            {"rollout_max_response_len": 100_000, "rollout_max_context_len": 100_000},
            "payloads of 2 steps take up to 0.077 GB of the object store",
        ),
        (
            {"rollout_max_response_len": 100_000},
            "payloads of 2 steps take up to 0.077 GB of the object store, prompts apart",
        ),
        # The columns of the response alone, 960 KB each, are below the limit.
        (
            {"rollout_max_response_len": 60_000, "rollout_max_prompt_len": 40_000},
            "payloads of 2 steps take up to 0.026 GB of the object store",
        ),
        (
            {"rollout_max_response_len": 10**6, "engine_context_length": 10**6},
            "payloads of 2 steps take up to 0.77 GB of the object store, which has 0.5 GB: --object-store-gb 1 holds "
            "them",
        ),
        (
            {"rollout_max_response_len": 10**6, "engine_context_length": 10**6, "ray_address": "auto"},
            "payloads of 2 steps take up to 0.77 GB of the object store",
        ),
    ],
)
def test_the_text_says_what_the_object_store_must_hold(options: dict[str, Any], text: str) -> None:
    assert store_text(args_of(**STEP, **options)) == text
