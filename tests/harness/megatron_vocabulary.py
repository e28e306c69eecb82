"""What ranks do with split logits and with packed rows for the tests; each function is called on all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def split_outputs(
    logits: torch.Tensor, targets: torch.Tensor, kept: list[torch.Tensor], chunk: int, weights: list[torch.Tensor]
) -> dict[str, Any]:
    """Log-probabilities and entropies of logits of which this rank has its part, and the gradient of their weighted sum
    in this part."""
    import buffer_rl_megatron.vocabulary as vocabulary

    vocabulary.CHUNK_ELEMENTS = chunk  # type: ignore[misc]
    own = logits.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].clone().requires_grad_()
    log_probs, entropy = vocabulary.log_probs_and_entropies(
        own, targets, temperature=0.7, group=dist.group.WORLD, kept=kept
    )
    (log_probs * weights[0] + entropy * weights[1]).sum().backward()
    return {"log_probs": log_probs.detach(), "entropy": entropy.detach(), "gradient": own.grad}
