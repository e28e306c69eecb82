"""The weight transport of examples/weight_transports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.options.section import compose
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.weights.publish import Publisher
from harness.fake_roles import FakeEngines, local_senders

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "weight_transports" / "bfloat16_folder.py"


def test_the_folder_of_a_version_holds_the_weights_rounded(tmp_path: Path) -> None:
    factory: Any = PluginRegistry().resolve("weight_transport", f"{EXAMPLE}:BFloat16Folder")
    args: Any = compose(CORE_SECTIONS)(run_dir=str(tmp_path / "run"), hf_checkpoint=str(tmp_path))
    trainer = local_senders(factory, args, lambda: iter([{"a": torch.tensor([1.0, 1.001])}]))
    engines: Any = FakeEngines()
    Publisher(factory(args), trainer, engines).publish(3)
    written = load_file(tmp_path / "run" / "weights" / "v000003" / "model-00001.safetensors")
    assert torch.equal(written["a"], torch.tensor([1.0, 1.0], dtype=torch.bfloat16))
    assert engines.version == 3
