"""The experts that computed each token in a mixture-of-experts model: from an engine's answer to a row."""

from __future__ import annotations

import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from buffer_rl.records.ids import VersionSpan

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
_SPARSE = frozenset({"sparse", "moe"})


def sparse_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The layers that have experts, of a language model's ``config.json``; empty for a dense model."""
    if not any(config.get(name) for name in _NUM_EXPERTS):
        return ()
    if kinds := config.get("mlp_layer_types"):
        return tuple(at for at, kind in enumerate(kinds) if kind in _SPARSE)
    first, step = int(config.get("first_k_dense_replace") or 0), int(config.get("decoder_sparse_step") or 1)
    without = set(config.get("mlp_only_layers") or ())
    layers = range(int(config.get("num_hidden_layers") or 0))
    return tuple(at for at in layers if at >= first and (at + 1) % step == 0 and at not in without)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSizes:
    """num_experts: of each layer that has some. top_k: how many of them compute a token. layers: those that have
    experts, of ``num_layers``."""

    num_experts: int
    top_k: int
    layers: tuple[int, ...]
    num_layers: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ExpertSizes | None:
        """Of a language model's ``config.json`` (see ``files.hf_config.text_config``); None for a dense model."""
        num_experts, top_k = (
            next((int(config[name]) for name in names if config.get(name)), 0) for names in (_NUM_EXPERTS, _TOP_K)
        )
        layers = sparse_layers(config)
        if not (num_experts and top_k and layers):
            return None
        return cls(
            num_experts=num_experts, top_k=top_k, layers=layers, num_layers=int(config.get("num_hidden_layers") or 0)
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest integers that name every expert."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.int16)

    def none(self) -> np.ndarray:
        """Of no tokens: ``[0, layers, top_k]``."""
        return np.zeros((0, len(self.layers), self.top_k), dtype=self.dtype)

    def holds(self, experts: np.ndarray) -> bool:
        """Whether these are numbers of experts."""
        return not experts.size or bool(0 <= experts.min() <= experts.max() < self.num_experts)

    def read(self, meta_info: Mapping[str, Any], num_tokens: int, start: int) -> tuple[np.ndarray | None, int]:
        """The experts in an answer of ``/generate``, ``[num_tokens - 1 - start, layers, top_k]``, and the token of the
        first; None if it has none.

        num_tokens: of prompt and answer. start: as asked for, if the answer does not say it. A server may send all
        layers of a model that has experts in some. Raises ValueError for what is something else."""
        if (text := meta_info.get("routed_experts")) is None:
            return None, start
        start = int(meta_info.get("routed_experts_start_len", start))
        numbers = np.frombuffer(binascii.a2b_base64(text), dtype="<i4")
        num_rows = max(num_tokens - 1 - start, 0)
        sent = next((n for n in (len(self.layers), self.num_layers) if numbers.size == num_rows * n * self.top_k), 0)
        if not sent:
            raise ValueError(
                f"routed_experts has {numbers.size} numbers for {num_rows} tokens, {len(self.layers)} layers with "
                f"experts and {self.top_k} experts a token"
            )
        rows = numbers.reshape(num_rows, sent, self.top_k)
        if sent != len(self.layers):
            rows = rows[:, list(self.layers)]
        if not self.holds(rows):
            raise ValueError(f"routed_experts names the experts {rows.min()} to {rows.max()} of {self.num_experts}")
        return rows.astype(self.dtype), start


def num_recomputed(spans: Sequence[VersionSpan]) -> int:
    """How many tokens of an answer have experts of other weights than those that sampled them. spans: of its versions.
    A publication that finds a request running retracts it, and its tokens go through the newest weights again."""
    return sum(span.end - span.start for span in spans[:-1])


def joined(known: np.ndarray | None, found: np.ndarray | None, start: int) -> np.ndarray | None:
    """``known``, the experts of the first tokens of a row, and behind them those of a later answer, which begin at
    token ``start``. None if there are none of a token in between, or of one of both."""
    if known is None or found is None or start > len(known):
        return None
    return np.concatenate([known, found[len(known) - start :]]) if len(known) else found[len(known) - start :]
