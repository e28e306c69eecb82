"""Each command line of the page can be typed: its flags are options, and do not contradict each other."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.options.checks import check_options
from buffer_rl.options.help import FlagParser, add_options, given_flags, take_items
from buffer_rl.options.section import compose
from buffer_rl.options.sources import resolve
from buffer_rl.plan.counts import with_counts
from buffer_rl_sglang.options import SglangOptions

PAGE = Path(__file__).resolve().parents[3] / "docs" / "cluster.md"
BLOCKS = re.findall(r"```\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
COMMANDS = [
    line for block in BLOCKS for line in block.replace("\\\n", "").splitlines() if line.startswith("buffer-rl train ")
]
SECTIONS = [*CORE_SECTIONS, SglangOptions]
EXPECTED: list[dict[str, Any]] = [
    {"rollout_engine": "embedded"},
    {"rollout_engine": "sglang", "sglang_python": ".venv-sglang/bin/python"},
    {"num_train_ranks": 4, "rollout_num_engines": 2, "sglang_args": {"mem_fraction_static": "0.8"}},
    {"num_train_ranks": 8, "rollout_num_engines": 4, "weight_sync_mode": "distributed", "ray_address": "auto"},
    {"rollout_num_engines": 2, "rollout_engine": "external"},
    {"router_url": "http://10.0.0.9:30080", "engine_urls": ["http://10.0.0.7:30000", "http://10.0.0.8:30000"]},
]


@pytest.mark.parametrize(("command", "expected"), list(zip(COMMANDS, EXPECTED, strict=True)), ids=range(len(EXPECTED)))
def test_a_command_line_can_be_typed(command: str, expected: dict[str, Any], tmp_path: Path) -> None:
    parser = FlagParser(prog="buffer-rl")
    add_options(parser, SECTIONS)
    parser.add_argument("--config")
    parser.set_defaults(sections=SECTIONS)
    namespace, extra = parser.parse_known_args(shlex.split(command)[2:])
    assert take_items(namespace, extra) == []
    config = tmp_path / "run.yaml"  # what the page's run.yaml is about: the task
    config.write_text("hf_checkpoint: /models/m\nprompt_data: d.jsonl\nnum_rollout: 3\nrm_type: exact_match\n")
    args: Any = with_counts(
        resolve(compose(SECTIONS), flags=given_flags(namespace), environ={}, config_paths=[str(config)]).args
    )
    check_options(args)
    assert {name: getattr(args, name) for name in expected} == expected
