"""A bash script as words and operators: quotes, expansions, arrays, comments, continuation lines and here-documents.

The part of bash that launch scripts are written in. Nothing is expanded here, and nothing is ever run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from buffer_rl.errors import ConfigError

OPERATORS = ("&&", "||", ";;", "|&", ";", "|", "&", "(", ")", "\n")
_REDIRECTION = re.compile(r"\d*(&>>|&>|>>|<<<|>&|<&|<>|>\||<|>)")
_HERE_DOCUMENT = re.compile(r"\d*<<(-?)[ \t]*(?:'([^'\n]*)'|\"([^\"\n]*)\"|\\?([^\s;&|<>()]+))")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_NAME = re.compile(r"[A-Za-z_]\w*|[@*#?$!0-9-]")
_ENDS_WORD = " \t\n;&|<>()"


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a word. kind: text, parameter (``${…}``), command (``$(…)``), arithmetic (``$((…))``)."""

    kind: str
    text: str
    quoted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """One word, before expansion. line: from 1."""

    parts: tuple[Part, ...]
    line: int

    def literal(self) -> str:
        """Its text where it holds no expansion and no quotes; else empty."""
        is_bare = all(part.kind == "text" and not part.quoted for part in self.parts)
        return "".join(part.text for part in self.parts) if is_bare else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """``name=value``, ``name+=value``, or the same with an array, ``name=(…)``, whose words are ``array``."""

    name: str
    adds: bool
    value: Word | None
    array: tuple[Word, ...] | None
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """An operator or the end of a line (``\\n``); ``((`` has the expression as its text."""

    symbol: str
    line: int
    text: str = ""


Token = Word | Assignment | Operator


def split_script(text: str, where: str, first_line: int = 1) -> list[Token]:
    """The tokens of a script. Raises ConfigError with ``file:line`` for a quote or bracket that is never closed."""
    return _Lexer(text, where, first_line).tokens()


def operand(text: str, where: str, line: int) -> Word:
    """All of ``text`` as one word, blanks included: what follows ``:-`` in ``${NAME:-text}``."""
    lexer = _Lexer(text, where, line)
    parts: list[Part] = []
    while lexer.at < len(text):
        lexer.part(parts, line)
    return Word(parts=tuple(parts), line=line)


@dataclass(slots=True)
class _Lexer:
    text: str
    where: str
    first_line: int
    at: int = 0
    counted: int = 0  # characters whose ``lines`` are counted
    lines: int = 0
    pending: list[tuple[str, bool]] = field(default_factory=list)  # here-documents whose bodies come after this line
    found: list[Token] = field(default_factory=list)

    def tokens(self) -> list[Token]:
        while self.at < len(self.text):
            self._step()
        return self.found

    def line(self) -> int:
        if self.at < self.counted:
            return self.first_line + self.text.count("\n", 0, self.at)
        self.lines += self.text.count("\n", self.counted, self.at)
        self.counted = self.at
        return self.first_line + self.lines

    def _step(self) -> None:
        text, line = self.text, self.line()
        if text[self.at] in " \t" or text.startswith("\\\n", self.at):
            self.at += 1 if text[self.at] in " \t" else 2
        elif text[self.at] == "#":
            self.at = self._end_of_line()
        elif here := _HERE_DOCUMENT.match(text, self.at):
            self.pending.append((next(group for group in here.groups()[1:] if group is not None), bool(here.group(1))))
            self.at = here.end()
        elif text.startswith(("<(", ">("), self.at):
            self.found.append(self._word(line))
        elif redirection := _REDIRECTION.match(text, self.at):
            self.at = redirection.end()
            while text[self.at : self.at + 1] in (" ", "\t"):
                self.at += 1
            if self.at < len(text) and text[self.at] not in "\n;|&":
                self._word(line)  # the file
        elif text.startswith("((", self.at):
            inner = self._balanced(self.at + 1, "(", ")")
            self.at += 1  # the second bracket
            self.found.append(Operator(symbol="((", line=line, text=inner))
        elif symbol := next((each for each in OPERATORS if text.startswith(each, self.at)), ""):
            self.at += len(symbol)
            self.found.append(Operator(symbol=symbol, line=line))
            if symbol == "\n" and self.pending:
                self._skip_here_documents()
        else:
            self._word_or_assignment(line)

    def _word_or_assignment(self, line: int) -> None:
        match = _ASSIGNMENT.match(self.text, self.at)
        if match is None:
            self.found.append(self._word(line))
            return
        name, adds = match.group(1), bool(match.group(2))
        self.at = match.end()
        value, array = None, None
        if self.text.startswith("(", self.at):
            array = self._array(line)
        else:
            value = self._word(line)
        self.found.append(Assignment(name=name, adds=adds, value=value, array=array, line=line))

    def _array(self, line: int) -> tuple[Word, ...]:
        self.at += 1
        words: list[Word] = []
        while self.at < len(self.text):
            character = self.text[self.at]
            if character == ")":
                self.at += 1
                return tuple(words)
            if character in " \t\n" or self.text.startswith("\\\n", self.at):
                self.at += 1 if character in " \t\n" else 2
            elif character == "#":
                self.at = self._end_of_line()
            elif character in ";&|<>(":
                raise self._error(f"{character!r} in an array", line)
            else:
                words.append(self._word(self.line()))
        raise self._error("the array that begins here is never closed", line)

    def _word(self, line: int) -> Word:
        parts: list[Part] = []
        if self.text.startswith(("<(", ">("), self.at):
            self.at += 1
            parts.append(Part("command", self._balanced(self.at, "(", ")"), False))
        while self.at < len(self.text) and self.text[self.at] not in _ENDS_WORD:
            self.part(parts, line)
        return Word(parts=tuple(parts), line=line)

    def part(self, parts: list[Part], line: int) -> None:
        character = self.text[self.at]
        if character == "'" or self.text.startswith("$'", self.at):
            begin = self.at + (1 if character == "'" else 2)
            parts.append(Part("text", self.text[begin : self._find("'", begin, line)], True))
            self.at = self._find("'", begin, line) + 1
        elif character == '"':
            self._double_quoted(parts, line)
        elif character == "\\":
            if not self.text.startswith("\\\n", self.at):
                parts.append(Part("text", self.text[self.at + 1 : self.at + 2], True))
            self.at += 2
        elif character in "$`" and (part := self._expansion(quoted=False)):
            parts.append(part)
        else:
            parts.append(Part("text", character, False))
            self.at += 1

    def _double_quoted(self, parts: list[Part], line: int) -> None:
        self.at += 1
        parts.append(Part("text", "", True))  # "" is a word
        while self.at < len(self.text) and self.text[self.at] != '"':
            character = self.text[self.at]
            if character == "\\" and self.text[self.at + 1 : self.at + 2] in tuple('$`"\\\n'):
                escaped = self.text[self.at + 1]
                parts.append(Part("text", "" if escaped == "\n" else escaped, True))
                self.at += 2
            elif character in "$`" and (part := self._expansion(quoted=True)):
                parts.append(part)
            else:
                parts.append(Part("text", character, True))
                self.at += 1
        if self.at >= len(self.text):
            raise self._error("the quote that begins here is never closed", line)
        self.at += 1

    def _expansion(self, *, quoted: bool) -> Part | None:
        """What ``$`` or a backquote begins; None for a plain dollar sign."""
        text = self.text
        if text[self.at] == "`":
            end = self._find("`", self.at + 1, self.line())
            inner, self.at = text[self.at + 1 : end], end + 1
            return Part("command", inner, quoted)
        self.at += 1
        if text.startswith("((", self.at):
            inner = self._balanced(self.at, "(", ")")
            return Part("arithmetic", inner[1:-1], quoted)
        if text.startswith("(", self.at):
            return Part("command", self._balanced(self.at, "(", ")"), quoted)
        if text.startswith("{", self.at):
            return Part("parameter", self._balanced(self.at, "{", "}"), quoted)
        if name := _NAME.match(text, self.at):
            self.at = name.end()
            return Part("parameter", name.group(), quoted)
        self.at -= 1
        return None

    def _balanced(self, begin: int, opening: str, closing: str) -> str:
        """What is between the bracket at ``begin`` and its own closing one, after which the lexer goes on."""
        line, depth, position = self.line(), 0, begin
        while position < len(self.text):
            character = self.text[position]
            if character == "\\":
                position += 1
            elif character == "'" and opening == "(":
                position = self._find("'", position + 1, line)
            elif character == opening:
                depth += 1
            elif character == closing:
                depth -= 1
                if depth == 0:
                    self.at = position + 1
                    return self.text[begin + 1 : position]
            position += 1
        raise self._error(f"the {opening!r} that begins here is never closed", line)

    def _skip_here_documents(self) -> None:
        for delimiter, tabs in self.pending:
            while self.at < len(self.text):
                end = self._end_of_line()
                line, self.at = self.text[self.at : end], end + 1
                if (line.lstrip("\t") if tabs else line) == delimiter:
                    break
        self.pending.clear()

    def _end_of_line(self) -> int:
        end = self.text.find("\n", self.at)
        return len(self.text) if end < 0 else end

    def _find(self, text: str, begin: int, line: int) -> int:
        end = self.text.find(text, begin)
        if end < 0:
            raise self._error("the quote that begins here is never closed", line)
        return end

    def _error(self, what: str, line: int) -> ConfigError:
        return ConfigError(what, where=f"{self.where}:{line}", hint="bash -n SCRIPT checks a script without running it")
