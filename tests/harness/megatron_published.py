"""What engines of a run serve, and what the optimizer of its Megatron trainer has, noted by functions of the run's
options; and the former from the latter, without the package's export."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

NAMES = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "self_attention.linear_proj": "self_attn.o_proj",
    "mlp.linear_fc2": "mlp.down_proj",
}
"""Of a layer of Qwen3: Megatron's names, and those of a Hugging Face folder, of what tensor ranks have whole or by
columns."""


def note_served(rollout_id: int, args: Any, samples: Any, extra: Any, seconds: float) -> None:
    """``--custom-rollout-log-function-path``: checksums of the weights that the engines sampled the rollout with."""
    from buffer_rl.engines.control import EngineControlClient
    from buffer_rl.engines.http import EngineFanOut, LoopThread

    async def listed() -> list[str]:
        engines = EngineFanOut(lambda: [], 30.0, router_url=args.router_url, api_key=args.engine_api_key)
        try:
            return list(await engines.server_info())
        finally:
            await engines.close()

    loop = LoopThread("listed-engines")  # the rollout has an event loop in its own thread
    urls = loop.run(listed())
    loop.stop()
    with EngineControlClient(urls, timeout_s=30.0, api_key=args.engine_api_key) as control:
        found = control.checksums()
    Path(args.run_dir, f"served_{rollout_id}.json").write_text(json.dumps(found))


def note_trained(args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, scheduler: Any) -> None:
    """``--custom-megatron-before-train-step-hook-path``: the parts of parameters that this rank's distributed optimizer
    steps: they are its own, whatever the model has gathered of the others'."""
    import torch.distributed as dist
    from megatron.core.utils import unwrap_model

    named = {parameter: name for chunk in model for name, parameter in unwrap_model(chunk).named_parameters()}
    parts = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for parameters, shards in zip(part.model_fp32_groups, part.shard_fp32_groups, strict=True):
            for parameter, shard in zip(parameters, shards, strict=True):
                start = int(part._get_model_param_range_map(parameter)["param"].start)
                parts.append((named[parameter], tuple(parameter.shape), start, shard.detach().clone()))
    torch.save(parts, Path(args.run_dir, f"trained_{rollout_id}_{dist.get_rank()}.pt"))


def trained_weights(run_dir: str, rollout_id: int, *, tp: int, config: Any) -> dict[str, torch.Tensor]:
    """Qwen3's weights under the names of its folder, put together from what ``note_trained`` left before the step of
    that rollout. Tensor ranks are innermost, as Megatron orders them."""
    ranks = len(list(Path(run_dir).glob(f"trained_{rollout_id}_*.pt")))
    shards: list[dict[str, dict[int, torch.Tensor]]] = [defaultdict(dict) for _ in range(tp)]
    shapes: dict[str, tuple[int, ...]] = {}
    for rank in range(ranks):
        for name, shape, start, values in torch.load(Path(run_dir, f"trained_{rollout_id}_{rank}.pt")):
            shards[rank % tp][name][start] = values
            shapes[name] = shape
    own = [
        {name: torch.cat([found[start] for start in sorted(found)]).view(shapes[name]) for name, found in each.items()}
        for each in shards
    ]
    weights = {
        "model.embed_tokens.weight": torch.cat([each["embedding.word_embeddings.weight"] for each in own]),
        "model.norm.weight": own[0]["decoder.final_layernorm.weight"],
    }
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][: config["vocab_size"]]
    groups, width = config["num_key_value_heads"] // tp, config["head_dim"]
    for number in range(config["num_hidden_layers"]):
        theirs, ours = f"decoder.layers.{number}", f"model.layers.{number}"
        for name, hf_name in NAMES.items():
            pieces = [each[f"{theirs}.{name}.weight"] for each in own]
            weights[f"{ours}.{hf_name}.weight"] = torch.cat(pieces, dim=1) if pieces[0].ndim == 2 else pieces[0]
        halves = [each[f"{theirs}.mlp.linear_fc1.weight"].chunk(2) for each in own]
        for hf_name, pieces in zip(("gate_proj", "up_proj"), zip(*halves, strict=True), strict=True):
            weights[f"{ours}.mlp.{hf_name}.weight"] = torch.cat(pieces)
        # Of each group of heads its queries, its key and its value.
        fused = torch.cat(
            [each[f"{theirs}.self_attention.linear_qkv.weight"].unflatten(0, (groups, -1)) for each in own]
        )
        for hf_name, part in zip("qkv", fused.split([fused.shape[1] - 2 * width, width, width], dim=1), strict=True):
            weights[f"{ours}.self_attn.{hf_name}_proj.weight"] = part.flatten(0, 1)
    return weights


def checksum_of(weights: dict[str, torch.Tensor], model: str, folder: Path) -> str:
    """The checksum that an engine reports which serves ``weights``; they are written into ``folder``."""
    from buffer_rl.embedded.loader import LoadedModel, LoadOptions, checksum_answer

    folder.mkdir()
    for file in Path(model).glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    named = LoadedModel(LoadOptions(model_path=str(folder))).decoder.named_weights()
    return str(checksum_answer(named)["per_engine_checksum"])
