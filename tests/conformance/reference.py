"""The same tiny models computed by transformers: greedy tokens and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from buffer_rl.testing.tiny import make_tiny_model

TEMPLATE = (
    "{% for tool in tools or [] %}T{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}{{ message.role[0] }}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments.x }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
CONTEXT = 520


class Reference:
    """Two models, the weight versions "0" and "1", in the folders ``base/0`` and ``base/1``, which are made where they
    are not there."""

    def __init__(self, base: str) -> None:
        self.base = base
        self._models: dict[str, Any] = {}
        for version in ("0", "1"):
            if not Path(base, version).exists():
                folder = make_tiny_model(Path(base, version), seed=int(version), max_position_embeddings=1024)
                tokenizer: Any = AutoTokenizer.from_pretrained(folder)
                tokenizer.chat_template = TEMPLATE
                tokenizer.save_pretrained(folder)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(self.folder("0"))
        self.vocab_size = int(self.model("0").config.vocab_size)
        self.eos = 1

    def folder(self, version: str) -> str:
        """Where the weights are."""
        return str(Path(self.base, version))

    def update(self, version: str) -> dict[str, Any]:
        """The body of ``/update_weights_from_disk``."""
        return {"model_path": self.folder(version), "weight_version": version}

    def model(self, version: str) -> Any:
        """The module with the weights of ``version``."""
        if version not in self._models:
            load: Any = AutoModelForCausalLM.from_pretrained
            self._models[version] = load(self.folder(version), dtype=torch.float32).eval()
        return self._models[version]

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], count: int, *, banned: Sequence[int] = (), version: str = "0") -> list[int]:
        """The ``count`` likeliest tokens one after another; ``banned`` ones are never taken."""
        ids = list(prompt)
        for _ in range(count):
            logits = self.model(version)(torch.tensor([ids])).logits[0, -1]
            logits[list(banned)] = float("-inf")
            ids.append(int(logits.argmax()))
        return ids[len(prompt) :]

    @torch.no_grad()
    def table(self, ids: Sequence[int], temperature: float = 1.0, version: str = "0") -> torch.Tensor:
        """``log_softmax(logits / temperature)`` behind each position of ``ids``: ``[len(ids), vocab]`` float64."""
        logits = self.model(version)(torch.tensor([list(ids)])).logits[0].double()
        return torch.log_softmax(logits / (1.0 if temperature < 1e-6 else temperature), dim=-1)

    def log_probs(
        self, prompt: Sequence[int], output: Sequence[int], temperature: float = 1.0, version: str = "0"
    ) -> list[float]:
        """Log-probabilities of the output tokens, in nats."""
        rows = self.table([*prompt, *output], temperature, version)[len(prompt) - 1 :]
        return [float(row[token]) for row, token in zip(rows, output, strict=False)]

    def top(self, prompt: Sequence[int], count: int, temperature: float = 1.0) -> list[int]:
        """The ``count`` likeliest next tokens."""
        return list(self.table(prompt, temperature)[-1].topk(count).indices.tolist())
