"""Each command line of plugins/buffer_rl_megatron/README.md can be typed: its flags are options, and its ranks fit the
parallelism."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.cli import main
from buffer_rl.options.checks import check_options
from buffer_rl.options.help import FlagParser, add_options, given_flags, take_items
from buffer_rl.options.section import compose
from buffer_rl.options.sources import resolve
from buffer_rl.plan.counts import with_counts
from buffer_rl.testing.tiny import make_tiny_model
from buffer_rl_megatron.model_shape import ModelShapeOptions
from buffer_rl_megatron.options import MegatronOptions, layout
from buffer_rl_sglang.options import SglangOptions
from harness.megatron_ranks import HAS_MEGATRON, REASON

PAGE = Path(__file__).resolve().parents[3] / "plugins" / "buffer_rl_megatron" / "README.md"
FENCES = re.findall(r"```(\w*)\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
BLOCKS = [text for language, text in FENCES if not language]
COMMANDS = [
    line for block in BLOCKS for line in block.replace("\\\n", "").splitlines() if line.startswith("buffer-rl train ")
]
SECTIONS = [*CORE_SECTIONS, SglangOptions, MegatronOptions, ModelShapeOptions]
EXPECTED: list[tuple[int, dict[str, Any]]] = [
    (1, {"num_train_ranks": 1}),
    (2, {"num_train_ranks": 4, "rollout_num_engines": 2, "tensor_model_parallel_size": 2, "bf16": True}),
    (4, {"num_train_ranks": 4, "rollout_num_engines": 1, "expert_model_parallel_size": 4, "moe_grouped_gemm": True}),
]


@pytest.mark.parametrize(("command", "expected"), list(zip(COMMANDS, EXPECTED, strict=True)), ids=range(len(EXPECTED)))
def test_a_command_line_can_be_typed(command: str, expected: tuple[int, dict[str, Any]], tmp_path: Path) -> None:
    parser = FlagParser(prog="buffer-rl")
    add_options(parser, SECTIONS)
    parser.add_argument("--config")
    parser.set_defaults(sections=SECTIONS)
    namespace, extra = parser.parse_known_args(shlex.split(command)[2:])
    assert take_items(namespace, extra) == []
    config = tmp_path / "run.yaml"
    config.write_text("hf_checkpoint: /models/m\nprompt_data: d.jsonl\nnum_rollout: 3\nrm_type: exact_match\n")
    args: Any = with_counts(
        resolve(compose(SECTIONS), flags=given_flags(namespace), environ={}, config_paths=[str(config)]).args
    )
    check_options(args)
    replicas, options = expected
    assert layout(args).dp_size == replicas
    assert {name: getattr(args, name) for name in options} == options


@pytest.mark.skipif(not HAS_MEGATRON, reason=REASON)
@pytest.mark.parametrize(("number", "architecture"), [(1, "qwen3"), (2, "qwen3_moe")], ids=["dense", "experts"])
def test_a_command_line_for_eight_gpus_passes_a_dry_run_and_needs_all_of_them(
    number: int, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The machine is said to have the devices, TransformerEngine and a Python with SGLang; all else is looked at."""
    model = make_tiny_model(tmp_path / "model", architecture, max_position_embeddings=65536)
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n' * 32)
    config = tmp_path / "run.yaml"
    config.write_text(f"prompt_data: {tmp_path / 'train.jsonl'}\nnum_rollout: 3\nrm_type: exact_match\n")
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    server = tmp_path / "python"
    server.write_text("#!/bin/sh\necho 0.5.23\n")
    server.chmod(0o755)
    words = shlex.split(COMMANDS[number])[1:]
    own = {"--config": str(config), "--hf-checkpoint": model, "--sglang-python": str(server)}
    for flag, value in own.items():
        words[words.index(flag) + 1] = value
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert main([*words, "--dry-run"]) == 0
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 7)
    capsys.readouterr()
    assert main([*words, "--dry-run"]) != 0
    assert "7 GPUs" in capsys.readouterr().err
