"""What a launch command of slime became, as a file for ``--config``, with a comment for what is not as it was."""

from __future__ import annotations

import json
import re

from buffer_rl.config import item_of_mapping, load_section
from buffer_rl.configuration.shell_values import shown, with_placeholders
from buffer_rl.configuration.slime_flags import Verdict
from buffer_rl.configuration.slime_import import Translation, texts_of
from buffer_rl.configuration.slime_verdicts import WITH_MEGATRON, Target
from buffer_rl.configuration.values import Raw, option_type


def yaml_text(translation: Translation, target: Target, *, title: str, run_dir: str) -> str:
    """The options as a file for ``--config``: the sections of the options, then what is not written, as comments."""
    sections: dict[str, list[str]] = {heading: [] for _, heading in _headings(target)}
    of = dict(_headings(target))
    out: dict[str, list[str]] = {}
    sections[of["run_dir"]].append(f"run_dir: {_scalar(run_dir)}")
    for line in [*translation.added, *translation.lines]:
        for name, raw in line.options.items():
            heading = of[name if name in of else item_of_mapping(target.fields, name)[0]]
            text = f"{name}: {_yaml(target, name, raw)}"
            if line.left_out:
                text = f"# {shown(text)}  # {line.left_out}"
            elif line.verdict is Verdict.RENAMED:
                text += f"  # slime's {line.flag} {line.value}".rstrip()
            elif line.why and line.why != WITH_MEGATRON:
                text += f"  # {line.why}"
            sections[heading].append(text)
        if not line.options and line.verdict in (Verdict.CHANGES, Verdict.NOT_YET):
            out.setdefault(f"{line.verdict}:", []).append(f"#   {line.flag} {line.value}".rstrip() + f": {line.why}")
    parts = [f"# {title}"]
    for heading, lines in sections.items():
        if lines:
            parts.append("\n".join([f"# {heading}", *lines]))
    for heading, lines in out.items():
        parts.append("\n".join([f"# Not in this file, {heading}", *lines]))
    return "\n\n".join(parts) + "\n"


def _headings(target: Target) -> list[tuple[str, str]]:
    """Each option's section heading, in the order of the sections."""
    sections = [load_section(reference) for reference in target.options_class.section_references]
    return [(name, section.heading or section.__name__) for section in sections for name in section.model_fields]


def _yaml(target: Target, name: str, raw: Raw) -> str:
    if name in target.fields and option_type(target.fields[name]).mapping and isinstance(raw, str):
        try:
            return json.dumps(json.loads(raw), ensure_ascii=False)
        except json.JSONDecodeError:
            return _scalar(with_placeholders(raw))
    if name in target.fields and option_type(target.fields[name]).many:
        raw = texts_of(raw)
    if isinstance(raw, list):
        return "[" + ", ".join(_scalar(with_placeholders(text), inside=True) for text in raw) + "]"
    return _scalar(with_placeholders(str(raw)))


_PLAIN = re.compile(r"[\w./][\w./+=@:-]*")
_PLAIN_WITH_VARIABLES = re.compile(r"([\w./]|\$\{env:\w+\})([\w./+=@:-]|\$\{env:\w+\})*")


def _scalar(text: str, *, inside: bool = False) -> str:
    """The text as YAML reads it back, plain where that is safe. inside: of a list in brackets."""
    plain = _PLAIN if inside else _PLAIN_WITH_VARIABLES
    if plain.fullmatch(text) and not text.endswith(":") and text.lower() != "null":
        return text
    return json.dumps(text, ensure_ascii=False)
