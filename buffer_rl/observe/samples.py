"""Sample dumps: what the model wrote, with its reward, for reading."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from buffer_rl.observe.files import JsonlWriter, records_before
from buffer_rl.types import Sample

SAMPLES_FILE = "samples.jsonl"


def sample_record(sample: Sample) -> dict[str, Any]:
    """The readable part of a sample, as JSON values.

    ``versions`` lists ``[version, start, end]``: response tokens start to end were sampled by that version.
    """
    return {
        "uid": None if sample.uid is None else str(sample.uid),
        "sample_index": sample.sample_index,
        "prompt": sample.prompt,
        "response": sample.response,
        "label": sample.label,
        "reward": sample.reward,
        "status": str(sample.status),
        "versions": [[span.version, span.start, span.end] for span in sample.weight_versions],
    }


class SampleDump:
    """Writes ``samples.jsonl`` in a run's folder. ``resume_step`` as in ``MetricsFile``."""

    def __init__(self, run_dir: str | Path, *, resume_step: int | None = None) -> None:
        self._writer = JsonlWriter(Path(run_dir) / SAMPLES_FILE, keep=records_before(resume_step, "rollout_id"))
        self.path = self._writer.path

    def write(self, rollout_id: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """Append one line a sample (see ``sample_record``), each with its ``rollout_id``."""
        for sample in samples:
            self._writer.write({"rollout_id": rollout_id, **{name: _plain(value) for name, value in sample.items()}})

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def _plain(value: Any) -> Any:
    """``value`` as JSON can hold it: labels and rewards are the user's, so anything may turn up here."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return _plain(value.item()) if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else str(value)
