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


def own_keys(_args: Any) -> None:
    """Attention has its own keys in place of those of the other ranks."""
    import buffer_rl_megatron.attention as attention

    attention.gather_states = lambda states, group: states.repeat(group.size(), *(1,) * (states.ndim - 1))


def own_gradient_of_keys(_args: Any) -> None:
    """The gradient of keys and values is that of this rank's queries alone."""
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    import buffer_rl_megatron.attention as attention

    attention.gather_states = lambda states, group: gather_from_sequence_parallel_region(states, False, group)


def chunks_in_order(_args: Any) -> None:
    """Each rank has two chunks of a row that follow one another, which is not what Megatron's positions are for."""
    import buffer_rl_megatron.attention as attention
    import buffer_rl_megatron.context as context

    def following(size: int, rank: int) -> tuple[int, ...]:
        return (2 * rank, 2 * rank + 1)

    context.chunks_of = attention.chunks_of = following


def half_vocabulary(_args: Any) -> None:
    """Each rank's softmax is over its own part of the vocabulary."""
    import buffer_rl_megatron.vocabulary as vocabulary

    vocabulary._over_ranks = lambda values_n, *_: values_n  # type: ignore[assignment]
