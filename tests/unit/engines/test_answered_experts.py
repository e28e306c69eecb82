"""The experts in the answers of a SGLang server: how they are asked for and read."""

from __future__ import annotations

import json

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.engines.client import EngineClient, parse_answer
from buffer_rl.errors import EngineError
from buffer_rl.options.section import compose
from buffer_rl.records.experts import ExpertSizes
from buffer_rl.testing.fake_engine import FakeEngine

RECORDED = {
    "output_ids": [0, 14, 68],
    "meta_info": {
        "finish_reason": {"type": "length", "length": 3},
        "output_token_logprobs": [[-5.6048431, 0, None], [-4.3729205, 14, None], [-4.921175, 68, None]],
        "weight_versions": [{"version": "0", "start": 0, "end": 3}],
        "routed_experts": "AAAAAAAAAAACAAAABgAAAAYAAAAHAAAAAgAAAAQAAAAAAAAAAAAAAAIAAAAGAAAAAAAAAAYAAAACAAAABAAAAAAAAAAA"
        "AAAABgAAAAIAAAAGAAAAAAAAAAEAAAADAAAA",
    },
}
"""Of SGLang 0.5.23, of two prompt tokens and three more, from the second on: a GLM-4 MoE of four layers, the first of
which has no experts."""


def test_of_a_servers_layers_those_with_experts_are_kept():
    sizes = ExpertSizes.of(
        {"n_routed_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 4, "first_k_dense_replace": 1}
    )
    result = parse_answer(RECORDED, "u", experts=sizes, num_prompt_tokens=2, experts_start=1)
    assert result.experts_start == 1
    assert result.experts.tolist() == [[[2, 6], [6, 7], [2, 4]], [[2, 6], [0, 6], [2, 4]], [[6, 2], [6, 0], [1, 3]]]
    with pytest.raises(EngineError, match="24 numbers for 2 tokens"):
        parse_answer(RECORDED, "u", experts=sizes, num_prompt_tokens=2, experts_start=2)


async def test_experts_are_asked_for_from_the_token_on_that_has_none_yet(tmp_path):
    sizes = {"vocab_size": 6, "num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    for router, expected in (("smg", [(True, 0), (True, 2)]), ("sglang", [(None, None)] * 2)):
        with FakeEngine() as engine:
            args = compose(CORE_SECTIONS)(
                hf_checkpoint=str(tmp_path), router_url=engine.url, router=router, replay_routed_experts=True
            )
            async with EngineClient.from_args(args) as client:
                for start in (0, 2):
                    await client.agenerate(f"r{start}", [5, 4, 3], {}, experts_start=start)
        names = ("return_routed_experts", "routed_experts_start_len")
        assert [tuple(map(request.get, names)) for request in engine.log.requests] == expected
