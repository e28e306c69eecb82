"""One generation request inside the engine, from admission to its answer."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from buffer_rl.engine.embedded.cache import Row
from buffer_rl.engine.embedded.sampling import SamplingParams


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """prompt and the tokens drawn so far; ``log_probs[i]`` belongs to ``output_ids[i]``.

    version_marks: (version, number of tokens drawn before it): the weights that later tokens come from.
    tag: whatever the caller wants to find the request by; the engine never looks at it.
    """

    rid: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    tag: Any = None
    output_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    version_marks: list[tuple[str, int]] = field(default_factory=list)
    finish_reason: dict[str, Any] | None = None
    cached_tokens: int = 0
    num_retractions: int = 0
    row: Row = field(default_factory=Row)
    created: float = field(default_factory=time.perf_counter)
    finished: float = 0.0

    @property
    def sequence(self) -> tuple[int, ...]:
        """Prompt and output so far."""
        return (*self.prompt_ids, *self.output_ids)

    @property
    def position(self) -> int:
        """Absolute position of the next token; with the seed, it names the random number behind it."""
        return len(self.prompt_ids) + len(self.output_ids)

    def mark_version(self, version: str) -> None:
        """Tokens drawn from now on come from the weights ``version``."""
        if self.version_marks and self.version_marks[-1][1] == len(self.output_ids):
            self.version_marks.pop()
        if not self.version_marks or self.version_marks[-1][0] != version:
            self.version_marks.append((version, len(self.output_ids)))

    def version_spans(self) -> list[dict[str, Any]]:
        """``[{"version", "start", "end"}]`` over the output tokens, without empty spans."""
        starts = [start for _, start in self.version_marks]
        ends = [*starts[1:], len(self.output_ids)] if starts else []
        return [
            {"version": version, "start": start, "end": end}
            for (version, start), end in zip(self.version_marks, ends, strict=True)
            if end > start
        ]

    def finish(self, reason: dict[str, Any]) -> None:
        """Set the reason and the time; the first reason stays."""
        if self.finish_reason is None:
            self.finish_reason = reason
            self.finished = time.perf_counter()
