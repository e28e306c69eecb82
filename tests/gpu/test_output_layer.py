"""The output layer as one function with log-probabilities and entropies, on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from buffer_rl.trainer import vocabulary
from buffer_rl.trainer.output_layer import fused_log_probs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.mark.parametrize("chunk", [1 << 24, 1250])  # all, five of forty tokens
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-6)])
def test_values_and_gradients_are_those_of_float64(
    chunk: int, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of logits are rounded to bfloat16 before products are made of them, and these are summed in float32."""
    monkeypatch.setattr(vocabulary, "CHUNK_ELEMENTS", chunk)
    generator = torch.Generator().manual_seed(0)
    cpu = [torch.randn(n, 64, generator=generator).to(dtype) for n in (40, 1000)]
    target = torch.randint(1000, (40,), generator=generator)
    factors = torch.linspace(-1, 1, 40)[:, None] * torch.tensor([1.0, 0.5])
    results = []
    for device, kind in (("cuda", dtype), ("cpu", torch.float64)):
        inputs = [each.to(device, kind).requires_grad_() for each in cpu]
        found = fused_log_probs(*inputs, target.to(device), temperature=0.7)
        gradients = torch.autograd.grad((found * factors.to(device)).sum(), inputs)
        results.append([found.detach().cpu(), *(each.cpu().double() for each in gradients)])
    assert results[0][0].dtype == torch.float32
    (values, *found_gradients), (expected, *exact) = results
    assert (values - expected).abs().max() < 1e-4
    for one, other in zip(found_gradients, exact, strict=True):
        assert (one - other).norm() <= tolerance * other.norm()
