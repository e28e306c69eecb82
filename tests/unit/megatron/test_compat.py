"""Megatron on the CPU: what is replaced, where, and that nothing is where CUDA is available."""

from __future__ import annotations

import importlib.metadata
import threading

import pytest
import torch

from buffer_rl.errors import ConfigError
from buffer_rl_megatron.compat import PATCHES, Patch, cpu_devices, install
from harness import megatron_models
from harness.megatron_ranks import HAS_MEGATRON, REASON, RankPool


def test_nothing_is_replaced_where_cuda_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Megatron does not define at all without TransformerEngine is defined there too."""
    applied: list[Patch] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.16.1")
    monkeypatch.setattr(Patch, "apply", lambda patch: applied.append(patch))
    install()
    assert applied == [patch for patch in PATCHES if patch.missing]
    assert len(applied) == 1
    with cpu_devices():
        assert torch.zeros(1).type() == "torch.FloatTensor"


def test_devices_named_cuda_are_the_cpu_in_the_thread_that_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    types: list[str] = []
    with cpu_devices():
        made = [
            torch.zeros(2, device="cuda"),
            torch.tensor([1.0], device=torch.device("cuda", 0)),
            torch.ones(1).to("cuda"),
            torch.ones(1).cuda(),
        ]
        assert all(tensor.device.type == "cpu" for tensor in made)
        assert torch.ones(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
        with cpu_devices():
            assert torch.ones(1).type() == "torch.cuda.FloatTensor"
        other = threading.Thread(target=lambda: types.append(torch.ones(1).type()))
        other.start()
        other.join(10)
    assert types == ["torch.FloatTensor"]
    assert torch.ones(1).type() == "torch.FloatTensor"


def test_a_version_that_the_patches_were_not_made_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.17.0")
    with pytest.raises(ConfigError, match=r"megatron-core 0.17.0 .*\n  expected: megatron-core>=0.16.1,<0.17"):
        install(())


def test_a_function_that_is_gone_is_named() -> None:
    gone = Patch(where="torch.cuda:no_such_function", replacement=None, cause="the test")
    with pytest.raises(ConfigError, match=r"torch\.cuda:no_such_function is not there to be replaced"):
        gone.apply()


def test_a_name_that_is_defined_is_not_replaced_by_one_for_its_absence() -> None:
    before = torch.cuda.synchronize
    Patch(where="torch.cuda:synchronize", replacement=None, cause="the test", missing=True).apply()
    assert torch.cuda.synchronize is before


def test_every_patch_says_why() -> None:
    assert all(patch.cause for patch in PATCHES)
    assert len({patch.where for patch in PATCHES}) == len(PATCHES)


@pytest.mark.megatron
@pytest.mark.skipif(not HAS_MEGATRON, reason=REASON)
def test_what_a_patch_replaces_is_there_and_is_replaced_once(ranks: RankPool) -> None:
    (found,) = ranks.run(1, megatron_models.patches_twice)
    assert found == {patch.where: True for patch in PATCHES}
