"""The HTML report of a run's folder, as a file."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

from buffer_rl.errors import ConfigError
from buffer_rl.observe.html_report import Report, render_report
from buffer_rl.observe.metrics import read_metrics
from buffer_rl.observe.run_folder import SAMPLES_FILE, read_facts, read_jsonl
from buffer_rl.observe.summary import REPORT_FILE, run_files
from buffer_rl.observe.timeline import read_trace


def write_report(run_dir: str | Path, output: str | Path | None = None, title: str = "") -> Path:
    """Write the report of the run in ``run_dir`` to ``output``, or to ``report.html`` there; returns its path.

    Raises DataError if the run has no metrics or a line of its files is damaged, ConfigError if the page cannot be
    written.
    """
    folder = Path(run_dir)
    target = folder / REPORT_FILE if output is None else Path(output)
    samples = folder / SAMPLES_FILE
    page = render_report(
        Report(
            title=title or folder.absolute().name,
            metrics=read_metrics(folder),
            samples=read_jsonl(samples) if samples.exists() else [],
            facts=read_facts(folder),
            spans=read_trace(folder),
            files={name: _address(path, target) for name, path in run_files(folder).items() if path != target},
        )
    )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.tmp")
        temporary.write_text(page, encoding="utf-8", errors="replace")  # a lone surrogate of a response is no UTF-8
        temporary.replace(target)
    except OSError as error:
        raise ConfigError(f"the report cannot be written: {error}", where=str(target)) from error
    return target


def _address(path: Path, page: Path) -> str:
    relative = os.path.relpath(path.absolute(), page.absolute().parent)
    return quote(relative.replace(os.sep, "/"))
