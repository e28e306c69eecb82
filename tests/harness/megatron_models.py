"""What ranks do with a Megatron model for the tests of its bridge; each function is called on all ranks."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.megatron_ranks import Layout, groups


def options(layout: Layout, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Arguments of ``load_bridge`` for the local layers in float32, with ``changes``."""
    return {"sequence_parallel": layout.sp, "transformer_impl": "local", "dtype": torch.float32, **(changes or {})}


def round_trip(layout: Layout, folder: str, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Load the folder into a model that is split that way, and export it: the names that differ from the folder's
    tensors, that did not come or came twice, and numbers of elements: of the rank's own parameters, of the most that
    were gathered at a time, and of the whole model."""
    from safetensors.torch import load_file

    from buffer_rl_megatron.bridge import load_bridge

    expected = {k: v for file in sorted(Path(folder).glob("*.safetensors")) for k, v in load_file(file).items()}
    dtype = options(layout, changes)["dtype"]
    expected = {name: tensor.to(dtype) for name, tensor in expected.items()}
    with groups(layout):
        bridge = load_bridge(folder, **options(layout, changes))
        chunks = bridge.build()
        bridge.load(chunks, folder)
        names, differing, most = [], [], 0
        kept = {parameter.untyped_storage().data_ptr() for chunk in chunks for parameter in chunk.parameters()}
        passing: list[weakref.ref[torch.Tensor]] = []
        for name, tensor in bridge.export(chunks):
            names.append(name)
            if not torch.equal(tensor, expected[name]):
                differing.append(name)
            if tensor.untyped_storage().data_ptr() not in kept:
                passing.append(weakref.ref(tensor))
            alive = [held for each in passing if (held := each()) is not None]
            most = max(most, sum(each.numel() for each in alive))
            del tensor, alive
        return {
            "differing": differing,
            "missing": sorted(set(expected) - set(names)),
            "repeated": sorted({name for name in names if names.count(name) > 1}),
            "own": sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters()),
            "most": most,
            "whole": sum(tensor.numel() for tensor in expected.values()),
            "padded": (bridge.vocab_size, bridge.padded_vocab_size),
        }


def logits(
    layout: Layout,
    folder: str,
    tokens: np.ndarray,
    control: str = "",
    changes: dict[str, Any] | None = None,
) -> np.ndarray | None:
    """Logits ``[rows, tokens, padded vocabulary]`` of ``tokens [rows, tokens]`` from a model split that way; None but
    on the last stage.

    control: "unloaded" leaves the random weights, "non-causal" lets each token see all, "q_norm" adds 1e-3 to one
    element of the first query norm."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    from buffer_rl_megatron.bridge import load_bridge

    with groups(layout), torch.no_grad():
        bridge = load_bridge(folder, **options(layout, changes))
        chunks = bridge.build()
        if control != "unloaded":
            bridge.load(chunks, folder)
        if control == "q_norm":
            chunks[0].decoder.layers[0].self_attention.q_layernorm.weight[0] += 1e-3
        ids = torch.from_numpy(tokens)
        rows, length = ids.shape
        hidden = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
        hidden &= control != "non-causal"

        def forward_step(_data: Any, model: Any) -> tuple[torch.Tensor, Any]:
            output = model(ids, torch.arange(length)[None].expand(rows, -1), hidden)
            return output, lambda logits, **_: gather_from_tensor_model_parallel_region(logits)

        found = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(())] * len(chunks) if len(chunks) > 1 else iter(()),
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=parallel_state.get_pipeline_model_parallel_world_size(),
            seq_length=length,
            micro_batch_size=rows,
            forward_only=True,
            collect_non_loss_data=True,
        )
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        return found[0].numpy() if last else None


def class_of(model_type: str, site: str) -> str:
    """The class that maps an architecture, with the distributions in the folder ``site`` installed."""
    import sys

    from buffer_rl_megatron.models import mapping_class

    sys.path.append(site)
    try:
        return str(mapping_class(model_type).__name__)
    finally:
        sys.path.remove(site)


def patches_twice() -> dict[str, bool]:
    """Whether each patch is in its place after ``install`` was called again."""
    import importlib

    from buffer_rl_megatron.compat import PATCHES, install

    install()
    places = {patch: patch.where.partition(":") for patch in PATCHES}
    return {
        patch.where: getattr(importlib.import_module(module), attribute) is patch.replacement
        for patch, (module, _, attribute) in places.items()
    }


def values(layout: Layout, folder: str, tokens: np.ndarray, weight: np.ndarray) -> dict[str, np.ndarray] | None:
    """Values ``[rows, tokens]`` of a value head with that weight ``[hidden]``, the weight's gradient of their sum, and
    names that an export has; None but on the last stage."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from buffer_rl_megatron.bridge import load_bridge

    with groups(layout):
        bridge = load_bridge(folder, **options(layout), overrides={"calculate_per_token_loss": True})
        models = bridge.build(value_head=True)
        bridge.load(models, folder)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        if last:
            models[-1].output_layer.weight.data.copy_(torch.from_numpy(weight)[None])
        config = DistributedDataParallelConfig(use_distributed_optimizer=False)
        chunks = [DistributedDataParallel(bridge.config, config, model) for model in models]
        bridge.config.finalize_model_grads_func = finalize_model_grads
        ids = torch.from_numpy(tokens)
        rows, length = ids.shape
        hidden = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
        found: list[np.ndarray] = []

        def total(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            found.append(output[..., 0].detach().numpy())
            return output.sum(), torch.tensor(1, dtype=torch.int), {}

        def forward_step(_data: Any, model: Any) -> tuple[torch.Tensor, Any]:
            return model(ids, torch.arange(length)[None].expand(rows, -1), hidden), total

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(()),
            model=chunks[0],
            num_microbatches=1,
            seq_length=length,
            micro_batch_size=rows,
            forward_only=False,
        )
        names = [name for name, _ in bridge.export(chunks)]
        if not last:
            return None
        gradient = models[-1].output_layer.weight.main_grad[0].numpy().copy()
        return {"values": found[0], "gradient": gradient, "names": np.array(names)}
