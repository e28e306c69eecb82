"""``buffer-rl import``: translate the launch script of another project

``buffer-rl import slime SCRIPT``, or ``import relax SCRIPT``, makes it a file of options, with a verdict for each flag.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.errors import ConfigError
from buffer_rl.observe.terminal import say
from buffer_rl.options.redaction import MASK, is_secret
from buffer_rl.options.section import compose, load_section
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.verbs.table import print_table
from buffer_rl.verbs.train import plugins_named, sections_of
from buffer_rl_slime.scripts.meaning import Verdict
from buffer_rl_slime.scripts.shell_script import Launch, Script, read_script
from buffer_rl_slime.scripts.translation import RELAX, Line, Translation, translate, yaml_text
from buffer_rl_slime.scripts.verdicts import Target

_DESCRIPTION = """\
Translate a launch script of slime or Relax (bash). The script is read, with what it sources, and never run.

One line a flag: same, renamed, not needed, changes the result, or not there yet, each with its reason. --output writes
the options as a file for 'buffer-rl train --config FILE'. Variables of the environment are as if they were not set:
their defaults in the script hold, and what has none is ${env:NAME} in the file.
"""
_PROJECTS = {"slime": "slime", "relax": RELAX}
_BACKENDS = ("torch", "megatron")


def add_parser(subparsers: argparse._SubParsersAction[Any], argv: Sequence[str]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser("import", description=_DESCRIPTION)
    projects = parser.add_subparsers(metavar="PROJECT", required=True, dest="project")
    for name, project in _PROJECTS.items():
        _add_project(projects, name, project, argv)


def _add_project(projects: argparse._SubParsersAction[Any], name: str, project: str, argv: Sequence[str]) -> None:
    parser = projects.add_parser(name, help=f"a bash script that starts {project}'s training", description=_DESCRIPTION)
    parser.add_argument("script", metavar="SCRIPT", help="for example scripts/run-qwen3-4B.sh")
    parser.add_argument(
        "--output", metavar="FILE", help="write the options to this file, for buffer-rl train --config FILE"
    )
    parser.add_argument("--force", action="store_true", help="overwrite FILE")
    parser.add_argument(
        "--set", nargs="*", action="extend", default=[], metavar="NAME=VALUE", help="variables of the script"
    )
    parser.add_argument(
        "--laptop", action="store_true", help="one machine without GPUs: the embedded engine, one trainer rank"
    )
    parser.add_argument(
        "--train-backend",
        choices=_BACKENDS,
        help="the trainer (default: megatron if its plugin is installed, else torch)",
    )
    parser.add_argument("-p", "--plugin", nargs="*", action="extend", default=[], metavar="NAME", help="as for train")
    parser.set_defaults(run=run, found=plugins_named(argv))


def run(namespace: argparse.Namespace) -> int:
    """Read, translate, report, write. Returns the exit status; raises ConfigError."""
    out = Path(namespace.output) if namespace.output else None
    if out is not None and out.exists() and not namespace.force:
        raise ConfigError("the file is there already", where=f"--output {out}", hint="another name, or --force")
    script = read_script(namespace.script, _given(namespace.set))
    launch = _launch(script, namespace.script)
    target = _target(namespace)
    translation = translate(launch, target)
    flags = [line for line in translation.lines if line.flag.startswith("--")]
    say(f"{launch.where}: {Path(launch.program).name} with {len(flags)} flags")
    _report(translation, namespace.script, target.project)
    if folders := translation.python_path():
        say(f"\nnotice: the job has PYTHONPATH={folders}; buffer-rl finds your functions if it has it too")
    for notice in script.notices:
        say(f"\nnotice: {notice}")
    if names := translation.unknown_values():
        say(f"\nnotice: only a run of the script knows {', '.join(names)}: --set {names[0]}=VALUE says it here")
    title = f"buffer-rl import {namespace.project} {Path(namespace.script).name}"
    _write(out, yaml_text(translation, target, title=title, run_dir=f"runs/{Path(namespace.script).stem}"))
    return 0


def _given(texts: Sequence[str]) -> Mapping[str, str]:
    given = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (equals and name.isidentifier()):
            raise ConfigError(f"{text!r} sets no variable", where="--set", expected="NAME=VALUE")
        given[name] = value
    return given


def _launch(script: Script, path: str) -> Launch:
    """The training that the script starts. Raises ConfigError if there is none, or several."""
    found = [launch for launch in script.launches if _name(launch.program).startswith("train")]
    if not found:
        others = ", ".join(f"{launch.program} ({launch.where})" for launch in script.launches)
        what = f"the script starts no training{f', but {others}' if others else ''}"
        expected = "python3 train.py FLAGS, perhaps after 'ray job submit … --'"
        raise ConfigError(what, where=path, expected=expected)
    if len(found) > 1:
        lines = ", ".join(launch.where for launch in found)
        raise ConfigError(f"the script starts {len(found)} trainings: {lines}", where=path, hint="keep one of them")
    return found[0]


def _name(program: str) -> str:
    """The name of the file; for a module, the last part of its name."""
    return Path(program).name if program.endswith(".py") else program.rpartition(".")[2]


def _target(namespace: argparse.Namespace) -> Target:
    registry = PluginRegistry.from_flags(namespace.found)
    sections = sections_of(namespace.found)
    of_plugins = [load_section(each) for each in sections if each not in CORE_SECTIONS]
    megatron: set[str] = set()
    if "megatron" in registry.names("trainer"):
        megatron.update(*(section.model_fields for section in of_plugins if "megatron" in section.__module__))
    if namespace.train_backend == "megatron" and not megatron:
        raise ConfigError("there is no such trainer", where="--train-backend megatron", hint="buffer-rl plugins list")
    wanted = namespace.train_backend or ("torch" if namespace.laptop else "megatron")
    return Target(
        options_class=compose(sections),
        names=registry.names,
        megatron=frozenset(megatron),
        with_megatron=wanted == "megatron" and bool(megatron),
        laptop=namespace.laptop,
        project=_PROJECTS[namespace.project],
    )


def _report(translation: Translation, script: str, project: str) -> None:
    """Print a table for each verdict, those to look at last, and how many flags each has."""
    for verdict in Verdict:
        if lines := [line for line in translation.lines if line.verdict is verdict]:
            say(f"\n{verdict.capitalize()} ({len(lines)})")
            because = "because" if verdict is not Verdict.SAME else ""
            print_table(("flag", "value", because, "at"), [_row(line, script) for line in lines])
    if translation.added:
        say(f"\nAdded, because {project} does so by itself ({len(translation.added)})")
        print_table(("option", "value", "", ""), [_row(line, script) for line in translation.added])


def _row(line: Line, script: str) -> tuple[str, str, str, str]:
    value = MASK if line.value and is_secret(line.flag) else line.value
    value = value if len(value) <= 60 else f"{value[:57]}..."
    why = "; ".join(filter(None, (line.why, f"a comment in the file: {line.left_out}" if line.left_out else "")))
    file, _, number = line.where.rpartition(":")
    return line.flag, value, why, number if file in ("", script) else f"{Path(file).name}:{number}"


def _write(out: Path | None, text: str) -> None:
    if out is None:
        say("\nAdd --output FILE to write the options.")
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the file cannot be written: {error.strerror}", where=f"--output {out}") from error
    say(f"\n{out} is written. Next: buffer-rl train --config {out} --dry-run")
