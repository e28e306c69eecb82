"""The commands of a bash script as a tree: what runs always, under a condition, or in a loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from buffer_rl.errors import ConfigError
from buffer_rl_slime.scripts.shell_words import Assignment, Operator, Token, Word

_SEPARATORS = ("\n", ";", "&", ")", ";;")
_CHAINS = ("&&", "||", "|", "|&")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Assignments and words, not expanded; or a test ``[[ … ]]`` with the operators in it."""

    tokens: tuple[Token, ...]
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Commands joined by ``&&``, ``||`` or ``|``: each with the operator before it, the first with none."""

    items: tuple[tuple[str, Node], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Negated:
    """``! command``."""

    node: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Branches:
    """``if``: conditions with what they run, and what runs if none holds."""

    arms: tuple[tuple[Block, Block], ...]
    otherwise: Block
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sometimes:
    """The body of a loop, or one arm of ``case``: run any number of times. name: of the loop's variable."""

    body: Block
    name: str
    line: int


Node = Command | Chain | Negated | Branches | Sometimes | tuple["Node", ...]
Block = tuple[Node, ...]


def parse(tokens: Sequence[Token], where: str) -> Block:
    """The tree of a script. Raises ConfigError with ``file:line`` for a construct that is never closed."""
    return _Parser(list(tokens), where).block(())


@dataclass(slots=True)
class _Parser:
    tokens: list[Token]
    where: str
    at: int = 0
    opened: list[int] = field(default_factory=list)

    def block(self, ends: tuple[str, ...]) -> Block:
        """Nodes up to one of the words or operators ``ends``, which is not consumed."""
        nodes: list[Node] = []
        while self.at < len(self.tokens):
            if self._here() in ends:
                return tuple(nodes)
            if self._here() in _SEPARATORS:
                self.at += 1
            else:
                nodes.append(self._chain())
        if ends:
            line = self.opened[-1]
            raise ConfigError(f"there is no {ends[-1]!r} for what begins here", where=f"{self.where}:{line}")
        return tuple(nodes)

    def _chain(self) -> Node:
        items: list[tuple[str, Node]] = [("", self._node())]
        while (symbol := self._here()) in _CHAINS:
            self.at += 1
            while self._here() == "\n":
                self.at += 1
            if self.at < len(self.tokens):
                items.append((symbol, self._node()))
        return items[0][1] if len(items) == 1 else Chain(items=tuple(items))

    def _node(self) -> Node:
        word, line = self._here(), self.tokens[self.at].line
        if word not in ("if", "for", "while", "until", "select", "case", "{", "(", "function", "!"):
            return self._command(line)
        self.at += 1
        if word == "!":
            return Negated(node=self._node())
        if word == "function":
            self.at += 1  # its name; the body is read where it stands
            return self._body()
        self.opened.append(line)
        if word == "if":
            node = self._if(line)
        elif word == "case":
            node = self._case(line)
        elif word in ("{", "("):
            node = self.block(("}" if word == "{" else ")",))
            self.at += 1
        else:
            name = self._here()
            self._skip_to(("do",))
            node = Sometimes(body=self.block(("done",)), name=name, line=line)
            self.at += 1
        self.opened.pop()
        return node

    def _if(self, line: int) -> Node:
        arms: list[tuple[Block, Block]] = []
        otherwise: Block = ()
        ending = "elif"
        while ending == "elif":
            condition = self.block(("then",))
            self.at += 1
            arms.append((condition, self.block(("elif", "else", "fi"))))
            ending = self._here()
            self.at += 1
        if ending == "else":
            otherwise = self.block(("fi",))
            self.at += 1
        return Branches(arms=tuple(arms), otherwise=otherwise, line=line)

    def _case(self, line: int) -> Node:
        self._skip_to(("in",))
        arms: list[Node] = []
        while self.at < len(self.tokens) and self._here() != "esac":
            if self._here() in ("\n", ";;", "("):
                self.at += 1
                continue
            self._skip_to((")",))  # past the pattern
            arms.append(Sometimes(body=self.block((";;", "esac")), name="", line=line))
        self.at += 1
        return tuple(arms)

    def _command(self, line: int) -> Node:
        taken: list[Token] = []
        in_test = self._here() == "[["
        while self.at < len(self.tokens):
            here = self._here()
            if not in_test and here in (*_SEPARATORS, *_CHAINS, "("):
                break
            taken.append(self.tokens[self.at])
            self.at += 1
            if in_test and here == "]]":
                in_test = False
        if len(taken) == 1 and self._here() == "(" and isinstance(taken[0], Word):  # name () { … }
            return self._body()
        if self._here() == "(":  # no bash that is known here: past the bracket
            self.at += 1
        return Command(tokens=tuple(taken), line=line)

    def _body(self) -> Node:
        while self._here() in ("(", ")", "\n"):
            self.at += 1
        return self._node() if self.at < len(self.tokens) else ()

    def _skip_to(self, words: tuple[str, ...]) -> None:
        while self.at < len(self.tokens) and self._here() not in words:
            self.at += 1
        self.at += 1

    def _here(self) -> str:
        token = self.tokens[self.at] if self.at < len(self.tokens) else None
        if isinstance(token, Operator):
            return token.symbol
        return "" if token is None or isinstance(token, Assignment) else token.literal()
