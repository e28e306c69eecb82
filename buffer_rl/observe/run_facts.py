"""``run.json``: what a run was started with, for whoever reads its folder later. It holds no secrets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from buffer_rl import __version__
from buffer_rl.config import Options, flag_of
from buffer_rl.redaction import mask_secrets

RUN_FILE = "run.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What is known of a run. Everything is empty for a run of which nothing was written down.

    started: UTC, ISO 8601. changed: the options that differ from their defaults, by flag.
    """

    started: str = ""
    version: str = ""
    changed: Mapping[str, Any] = field(default_factory=dict)


def changed_options(args: Options) -> dict[str, Any]:
    """The options that are not at their default, by flag, as JSON values without secrets."""
    values = args.model_dump(mode="json")
    fields = type(args).model_fields
    return {
        flag_of(name): mask_secrets(value, name)
        for name, value in values.items()
        if getattr(args, name) != fields[name].get_default(call_default_factory=True, validated_data={})
    }


def write_facts(run_dir: str | Path, args: Options, provenance: Mapping[str, Any] | None = None) -> Path:
    """Write ``run_dir/run.json`` in place of an earlier one. Raises ``OSError``.

    provenance: what code and data the run is made of, as JSON values."""
    path = Path(run_dir) / RUN_FILE
    facts = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "changed": changed_options(args),
        **(provenance or {}),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    return path


def read_facts(run_dir: str | Path) -> RunFacts:
    """The facts of the run in ``run_dir``; empty where the file is missing or is none of ours."""
    try:
        found = json.loads((Path(run_dir) / RUN_FILE).read_text(encoding="utf-8"))
        return RunFacts(started=str(found["started"]), version=str(found["version"]), changed=dict(found["changed"]))
    except (OSError, ValueError, KeyError, TypeError):
        return RunFacts()
