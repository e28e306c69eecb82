"""Options of progress display, metrics, sample dumps and trace."""

from __future__ import annotations

from typing import ClassVar, Literal

from buffer_rl.options.section import Section, option


class ObserveOptions(Section):
    """Progress display, metric loggers, sample dump and trace."""

    heading: ClassVar[str] = "Observation"

    logger: list[str] = option(["tensorboard"], "metric loggers besides the JSONL file", kind="logger", common=True)
    progress: Literal["auto", "rich", "plain", "none"] = option("auto", "progress display")
    dump_samples: int = option(4, "groups a rollout that are written to samples.jsonl", ge=0)
    trace: bool = option(True, "write trace.json, for Perfetto and the report: who worked on what, and when")
