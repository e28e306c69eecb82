"""A Qwen3 mixture of experts written down in float64, token by token, whose tokens go to given experts; and rows with
experts that no router chose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from buffer_rl.records.groups import GroupUid, RowId, TrainBatch

SIZES: dict[str, Any] = {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
"""Of ``make_tiny_model(folder, "qwen3_moe", ...)``."""
NUM_LAYERS, NUM_EXPERTS, TOP_K = 4, 8, 2


def rows_with_experts(num_groups: int = 2, num_samples: int = 3, seed: int = 0) -> TrainBatch:
    """Groups whose samples have one prompt of 3 to 5 tokens, and responses of 2 to 8, with random experts. Samples 0
    and 1 have equal experts in their prompts, the others have others; the last sample of each group lacks the experts
    of its last two tokens, which are masked, as observations behind the last turn do."""
    rng = np.random.default_rng(seed)

    def experts(count: int) -> np.ndarray:
        return rng.permuted(np.tile(np.arange(NUM_EXPERTS), (count, NUM_LAYERS, 1)), axis=-1)[..., :TOP_K]

    columns: dict[str, Any] = {name: [] for name in ("tokens", "loss_mask", "routed_experts", "advantages", "returns")}
    row_ids, lengths = [], []
    for group in range(num_groups):
        prompt = rng.integers(3, 20, int(rng.integers(3, 6)))
        of_prompt = experts(len(prompt))
        for sample in range(num_samples):
            length = int(rng.integers(3, 9))
            row_ids.append(RowId(GroupUid("set", group, 0), sample, 0))
            lengths.append(length)
            columns["tokens"].append(np.concatenate([prompt, rng.integers(3, 20, length)]).astype(np.int32))
            own = np.concatenate([of_prompt if sample < 2 else experts(len(prompt)), experts(length - 1)])
            mask = np.ones(length, dtype=np.float32)
            if sample == num_samples - 1:
                own, mask[-2:] = own[:-2], 0.0
            columns["routed_experts"].append(own.astype(np.uint8))
            columns["loss_mask"].append(mask)
            columns["advantages"].append(rng.normal(size=length).astype(np.float32))
            columns["returns"].append(np.zeros(length, dtype=np.float32))
    columns["response_length"] = np.array(lengths, dtype=np.int32)
    columns["reward"] = rng.normal(size=len(row_ids)).astype(np.float32)
    return TrainBatch(rollout_id=0, task="train_0", row_ids=row_ids, columns=columns)


def written_log_probs(
    weights: Mapping[str, torch.Tensor], config: Any, tokens: Sequence[int], experts: np.ndarray
) -> torch.Tensor:
    """The log-probability of each token after the first, ``[num_tokens - 1]``, in nats. weights: under the names of
    transformers' module, float64. experts: of the first tokens; others go where their router sends them."""
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    count = len(tokens)
    positions = torch.arange(count, dtype=torch.float64)
    angles = positions[:, None] / config.rope_parameters["rope_theta"] ** (
        torch.arange(0, dim, 2, dtype=torch.float64) / dim
    )
    hidden = weights["model.embed_tokens.weight"][list(tokens)]
    for layer in range(config.num_hidden_layers):
        own = {
            name.removeprefix(f"model.layers.{layer}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        x = _norm(hidden, own["input_layernorm.weight"], config)
        q, k, v = (
            (x @ own[f"self_attn.{name}_proj.weight"].T).view(count, -1, dim).transpose(0, 1)
            for name in ("q", "k", "v")
        )
        q = _turned(_norm(q, own["self_attn.q_norm.weight"], config), angles)
        k = _turned(_norm(k, own["self_attn.k_norm.weight"], config), angles)
        k, v = (each.repeat_interleave(heads // kv_heads, 0) for each in (k, v))
        scores = (q @ k.transpose(1, 2)) / dim**0.5 + torch.full((count, count), -torch.inf).double().triu(1)
        attended = (scores.softmax(-1) @ v).transpose(0, 1).reshape(count, heads * dim)
        hidden = hidden + attended @ own["self_attn.o_proj.weight"].T
        x = _norm(hidden, own["post_attention_layernorm.weight"], config)
        hidden = hidden + torch.stack(
            [_mixed(x[at], own, experts[at, layer] if at < len(experts) else None, config) for at in range(count)]
        )
    logits = _norm(hidden, weights["model.norm.weight"], config) @ weights["lm_head.weight"].T
    return logits[:-1].log_softmax(-1).gather(-1, torch.tensor(list(tokens[1:]))[:, None])[:, 0]


def _mixed(x: torch.Tensor, own: Mapping[str, torch.Tensor], chosen: np.ndarray | None, config: Any) -> torch.Tensor:
    """Softmax over all experts, cut to the chosen ones, renormalised: Qwen3's, with ``norm_topk_prob``."""
    shares = (own["mlp.gate.weight"] @ x).softmax(-1)
    indices = shares.topk(config.num_experts_per_tok).indices.tolist() if chosen is None else chosen.tolist()
    total = sum(shares[index] for index in indices) if config.norm_topk_prob else 1.0
    mixed = torch.zeros_like(x)
    for index in indices:
        gate, up = (own["mlp.experts.gate_up_proj"][index] @ x).chunk(2)
        mixed = mixed + shares[index] / total * (own["mlp.experts.down_proj"][index] @ (gate * gate.sigmoid() * up))
    return mixed


def _norm(x: torch.Tensor, weight: torch.Tensor, config: Any) -> torch.Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()


def _turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def written_gradients(weights: Mapping[str, torch.Tensor], config: Any, batch: TrainBatch) -> dict[str, torch.Tensor]:
    """Of the sum over unmasked tokens of minus advantage times log-probability, by name."""
    own = {name: tensor.detach().double().requires_grad_() for name, tensor in weights.items()}
    names = ("tokens", "routed_experts", "loss_mask", "advantages")
    for tokens, experts, mask, advantages in zip(*(batch.columns[name] for name in names), strict=True):
        log_probs = written_log_probs(own, config, tokens.tolist(), experts)[-len(mask) :]
        loss = -(torch.from_numpy(mask * advantages).double() * log_probs).sum()
        loss.backward()  # type: ignore[no-untyped-call]
    return {name: tensor.grad for name, tensor in own.items() if tensor.grad is not None}


def _shifted(experts: np.ndarray) -> np.ndarray:
    return np.concatenate([experts[:1], experts[:-1]])


MUTANTS: dict[str, Any] = {
    "the layer before": lambda column: [np.roll(experts, 1, axis=1) for experts in column],
    "the token before": lambda column: [_shifted(experts) for experts in column],
    "another row": lambda column: [
        np.resize(column[(row + 1) % len(column)], experts.shape) for row, experts in enumerate(column)
    ],
    "a permutation of the tokens": lambda column: [experts[::-1].copy() for experts in column],
    "experts of one layer permuted": lambda column: [
        np.concatenate([experts[:, :1][::-1], experts[:, 1:]], axis=1) for experts in column
    ],
}
"""Columns that a broken replay would replay in place of the right one."""
