"""A page of a run as one file: it loads nothing, runs its own script alone, and escapes every text that is put in."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from buffer_rl.errors import ConfigError, raised_as
from buffer_rl.observe.svg_chart import TEMPLATES, format_seconds


def render_page(template: str, **values: Any) -> str:
    """The page that ``template`` makes of ``values``, with the style and the script of reports.

    Only pictures, style and script are put in as they are."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"json": lambda value: json.dumps(value, ensure_ascii=False), "seconds": format_seconds}
    script = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template(template).render(
        # The browser loads nothing and runs no script but this one, whatever a response holds.
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'",
        style=(TEMPLATES / "report.css").read_text(encoding="utf-8"),
        script=script,
        **values,
    )


def write_page(page: str, target: Path) -> Path:
    """Write a page in one go. Raises ConfigError if it cannot be written."""
    with raised_as(ConfigError, "the report cannot be written", OSError, where=str(target)):
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.tmp")
        temporary.write_text(page, encoding="utf-8", errors="replace")  # a lone surrogate of a response is no UTF-8
        temporary.replace(target)
    return target
