"""What ranks do with split logits and with split rows for the tests; each function is called on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from harness.megatron_ranks import Layout, groups


def split_outputs(
    logits: torch.Tensor, targets: torch.Tensor, kept: list[torch.Tensor], chunk: int, weights: list[torch.Tensor]
) -> dict[str, Any]:
    """Log-probabilities and entropies of logits of which this rank has its part, and the gradient of their weighted sum
    in this part."""
    import buffer_rl.trainer.vocabulary as core
    import buffer_rl_megatron.vocabulary as vocabulary

    core.CHUNK_ELEMENTS = chunk  # type: ignore[misc]
    own = logits.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].clone().requires_grad_()
    log_probs, entropy = vocabulary.log_probs_and_entropies(
        own, targets, temperature=0.7, group=dist.group.WORLD, kept=kept
    )
    (log_probs * weights[0] + entropy * weights[1]).sum().backward()
    return {"log_probs": log_probs.detach(), "entropy": entropy.detach(), "gradient": own.grad}


def split_attention(
    lengths: np.ndarray, states: list[torch.Tensor], weights: torch.Tensor, packed: bool
) -> list[tuple[np.ndarray, torch.Tensor]]:
    """Attention of this context-parallel rank's queries, and the gradients of its queries, keys and values for the sum
    of all ranks' outputs times ``weights``; each with the places in the rows of the tokens that it is of.

    states: of all tokens of the rows ``[num_tokens, ...]`` if they are packed, else ``[length, num_rows, ...]``."""
    from types import SimpleNamespace

    from megatron.core import parallel_state

    from buffer_rl_megatron.attention import CausalAttention, packed_rows, share_of

    with groups(Layout(cp=dist.get_world_size())):
        group = parallel_state.get_context_parallel_group()
        config = SimpleNamespace(attention_dropout=0.0, window_size=None, kv_channels=states[0].shape[-1])
        attention = CausalAttention(config, pg_collection=SimpleNamespace(cp=group))
        share = share_of(lengths, group.size(), group.rank())
        own = [each[share.own].clone().requires_grad_() for each in states]
        rows = packed_rows(share, torch.device("cpu")) if packed else None
        output = attention(*own, None, packed_seq_params=rows)
        (output * weights[share.own]).sum().backward()
        found = [output.detach(), *(each.grad for each in own)]
        return [(share.own, each) for each in found if each is not None]
