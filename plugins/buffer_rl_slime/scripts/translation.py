"""A launch command of slime as options: a verdict for each flag, and additions where slime's defaults are others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from buffer_rl.errors import ConfigError
from buffer_rl.options.section import flag_of, item_of_mapping, load_section
from buffer_rl.options.sources import resolve
from buffer_rl.options.values import Raw, option_type
from buffer_rl_slime.scripts.asynchronous import PROGRAM, corrections, of_program, schedule_of
from buffer_rl_slime.scripts.flags import DEFAULTS
from buffer_rl_slime.scripts.meaning import Verdict
from buffer_rl_slime.scripts.shell_script import SFT, Flags, Launch, flags_of, value_of
from buffer_rl_slime.scripts.shell_values import is_computed, marks_of, shown, with_placeholders
from buffer_rl_slime.scripts.verdicts import WITH_MEGATRON, Judge, Target

RELAX = "Relax"
PLACES = (
    "actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus", "rollout_num_gpus_per_engine",
    "num_gpus_per_node", "colocate", "offload_train", "offload_rollout", "resource",
    "weight_sync_mode", "rollout_engine", "engine_dtype", "engine_device", "router_policy",
)  # fmt: skip
"""Options that a run on one machine without GPUs leaves out, with those of SGLang and Megatron."""


_JOB_ENVIRONMENT = "--runtime-env-json="
_PLAIN = re.compile(r"[\w./][\w./+=@:-]*")
_PLAIN_WITH_VARIABLES = re.compile(r"([\w./]|\$\{env:\w+\})([\w./+=@:-]|\$\{env:\w+\})*")
_OF_GENERATION = ("rollout_skip_special_tokens", "label_key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One flag. value: as people read it. options: what it becomes; where ``written`` is not empty it is the reason
    that the file has them as comments. where: ``file:line``."""

    flag: str
    value: str = ""
    verdict: Verdict
    why: str = ""
    options: Mapping[str, Raw] = field(default_factory=dict)
    left_out: str = ""
    where: str = ""

    def unknown_values(self) -> list[str]:
        """Variables that only a run of the script knows, and that the options need."""
        texts = [text for raw in self.options.values() for text in texts_of(raw) if is_computed(text)]
        return list(dict.fromkeys(name for text in texts for name in marks_of(text)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """lines: one a flag, in the script's order. added: slime's defaults, where those of a run are others."""

    launch: Launch
    lines: list[Line]
    added: list[Line]

    def python_path(self) -> str:
        """The ``PYTHONPATH`` of the job, without Megatron's folders; empty where it sets none."""
        given = next((word.text for word in self.launch.words if word.text.startswith(_JOB_ENVIRONMENT)), "")
        try:
            variables = json.loads(shown(given).removeprefix(_JOB_ENVIRONMENT)).get("env_vars", {})
        except (json.JSONDecodeError, AttributeError):
            return ""
        folders = str(variables.get("PYTHONPATH", "")).split(":")
        return ":".join(folder for folder in folders if folder and "Megatron" not in folder)

    def unknown_values(self) -> list[str]:
        """Variables that only a run of the script knows, and that the options need."""
        return list(dict.fromkeys(name for line in [*self.lines, *self.added] for name in line.unknown_values()))


def translate(launch: Launch, target: Target) -> Translation:
    """Give each flag of the command its verdict. Raises ConfigError for arguments that belong to no flag."""
    flags, again, where = flags_of(launch.arguments)
    schedule = schedule_of(Path(launch.program).name, flags)
    lines = []
    for name, values in flags.items():
        texts = [value.text.strip() for value in values]  # of blanks that only Python knows, as slime's parser does
        verdict, why, options = Judge(flags=flags, target=target, schedule=schedule).judge(name, texts)
        why = "; ".join(filter(None, (why, "given twice, the last one counts" if name in again else "")))
        value = shown(" ".join(texts))
        line = Line(flag=f"--{name}", value=value, verdict=verdict, why=why, options=options, where=where[name])
        lines.append(_left_out(_checked(line, target), target))
    lines += [*_of_program(launch, flags, schedule), *_of_absent(flags)]
    added = [_left_out(_checked(line, target), target) for line in _defaults(flags, target)]
    return Translation(launch=launch, lines=lines, added=added)


def _of_program(launch: Launch, flags: Flags, schedule: str) -> Iterable[Line]:
    """What is to be said of slime's other program, which generates while it trains, and what its loss lacks."""
    name = Path(launch.program).name
    if name == PROGRAM:
        verdict, why, options = of_program(flags, schedule)
        yield Line(flag=name, verdict=verdict, why=why, options=options, where=launch.where)
    for flag, why, options in corrections(flags, schedule):
        yield Line(flag=flag, verdict=Verdict.CHANGES, why=why, options=options, where=launch.where)


def _of_absent(flags: Flags) -> Iterable[Line]:
    """What Megatron does by default, and no option here can do."""
    for name in ("attention-dropout", "hidden-dropout"):
        if name not in flags:
            why = "Megatron's default is a dropout of 0.1, and there is none here"
            yield Line(flag=f"(no --{name})", verdict=Verdict.CHANGES, why=why)


def texts_of(raw: Raw) -> list[str]:
    if isinstance(raw, list):
        return raw
    return [raw] if isinstance(raw, str) else []


def _defaults(flags: Flags, target: Target) -> Iterable[Line]:
    """The defaults of slime, where those of a run here are others."""
    project = target.project
    if "fully-async" in flags and project == RELAX and "max-staleness" not in flags:
        yield _added("max_staleness", "0", "Relax's default, without --max-staleness")
    supervised = value_of(flags, "loss-type") == SFT
    if not supervised:
        yield _added("rollout_engine", "sglang", f"{project}'s engines are always SGLang's")
    if target.with_megatron:
        yield _added("train_backend", "megatron", f"{project}'s trainer")
        for name, value in (("transformer_impl", "transformer_engine"), ("bf16", "true")):
            if name in target.fields and name.replace("_", "-") not in flags:
                yield _added(name, value, f"{project}'s default, without {flag_of(name)}")
    for flag, option, value, only_with in DEFAULTS:
        if flag in flags or (only_with and only_with not in flags) or (supervised and option in _OF_GENERATION):
            continue
        if option == "actor_num_gpus_per_node" and "resource" in flags:
            continue
        if option == "loss_agg_mode" and value_of(flags, "advantage-estimator") == "gspo":
            continue  # a number for each row, whatever the mode
        yield _added(option, value, f"{project}'s default, without --{flag}")
    for name in ("offload-train", "offload-rollout") if "colocate" in flags else ():
        if not {name, f"no-{name}", "offload"} & flags.keys():
            yield _added(name.replace("-", "_"), "true", f"{project}'s --colocate implies it")
    alone = (value_of(flags, "n-samples-per-prompt") or "1") == "1"
    if alone and not supervised and "disable-grpo-std-normalization" not in flags:
        yield _added("grpo_std_normalization", "false", f"as {project} does with one sample a prompt")


def _added(option: str, value: str, why: str) -> Line:
    return Line(flag=flag_of(option), value=value, verdict=Verdict.SAME, why=why, options={option: value})


def _checked(line: Line, target: Target) -> Line:
    """The line, or another verdict where its value is none of the option's."""
    for name, raw in line.options.items():
        owner, _ = ("", "") if name in target.fields else item_of_mapping(target.fields, name)
        if name not in target.fields and not owner:
            return replace(line, verdict=Verdict.NOT_YET, why=f"there is no {flag_of(name)} here", options={})
        if owner or any(marks_of(text) for text in texts_of(raw)):
            continue
        try:
            resolve(target.options_class, flags={name: raw}, environ={})
        except ConfigError as error:
            wanted = option_type(target.fields[name])
            why = f"the value is not {wanted}" if "is not" in str(error) else str(error).replace("\n", " ")
            return replace(line, verdict=Verdict.NOT_YET, why=why, options={})
    return line


def _left_out(line: Line, target: Target) -> Line:
    """The line with the reason for which the file has its options as comments, if there is one."""
    if names := line.unknown_values():
        return replace(line, left_out=f"only a run of the script knows {', '.join(names)}")
    if any(name in target.megatron for name in line.options) and not target.with_megatron:
        return replace(line, left_out="with train_backend: megatron")
    if target.laptop and any(name in PLACES or name.startswith("sglang_") for name in line.options):
        return replace(line, left_out="for GPUs and SGLang")
    if target.laptop and "bf16" in line.options:
        return replace(line, left_out="for GPUs: a CPU is slower in bfloat16")
    return line


def yaml_text(translation: Translation, target: Target, *, title: str, run_dir: str) -> str:
    """The options as a file for ``--config``: the sections of the options, then what is not written, as comments."""
    of = _headings(target)
    sections: dict[str, list[str]] = {heading: [] for heading in of.values()}
    out: dict[str, list[str]] = {}
    sections[of["run_dir"]].append(f"run_dir: {_scalar(run_dir)}")
    for line in [*translation.added, *translation.lines]:
        for name, raw in line.options.items():
            heading = of[name if name in of else item_of_mapping(target.fields, name)[0]]
            text = f"{name}: {_yaml(target, name, raw)}"
            if line.left_out:
                text = f"# {shown(text)}  # {line.left_out}"
            elif line.verdict is Verdict.RENAMED:
                text += f"  # {target.project}'s {line.flag} {line.value}".rstrip()
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


def _headings(target: Target) -> dict[str, str]:
    """Each option's section heading, in the order of the sections."""
    sections = [load_section(reference) for reference in target.options_class.section_references]
    return {name: section.heading or section.__name__ for section in sections for name in section.model_fields}


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


def _scalar(text: str, *, inside: bool = False) -> str:
    """The text as YAML reads it back, plain where that is safe. inside: of a list in brackets."""
    plain = _PLAIN if inside else _PLAIN_WITH_VARIABLES
    if plain.fullmatch(text) and not text.endswith(":") and text.lower() != "null":
        return text
    return json.dumps(text, ensure_ascii=False)
