"""``/metrics``: Prometheus' text format, under SGLang's names."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from buffer_rl.embedded.scheduler import Request

PREFIX = "sglang:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Metric = tuple[str, str, str, float]
"""Name, type, help and value."""


@dataclass(slots=True, kw_only=True)
class Counts:
    """What was answered since the start; ``add`` is called once a request, not once a step."""

    requests: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    seconds: float = 0.0
    _last: tuple[float, int] = field(default_factory=lambda: (time.monotonic(), 0))

    def add(self, request: Request) -> None:
        """Count a finished request."""
        self.requests += 1
        self.aborted += (request.finish_reason or {}).get("type") == "abort"
        self.prompt_tokens += len(request.prompt_ids)
        self.cached_tokens += request.cached_tokens
        self.generation_tokens += len(request.output_ids)
        self.seconds += request.finished - request.created

    def throughput(self) -> float:
        """Tokens a second of the requests that were answered since the last call."""
        (before, tokens), now = self._last, time.monotonic()
        self._last = now, self.generation_tokens
        return (self.generation_tokens - tokens) / max(now - before, 1e-9)

    def counters(self) -> list[Metric]:
        """The counters."""
        total, counter = PREFIX, "counter"
        return [
            (f"{total}num_requests_total", counter, "Requests answered.", self.requests),
            (f"{total}num_aborted_requests_total", counter, "Requests that were aborted.", self.aborted),
            (f"{total}prompt_tokens_total", counter, "Prompt tokens of answered requests.", self.prompt_tokens),
            (f"{total}cached_tokens_total", counter, "Prompt tokens of them that were not run.", self.cached_tokens),
            (f"{total}generation_tokens_total", counter, "Output tokens of them.", self.generation_tokens),
            (f"{total}e2e_request_latency_seconds_sum", counter, "Seconds from arrival to answer.", self.seconds),
            (f"{total}e2e_request_latency_seconds_count", counter, "Requests in that sum.", self.requests),
        ]


def render(metrics: list[Metric], model_name: str) -> str:
    """The text of ``/metrics``."""
    label = model_name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return "".join(
        f'# HELP {name} {text}\n# TYPE {name} {kind}\n{name}{{model_name="{label}"}} {value!r}\n'
        for name, kind, text, value in metrics
    )
