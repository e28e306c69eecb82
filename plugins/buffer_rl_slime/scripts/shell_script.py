"""Which training command a bash script would start, found by reading the script; nothing in it is ever run.

Variables with their defaults, arrays, ``source``, conditions that follow from the script, and a few commands that only
compute texts (``dirname``, ``pwd``, ``seq``, ``echo``) are understood. What depends on other commands stays a mark in
the value (``shell_values``). Environment variables are as if they were not set. Functions are read where they stand.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from buffer_rl.errors import ConfigError
from buffer_rl_slime.scripts.shell_expansion import DEEPEST, Argument, Scope
from buffer_rl_slime.scripts.shell_syntax import Block, Branches, Chain, Command, Negated, Node, Sometimes, parse
from buffer_rl_slime.scripts.shell_values import as_run, computed, holds, marks_of, shown
from buffer_rl_slime.scripts.shell_words import Assignment, Operator, Word, split_script

MOST_BYTES = 1 << 20
MOST_FOLLOWED = 200
"""Scripts and commands in texts that are followed, the script's own included."""
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
_TRAINING_MODULE = re.compile(r"(\w+\.)*train\w*")
_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_ELEMENT = re.compile(r"([A-Za-z_]\w*)\[.*\]\+?=.*", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A Python program that the script starts. words: the whole command, of which ``arguments`` are the program's."""

    program: str
    arguments: tuple[Argument, ...]
    words: tuple[Argument, ...]
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What was found. notices: what of the script could not be followed, and matters."""

    launches: tuple[Launch, ...]
    notices: tuple[str, ...]


def read_script(path: str, given: Mapping[str, str]) -> Script:
    """Read the script and what it sources. given: variables whose values replace those of the script.

    Raises ConfigError for a file that cannot be read, or that is no bash as far as it is known here."""
    reader = _Reader(scope=Scope(given=given))
    reader.read(path, Path(path))
    return Script(launches=tuple(reader.launches), notices=tuple(dict.fromkeys(reader.scope.notices)))


@dataclass(slots=True, kw_only=True)
class _Reader:
    scope: Scope
    launches: list[Launch] = field(default_factory=list)
    followed: int = 0

    def read(self, where: str, file: Path) -> None:
        """Follow one file. Raises ConfigError."""
        try:
            if file.stat().st_size > MOST_BYTES:
                raise ConfigError("this is no launch script: it has more than 1 MiB", where=where)
            text = file.read_bytes().decode()
        except OSError as error:
            raise ConfigError(f"cannot read the script: {error.strerror}", where=where) from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"the script is not UTF-8: {error}", where=where) from error
        outer, self.scope.path = self.scope.path, str(file)
        self.follow(text, where)
        self.scope.path = outer

    def follow(self, text: str, where: str, first_line: int = 1) -> None:
        """Follow the text of a script."""
        self.followed += 1
        if self.scope.depth >= DEEPEST or self.followed > MOST_FOLLOWED:
            raise ConfigError("scripts and commands are inside each other too often", where=where)
        self.scope.depth += 1
        self.run(parse(split_script(text.replace("\r\n", "\n"), where, first_line), where))
        self.scope.depth -= 1

    # ---- commands. The outcome is True, False, or None where it is not known.

    def run(self, block: Block) -> bool | None:
        outcome: bool | None = True
        for node in block:
            outcome = self._run(node)
        return outcome

    def _run(self, node: Node) -> bool | None:
        if isinstance(node, Command):
            return self._command(node)
        if isinstance(node, Chain):
            return self._chain(node)
        if isinstance(node, Negated):
            outcome = self._run(node.node)
            return None if outcome is None else not outcome
        if isinstance(node, Branches):
            return self._branches(node)
        if isinstance(node, Sometimes):
            if node.name:
                self.scope.variables[node.name] = computed(node.name)
            self._perhaps([lambda: self.run(node.body)], node.line)
            return None
        return self.run(node)

    def _chain(self, chain: Chain) -> bool | None:
        outcome: bool | None = True
        for symbol, node in chain.items:
            if symbol in ("", "|", "|&"):
                outcome = self._run(node)
                outcome = outcome if symbol == "" and len(chain.items) > 1 else None
            elif outcome is None:
                line = node.line if isinstance(node, Command) else 0
                self._perhaps([lambda node=node: self._run(node)], line)  # type: ignore[misc]
            elif outcome == (symbol == "&&"):
                outcome = self._run(node)
        return outcome

    def _branches(self, node: Branches) -> bool | None:
        undecided: list[Callable[[], object]] = []
        for condition, body in node.arms:
            outcome = self.run(condition)
            if outcome is True and not undecided:
                return self.run(body)
            if outcome is not False:
                undecided.append(lambda body=body: self.run(body))  # type: ignore[misc]
        if not undecided:
            return self.run(node.otherwise)
        self._perhaps([*undecided, lambda: self.run(node.otherwise)], node.line)
        return None

    def _perhaps(self, alternatives: Sequence[Callable[[], object]], line: int) -> None:
        """Follow each alternative from here: texts that differ afterwards are unknown, arrays are as in the first that
        changes them."""
        before = self.scope.variables
        results = []
        for alternative in alternatives:
            self.scope.variables = dict(before)
            alternative()
            results.append(self.scope.variables)
        self.scope.variables = dict(before)
        for name in {name: None for result in results for name in result}:
            values = [result.get(name) for result in [*results, *([before] if len(results) == 1 else [])]]
            if all(value == before.get(name) for value in values):
                continue
            changed = next(value for value in values if value != before.get(name) and value is not None)
            if isinstance(changed, str) and any(value != changed for value in values):
                changed = computed(name)
            elif any(value != changed for value in values):
                what = f"whether {name} is filled here is known to the run alone; it is read as if it were"
                self.scope.doubtful[name] = f"{self.scope.path}:{line}: {what}"
            self.scope.variables[name] = changed

    def _command(self, command: Command) -> bool | None:
        tokens = list(command.tokens)
        while tokens and isinstance(tokens[0], Assignment):
            self.scope.assign(tokens.pop(0))  # type: ignore[arg-type]
        if not tokens:
            return True
        if isinstance(tokens[0], Operator):
            return self.scope.truth(tokens[0])
        name = tokens[0].literal() if isinstance(tokens[0], Word) else ""
        if name in ("[", "[[", "test"):
            return holds(list(self.scope.test_words(tokens[1:])))
        if name in _DECLARING:
            for token in tokens:
                if isinstance(token, Assignment):
                    self.scope.assign(token)
            return True
        words = list(self.scope.words(tokens))
        if not words:
            return True
        return self._builtin(words, command.line)

    def _builtin(self, words: list[Argument], line: int) -> bool | None:
        name, where = words[0].text, f"{self.scope.path}:{line}"
        if name in ("source", ".") and len(words) > 1:
            self._source(words[1].text, where)
        elif name == "eval":
            self.follow(" ".join(word.text for word in words[1:]), self.scope.path, line)
        elif name in ("read", "mapfile", "readarray"):
            for word in words[1:]:
                self.scope.set(word.text, computed(word.text))
        elif name == "printf" and len(words) > 2 and words[1].text == "-v":
            self.scope.set(words[2].text, computed(words[2].text))
        elif name == "unset":
            for word in words[1:]:
                self.scope.variables.pop(word.text, None)
        elif name.startswith("--"):
            what = "a command cannot begin so; is a backslash missing at the end of the line before?"
            self.scope.notices.append(f"{where}: {name}: {what}")
        elif element := _ELEMENT.fullmatch(name):
            changed = element.group(1)
            self.scope.doubtful[changed] = f"{where}: one element of {changed} is set, which is not followed"
        elif name in (":", "true", "false"):
            return name != "false"
        elif name in ("command", "which", "type", "grep", "pgrep", "curl"):
            return None
        else:
            self._look_for_launch(words, line)
        return True

    def _source(self, path: str, where: str) -> None:
        file = Path(path)
        if not marks_of(path) and file.is_file():
            self.read(path, file)
            return
        what = "the model's shape, which is read from --hf-checkpoint anyway" if "models" in file.parts else "its flags"
        self.scope.notices.append(f"{where}: {shown(path)} is not there, and with it {what}")

    def _look_for_launch(self, words: list[Argument], line: int) -> None:
        for position, word in enumerate(words):
            base = os.path.basename(word.text)
            if base in ("bash", "sh") and position + 2 < len(words) and words[position + 1].text in ("-c", "-lc"):
                self.follow(words[position + 2].text, self.scope.path, line)
                return
            if not _PYTHON.fullmatch(base):
                continue
            if (at := _program(words, position + 1)) is not None:
                arguments, where = tuple(words[at + 1 :]), f"{self.scope.path}:{line}"
                launch = Launch(program=words[at].text, arguments=arguments, words=tuple(words), where=where)
                self.launches.append(launch)
            return


def _program(words: Sequence[Argument], first: int) -> int | None:
    """Where the program of a Python command is, whose options begin at ``first``: a file, or a module after ``-m``."""
    for at in range(first, len(words)):
        text = words[at].text
        if text == "-m":
            is_training = at + 1 < len(words) and _TRAINING_MODULE.fullmatch(words[at + 1].text)
            return at + 1 if is_training else None
        if not text.startswith("-"):
            return at if text.endswith(".py") else None
    return None


SFT = "sft_loss"

Flags = dict[str, list[Argument]]
"""The values of each flag, by its name without dashes."""


def value_of(flags: Flags, name: str) -> str:
    """The values of a flag as one text; empty without them."""
    return " ".join(argument.text for argument in flags.get(name, ()))


def steps_per_rollout(flags: Flags) -> int:
    """Optimizer steps on each rollout. Raises ValueError where the flags do not say."""
    if "global-batch-size" not in flags:
        return int(value_of(flags, "num-steps-per-rollout") or "1")
    samples = int(value_of(flags, "rollout-batch-size")) * int(value_of(flags, "n-samples-per-prompt") or "1")
    return samples // int(value_of(flags, "global-batch-size"))


def flags_of(arguments: Iterable[Argument]) -> tuple[Flags, set[str], dict[str, str]]:
    """Each flag's values, the flags that came again, and ``file:line`` of each. Raises ConfigError for values without a
    flag before them."""
    flags: Flags = {}
    again: set[str] = set()
    where: dict[str, str] = {}
    values: list[Argument] | None = None
    for argument in arguments:
        if argument.text.startswith("--") and len(argument.text) > 2:
            flag, equals, value = argument.text[2:].partition("=")
            name = flag.replace("_", "-")
            again |= {name} & flags.keys()
            values = [Argument(value, argument.where)] if equals else []
            flags.pop(name, None)
            flags[name], where[name] = values, argument.where
        elif values is None:
            if as_run(argument.text):
                raise ConfigError(f"{shown(argument.text)!r} belongs to no flag", where=argument.where)
        else:
            values.append(argument)
    return flags, again, where
