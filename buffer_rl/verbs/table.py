"""The verbs of the command line, in the order in which ``--help`` shows them, and the tables that verbs print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
_WIDTH_OF_FILES = 160  # characters of a line where the output goes to a file or a pipe


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
