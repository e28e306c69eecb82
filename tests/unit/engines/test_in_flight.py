"""What follows from the staleness of a schedule for requests: their deadline, and the slots that they fill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.engines.client import EngineClient, request_timeout_s
from buffer_rl.engines.fleet import slots_notice
from buffer_rl.options.section import compose

TIMES = {"generate_timeout_s": 100.0, "update_weights_timeout_s": 30.0}


def args_of(**options: Any) -> Any:
    return compose(CORE_SECTIONS)(**options)


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({}, 100.0),
        ({"schedule": "pipelined"}, 100.0),
        ({"schedule": "async", "max_staleness": 0}, 100.0),
        ({"schedule": "one-step-off"}, 230.0),
        ({"schedule": "async"}, 230.0),  # S = 1
        ({"schedule": "async", "max_staleness": 4, "target_staleness": 3}, 430.0),
    ],
)
def test_a_request_has_time_for_the_tickets_that_share_the_engines_and_for_weights_to_load(
    options: dict[str, Any], seconds: float, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 6}))
    args = args_of(**TIMES, **options, router_url="http://router", hf_checkpoint=str(tmp_path))
    assert request_timeout_s(args) == seconds
    assert EngineClient.from_args(args).timeout_s == seconds


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
        ({"schedule": "lockstep", "engine_max_running_requests": 16}, "engines have 32 slots"),
    ],
)
def test_the_notice_says_what_is_in_flight_and_what_stays_empty(options: dict[str, Any], end: str) -> None:
    assert slots_notice(args_of(**{**STEP, **options})).endswith(end)
