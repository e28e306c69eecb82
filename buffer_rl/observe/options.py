"""Options of progress display, metrics, sample dumps and trace."""

from __future__ import annotations

from typing import ClassVar, Literal

from buffer_rl.options.section import Section, option


class ObserveOptions(Section):
    """Progress display, metric loggers, sample dump and trace."""

    heading: ClassVar[str] = "Observation"

    logger: list[str] = option(["tensorboard"], "metric loggers besides metrics.jsonl", kind="logger", common=True)
    progress: Literal["auto", "rich", "plain", "none"] = option("auto", "progress display")
    dump_samples: int = option(4, "number of groups per rollout to write to samples.jsonl", ge=0)
    trace: bool = option(True, "write trace.json, a timeline of all processes for Perfetto and the report")
