"""``buffer-rl plugins``: what is installed and loaded, whether one reference can be used, and new ones."""

from __future__ import annotations

import argparse
import ast
import json
import keyword
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from buffer_rl.errors import ConfigError
from buffer_rl.kinds.kind import PluginKind
from buffer_rl.kinds.table import KINDS, kind_named
from buffer_rl.observe.terminal import say
from buffer_rl.options.section import compose
from buffer_rl.options.sources import resolve
from buffer_rl.plugin.calls import plugin_error
from buffer_rl.plugin.reference import Form, form_of
from buffer_rl.plugin.registry import PluginInfo, PluginRegistry
from buffer_rl.plugin.signature import fitting_kinds, signature_of
from buffer_rl.testing.lint import failures
from buffer_rl.testing.lint_estimator import lint_estimator
from buffer_rl.verbs.init import templates, write_new
from buffer_rl.verbs.table import print_table

_CHECK = """Import one plugin and check its signature. A loss and an advantage estimator are also called, on rows made
from a seed, and checked for what their unit or scope and needs promise: one line a property; the exit status is 1 where
one fails. With --on FILE a reward, a filter, a generate function, an agent or an environment is called, too, on rows of
the file."""
_ON = """call the plugin on rows of this file. A reward gets the label, an empty and a truncated answer. A filter gets
groups with rewards of 0 and 1. The others get an engine that answers the label"""
_PLUGIN = "load a pluggy plugin, or block one with no:NAME"


def add_parser(subparsers: argparse._SubParsersAction[Any], argv: Sequence[str]) -> None:
    """Add the verb with its three actions."""
    parser = subparsers.add_parser(
        "plugins", help="list, check and begin plugins", description="List and check plugins, begin a new one."
    )
    actions = parser.add_subparsers(metavar="ACTION", dest="action", required=True)
    listing = actions.add_parser("list", help="every plugin that is installed or provided, and where it is from")
    listing.add_argument("--kind", metavar="KIND", choices=list(KINDS), help="only plugins of this kind")
    listing.add_argument("--json", action="store_true", help="print JSON")
    check = actions.add_parser("check", help="import one plugin and check it against its contract", description=_CHECK)
    check.add_argument(
        "--kind", metavar="KIND", choices=list(KINDS), help="the kind to check for; guessed where absent"
    )
    check.add_argument("reference", metavar="REF", help="module:name, ./file.py:name or a registered name")
    check.add_argument("--on", metavar="FILE", help=_ON)
    check.add_argument("--config", metavar="FILE", help="with --on: options of a run, such as label_key and reward_key")
    new = actions.add_parser("new", help="write a working plugin of your own, with its test")
    new.add_argument("kind", metavar="KIND", choices=list(KINDS), help=f"one of {', '.join(KINDS)}")
    new.add_argument("name", metavar="NAME", help="of the file and of the function in it")
    new.add_argument("--output", metavar="FOLDER", default=".", help="where the two files go; the working directory")
    for action in (listing, check):
        action.add_argument("-p", "--plugin", action="append", default=[], metavar="NAME", help=_PLUGIN)
    parser.set_defaults(run=run)


def run(ns: argparse.Namespace) -> int:
    """Returns the exit status, 1 where a loss or an estimator fails a property; raises PluginError for a reference that
    cannot be used, ConfigError for a file that cannot be written."""
    if ns.action == "new":
        plugin, test = write_plugin(ns.kind, ns.name, Path(ns.output))
        row = KINDS[ns.kind]
        say(f"{plugin}: {row.signature}\n{test}: its test")
        say(f"  try it:  python -m pytest {test}")
        say(f"  use it:  {row.flags[0]} {plugin.resolve()}:{object_name(row, ns.name)}")
        return 0
    registry = PluginRegistry.from_flags(ns.plugin)
    if ns.action == "check":
        return _check(registry, ns)
    rows = registry.infos(ns.kind)
    if ns.json:
        say(json.dumps([{**asdict(row), "does": first_sentence(row)} for row in rows], indent=2, ensure_ascii=False))
    else:
        _print_table(rows)
    return 0


def write_plugin(kind: str, name: str, folder: Path) -> tuple[Path, Path]:
    """Write ``name.py`` and ``test_name.py`` into ``folder``; the paths of both.

    Raises ConfigError for an unknown kind, for a name that is no identifier, and where one of the files is there
    already.
    """
    row = kind_named(kind)
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigError(f"{name!r} is no name of a Python module", where="NAME", expected="letters, digits and _")
    values = {"kind": row, "module": name, "name": object_name(row, name)}
    of_names = {f"{name}.py": f"{kind}.py.jinja", f"test_{name}.py": f"test_{kind}.py.jinja"}
    texts = {file: templates("plugin").get_template(of).render(values) for file, of in of_names.items()}
    plugin, test = write_new(folder, texts, "choose another name or --output FOLDER")
    return plugin, test


def object_name(kind: PluginKind, name: str) -> str:
    """The name of the function, or of the class for kinds that are classes: ``my_logger`` makes ``MyLogger``."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_")) if kind.constructed else name


def _check(registry: PluginRegistry, ns: argparse.Namespace) -> int:
    reference = ns.reference
    kinds = [ns.kind] if ns.kind else _possible_kinds(registry, reference)
    obj = registry.resolve(kinds[0], reference)
    say(f"{reference}: {kinds[0]}, {signature_of(obj)}")
    say(f"  found in: {registry.locate(kinds[0], reference)}")
    say(f"  contract: {KINDS[kinds[0]].signature}, for {' or '.join(KINDS[kinds[0]].flags)}")
    if len(kinds) > 1:
        say(f"  also fits: {', '.join(kinds[1:])}")
    if kinds[0] == "environment":
        from buffer_rl.agents.tools import offers_of

        say(f"  offers:   {offers_of(obj)}")
    is_linted = kinds[0] in ("loss", "advantage")
    if not is_linted and ns.on is None:
        return 0
    from buffer_rl.verbs.train import sections_of  # imports what a run needs

    sections = compose(sections_of(ns.plugin))
    if ns.on is not None:
        from buffer_rl.verbs.plugin_trial import try_plugin

        args = resolve(sections, flags={}, environ=os.environ, config_paths=[ns.config] if ns.config else []).args
        say(*try_plugin(registry, kinds[0], reference, ns.on, args), sep="\n")
        return 0
    lint: Any = lint_estimator
    if kinds[0] == "loss":
        from buffer_rl.testing.lint_loss import lint_loss as lint  # imports torch
    findings = lint(obj, sections(), reference=reference)
    say(*(f"  {finding}" for finding in findings), sep="\n")
    return 1 if failures(findings) else 0


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
    cells = []
    for row in rows:
        source = f"{row.distribution} {row.version}".strip() or row.provider
        state = row.error.splitlines()[0] if row.error else "loaded" if row.loaded else "not imported yet"
        cells.append((row.kind or "plugin", row.name, first_sentence(row), row.target, source, state))
    headings = ("kind", "name", "what it does", "target", "from", "state")
    print_table(headings, cells, styles=["red" if row.error else "" for row in rows])


def first_sentence(row: PluginInfo) -> str:
    """What a plugin does: the first sentence of the docstring of its function or class, else of its module. The source
    is read, and nothing is imported; empty where it says nothing or cannot be read."""
    attr = row.target.partition(":")[2].partition(".")[0]
    try:
        module = ast.parse(Path(row.file).read_bytes())
    except (OSError, SyntaxError, ValueError):  # of a compiled module, or with null bytes
        return ""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    own = next((node for node in module.body if isinstance(node, kinds) and node.name == attr), None)
    text = (own and ast.get_docstring(own)) or ast.get_docstring(module) or ""
    paragraph = " ".join(re.split(r"\n\s*\n", text)[0].replace("``", "").split())
    return re.split(r"(?<=[.!?])\s", paragraph)[0].rstrip(".:")
