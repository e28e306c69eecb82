r"""Whether a response itself refuses an answer, or leaves it open among several, by the English words beside it; and
whether two answers are different words. No reward itself.

"34 is wrong", "not 34" and "33 or maybe 34" do not answer 34; ``\text{cat}`` is not ``act``, although the products of
their letters are equal, and 6 p.m. is not 6 a.m. Only words next to an answer count: "It is not hard to see that it is
34" answers 34.
"""

from __future__ import annotations

import re

WINDOW = 160
"""How many characters beside an answer are read, so that every function takes time linear in the text."""

TEXT = re.compile(r"\\(?:text|textbf|textrm|mathrm|mbox)\{([^{}]*(?:\^\{-?\d\}[^{}]*)*)\}")
"""``\\text{...}`` and its like; the first group is what it holds."""

DOUBT = (
    r"(?:\b(?:not|never|cannot|except|wrong|incorrect|false|maybe|perhaps|possibly|nor)\b|n['\u2019]t\b|\bor\s+(?=\w))"
)
"""A pattern of words in ``\\text{...}`` that make it no unit of the number beside it."""

_COMMAND = re.compile(r"\\[a-zA-Z]+")
_TOKEN = re.compile(r"[\w'\u2019^/]+|[.,;:?!]")
_REFUSED = r"(?:wrong|incorrect|false|mistaken|impossible|invalid)"
_SAID = r"(?:is|are|was|were|be|seems?|looks?|sounds)"
_NOT = r"(?:\w+n['\u2019]t|cannot|(?:does|do|did|would|can|could|must|should) not)"
_NOT_RIGHT = (
    rf"(?:{_SAID} (?:\w+ ){{0,2}}?{_REFUSED}|(?:{_SAID} not|{_NOT}) (?:\w+ ){{0,2}}?"
    r"(?:right|correct|true|it|valid|work|fit|answer)(?! (?:that|for|to) ))"
)
_LINK = (
    r"(?:be|been|equals?|to|the|an?|is|as|of|than|out|really|necessarily|exactly|simply|just|it|that|this|think|correct"
    r"|right|answers?|options?|choices?|letters?|numbers?|values?|results?|:)"
)
# All of them are matched against tokens with a space after each.
_BEFORE = re.compile(
    rf"(?:\A|.* )(?:(?:not|never|hardly|unlikely|cannot|neither|nor|except|unlike|instead|rather|other|\w+n['\u2019]t"
    rf"|rul(?:e|ed|ing)(?= out)|eliminat(?:e|ed|ing)|exclud(?:e|ed|ing)|reject(?:ed|ing)?)"
    rf"|(?<!is )(?<!was )(?<!am ){_REFUSED}(?= [a-z:])) (?:{_LINK} )*\Z",
    re.IGNORECASE,
)
_OTHER_SUBJECT = rf"(?:because|since|as|for|and|while|but|if|so|or|nor|when|which|that|this|it|{_SAID})"
_AFTER = re.compile(  # of "C because B is wrong", B is
    rf"(?:[,:] )*(?:{_REFUSED} |(?:(?!{_OTHER_SUBJECT} )[a-z][\w^/]+ ){{0,3}}"
    rf"(?:{_NOT} |{_SAID} (?:\w+ ){{0,2}}?(?:not|{_REFUSED}) ))"
)
_RETRACTED = re.compile(
    rf"(?:[.,;:?!] )*(?:(?:(?:no|nope|wait|hmm|oh|oops|sorry|actually|but) (?:[.,;:?!] )*)*"
    rf"(?:(?:that|this|it|which|(?:the|my) answer) {_NOT_RIGHT} |(?:that|it)['\u2019]s (?:\w+ ){{0,2}}?{_REFUSED} "
    rf"|(?:that|it)['\u2019]s not (?:right|correct|true|it) |i (?:was|am) (?:wrong|mistaken) )"
    r"|(?:no|nope|oops) (?:[.!] )*\Z"
    r"|(?:or|maybe|perhaps|possibly|alternatively) (?:(?:maybe|perhaps|possibly|even|just|it|is|be|the|answer|,) )*"
    r"(?:\d\S*|(?!i )[a-z]) (?![a-z]))",
    re.IGNORECASE,
)
_OR = frozenset("or and maybe perhaps possibly probably alternatively otherwise either".split())  # noqa: SIM905
_BESIDE_OR = frozenset(
    ". , ; : ? ! no wait it is be could might may can even else also then another the answer option choice".split()  # noqa: SIM905
)
_OPPOSITES = "am/pm bc/ad gain/loss profit/loss increase/decrease more/less north/south east/west left/right up/down"
_OPERATOR = re.compile(r"\s*([-+*/=^_])\s*")
_FUNCTIONS = re.compile(r"sqrt|sin|cos|tan|exp|log|ln|pi|inf(?:ini)?ty|\\(?:begin|end)\{\w*\}|\\[a-zA-Z]+")
_WORD = re.compile(r"(?<![\w\\^{}+*/=-])[a-z]{3,}(?![\w^{}+*/=-])|(?<![a-z_])(?<!_\{)[a-z]{4,}")


def taken_back(before: str, after: str) -> bool:
    """Whether the words next to an answer refuse it ("not 34", "34 is wrong") or add another ("34, or 35")."""
    after = _tokens(after[:WINDOW])
    return bool(_BEFORE.match(_tokens(before[-WINDOW:])) or _AFTER.match(after) or _RETRACTED.match(after))


def joined(gap: str) -> bool:
    """Whether the text between two answers leaves both of them open: "or", "and maybe", a comma."""
    if len(gap) > WINDOW:
        return False
    words = set(_tokens(gap).lower().split())
    if words & _OR:
        return all(len(word) == 1 for word in words - _OR - _BESIDE_OR)  # "3 or x = 4"
    return bool(re.search("[,/&]", gap)) and words <= {",", "/"}


def differ_in_words(one: str, other: str) -> bool:
    r"""Whether two answers are different words, which are no products of letters.

    Words are ``\text{...}`` as a whole, three letters and more that stand alone (``abc`` too), runs of four and more.
    """
    if _is_text(one) or _is_text(other):
        return _letters(one) != _letters(other)
    words, others = _words(one), _words(other)
    return (bool(words and others) and words != others) or opposed(one, other)


def opposed(one: str, other: str) -> bool:
    r"""Whether the texts beside two numbers have opposite words: ``6\text{ a.m.}`` is not ``6\text{ p.m.}``."""
    sides = [set(re.sub("[^a-z ]", "", " ".join(TEXT.findall(text)).lower()).split()) for text in (one, other)]
    named = [[side & set(pair.split("/")) for side in sides] for pair in _OPPOSITES.split()]
    return any(len(first) == len(second) == 1 and first != second for first, second in named)


def _tokens(text: str) -> str:
    """The words and the punctuation of a text, with a space after each; without commands of LaTeX and brackets."""
    return "".join(f"{token} " for token in _TOKEN.findall(_COMMAND.sub(" ", text)))


def _is_text(answer: str) -> bool:
    found = TEXT.fullmatch(answer.strip())
    return found is not None and not re.search(r"\d", found[1]) and bool(_letters(answer))


def _letters(answer: str) -> str:
    return re.sub(r"[\W\d_]", "", TEXT.sub(r"\1", answer)).lower()


def _words(answer: str) -> list[str]:
    bare = _FUNCTIONS.sub(" ", TEXT.sub(" ", _OPERATOR.sub(r"\1", answer))).lower()
    return sorted(word.removesuffix("s") for word in _WORD.findall(bare))
