"""Rows whose tokens have experts, and a replay of these that is written by hand, in float64.

The model's weights and attention are those of transformers, a row at a time without padding; norms, routers and
experts are written here. The gradient is that of all rows of a step at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import TrainBatch
from buffer_rl.testing.tiny import make_tiny_model
from buffer_rl.trainer.objective import Objective
from harness.megatron_rows import CHARACTERS, make_args, make_rows
from harness.megatron_steps import Found
from harness.replayed_experts import NUM_EXPERTS, NUM_LAYERS, SIZES, TOP_K

COLUMN = "routed_experts"


def make_moe(folder: Any, **changes: Any) -> str:
    """A random Qwen3-MoE model of four layers, with eight experts of which a token has two."""
    return make_tiny_model(folder, "qwen3_moe", characters=CHARACTERS, init_scale=0.2, **SIZES | changes)


def replay_args(model: str, **changes: Any) -> Any:
    """Options of a run that replays, whose first step moves a weight by ``g / (1 + |g|)`` against its gradient g, so
    that weights after it tell gradients apart; with several micro-batches."""
    step = {"lr": 1.0, "adam_eps": 1.0, "weight_decay": 0.0, "clip_grad": 0.0, "max_tokens_per_gpu": 32}
    return make_args(model, replay_routed_experts=True, **step | changes)


def with_experts(batch: TrainBatch, seed: int = 0) -> TrainBatch:
    """The rows with random experts for all tokens but the last; each third row lacks those of two tokens before it."""
    rng = np.random.default_rng(seed)
    missing = [1 if row % 3 else min(3, length) for row, length in enumerate(batch.lengths)]
    counts = [length - each for length, each in zip(batch.lengths, missing, strict=True)]
    scores = [rng.random((count, NUM_LAYERS, NUM_EXPERTS)) for count in counts]
    batch.columns[COLUMN] = [np.argsort(each, -1)[..., :TOP_K].astype(np.uint8) for each in scores]
    return batch


def equal_rows() -> TrainBatch:
    """Eight rows of eight tokens: two of them are a micro-batch of sixteen tokens, as all others are."""
    batch = make_rows(8)
    rng = np.random.default_rng(1)
    batch.columns["tokens"] = [rng.integers(3, 30, 8).astype(np.int32) for _ in range(8)]
    batch.columns["response_length"] = np.full(8, 4, dtype=np.int32)
    batch.columns["loss_mask"] = [np.ones(4, dtype=np.float32) for _ in range(8)]
    batch.columns["rollout_log_probs"] = [-rng.random(4).astype(np.float32) for _ in range(8)]
    return with_experts(batch)


def log_probs_of_columns(args: Any, batch: TrainBatch, columns: Sequence[list[np.ndarray]]) -> list[list[np.ndarray]]:
    """Log-probabilities of the rows with each of the columns in turn, on this rank, which is the only one."""
    from buffer_rl_megatron.trainer import MegatronTrainer

    trainer = MegatronTrainer(args, 0, 1, Objective(args, PluginRegistry.from_flags([])))
    found = []
    for column in columns:
        batch.columns[COLUMN] = column
        found.append(trainer.log_probs("actor", batch) or [])
    return found


def by_hand(args: Any, batch: TrainBatch, *, replays: bool = True, balance: float = 0.0) -> Found:
    """What a step of the whole batch, whose column the model replays, gives in float64.

    balance: weight of the auxiliary loss (Fedus et al. 2022, arXiv:2101.03961, equation 4) of all rows together, in
    which the experts of a token are those of its highest scores."""
    from transformers import AutoModelForCausalLM

    objective = Objective(args, PluginRegistry.from_flags([]))
    model = AutoModelForCausalLM.from_pretrained(args.hf_checkpoint, dtype=torch.float64)
    objective.compute_advantages(batch)
    experts = [np.asarray(row, dtype=np.int64) for row in batch.columns[COLUMN]] if replays else [None] * len(batch)
    lengths = batch.columns["response_length"]
    scores: list[list[torch.Tensor]] = [[] for _ in range(NUM_LAYERS)]
    rows = [_outputs(model, scores, *each) for each in zip(batch.columns["tokens"], lengths, experts, strict=True)]
    log_probs_bt, entropy_bt = (torch.nn.utils.rnn.pad_sequence(each, True) for each in zip(*rows, strict=True))
    loss, sums = objective(log_probs_bt, entropy_bt, batch)
    sums = sums.resolved()
    (loss + balance * sums.divisor * sum(map(_imbalance, scores))).backward()
    gradients = {name: weight.grad / sums.divisor for name, weight in model.named_parameters()}
    moved = {
        name: weight.detach() - gradients[name] / (1 + gradients[name].abs())
        for name, weight in model.named_parameters()
    }
    norm = float(torch.cat([each.flatten() for each in gradients.values()]).norm())
    outputs = [row.detach().float().numpy() for row, _ in rows]
    return Found(
        outputs=dict(zip(batch.row_ids, outputs, strict=True)),
        steps=[sums.means() | {"grad_norm": norm, "routed_experts_differ": _differing(scores, experts)}],
        weights={name: tensor.float() for name, tensor in _split_experts(moved)},
    )


def _outputs(
    model: Any, scores: list[list[torch.Tensor]], tokens: np.ndarray, length: int, experts: np.ndarray | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies ``[length]`` of a row's response tokens. scores: those of each layer's router,
    ``[num_tokens, NUM_EXPERTS]``, are appended."""
    for number, layer in enumerate(model.model.layers):
        seen = scores[number]
        own = None if experts is None else torch.from_numpy(experts[:, number])
        layer.mlp.forward = _experts_of(layer.mlp, own, seen)
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = _norm_of(module)
    ids = torch.from_numpy(tokens.astype(np.int64))
    logits = model(input_ids=ids[None], use_cache=False).logits[0]
    assert logits.dtype == torch.float64
    log_softmax = logits[len(ids) - length - 1 : -1].log_softmax(-1)
    log_probs = log_softmax.gather(1, ids[len(ids) - length :, None])[:, 0]
    return log_probs, -(log_softmax.exp() * log_softmax).sum(-1)


def _differing(scores: Sequence[Sequence[torch.Tensor]], experts: Sequence[np.ndarray | None]) -> float:
    """The share of tokens and layers whose experts are not those of the highest scores, of those with experts."""
    differ = [
        set(row.topk(TOP_K).indices.tolist()) != set(given.tolist())
        for layer, of_rows in enumerate(scores)
        for whole, column in zip(of_rows, experts, strict=True)
        if column is not None
        for row, given in zip(whole, column[:, layer], strict=False)
    ]
    return sum(differ) / max(1, len(differ))


def _norm_of(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: module.weight * x * (x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon).rsqrt()


def _imbalance(scores: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of one layer, whose ``scores`` are ``[num_tokens, NUM_EXPERTS]`` of each row."""
    of_all = torch.cat(list(scores))
    chosen = torch.zeros_like(of_all).scatter(1, of_all.topk(TOP_K).indices, 1.0)
    return NUM_EXPERTS * (chosen.mean(0) / TOP_K * of_all.mean(0)).sum()


def _experts_of(
    block: Any, given: torch.Tensor | None, seen: list[torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """given: the experts ``[num_given, k]`` of the first tokens; the others go to those of highest score, as all do
    without it. seen: the scores are appended to it."""

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        x = hidden[0]
        scores = (x @ block.gate.weight.T).softmax(-1)
        seen.append(scores)
        chosen = scores.topk(TOP_K).indices
        if given is not None:
            chosen = torch.cat([given, chosen[len(given) :]])
        weights = scores.gather(1, chosen)
        if block.gate.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        gate, up = torch.einsum("th,tkih->tki", x, block.experts.gate_up_proj[chosen]).chunk(2, -1)
        outputs = torch.einsum("tki,tkhi->tkh", torch.nn.functional.silu(gate) * up, block.experts.down_proj[chosen])
        return (outputs * weights[..., None]).sum(1)[None]

    return forward


def _split_experts(weights: dict[str, torch.Tensor]) -> Sequence[tuple[str, torch.Tensor]]:
    """Under the names of checkpoints, in which each expert has matrices of its own."""
    found = []
    for name, tensor in weights.items():
        prefix, _, kind = name.rpartition(".")
        if kind not in ("gate_up_proj", "down_proj") or not prefix.endswith("experts"):
            found.append((name, tensor))
            continue
        for number, matrix in enumerate(tensor):
            parts = (
                {"down_proj": matrix}
                if kind == "down_proj"
                else dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
            )
            found += [(f"{prefix}.{number}.{part}.weight", each) for part, each in parts.items()]
    return found
