"""The report on groups in quarantine: one line of JSON each, in ``quarantine.jsonl`` of the run's folder."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from buffer_rl.redaction import mask_secrets
from buffer_rl.rollout.failures import AttemptFailure
from buffer_rl.types import SampleGroup

QUARANTINE_FILE = "quarantine.jsonl"
EXCERPT_CHARS = 400
ERROR_CHARS = 4000


def quarantine_record(group: SampleGroup, task: str, failure: AttemptFailure, attempts: int) -> dict[str, Any]:
    """What is written down of one group: who it is, the beginning of its prompt, and the end of its error.

    attempts: how many of them failed for reasons of this domain."""
    prompt = group[0].prompt
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False, default=str)
    record = {
        "uid": str(group.uid),
        "task": task,
        "time": time.time(),
        "reason": failure.reason,
        "attempts": attempts,
        "prompt": text[:EXCERPT_CHARS],
        "error": str(failure.error)[-ERROR_CHARS:],
    }
    masked: dict[str, Any] = mask_secrets(record)
    return masked


def write_record(run_dir: Path, group: SampleGroup, task: str, failure: AttemptFailure, attempts: int) -> None:
    """Append the group's line; several workers may write one file."""
    line = json.dumps(quarantine_record(group, task, failure, attempts), ensure_ascii=False) + "\n"
    with (run_dir / QUARANTINE_FILE).open("ab") as file:
        file.write(line.encode("utf-8", errors="replace"))
