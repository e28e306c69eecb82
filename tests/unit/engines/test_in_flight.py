"""What follows from the staleness of a schedule for requests: their deadline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.engines.client import EngineClient, request_timeout_s
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
