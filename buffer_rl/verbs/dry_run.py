"""What ``--dry-run`` shows: every option with its origin, without secrets; the plugins and where they are; the data."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from buffer_rl.config import load_section
from buffer_rl.configuration.sources import Resolved
from buffer_rl.redaction import mask_secrets, mask_url


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginUse:
    """One option that names a plugin. ``place``: where it is; ``origin``: where the option's value is from."""

    option: str
    kind: str
    reference: str
    place: str
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One data file that was read. ``use``: ``train`` or ``eval/NAME``."""

    use: str
    path: str
    num_rows: int
    source_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """A run that could start."""

    resolved: Resolved
    plugins: list[PluginUse]
    data: list[DataFile]


def print_json(plan: DryRun) -> None:
    """Print one JSON object with ``options``, ``plugins`` and ``data``."""
    values = mask_secrets(plan.resolved.args.model_dump(mode="json"))
    origins = plan.resolved.origins
    document: dict[str, Any] = {
        "options": {
            name: {"value": value, "source": str(origins[name].source), "where": origins[name].where}
            for name, value in values.items()
        },
        "plugins": [asdict(use) for use in plan.plugins],
        "data": mask_secrets([asdict(file) for file in plan.data]),
    }
    print(json.dumps(document, indent=2, ensure_ascii=False))


def print_text(plan: DryRun) -> None:
    """Print three tables."""
    for line in _option_lines(plan.resolved):
        print(line)
    print("\nPlugins")
    _print_columns([(use.kind, use.reference, use.place) for use in plan.plugins])
    print("\nData files")
    _print_columns([(file.use, mask_url(file.path), f"{file.num_rows} rows") for file in plan.data])
    print("\nDry run: everything that can be checked before a run is right.")


def _option_lines(resolved: Resolved) -> Iterator[str]:
    values = mask_secrets(resolved.args.model_dump(mode="json"))
    names = max(len(name) for name in values)
    for position, reference in enumerate(resolved.args.section_references):
        section = load_section(reference)
        yield ("\n" if position else "") + (section.heading or section.__name__)
        for name in section.model_fields:
            origin = resolved.origins[name]
            shown = json.dumps(values[name], ensure_ascii=False)
            yield f"  {name:<{names}}  {shown:<28}  {'' if origin.source == 'default' else origin}".rstrip()


def _print_columns(rows: Sequence[tuple[str, str, str]]) -> None:
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(2)]
    for first, second, third in rows:
        print(f"  {first:<{widths[0]}}  {second:<{widths[1]}}  {third}".rstrip())
