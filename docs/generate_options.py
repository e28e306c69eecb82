"""Write the tables of ``docs/options.md`` from the option sections: ``python docs/generate_options.py``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from buffer_rl.config import flag_of, load_section
from buffer_rl.configuration.help import default_text, short_flag
from buffer_rl.configuration.values import option_type
from buffer_rl.options import CORE_SECTIONS

PAGE = Path(__file__).with_name("options.md")
MARKER = "<!-- The tables are written by: python docs/generate_options.py -->\n"


def render_tables(references: Iterable[str]) -> str:
    """One heading and one table for each section."""
    parts = []
    for reference in references:
        section = load_section(reference)
        lines = [f"\n### {section.heading}\n", "| flag | type | default | meaning |", "|---|---|---|---|"]
        for name, field in section.model_fields.items():
            flags = ", ".join(f"`{flag}`" for flag in [flag_of(name), *short_flag(field)])
            extra = field.json_schema_extra
            kind = extra.get("kind") if isinstance(extra, dict) else ""
            wanted = str(option_type(field)) + (f"; REF of a {kind} plugin" if kind else "")
            cells = (flags, wanted, f"`{default_text(field)}`", str(field.description))
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append("\n".join(lines) + "\n")
    return "".join(parts)


def render_page(page: str) -> str:
    """The page with new tables below its marker. Raises ValueError without a marker."""
    head, marker, _ = page.partition(MARKER)
    if not marker:
        raise ValueError(f"{PAGE.name} has no line {MARKER.strip()!r}")
    return head + marker + render_tables(CORE_SECTIONS)


if __name__ == "__main__":
    PAGE.write_text(render_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
