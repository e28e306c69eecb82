"""Words of a script as a shell would expand them: variables, arrays, defaults, arithmetic, and what commands print that
only compute texts. What is not known stays a mark in the text (``shell_values``)."""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from buffer_rl.errors import ConfigError
from buffer_rl_slime.scripts.shell_syntax import Block, Chain, Command, parse
from buffer_rl_slime.scripts.shell_values import (
    arithmetic,
    as_run,
    computed,
    is_computed,
    is_mark,
    marks_of,
    removed,
    unset,
)
from buffer_rl_slime.scripts.shell_words import Assignment, Operator, Part, Token, Word, operand, split_script

DEEPEST = 8
"""Of scripts that source each other, and of commands in commands."""
LONGEST = 1 << 16
"""Characters of a value, and elements of an array: a script that goes beyond is none that starts a training."""

_PARAMETER = re.compile(r"(#?)([A-Za-z_]\w*|[@*#?$!-]|\d+)(?:\[([^\]]*)\])?(.*)", re.DOTALL)
_BLANKS = re.compile(r"[ \t\n]+")
_FIELD_ENDS = (" ", "\t", "\n")
_NUMBERS = re.compile(r"-?\d+")


@dataclass(frozen=True, slots=True)
class Argument:
    """One word after expansion. where: ``file:line`` of what it was written in."""

    text: str
    where: str


@dataclass(slots=True, kw_only=True)
class Scope:
    """The variables at one point of a script.

    given: values in place of those of the script. doubtful: arrays whose elements are not certain, and why; an array
    that is used adds its reason to ``notices``. path: of the script, for ``BASH_SOURCE`` and for messages."""

    given: Mapping[str, str]
    path: str = ""
    variables: dict[str, str | list[Argument]] = field(default_factory=dict)
    doubtful: dict[str, str] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    depth: int = 0

    def assign(self, assignment: Assignment) -> None:
        name, before = assignment.name, self.variables.get(assignment.name)
        if assignment.array is not None:
            added = list(self.words(assignment.array))
            kept = before if isinstance(before, list) else []
            elements = [*kept, *added] if assignment.adds else added
            self._limit(name, len(elements))
            self.variables[name] = elements
            if not assignment.adds:
                self.doubtful.pop(name, None)
            return
        value = self._text(assignment.value) if assignment.value is not None else ""
        if assignment.adds and isinstance(before, str):
            value = before + value
        self.set(name, value)

    def _limit(self, name: str, size: int) -> None:
        if size > LONGEST:
            raise ConfigError(f"the value of {name} grows beyond {LONGEST} characters or elements", where=self.path)

    def set(self, name: str, value: str) -> None:
        """Give a variable a value, unless one was given in place of it. Raises ConfigError for an endless one."""
        self._limit(name, len(value))
        value = self.given.get(name, value)
        # A mark names a variable, which its reader can set: this one, unless those in the text are of others.
        others = all(mark in self.variables for mark in marks_of(value)) and not is_mark(value)
        self.variables[name] = value if others or not is_computed(value) else computed(name)

    def truth(self, token: Operator) -> bool | None:
        value = arithmetic(self._arithmetic(token.text))
        return None if value is None else bool(value)

    def test_words(self, tokens: Sequence[Token]) -> Iterator[str]:
        for token in tokens:
            if isinstance(token, Operator):
                yield token.symbol
            elif isinstance(token, Word) and token.literal() not in ("]", "]]"):
                yield from (word.text for word in self.words([token]))

    def words(self, tokens: Sequence[Token]) -> Iterator[Argument]:
        for token in tokens:
            if isinstance(token, Assignment):  # an argument such as env=value
                sign = "+=" if token.adds else "="
                value = self._text(token.value) if token.value is not None else ""
                yield Argument(f"{token.name}{sign}{value}", f"{self.path}:{token.line}")
            elif isinstance(token, Word):
                yield from self._expand(token)

    def _text(self, word: Word) -> str:
        """A word where no fields are split."""
        quoted = tuple(replace(part, quoted=True) for part in self._tilde(word.parts))
        return " ".join(argument.text for argument in self._expand(Word(parts=quoted, line=word.line)))

    @staticmethod
    def _tilde(parts: tuple[Part, ...]) -> tuple[Part, ...]:
        plain = "".join(part.text if part.kind == "text" and not part.quoted else "\0" for part in parts[:2])
        return (Part("parameter", "HOME", True), *parts[1:]) if plain in ("~", "~/") else parts

    def _expand(self, word: Word) -> Iterator[Argument]:
        here = f"{self.path}:{word.line}"
        fields: list[list[str]] = []  # of each field its text and where it is from
        opened = False
        vanishes = False  # as "${ARRAY[@]}" does where the array is empty
        for part in self._tilde(word.parts):
            values = [(part.text, here)] if part.kind == "text" else list(self._values(part, here))
            vanishes |= part.kind == "parameter" and not values
            if part.kind == "text" or part.quoted:
                pieces = values
                joins_last = True
            else:
                pieces = [(piece, where) for text, where in values for piece in _BLANKS.split(text) if piece]
                if values and values[0][0][:1] in _FIELD_ENDS:
                    opened = False
                joins_last = bool(values) and values[-1][0][-1:] not in _FIELD_ENDS
            for number, (text, where) in enumerate(pieces):
                if opened and number == 0:
                    fields[-1][0] += text
                else:
                    fields.append([text, where])
                opened = True
            if not joins_last and values:
                opened = False
        if not (vanishes and [text for text, _ in fields] == [""]):
            yield from (Argument(text, where) for text, where in fields)

    def _values(self, part: Part, here: str) -> Iterator[tuple[str, str]]:
        if part.kind == "arithmetic":
            value = arithmetic(self._arithmetic(part.text))
            yield (computed("arithmetic") if value is None else str(value)), here
        elif part.kind == "command":
            yield self._output(part.text, here), here
        else:
            yield from self._parameter(part.text, here)

    def _parameter(self, text: str, here: str) -> Iterator[tuple[str, str]]:
        match = _PARAMETER.fullmatch(text)
        if match is None:
            yield computed("expansion"), here
            return
        length, name, index, operation = match.groups()
        value = self._variable(name)
        if name in ("@", "*"):
            return  # the script is read as started without arguments
        if isinstance(value, list) and index in ("@", "*") and not length and not operation:
            if name in self.doubtful:
                self.notices.append(self.doubtful.pop(name))
            yield from ((each.text, each.where) for each in value)
            return
        if index in ("@", "*") and value is None and not length:
            return
        if isinstance(value, list):
            number = int(index) if index and index.isdigit() else 0
            value = str(len(value)) if length else value[number].text if number < len(value) else ""
        elif length:
            value = computed(name) if value is None or marks_of(value) else str(len(value))
        yield self._operated(name, value, operation, here), here

    def _variable(self, name: str) -> str | list[Argument] | None:
        if name in self.given:
            return self.given[name]
        if name in ("BASH_SOURCE", "0"):
            return self.path
        return self.variables.get(name)

    def _operated(self, name: str, value: str | None, operation: str, here: str) -> str:
        match = re.match(r":?[-=+?]|%%|%|##|#", operation)
        if not operation:
            return unset(name) if value is None else value
        if match is None:  # substitutions and slices
            return computed(name)
        symbol, line = match.group(), int(here.rpartition(":")[2])
        other = self._text(operand(operation[match.end() :], self.path, line))
        if symbol[0] in "%#":
            return computed(name) if value is None or marks_of(value) else removed(value, symbol, as_run(other))
        empty = value is None or (symbol.startswith(":") and as_run(value) == "")
        if symbol.endswith("+"):
            return "" if empty else other
        if symbol.endswith("?"):
            return unset(name) if value is None else value
        if empty and symbol.endswith("="):
            self.set(name, other)
        return other if empty or value is None else value

    def _arithmetic(self, text: str) -> str:
        expanded = self._text(operand(text, self.path, 0))
        names = re.sub(r"[A-Za-z_]\w*", lambda match: f"${{{match.group()}}}", expanded)
        return as_run(self._text(operand(names, self.path, 0)))

    def _output(self, text: str, here: str) -> str:
        """What a command prints, if it only computes texts; else a mark with its name."""
        name = (text.split() or ["command"])[0]
        if self.depth >= DEEPEST:
            return computed(name)
        self.depth += 1
        try:
            block = parse(split_script(text, self.path, int(here.rpartition(":")[2])), self.path)
            printed = self._printed(list(_flat(block)))
        except ConfigError:
            printed = None
        finally:
            self.depth -= 1
        return computed(name) if printed is None else printed

    def _printed(self, commands: Sequence[Command | None]) -> str | None:
        folder, output = None, ""
        for command in commands:
            if command is None:
                return None
            words = [word.text for word in self.words(command.tokens) if word.text != "--"]
            if not words or any(is_computed(word) for word in words):
                return None
            name, arguments = words[0], words[1:]
            if name == "cd" and len(arguments) == 1:
                folder = os.path.abspath(os.path.join(folder or os.path.dirname(self.path), arguments[0]))
            elif name == "pwd" and folder is not None:
                output = folder
            elif (value := _computed_text(name, arguments)) is not None:
                output = value
            else:
                return None
        return output


def _flat(block: Block) -> Iterator[Command | None]:
    """The commands of a block one after another; None for what is no plain command."""
    for node in block:
        if isinstance(node, Command):
            yield node
        elif isinstance(node, Chain) and all(symbol in ("", "&&") for symbol, _ in node.items):
            yield from _flat(tuple(item for _, item in node.items))
        else:
            yield None


def _computed_text(name: str, arguments: Sequence[str]) -> str | None:
    """What ``dirname``, ``basename``, ``realpath``, ``readlink -f``, ``echo`` and ``seq`` print."""
    if name == "dirname" and len(arguments) == 1:
        return os.path.dirname(arguments[0].rstrip("/")) or "."
    if name == "basename" and arguments:
        return os.path.basename(arguments[0].rstrip("/")).removesuffix("".join(arguments[1:2]))
    if name in ("realpath", "readlink") and arguments:
        return os.path.abspath(arguments[-1])
    if name == "echo" and not any(argument.startswith("-") for argument in arguments):
        return " ".join(arguments)
    if name == "seq" and 1 <= len(arguments) <= 3 and all(_NUMBERS.fullmatch(each) for each in arguments):
        numbers = [int(each) for each in arguments]
        first, step = numbers[0] if len(numbers) > 1 else 1, numbers[1] if len(numbers) == 3 else 1
        counted = range(first, numbers[-1] + (1 if step > 0 else -1), step) if step else range(0)
        return "\n".join(map(str, counted)) if len(counted) < 10_000 else None
    return None
