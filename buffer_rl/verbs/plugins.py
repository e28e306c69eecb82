"""``buffer-rl plugins``: what is installed and loaded, whether one reference can be used, and new ones."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from buffer_rl.kinds import KINDS
from buffer_rl.plugins import PluginInfo, PluginRegistry
from buffer_rl.resolution.calls import plugin_error
from buffer_rl.resolution.reference import Form, form_of
from buffer_rl.resolution.signature import fitting_kinds, signature_of
from buffer_rl.verbs.new_plugin import object_name, write_plugin

_WIDTH_OF_FILES = 160  # characters of a line where the output goes to a file or a pipe


def add_parser(subparsers: argparse._SubParsersAction[Any], argv: Sequence[str]) -> None:
    """Add the verb with its three actions."""
    parser = subparsers.add_parser(
        "plugins", help="list, check and begin plugins", description="List and check plugins, begin a new one."
    )
    actions = parser.add_subparsers(metavar="ACTION", dest="action", required=True)
    listing = actions.add_parser("list", help="every plugin that is installed or provided, and where it is from")
    listing.add_argument("--kind", metavar="KIND", choices=list(KINDS), help="only plugins of this kind")
    listing.add_argument("--json", action="store_true", help="print JSON")
    check = actions.add_parser("check", help="import one plugin and check it against its contract")
    check.add_argument(
        "--kind", metavar="KIND", choices=list(KINDS), help="the kind to check for; guessed where absent"
    )
    check.add_argument("reference", metavar="REF", help="module:name, ./file.py:name or a registered name")
    new = actions.add_parser("new", help="write a working plugin of your own, with its test")
    new.add_argument("kind", metavar="KIND", choices=list(KINDS), help=f"one of {', '.join(KINDS)}")
    new.add_argument("name", metavar="NAME", help="of the file and of the function in it")
    new.add_argument("--output", metavar="FOLDER", default=".", help="where the two files go; the working directory")
    for action in (listing, check):
        action.add_argument(
            "-p",
            "--plugin",
            action="append",
            default=[],
            metavar="NAME",
            help="load a pluggy plugin, or block one with no:NAME",
        )
    parser.set_defaults(run=run)


def run(ns: argparse.Namespace) -> int:
    """Returns the exit status 0; raises PluginError for a reference that cannot be used, ConfigError for a file that
    cannot be written."""
    if ns.action == "new":
        return _new(ns.kind, ns.name, Path(ns.output))
    registry = PluginRegistry.from_flags(ns.plugin)
    if ns.action == "check":
        return _check(registry, ns.reference, ns.kind)
    rows = registry.infos(ns.kind)
    if ns.json:
        print(json.dumps([asdict(row) for row in rows], indent=2, ensure_ascii=False))
    else:
        _print_table(rows)
    return 0


def _new(kind: str, name: str, folder: Path) -> int:
    plugin, test = write_plugin(kind, name, folder)
    row = KINDS[kind]
    print(f"{plugin}: {row.signature}\n{test}: its test")
    print(f"  try it:  python -m pytest {test}")
    print(f"  use it:  {row.flags[0]} {plugin.resolve()}:{object_name(row, name)}")
    return 0


def _check(registry: PluginRegistry, reference: str, kind: str | None) -> int:
    kinds = [kind] if kind else _possible_kinds(registry, reference)
    obj = registry.resolve(kinds[0], reference)
    origin = registry.locate(kinds[0], reference)
    print(f"{reference}: {kinds[0]}, {signature_of(obj)}")
    print(f"  found in: {origin}")
    print(f"  contract: {KINDS[kinds[0]].signature}, for {' or '.join(KINDS[kinds[0]].flags)}")
    if len(kinds) > 1:
        print(f"  also fits: {', '.join(kinds[1:])}")
    return 0


def _possible_kinds(registry: PluginRegistry, reference: str) -> list[str]:
    """The kinds that a reference can serve as, the best guess first. Raises PluginError if there is none."""
    if form_of(reference) in (Form.NAME, Form.DOTTED):
        named = [kind for kind in KINDS if reference in registry.names(kind)]
        if named:
            return named
    obj = registry.load(reference)
    fitting = fitting_kinds(obj)
    if not fitting:
        hint = "name the kind with --kind to see what it lacks"
        raise plugin_error(None, reference, "it fits no plugin kind", actual=signature_of(obj), hint=hint)
    return fitting


def _print_table(rows: Sequence[PluginInfo]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for heading in ("kind", "name", "target", "from", "sha256", "state"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        source = f"{row.distribution} {row.version}".strip() or row.provider
        state = row.error.splitlines()[0] if row.error else "loaded" if row.loaded else "not imported yet"
        cells = (row.kind or "plugin", row.name, row.target, source, row.sha256[:12], state)
        # Text, not markup: a name or an error may hold square brackets.
        table.add_row(*(Text(cell, style="red" if row.error else "") for cell in cells))
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH_OF_FILES
    console.print(table)
