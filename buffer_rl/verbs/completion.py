"""``buffer-rl completion bash|zsh``: a script that completes verbs, actions and flags, made from the parsers."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from buffer_rl.configuration.help import FlagParser
from buffer_rl.verbs.table import VERBS

_BASH = """\
# bash completion of buffer-rl. In ~/.bashrc: source <(buffer-rl completion bash)
_buffer_rl() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} path="${{COMP_WORDS[1]}}" words
  [ "$COMP_CWORD" -le 1 ] && path=""
  case "$path ${{COMP_WORDS[2]}}" in {pairs}) [ "$COMP_CWORD" -gt 2 ] && path="$path ${{COMP_WORDS[2]}}" ;; esac
  case "$path" in
{cases}
  esac
  # behind a flag comes its value, perhaps a file; flags are offered again once a word was begun with -
  [[ "$word" != -* && "${{COMP_WORDS[COMP_CWORD-1]}}" == -* ]] && words=""
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o bashdefault -o default -F _buffer_rl buffer-rl
"""

_ZSH = """\
#compdef buffer-rl
# zsh completion of buffer-rl. In ~/.zshrc, after compinit: source <(buffer-rl completion zsh)
_buffer_rl() {{
  local where="${{words[2]}}" status_=1
  local -a candidates
  (( CURRENT <= 2 )) && where=""
  case "$where ${{words[3]}}" in {pairs}) (( CURRENT > 3 )) && where="$where ${{words[3]}}" ;; esac
  case "$where" in
{cases}
  esac
  # behind a flag comes its value, perhaps a file; flags are offered again once a word was begun with -
  [[ "${{words[CURRENT]}}" != -* && "${{words[CURRENT-1]}}" == -* ]] && candidates=()
  (( $#candidates )) && compadd -a candidates && status_=0
  (( CURRENT > 2 )) && [[ "${{words[CURRENT]}}" != -* ]] && _files && status_=0
  return $status_
}}
compdef _buffer_rl buffer-rl
"""


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
    print(completion_script(namespace.shell, command_words(tuple(VERBS))), end="")
    return 0


def command_words(verbs: Sequence[str]) -> dict[str, list[str]]:
    """What may follow each command: ``""`` the verbs, ``"train"`` its flags, ``"data"`` its actions."""
    parser = FlagParser(prog="buffer-rl")
    parser.add_argument("--version", action="store_true")
    subparsers = parser.add_subparsers()
    for verb in verbs:
        importlib.import_module(f"buffer_rl.verbs.{verb}").add_parser(subparsers, [verb])
    return {" ".join(path): words for path, words in _walk(parser, ())}


def completion_script(shell: str, words: Mapping[str, Sequence[str]]) -> str:
    """The script for ``bash`` or ``zsh``. Words are verbs and flags, which need no quoting."""
    pairs = "|".join(f'"{path}"' for path in words if " " in path) or '""'
    form = '    "{path}") words="{words}" ;;' if shell == "bash" else '    "{path}") candidates=({words}) ;;'
    cases = "\n".join(form.format(path=path, words=" ".join(found)) for path, found in words.items())
    return (_BASH if shell == "bash" else _ZSH).format(pairs=pairs, cases=cases)


def _walk(parser: argparse.ArgumentParser, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    words: list[str] = []
    children: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        words += [flag for flag in action.option_strings if flag.startswith("--")]
        if isinstance(action, argparse._SubParsersAction):
            children = dict(action.choices)
        elif action.choices and not action.option_strings:
            words += [str(choice) for choice in action.choices]
    yield path, [*children, *words]
    for name, child in children.items():
        yield from _walk(child, (*path, name))
