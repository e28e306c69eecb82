"""``buffer-rl completion bash|zsh``: a script that completes verbs, actions and flags, made from the parsers."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import shtab

from buffer_rl.options.help import FlagParser
from buffer_rl.verbs.table import all_verbs, parser_of, summary_of

_BASH_FILES = "complete -o bashdefault -o default -F _shtab_buffer_rl buffer-rl"  # files where nothing else fits


def add_parser(subparsers: argparse._SubParsersAction[Any], argv: Sequence[str]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "completion",
        description="Print a script that completes verbs and flags. In ~/.bashrc: source <(buffer-rl completion bash)",
    )
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell to complete in")
    parser.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    """Print the script."""
    print(completion_script(namespace.shell))
    return 0


def completion_script(shell: str) -> str:
    """The script for ``bash`` or ``zsh``, with the flags of installed plugins."""
    parser = FlagParser(prog="buffer-rl")
    parser.add_argument("--version", action="store_true")
    subparsers = parser.add_subparsers()
    for verb in all_verbs():  # shtab leaves out verbs and flags that have no help text
        add_listed = functools.partial(subparsers.add_parser, help=summary_of(verb))
        listed: Any = SimpleNamespace(add_parser=add_listed, choices=subparsers.choices)
        parser_of(verb)(listed, [verb])
    _complete_values(parser)
    script = shtab.complete(parser, shell)
    return f"{script}\n{_BASH_FILES}" if shell == "bash" else script


def _complete_values(parser: argparse.ArgumentParser) -> None:
    """Have every flag completed, hidden ones too, and its value as a file where there are no choices."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                _complete_values(child)
            continue
        if action.help == argparse.SUPPRESS:
            action.help = ""
        if action.nargs != 0 and not action.choices:
            # For bash, shtab would complete files after flags of many values even where a flag is begun.
            action.complete = {"zsh": "_files"}  # type: ignore[attr-defined]
