"""Write the tables of ``docs/options.md`` from the option sections: ``python docs/generate_options.py``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.options.help import default_text, short_flag
from buffer_rl.options.section import declared, flag_of, load_section
from buffer_rl.options.values import option_type

PAGE = Path(__file__).with_name("options.md")
MARKER = "<!-- The tables are written by: python docs/generate_options.py -->\n"


def render_tables(references: Sequence[str]) -> str:
    """One heading and one table for each section."""
    parts = []
    known = {name: field for reference in references for name, field in load_section(reference).model_fields.items()}
    for reference in references:
        section = load_section(reference)
        lines = [f"\n### {section.heading}\n", "| flag | type | default | meaning |", "|---|---|---|---|"]
        for name, field in section.model_fields.items():
            flags = ", ".join(f"`{flag}`" for flag in [flag_of(name), *short_flag(field)])
            kind, group = declared(field, "kind"), declared(field, "one_of")
            rivals = [flag_of(other) for other, each in known.items() if declared(each, "one_of") == group != ""]
            excludes = ", ".join(f"`{flag}`" for flag in rivals if flag != flag_of(name))
            wanted = str(option_type(field)) + (f"; REF of a {kind} plugin" if kind else "")
            cells = (
                flags,
                wanted,
                f"`{default_text(field)}`",
                f"{field.description}{f' (excludes {excludes})' if excludes else ''}",
            )
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
