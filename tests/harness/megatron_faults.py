"""Faults that ``--custom-megatron-init-path`` puts into a rank, for tests that must notice them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
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

    def following(size: int, rank: int) -> tuple[int, ...]:
        return (2 * rank, 2 * rank + 1)

    attention.chunks_of = following


def half_vocabulary(_args: Any) -> None:
    """Each rank's softmax is over its own part of the vocabulary."""
    import buffer_rl_megatron.vocabulary as vocabulary

    vocabulary._over_ranks = lambda values_n, *_: values_n  # type: ignore[assignment]


def undivided_gradients_of_experts(_args: Any) -> None:
    """The divisor of the step does not reach the gradients of experts that are spread over ranks."""
    from megatron.core.distributed import DistributedDataParallel

    def scale(self: Any, factor: float) -> None:
        for buffer in self.buffers:
            buffer.scale_gradients(factor)

    DistributedDataParallel.scale_gradients = scale


def own_gradient_of_embeddings(_args: Any) -> None:
    """Tied embeddings on the first and the last pipeline stage get the gradient of their stage alone."""
    from megatron.core.distributed import finalize_model_grads

    module: Any = __import__(finalize_model_grads.__module__, fromlist=["_"])
    module._allreduce_word_embedding_grads = lambda *_, **__: None


def unmarked_post_norms(_args: Any) -> None:
    """GLM-4's further norms do not say that each tensor rank has a part of the sequence."""
    import buffer_rl_megatron_glm4 as glm4

    made = glm4.RMSNorm

    def unmarked(*args: Any, **settings: Any) -> Any:
        norm = made(*args, **settings)
        norm.weight.sequence_parallel = False
        return norm

    glm4.RMSNorm = unmarked  # type: ignore[assignment, misc]


def experts_of_the_last_forward_pass(_args: Any) -> None:
    """Recomputed layers route the tokens of a micro-batch as those of the one whose forward pass was the last."""
    from buffer_rl_megatron.routing import RoutingReplay

    begin = RoutingReplay.begin

    def forward_alone(self: Any, chunk: Any, micro: Any, *, again: bool = False) -> None:
        if not again:
            begin(self, chunk, micro)

    RoutingReplay.begin = forward_alone  # type: ignore[method-assign]


def _kill_once(args: Any, module: Any, name: str, call: int) -> None:
    """Have rank 1 of the run's first processes end at the ``call``-th call of a function, from 1 on."""
    import torch.distributed as dist

    replaced: Callable[..., Any] = getattr(module, name)
    calls, killed = 0, Path(args.run_dir, "killed")

    def counting(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and dist.get_rank() == 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return replaced(*given, **named)

    setattr(module, name, counting)


def killed_between_gradient_and_step(args: Any) -> None:
    """In the sixth step, when the gradients of all ranks have been summed."""
    import buffer_rl_megatron.optimizer as optimizer

    _kill_once(args, optimizer, "learning_rate", 6)


def killed_in_a_save(args: Any) -> None:
    """While the third checkpoint, of step 6, is written."""
    import buffer_rl_megatron.checkpoint as checkpoint

    _kill_once(args, checkpoint, "_state", 3)


def killed_in_an_export(args: Any) -> None:
    """While weights are gathered for the model folder of the third checkpoint."""
    from buffer_rl_megatron.bridge import Bridge

    _kill_once(args, Bridge, "export", 3)
