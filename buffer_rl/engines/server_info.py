"""What an engine says of itself in ``/server_info``, as far as runs look at it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from buffer_rl.engines.row_ids import RowSeeds
from buffer_rl.errors import EngineError

EMBEDDED = "buffer_rl.embedded"
"""``engine`` in ``/server_info`` of this package's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What an engine says that it is. is_embedded: one of this package's. imitates: the server that it answers as.
    deterministic: an answer depends on the request and its seed alone. shares_seeds: the rows of a request have its
    seed, where it is not ours. device: ``"cuda"`` or ``"cpu"``; empty where it does not say. context_length: None where
    it is the model's own."""

    is_embedded: bool = False
    imitates: str | None = None
    tp_size: int = 1
    dp_size: int = 1
    deterministic: bool = False
    shares_seeds: bool = False
    device: str = ""
    context_length: int | None = None

    @classmethod
    def parse(cls, answer: Any, url: str) -> ServerInfo:
        """Of an answer of ``/server_info``. Raises EngineError unless it is one."""
        try:
            deterministic, length = bool(answer.get("deterministic")), answer.get("context_length")
            return cls(
                is_embedded=answer.get("engine") == EMBEDDED,
                imitates=answer.get("imitates"),
                tp_size=int(answer.get("tp_size", 1)),
                dp_size=int(answer.get("dp_size", 1)),
                deterministic=deterministic,
                shares_seeds=deterministic or bool(answer.get("enable_deterministic_inference")),
                device=str(answer.get("device") or ""),
                context_length=None if length is None else int(length),
            )
        except (AttributeError, TypeError, ValueError) as error:
            raise EngineError(f"not what a server says of itself: {error}", where=f"{url}/server_info") from error

    @property
    def is_ours(self) -> bool:
        """Whether it behaves as the embedded engine, which takes weights only as a whole, and only those that fit."""
        return self.is_embedded and self.imitates is None

    @property
    def row_seeds(self) -> RowSeeds:
        """How the rows of a request draw."""
        if self.is_ours:
            return RowSeeds.OWN
        return RowSeeds.SHARED if self.shares_seeds else RowSeeds.NONE
