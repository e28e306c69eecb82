r"""Multiple choice: 1 if the chosen letter is the label's, else 0.

Source: Rein et al. 2023, GPQA, arXiv:2311.12022; the answer sentences are those of its prompts ("The correct
answer is (insert answer here)") and of the ``Answer: $LETTER`` format in which the set is commonly asked.
"""

from __future__ import annotations

import re
import string
from typing import Any

from buffer_rl.errors import RewardError
from buffer_rl.scope import rows_may_choose
from buffer_rl.types import Sample, Status
from rm_hub.answers import after_reasoning, last_boxed, last_line, response_of, where

LAST_CHARACTERS = 1000

_STATED = re.compile(
    r"(?i:answer(?:[ \t*]++is\b)?+[ \t*]*+:?[ \t*$\"`\[]*+(?:(?:option|choice)[ \t*]++)?)"
    r"(?=\(?[A-Z]\)?(?:[\s.,:;*/&$)\"`\]]|\Z))"
)
# "I" and "A" before another word are words. Of "B or C" and "B, C" neither letter is chosen.
_LETTER = r"(?:[B-HJ-Z]|[AI](?![ \t]+(?!(?:because|since|as|for|due|which|is|are|both|and|or|but|if)\b)[\w']))(?![\w'])"
_ONE = re.compile(
    rf"\(?({_LETTER})(?![ \t*$()\"`\[\]]*(?:(?:or|and|&|/|,)[ \t*$(\"`\[]*)+{_LETTER}"
    r"(?![ \t]+is[ \t]+(?:wrong|incorrect|false|not)\b))"
)
# For score_lenient, from the clearest to the weakest. A small letter, or "A" and "I", must end its sentence.
_SMALL = r"[a-z](?=[)*$\"`}\]]*+[.,;:!]?[)*$\"`}\]]*+\s*(?:\n|\Z))"
_LEADING = r"[\s:*_$(\"`\[]*+(?:\\[a-z]{1,10}\{)*+\(?+"
_STATING = r"(?i:\banswers?)[\s*]*+(?i:(?:is|are|should be|must be|would be)\b)?+"
_LENIENT = (
    re.compile(r"\\boxed\{\(?([a-z])\)?\}"),
    re.compile(rf"{_STATING}{_LEADING}(?i:(?:option|choice)\b)?+{_LEADING}({_LETTER}|{_SMALL})"),
    re.compile(r"\b([A-Z])\b[)*\"`]*+\s+is\s+(?:the\s+)?(?:correct|right|best)\b"),
    re.compile(rf"(?i:\b(?:option|choice))[\s*]*+(?i:is\b)?+{_LEADING}({_LETTER}|{_SMALL})"),
    re.compile(rf"(?<![A-Za-z0-9_'])({_LETTER})(?![A-Za-z0-9_])"),
    re.compile(rf"\A\s*[(*$]*+({_SMALL})"),
)
_ALONE = re.compile(r"[*$( ]*([A-Z])[*$) .:]*")
_BOXED = re.compile(r"(?:\\(?:text|mathrm|textbf)\{)?\(?([A-Z])\)?\}?[.:]?")


@rows_may_choose
def score(args: Any, sample: Sample) -> float:
    r"""1.0 if the response chooses the label's letter and ended by itself, else 0.0.

    The choice is, after the reasoning, the last ``\boxed{C}``; else the last "answer is C" or "Answer: C", where the
    letter comes next (not "Answer: I think C") and is the only one (not "C or D"; an earlier sentence does not count
    then); else a last line that is a letter alone. The label is ``correct_letter`` in the metadata, a letter, its
    number counted from 0, or, with ``choices`` in the metadata, the text of one of them. Raises RewardError if it is
    none of these.
    """
    letter = _label(sample)
    return float(sample.status is Status.COMPLETED and choice(response_of(args, sample)) == letter)


@rows_may_choose
def score_lenient(args: Any, sample: Sample) -> float:
    r"""As ``score``, and where no letter is chosen in so many words, 1.0 if the label's is the likeliest one.

    That is, among the letters of the choices: a small one in a box; else the last "answer should be c"; else the last
    "C is correct"; else the last "option C"; else the last capital letter that stands alone ("I choose C", "A or C");
    else a response that is a small letter; else, where there is none at all, the only one of ``choices`` whose words
    the response has.
    """
    letter = _label(sample)
    response = response_of(args, sample)
    chosen = choice(response)
    if chosen is None or chosen not in _letters(sample):
        chosen = likely_choice(after_reasoning(response)[-LAST_CHARACTERS:], _letters(sample))
    if chosen is None:
        words = _words(after_reasoning(response))
        named = [
            at for at, text in zip(_letters(sample), _choices(sample) or (), strict=False) if _words(text) in words
        ]
        chosen = named[0] if len(named) == 1 else None
    return float(sample.status is Status.COMPLETED and chosen == letter)


def likely_choice(text: str, letters: str) -> str | None:
    """The one of ``letters`` that a text is likely to choose; None where none stands in it."""
    for pattern in _LENIENT:
        if found := [at[1].upper() for at in pattern.finditer(text) if at[1].upper() in letters]:
            return found[-1]
    return None


def choice(response: str) -> str | None:
    """The capital letter that a response chooses; None where it chooses none."""
    text = after_reasoning(response)
    if (boxed := last_boxed(text)) is not None:
        found = _BOXED.fullmatch(boxed)
        return found[1] if found else None
    text = text[-LAST_CHARACTERS:]
    *_, stated = (None, *_STATED.finditer(text))
    if stated:
        found = _ONE.match(text, stated.end())
        return found[1] if found else None
    alone = _ALONE.fullmatch(last_line(text))
    return alone[1] if alone else None


def _choices(sample: Sample) -> list[str] | None:
    choices = sample.metadata.get("choices")
    if isinstance(choices, dict):
        choices = list(choices.values())
    return [str(choice) for choice in choices] if isinstance(choices, list) else None


def _letters(sample: Sample) -> str:
    """The letters that may be chosen: the metadata's ``valid_letters``, else one for each of the choices, else all."""
    valid, choices = sample.metadata.get("valid_letters"), _choices(sample)
    if isinstance(valid, list | str) and valid:
        return "".join(str(letter).upper() for letter in valid)
    return string.ascii_uppercase if choices is None else string.ascii_uppercase[: len(choices)]


def _words(text: str) -> str:
    """The words of a text in small letters, each between spaces."""
    return f" {' '.join(re.findall(r'[a-z0-9]+', text.lower()))} "


def _label(sample: Sample) -> str:
    label, choices, letters = sample.label, _choices(sample), _letters(sample)
    given = sample.metadata.get("correct_letter")
    label = given if isinstance(given, str) and given.strip() else label
    if isinstance(label, str):
        letter = label.strip().strip("().").upper()
        found = [at for at, text in zip(letters, choices or (), strict=False) if text == label]
        found = found or [at for at, text in zip(letters, choices or (), strict=False) if _words(text) == _words(label)]
        found += [letter] if len(letter) == 1 and letter in letters else []
        if len(set(found)) == 1:  # more, where a choice's text is another's letter, or comes twice
            return found[0]
    elif isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(letters):
        return letters[label]
    raise RewardError(
        f"the label is {label!r:.80}",
        where=where(sample, "rm_hub.gpqa"),
        expected=f"a letter from A to {letters[-1:]}, or the text or number of one of the metadata's choices, "
        "and of no second",
    )
