"""What a run needs in numbers: rows for ranks, cores for processes, space on the disk."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.errors import ConfigError
from buffer_rl.options.section import compose
from buffer_rl.verbs import resources
from buffer_rl.verbs.resources import PROCESS_BYTES, Needs, bytes_text, check_resources, memory_of_processes, num_cores

BYTES = 2 * (3 * 4 + 5)  # of the weights of two shapes in 16 bits


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    tensors = {"w": {"dtype": "F16", "shape": [3, 4], "data_offsets": [0, 24]}}
    tensors["v"] = {"dtype": "F16", "shape": [5], "data_offsets": [24, 34]}
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(BYTES))
    return folder


def needs(model: Path, free: int = 10**12, **changes: Any) -> tuple[Needs, list[str]]:
    chosen = {"hf_checkpoint": str(model), "run_dir": str(model.parent / "run"), "num_rollout": 10, **changes}
    with patch("shutil.disk_usage", lambda folder: SimpleNamespace(free=free)):
        return check_resources(compose(CORE_SECTIONS).model_validate(chosen))


def test_parameters_and_the_bytes_of_a_run_are_those_of_the_shapes(model: Path) -> None:
    on_disk = (model / "model.safetensors").stat().st_size
    found, notices = needs(model, weight_sync_mode="tensor", num_train_ranks=1)
    assert (found.parameters, found.disk) == (17, 17 * 4)  # the model at the end, in float32
    assert needs(model, weight_sync_mode="disk")[0].disk == 3 * 17 * 4  # and two versions for the engines
    saves: dict[str, Any] = {"save": str(model.parent / "saves"), "save_interval": 3, "weight_sync_mode": "tensor"}
    assert needs(model, **saves)[0].disk == 17 * 4 + 4 * (17 * 12 + on_disk)  # after steps 3, 6, 9 and 10
    assert needs(model, num_rollout=0)[0].disk == 0
    assert notices == []


CONFIG = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 20}
CONFIG_OF_LAYERS: dict[str, Any] = CONFIG | {"intermediate_size": [30, 20, 30]}
CONFIG |= {"intermediate_size": 30}
KEPT = 24 * 40 * 3 * 440 * 4
"""Bytes that the layers keep of 24 rows of 40 tokens."""


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # 17 parameters: weights, gradients and two moments of 4 bytes. Two versions of weights, and a cache of 2 x 3
        # layers x 2 heads x 5 numbers for each of 6 x 4 sequences on one engine, in the smallest pool, of 64 places.
        ({}, {"trainer rank": 17 * 16 + KEPT, "engine": (34 + 60 * 24 * 64) * 4}),
        ({"rollout_num_engines": 2, "engine_dtype": "bfloat16"}, {"engine": (34 + 60 * 12 * 64) * 2}),
        ({"engine_max_running_requests": 5}, {"engine": (34 + 60 * 5 * 64) * 4}),
        # The prompt has 10 tokens: pools of 64, 128 and 256; the context ends in the last one.
        ({"rollout_max_response_len": 130}, {"engine": (34 + 60 * 24 * (64 + 128 + 256)) * 4}),
        (
            {"rollout_max_response_len": 130, "engine_context_length": 150},
            {"engine": (34 + 60 * 24 * (64 + 128 + 150)) * 4},
        ),
        ({"engine_context_length": 35}, {"engine": (34 + 60 * 24 * 35) * 4}),
        # An agent asks again and again, until the conversation is as long as it may be.
        ({"tools_path": ["t.py:t"], "engine_context_length": 90}, {"engine": (34 + 60 * 24 * (64 + 90)) * 4}),
        # Of 24 rows of 40 tokens, in each of 3 layers: 7 x 20 + 6 x (4 + 2) x 5 + 4 x 30 numbers.
        ({"num_train_ranks": 5}, {"trainer rank": 17 * 16 + 5 * 40 * 3 * 440 * 4}),
        ({"max_tokens_per_gpu": 100}, {"trainer rank": 17 * 16 + 100 * 3 * 440 * 4}),
        ({"recompute_granularity": "full"}, {"trainer rank": 17 * 16 + 960 * (3 * 20 + 440) * 4}),
        ({"use_kl_loss": True}, {"trainer rank": 17 * 20 + KEPT}),
        ({"use_kl_loss": True, "bf16": True}, {"trainer rank": 17 * 18 + KEPT * 5 // 8}),
        ({"use_kl_loss": True, "lora_rank": 2}, {"trainer rank": 17 * 4 + KEPT}),
        (
            {"use_kl_loss": True, "lora_rank": 2, "bf16": True, "ref_load": "m"},
            {"trainer rank": 17 * 4 + KEPT * 5 // 8},
        ),
        ({"use_kl_loss": True, "num_ref_workers": 1}, {"trainer rank": 17 * 16 + KEPT}),
        ({"use_kl_loss": True, "num_train_ranks": 4, "fsdp_size": 2}, {"trainer rank": 17 * 10 + KEPT // 4}),
        ({"advantage_estimator": "ppo"}, {"critic rank": 17 * 16 + KEPT}),
    ],
)
def test_the_memory_of_a_process_is_estimated_from_the_model_and_the_lengths(
    model: Path, changes: dict[str, Any], expected: dict[str, int]
) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG))
    chosen: dict[str, Any] = {"hf_checkpoint": str(model), "run_dir": str(model.parent / "run"), "num_rollout": 1}
    chosen |= {"rollout_batch_size": 6, "n_samples_per_prompt": 4, "rollout_max_response_len": 30, **changes}
    args = compose(CORE_SECTIONS).model_validate(chosen)
    found = memory_of_processes(args, check_resources(args)[0], longest_prompt=10)
    assert {name: found[name][0] - PROCESS_BYTES for name in expected} == expected
    assert ("critic rank" in found) == ("critic rank" in expected)
    (model / "config.json").write_text(json.dumps(CONFIG_OF_LAYERS))
    assert memory_of_processes(args, check_resources(args)[0], longest_prompt=10) == found


def test_a_disk_that_cannot_hold_one_checkpoint_is_refused_and_a_scarce_one_is_told(model: Path) -> None:
    on_disk = (model / "model.safetensors").stat().st_size
    saves: dict[str, Any] = {"save": str(model.parent / "saves"), "save_interval": 3, "weight_sync_mode": "tensor"}
    least, most = on_disk + 17 * 12 + on_disk, 17 * 4 + 4 * (17 * 12 + on_disk)
    words = f"--run-dir and --save: the disk has {bytes_text(least - 1)} free, .* at least {bytes_text(least)}"
    with pytest.raises(ConfigError, match=re.escape(words).replace(r"\.\*", ".*")):
        needs(model, free=least - 1, **saves)
    (notice,) = needs(model, free=least, **saves)[1]
    assert f"the whole run writes {bytes_text(most)}" in notice
    assert needs(model, free=most, **saves)[1] == []
    assert needs(model, free=0, num_rollout=0)[1] == []


def test_more_ranks_than_rows_of_a_step_are_refused_with_the_product(model: Path) -> None:
    sizes: dict[str, Any] = {"rollout_batch_size": 4, "n_samples_per_prompt": 2}
    assert needs(model, **sizes, num_train_ranks=8)[0].rows == 8
    with pytest.raises(
        ConfigError, match=r"9 trainer ranks cannot share the 8 rows of a step \(--rollout-batch-size 4"
    ):
        needs(model, **sizes, num_train_ranks=9)
    with pytest.raises(ConfigError, match=r"share the 2 rows of a step \(.* in 3 optimizer steps\)"):
        needs(model, **sizes, num_train_ranks=3, num_steps_per_rollout=3)  # groups 1, 1 and 2
    for others in (
        {"custom_generate_function_path": "own:generate"},  # may return several rows a sample
        {"num_rollout": 0},
        {"debug_rollout_only": True},
        {"train_backend": "megatron"},  # whose ranks share rows
    ):
        needs(model, **sizes, num_train_ranks=9, **others)


def test_more_processes_than_cores_are_told_with_their_numbers(model: Path) -> None:
    cores = num_cores()
    found, notices = needs(model, num_train_ranks=cores + 7, rollout_num_engines=3, num_ref_workers=1)
    assert found.processes == {"trainer rank": cores + 7, "engine": 3, "ref worker": 1, "rollout worker": 1}
    assert notices[0].startswith(
        f"{cores + 7} trainer ranks, 3 engines, 1 ref worker, 1 rollout worker on {cores} core"
    )
    assert needs(model, num_train_ranks=cores, rollout_num_engines=1)[1] == []
    assert needs(model, num_train_ranks=cores + 7, ray_address="10.0.0.1:6379")[1] == []


def test_a_run_that_does_not_fit_into_memory_is_told_before_it_starts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "GPU_FILES", ())
    monkeypatch.setattr(resources, "MEMORY_LIMIT", limit := tmp_path / "memory.max")
    (model / "config.json").write_text(json.dumps(CONFIG))
    sizes: dict[str, Any] = {"rollout_batch_size": 6, "n_samples_per_prompt": 4, "rollout_max_response_len": 30}
    sizes["num_train_ranks"] = 1
    trainer, engine = 17 * 16 + 24 * 30 * 3 * 440 * 4, (34 + 60 * 24 * 64) * 4  # as above, of responses alone
    limit.write_text(f"{2 * PROCESS_BYTES + trainer + engine}\n")
    assert needs(model, **sizes)[1] == []
    limit.write_text(f"{2 * PROCESS_BYTES + trainer + engine - 1}\n")
    (notice,) = needs(model, **sizes)[1]
    assert notice.startswith(
        "this machine has 504 MB of memory, and the run may take 504 MB: a trainer rank 254 MB for "
    )
    assert "activations of 720 tokens (--max-tokens-per-gpu)" in notice
    assert needs(model, **sizes, ray_address="10.0.0.1:6379")[1] == []
    limit.write_text("max\n")
    assert needs(model, **sizes)[1] == []
    monkeypatch.setattr(resources, "MEMORY_LIMIT", tmp_path)  # which cannot be read
    assert needs(model, **sizes)[1] == []
    monkeypatch.setattr(resources, "GPU_FILES", (str(limit),))
    limit.write_text("1\n")
    assert needs(model, **sizes)[1] == []


def test_bytes_are_shown_in_powers_of_1000() -> None:
    assert [bytes_text(count) for count in (0, 999, 1500, 2.5e9, 7e15)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "2.5 GB",
        "7e+03 TB",
    ]
