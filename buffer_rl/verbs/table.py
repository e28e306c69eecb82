"""The verbs of the command line, in the order in which ``--help`` shows them, and the tables that verbs print."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

from buffer_rl.errors import PluginError
from buffer_rl.resolution.entry_points import AUTOLOAD_VARIABLE, EntryPointInfo, EntryPoints

# Verb to summary. The module ``buffer_rl.verbs.VERB`` has ``add_parser(subparsers, argv)``, which sets ``run``.
VERBS = {
    "train": "train a model",
    "eval": "evaluate a model or a checkpoint",
    "generate": "print a model's responses to prompts",
    "plugins": "list, check and begin plugins",
    "data": "validate, show and count data files",
    "report": "write one HTML page of a run",
    "ledger": "where each group of a run is, and whether it adds up",
    "checkpoint": "check that checkpoints are whole",
    "export": "take the model out of a checkpoint",
    "completion": "print a completion script for a shell",
}
VERB_GROUP = "verb"
"""Entry points of the group ``buffer_rl.verb`` are verbs of plugins: a module like those of ``buffer_rl.verbs``, whose
``SUMMARY`` says what the verb does."""
_WIDTH_OF_FILES = 160  # characters of a line where the output goes to a file or a pipe


def all_verbs() -> list[str]:
    """``VERBS``, and after them those of installed plugins."""
    return list(dict.fromkeys([*VERBS, *(entry.name for entry in _added())]))


def summary_of(verb: str) -> str:
    """What ``--help`` says of a verb of ``all_verbs``; of a plugin's whose module is broken, what is wrong with it."""
    if verb in VERBS:
        return VERBS[verb]
    try:
        return str(getattr(_module_of(verb), "SUMMARY", "of an installed plugin"))
    except PluginError as error:
        return str(error.what)


def parser_of(verb: str) -> Callable[[Any, Sequence[str]], None]:
    """``add_parser`` of a verb of ``all_verbs``. Raises PluginError if a plugin's module has none."""
    found: Callable[[Any, Sequence[str]], None] = _module_of(verb).add_parser
    return found


def _module_of(verb: str) -> ModuleType:
    if verb in VERBS:
        return importlib.import_module(f"buffer_rl.verbs.{verb}")
    name = next(entry.value for entry in _added() if entry.name == verb)
    try:
        module = importlib.import_module(name)
        _ = module.add_parser
    except Exception as error:  # fault boundary: code of a third party
        what = f"its module cannot be used: {type(error).__name__}: {error}"
        raise PluginError(what, where=f"verb {verb} of {name}", expected="add_parser(subparsers, argv)") from error
    return module


def _added() -> list[EntryPointInfo]:
    return EntryPoints(autoload=not os.environ.get(AUTOLOAD_VARIABLE)).usable(VERB_GROUP)


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], styles: Iterable[str] = ()) -> None:
    """Print columns under headings. styles: rich's style of each row."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row, style in zip(rows, styles or [""] * len(rows), strict=True):
        table.add_row(*(Text(cell, style=style) for cell in row))  # Text, not markup: a cell may hold square brackets
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH_OF_FILES
    console.print(table)
