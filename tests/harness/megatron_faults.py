"""Faults that ``--custom-megatron-init-path`` puts into a rank, for tests that must notice them."""

from __future__ import annotations

from typing import Any


def unsummed_norms(_args: Any) -> None:
    """Gradients of norms are not summed over the parts of the sequence."""
    from megatron.core.distributed import finalize_model_grads

    module: Any = __import__(finalize_model_grads.__module__, fromlist=["_"])
    module._allreduce_non_tensor_model_parallel_grads = lambda *_: None


def stale_export(_args: Any) -> None:
    """An export does not wait for parameters that are still gathered."""
    from megatron.core.distributed import DistributedDataParallel

    DistributedDataParallel.start_param_sync = lambda *_args, **_kwargs: None


def mixed_rows(_args: Any) -> None:
    """Tokens see the tokens after them."""
    from buffer_rl_megatron.attention import CausalAttention

    def seeing_all(self: Any, query: Any, key: Any, value: Any) -> Any:
        import torch

        return torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=self._scale, enable_gqa=True)

    CausalAttention._causal = seeing_all  # type: ignore[method-assign]


def half_vocabulary(_args: Any) -> None:
    """Each rank's softmax is over its own part of the vocabulary."""
    import buffer_rl_megatron.vocabulary as vocabulary

    vocabulary._over_ranks = lambda values_n, *_: values_n  # type: ignore[assignment]
