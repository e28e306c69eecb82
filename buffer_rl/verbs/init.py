"""``buffer-rl init [FOLDER]``: a project that trains as it stands, to be changed into one's own task.

Its files are made of those in ``project/``: Jinja templates with ``<% %>`` and ``<< >>``.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from buffer_rl.errors import ConfigError, raised_as
from buffer_rl.observe.terminal import say

if TYPE_CHECKING:
    from jinja2 import Environment

_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?")
_DESCRIPTION = """\
Write a small project that trains as it stands: run.yaml, my_reward.py with its test, and prepare.py, which makes sample
data and a tiny model. Existing files are never overwritten. docs/your_own_task.md goes through all of it."""


def add_parser(subparsers: argparse._SubParsersAction[Any], argv: Sequence[str]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser("init", description=_DESCRIPTION)
    parser.add_argument(
        "folder", nargs="?", default=".", metavar="FOLDER", help="where to write; default: the working directory"
    )
    parser.add_argument(
        "--model", metavar="MODEL", help="a Hugging Face folder, or a name of the Hub, to train instead of a tiny model"
    )
    parser.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    """Write the files and print the next commands. Raises ConfigError."""
    folder, model = Path(namespace.folder), namespace.model and model_value(namespace.model)
    paths = write_project(folder, model)
    say(f"{folder}: {', '.join(path.name for path in paths)}")
    say("Next:" if folder.resolve() == Path.cwd() else f"Next, after cd {shlex.quote(str(folder))}:")
    say(f"  python prepare.py                             # {'sample data' if model else 'sample data, a tiny model'}")
    say("  buffer-rl train --config run.yaml --dry-run   # check everything, start nothing")
    say("  buffer-rl train --config run.yaml             # train")
    return 0


def model_value(model: str) -> str:
    """``hf_checkpoint`` for ``--model``: an absolute path, or a name of the Hub as it is. Raises ConfigError."""
    path = Path(model).expanduser()
    if (path / "config.json").is_file():
        return str(path.resolve())
    if path.exists() or not _HUB_NAME.fullmatch(model):
        what = "there is no config.json in it" if path.exists() else "there is no such folder"
        expected = "a Hugging Face folder with config.json, or a name of the Hub: ORG/NAME"
        raise ConfigError(what, where=f"--model {model}", expected=expected)
    return model


def write_project(folder: Path, model: str | None = None) -> list[Path]:
    """Write the project's files into ``folder``, for the model of ``hf_checkpoint`` or a tiny one; returns their paths.

    Raises ConfigError if one of the files exists already, or if the folder cannot be written."""
    hint = f"buffer-rl init FOLDER writes to another one{'; or move them away' if folder.exists() else ''}"
    return write_new(folder, project_files(model), hint)


def write_new(folder: Path, texts: Mapping[str, str], hint: str) -> list[Path]:
    """Write files, by name, into ``folder``; returns their paths. Raises ConfigError as ``write_project``."""
    if existing := [name for name in texts if (folder / name).exists()]:
        raise ConfigError(f"already there, and not overwritten: {', '.join(existing)}", where=str(folder), hint=hint)
    with raised_as(ConfigError, "the folder cannot be written", OSError, where=str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def project_files(model: str | None = None) -> dict[str, str]:
    """The text of each file of a project, by name."""
    value = model and yaml.safe_dump(model, width=10_000).removesuffix("\n").removesuffix("\n...")
    names = ("run.yaml", "my_reward.py", "test_my_reward.py", "prepare.py")
    return {name: templates("project").get_template(f"{name}.jinja").render(model=value) for name in names}


def templates(folder: str) -> Environment:
    """The templates of files that verbs write, in a folder beside this module."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # which naming a plugin does not need

    return Environment(
        loader=FileSystemLoader(Path(__file__).with_name(folder)),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        block_start_string="<%",
        block_end_string="%>",
        variable_start_string="<<",
        variable_end_string=">>",
        comment_start_string="<#",
        comment_end_string="#>",
    )
