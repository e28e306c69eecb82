"""What changed between two versions: its forms, that they are exact, and that faults of them are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.errors import ConfigError, EngineError
from buffer_rl.options.section import compose
from buffer_rl.testing.tiny import make_tiny_model
from buffer_rl.weights.delta import DeltaSource, apply, encode, tensor_digest, weights_digest
from buffer_rl.weights.options import WeightOptions
from buffer_rl.weights.sender import cast_for_engines

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]
BF16 = torch.bfloat16


def bits(tensor: torch.Tensor) -> list[int]:
    return list(tensor.contiguous().view(-1).view(torch.uint8).tolist())


def changed(before: torch.Tensor, at: list[int], value: float = 1.5) -> torch.Tensor:
    after = before.clone().view(-1)
    after[at] = torch.tensor(value).to(after.dtype)
    return after.view(before.shape)


def applied(before: torch.Tensor, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    tensors = {"w": before.clone()}
    apply(parts, tensors)
    return tensors["w"]


def test_few_changes_are_gaps_of_16_bits_more_are_gaps_of_8_and_many_are_the_whole_tensor() -> None:
    before = torch.zeros(40, 100, dtype=BF16)
    few = encode("w", before, changed(before, [3, 700, 701]))
    assert few["w:gaps"].dtype == torch.int16
    assert few["w:gaps"].tolist() == [3, 696, 0]
    assert few["w:values"].tolist() == [1.5] * 3
    more = encode("w", before, changed(before, list(range(10, 4000, 50))))  # 80 of 4,000: more than one in 85
    assert more["w:gaps"].dtype == torch.uint8
    assert more["w:gaps"].tolist()[:7] == [10, 49, 49, 49, 49, 44, 4]  # 10, 60, 110, 160, 210, and 255, 260
    assert more["w:values"].tolist()[:7] == [1.5] * 5 + [0, 1.5]
    # 1 byte and 2 for 2,600 elements are 7,800; with each 256th, of which there are 15, as much as all, 8,000, or more.
    assert set(encode("w", before, changed(before, list(range(2600))))) == {"w:gaps", "w:values"}
    assert encode("w", before, after := changed(before, list(range(2700)))) == {"w": after}
    assert encode("w", before, before.clone()) == {}
    assert list(encode("w", None, before)) == ["w"]


def test_every_65536th_element_is_listed_so_that_a_wide_gap_has_16_bits() -> None:
    before = torch.zeros(200_000, dtype=BF16)
    after = changed(before, [199_999])
    parts = encode("w", before, after)
    positions = (parts["w:gaps"].to(torch.int64) % 65_536 + 1).cumsum(0) - 1
    assert positions.tolist() == [65_535, 131_071, 196_607, 199_999]
    assert torch.equal(applied(before, parts), after)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.0001, 0.004, 0.05, 0.3, 1.0])
def test_a_delta_gives_the_bits_of_the_version_also_of_values_that_are_no_numbers(
    dtype: torch.dtype, share: float
) -> None:
    random = torch.Generator().manual_seed(1)
    size = dtype.itemsize
    before, after = (torch.randint(0, 256, (300_000 * size,), generator=random, dtype=torch.uint8) for _ in range(2))
    keeps = torch.rand(300_000, generator=random) >= share
    after = torch.where(keeps.repeat_interleave(size), before, after)
    old, new = (each.view(dtype).view(300, 1000) for each in (before, after))
    parts = encode("w", old, new)
    assert bits(applied(old, parts)) == bits(new)
    if share < 0.1:
        assert sum(part.nbytes for part in parts.values()) < new.nbytes / 2


def test_zero_and_minus_zero_differ() -> None:
    before = torch.zeros(1000, dtype=BF16)
    parts = encode("w", before, changed(before, [7], -0.0))
    assert bits(applied(before, parts)) != bits(before)


@pytest.mark.parametrize(
    "parts",
    [
        {"x": torch.zeros(10)},
        {"w": torch.zeros(11)},
        {"w": torch.zeros(10, dtype=BF16)},
        {"w:values": torch.zeros(10)},
        {"w:gaps": torch.zeros(1, dtype=torch.uint8), "w:values": torch.zeros(2)},
        {"w:gaps": torch.tensor([9, 0], dtype=torch.uint8), "w:values": torch.zeros(2)},
        {"w:gaps": torch.tensor([-1], dtype=torch.int16), "w:values": torch.zeros(1)},  # 65,535
        {"w:gaps": torch.zeros(1, dtype=torch.uint8), "w:values": torch.zeros(1, dtype=BF16)},
    ],
    ids=lambda parts: " ".join(parts),
)
def test_a_delta_of_other_weights_is_refused(parts: dict[str, torch.Tensor]) -> None:
    if "w:values" in parts and "w:gaps" not in parts:
        parts["w:values"] = torch.zeros(3)
    with pytest.raises(EngineError, match="the delta"):
        apply(parts, {"w": torch.zeros(10)})


def test_a_digest_is_of_names_formats_shapes_and_every_bit() -> None:
    weights = {"a": torch.zeros(4, 6, dtype=BF16), "b": torch.zeros(2, dtype=BF16)}
    flipped = {**weights, "a": (weights["a"].view(torch.int16) ^ torch.eye(4, 6, dtype=torch.int16)).view(BF16)}
    others: list[dict[str, torch.Tensor]] = [
        flipped,
        {"a": weights["a"]},
        {"a": weights["a"], "c": weights["b"]},
        {"a": weights["a"].view(6, 4), "b": weights["b"]},
        {"a": weights["a"].to(torch.float16), "b": weights["b"]},
    ]
    found = [weights_digest(each) for each in (weights, *others)]
    assert len(set(found)) == len(found)
    assert found[0] == weights_digest(dict(reversed(weights.items())))
    assert tensor_digest(weights["a"].t().contiguous().t()) == tensor_digest(weights["a"])


def versions(num: int) -> list[dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(0)
    found = [{name: torch.randn(size, generator=random) for name, size in (("a", (50, 40)), ("b", (30,)), ("c", (9,)))}]
    for _ in range(num - 1):
        at = int(torch.randint(2000, (), generator=random))
        found.append({**found[-1], "a": changed(found[-1]["a"], [at]), "b": found[-1]["b"] + 1})
    return found


def buckets_in_one_memory(version: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """A bucket a tensor, each in the memory of the one before, as a trainer may gather them."""
    memory = torch.empty(2000)
    for name, tensor in version.items():
        yield {name: memory[: tensor.numel()].view(tensor.shape).copy_(tensor)}


def test_a_source_holds_the_newest_version_and_the_delta_of_the_one_before() -> None:
    source = DeltaSource()
    held: dict[str, torch.Tensor] = {}
    for number, version in enumerate(versions(4)):
        encoded = source.advance(buckets_in_one_memory(version))
        assert encoded.digest == weights_digest(version)
        assert encoded.base == (None if not number else weights_digest(held))
        assert encoded.full_bytes == 4 * 2039
        assert [plan["names"] for plan in encoded.full_plan] == [["a"], ["b"], ["c"]]
        whole = {name: tensor for bucket in source.buckets(as_delta=False) for name, tensor in bucket.items()}
        assert weights_digest(whole) == encoded.digest
        if number:
            assert encoded.delta_bytes == 2 + 4 + 4 * 30  # a gap and a value of a, all of b
            for bucket in source.buckets(as_delta=True):
                apply(bucket, held)
            assert weights_digest(held) == encoded.digest
        held = {name: tensor.clone() for name, tensor in whole.items()}


def test_what_failed_to_be_gathered_and_what_has_other_names_is_no_base() -> None:
    source = DeltaSource()
    first, second, third = versions(3)

    def failing() -> Iterator[dict[str, torch.Tensor]]:
        yield {"a": second["a"]}
        raise EngineError("broken")

    source.advance([first])
    with pytest.raises(EngineError, match="broken"):
        source.advance(failing())
    assert source.advance([third]).base is None
    assert source.advance([{**third, "d": third["b"]}]).base is None
    assert source.advance([third]).base is None
    assert source.advance([third]).base == weights_digest(third)
    assert source.advance([third]).delta_plan == []


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    path = make_tiny_model(tmp_path_factory.mktemp("model"))
    return lambda **more: compose(CORE_SECTIONS)(hf_checkpoint=path, publish_delta=True, **more)


@pytest.mark.parametrize(
    ("engine", "weight", "sent"),
    [
        ("bfloat16", torch.float32, torch.bfloat16),
        ("float32", torch.float32, torch.float32),
        ("float32", torch.bfloat16, torch.bfloat16),
        ("float16", torch.bfloat16, torch.bfloat16),
    ],
)
def test_a_weight_is_sent_in_the_format_of_the_engine_unless_it_has_fewer_bits(
    options: Callable[..., Any], engine: str, weight: torch.dtype, sent: torch.dtype
) -> None:
    cast = cast_for_engines(options(engine_dtype=engine))
    assert cast("model.norm.weight", torch.ones(3, dtype=weight)).dtype == sent


def test_what_an_architecture_computes_in_float32_is_sent_so(
    options: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Qwen3ForCausalLM

    monkeypatch.setattr(Qwen3ForCausalLM, "_keep_in_fp32_modules_strict", ["q_norm"])
    cast = cast_for_engines(options(engine_dtype="bfloat16"))
    weight = torch.ones(3)
    assert cast("model.layers.0.self_attn.q_norm.weight", weight) is weight
    assert cast("model.layers.0.self_attn.k_norm.weight", weight).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"weight_sync_mode": "tensor"}, "--weight-sync-mode tensor: it sends all weights"),
        ({"weight_sync_mode": "mine:Transport"}, "--weight-sync-mode mine:Transport: it sends all"),
        ({"rollout_engine": "sglang"}, "--rollout-engine sglang: its engines take whole tensors"),
        ({"lora_publish": "adapter"}, "--lora-publish adapter: adapters are all"),
    ],
)
def test_a_delta_that_nobody_applies_is_refused(options: Callable[..., Any], more: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        WeightOptions.check(options(**more))
    for weight_sync_mode in ("disk", "distributed"):
        WeightOptions.check(options(weight_sync_mode=weight_sync_mode))
