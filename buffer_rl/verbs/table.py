"""The verbs of the command line, in the order in which ``--help`` shows them, and the tables that verbs print."""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from buffer_rl.errors import PluginError
from buffer_rl.observe.terminal import printable, say
from buffer_rl.plugin.calls import contained, error_name
from buffer_rl.plugin.entry_points import AUTOLOAD_VARIABLE, EntryPointInfo, EntryPoints
from buffer_rl.plugin.reference import find_module

# Verb to summary. The module ``buffer_rl.verbs.VERB`` has ``add_parser(subparsers, argv)``, which sets ``run``.
VERBS = {
    "init": "write a project to begin with",
    "train": "train a model",
    "eval": "evaluate a model or a checkpoint",
    "generate": "print a model's responses to prompts",
    "plugins": "list, check and begin plugins",
    "data": "validate, show and count data files",
    "plan": "predict the speed of a run on other devices and schedules",
    "report": "write one HTML page of a run, or compare runs",
    "ledger": "where each group of a run is, and whether it adds up",
    "why": "what became of a group and why, or where a step's time went",
    "rescore": "score the samples of a run by another reward",
    "checkpoint": "check, list and remove checkpoints",
    "drill": "test a configuration against faults, for a certificate",
    "export": "take the model out of a checkpoint",
    "completion": "print a completion script for a shell",
}
INSTEAD = {
    **dict.fromkeys(("resume", "continue"), "buffer-rl train --load auto goes on from the newest checkpoint in --save"),
    **dict.fromkeys(("chat", "infer", "inference", "predict", "sample"), "buffer-rl generate --prompt TEXT"),
    **dict.fromkeys(("options", "flags", "config"), "buffer-rl train --help all shows every option"),
    **dict.fromkeys(("run", "start", "launch", "fit", "grpo", "ppo", "rl"), "buffer-rl train"),
    **dict.fromkeys(("sft", "finetune"), "buffer-rl train --loss-type sft_loss"),
    **dict.fromkeys(("evaluate", "eval-only", "eval_only", "test"), "buffer-rl eval"),
    **dict.fromkeys(("dry-run", "check-config", "doctor"), "buffer-rl train --dry-run"),
    **dict.fromkeys(("compare", "plot"), "buffer-rl report RUN_DIR..."),
    **{action: f"buffer-rl data {action}" for action in ("validate", "show", "stats")},
    **{action: f"buffer-rl plugins {action}" for action in ("check", "new")},
    **{action: f"buffer-rl checkpoint {action}" for action in ("verify", "prune")},
    "list": "buffer-rl plugins list, or buffer-rl checkpoint list",
    "merge": "buffer-rl export",
    "help": "buffer-rl --help, or buffer-rl VERB --help",
    "version": "buffer-rl --version",
}
"""What to type instead of words that are no verbs: those of other toolkits, and actions without their verb."""
PACKAGES = ("plan", "why", "rescore", "drill")
"""Verbs that are packages; the module is ``buffer_rl.verbs.VERB.verb``."""
VERB_GROUP = "verb"
"""Entry points of the group ``buffer_rl.verb`` are verbs of plugins: a module like those of ``buffer_rl.verbs``, whose
docstring says in its first line what the verb does."""
_WIDTH_OF_FILES = 160  # characters of a line where the output goes to a file or a pipe


def all_verbs() -> list[str]:
    """``VERBS``, and after them those of installed plugins."""
    return list(dict.fromkeys([*VERBS, *(entry.name for entry in _added())]))


def summary_of(verb: str) -> str:
    """What ``--help`` says of a verb of ``all_verbs``: of a plugin's the first line of its module's docstring, which is
    read without importing it."""
    if verb in VERBS:
        return VERBS[verb]
    found = find_module(_module_name(verb), ())
    if found is None:
        return "its module cannot be found"
    try:
        document = ast.get_docstring(ast.parse(Path(found.file).read_bytes())) or ""
    except (OSError, SyntaxError):
        return "its module cannot be read"
    first = document.partition("\n")[0].rstrip(".")
    return first.partition("``: ")[2] or first or f"of the plugin {_module_name(verb).partition('.')[0]}"


def parser_of(verb: str) -> Callable[[Any, Sequence[str]], None]:
    """``add_parser`` of a verb of ``all_verbs``. Raises PluginError if a plugin's module has none."""
    module = _module_name(verb)
    try:
        with contained():
            found: Callable[[Any, Sequence[str]], None] = importlib.import_module(module).add_parser
    except Exception as error:  # fault boundary: code of a third party
        if verb in VERBS:
            raise
        what = f"its module cannot be used: {error_name(error)}"
        raise PluginError(what, where=f"verb {verb} of {module}", expected="add_parser(subparsers, argv)") from error
    return found


def _module_name(verb: str) -> str:
    if verb in VERBS:
        return f"buffer_rl.verbs.{verb}" + (".verb" if verb in PACKAGES else "")
    return next(entry.target for entry in _added() if entry.name == verb)


def _added() -> list[EntryPointInfo]:
    return EntryPoints(autoload=not os.environ.get(AUTOLOAD_VARIABLE)).usable(VERB_GROUP)


def print_notices(texts: Iterable[str]) -> None:
    """Tell the user on stderr, one line per text."""
    for text in texts:
        say(f"buffer-rl: notice: {text}", file=sys.stderr)


def shown_time(seconds: float) -> str:
    """Seconds since 1970 as the local time, to the millisecond."""
    return datetime.fromtimestamp(seconds).isoformat(sep=" ", timespec="milliseconds")


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], styles: Iterable[str] = ()) -> None:
    """Print columns under headings. styles: rich's style of each row."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row, style in zip(rows, styles or [""] * len(rows), strict=True):
        # Text, not markup: a cell may hold square brackets.
        table.add_row(*(Text(printable(cell), style=style) for cell in row))
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH_OF_FILES
    console.print(table)
