"""GLM-4, the architecture that a plugin adds, beside that of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from buffer_rl.testing.tiny import make_tiny_model
from harness import megatron_models
from harness.megatron_ranks import HAS_MEGATRON, REASON, Layout, RankError, RankPool

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(not HAS_MEGATRON, reason=REASON),
    pytest.mark.timeout(300),
]

GLM4 = {"model_class": "buffer_rl_megatron_glm4:Glm4Bridge"}
LAYOUTS = {
    "one rank": (1, Layout()),
    "tp2": (2, Layout(tp=2)),
    "tp2 sp": (2, Layout(tp=2, sp=True)),
    "pp2": (2, Layout(pp=2)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "glm4", "glm4")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_and_weights_are_those_of_transformers(ranks: RankPool, folder: str, layout: str) -> None:
    from transformers import AutoModelForCausalLM

    tokens = np.random.default_rng(0).integers(3, 99, (2, 40))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens)).logits.numpy()
    world, sizes = LAYOUTS[layout]
    found = ranks.run(world, megatron_models.logits, sizes, folder, tokens, "", GLM4)
    (*_, answer) = [each for each in found if each is not None]
    assert np.abs(answer[..., :99] - expected).max() <= 5e-6
    for weights in ranks.run(world, megatron_models.round_trip, sizes, folder, GLM4):
        assert weights["differing"] == weights["missing"] == weights["repeated"] == []


def test_a_folder_whose_norms_have_no_place_is_refused(ranks: RankPool, folder: str, tmp_path: Path) -> None:
    """A class of the user's own, named by its file, which forgets the two norms."""
    (tmp_path / "own.py").write_text(
        "from buffer_rl_megatron_glm4 import Glm4Bridge\n"
        "class Own(Glm4Bridge):\n"
        "    def customize_local_spec(self, block):\n"
        "        return block\n"
    )
    changes = {"model_class": f"{tmp_path / 'own.py'}:Own"}
    with pytest.raises(RankError, match=r"4 of its tensors have no place in the model, such as .*post_mlp_layernorm"):
        ranks.run(1, megatron_models.round_trip, Layout(), folder, changes)


def test_an_architecture_is_found_by_its_entry_point_and_an_unknown_one_is_refused(
    ranks: RankPool, tmp_path: Path
) -> None:
    info = tmp_path / "someone-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: someone\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[buffer_rl_megatron.model]\nsome_model = buffer_rl_megatron_glm4:Glm4Bridge\n"
    )
    assert ranks.run(1, megatron_models.class_of, "some_model", str(tmp_path)) == ["Glm4Bridge"]
    with pytest.raises(RankError, match="no Megatron mapping of the architecture gpt_neox"):
        ranks.run(1, megatron_models.class_of, "gpt_neox", str(tmp_path))
