r"""Multiple choice: 1 if the chosen letter is the label's, else 0.

Source: Rein et al. 2023, GPQA, arXiv:2311.12022; the answer sentences are those of its prompts ("The correct
answer is (insert answer here)") and of the ``Answer: $LETTER`` format in which the set is commonly asked.
"""

from __future__ import annotations

import re
import string
from typing import Any

from buffer_rl.errors import RewardError
from buffer_rl.kinds.marks import rows_may_choose
from buffer_rl.records.groups import Sample, Status
from rm_hub.answers import answer_of, boxed_answers, last_line, where
from rm_hub.doubt import joined, taken_back

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
_ALONE_IN_TEXT = re.compile(rf"(?<![A-Za-z0-9_'])({_LETTER})(?![A-Za-z0-9_])")
# For score_lenient, from the clearest to the weakest. A small letter, or "A" and "I", must end its sentence.
_SMALL = r"[a-z](?=[)*$\"`}\]]*+[.,;:!]?[)*$\"`}\]]*+\s*(?:\n|\Z))"
_LEADING = r"[\s:*_$(\"`\[]*+(?:\\[a-z]{1,10}\{)*+\(?+"
_STATING = r"(?i:\banswers?)[\s*]*+(?i:(?:is|are|should be|must be|would be)\b)?+"
_LENIENT = (
    re.compile(r"\\boxed\{\(?([a-z])\)?\}"),
    re.compile(rf"{_STATING}{_LEADING}(?i:(?:option|choice)\b)?+{_LEADING}({_LETTER}|{_SMALL})"),
    re.compile(r"\b([A-Z])\b[)*\"`]*+\s+is\s+(?:the\s+)?(?:correct|right|best)\b"),
    re.compile(rf"(?i:\b(?:option|choice))[\s*]*+(?i:is\b)?+{_LEADING}({_LETTER}|{_SMALL})"),
    _ALONE_IN_TEXT,
    re.compile(rf"\A\s*[(*$]*+({_SMALL})"),
)
_ALONE = re.compile(r"[*$( ]*([A-Z])[*$) .:]*")
_BOXED = re.compile(r"(?:\\(?:text|mathrm|textbf)\{)?\(?([A-Z])\)?\}?[.:]?")


@rows_may_choose
def score(args: Any, sample: Sample) -> float:
    r"""1.0 if the response chooses the label's letter and ended by itself, else 0.0.

    The choice is, after the reasoning, what each ``\boxed{C}`` holds (none, if they differ); else the last "answer is
    C" or "Answer: C", where the letter comes next (not "Answer: I think C") and is the only one (not "C or D"; an
    earlier sentence does not count then); else a last line that is a letter alone. A letter that the words beside it
    refuse is not chosen ("Answer A is wrong"; ``rm_hub/doubt.py``). The label is ``correct_letter`` in the metadata, a
    letter, its number counted from 0, or, with ``choices`` in the metadata, the text of one of them. Raises RewardError
    if it is none of these.
    """
    letter = _label(sample)
    return float(sample.status is Status.COMPLETED and choice(answer_of(args, sample)) == letter)


@rows_may_choose
def score_lenient(args: Any, sample: Sample) -> float:
    r"""As ``score``, and where no letter is chosen in so many words, 1.0 if the label's is the likeliest one.

    That is, among the letters of the choices: a small one in a box; else the last "answer should be c"; else the last
    "C is correct"; else the last "option C"; else the last capital letter that stands alone ("I choose C"); else a
    response that is a small letter; else, where there is none at all, the only one of ``choices`` whose words the
    response has. A letter that is refused is passed over ("C is wrong"); one of several ("A or C") is no choice.
    """
    letter = _label(sample)
    text, letters = answer_of(args, sample), _letters(sample)
    chosen = choice(text)
    if (chosen is None or chosen not in letters) and len(set(boxed_answers(text) or ())) < 2:
        chosen = likely_choice(text[-LAST_CHARACTERS:], letters)
        if chosen is None:
            texts = zip(letters, _choices(sample) or (), strict=False)
            named = [at for at, words in texts if _names(text, words)]
            chosen = named[0] if len(named) == 1 else None
    return float(sample.status is Status.COMPLETED and chosen == letter)


def likely_choice(text: str, letters: str) -> str | None:
    """The one of ``letters`` that a text is likely to choose; None where none stands in it; empty where several do."""
    for pattern in _LENIENT:
        found = [at for at in pattern.finditer(text) if at[1].upper() in letters]
        found = [at for at in found if not taken_back(text[: at.start(1)], text[at.end(1) :])]
        if found:
            chosen = found[-1][1].upper()
            return "" if _one_of_several(text, found[-1].span(1), chosen, letters) else chosen
    return None


def _one_of_several(text: str, place: tuple[int, int], chosen: str, letters: str) -> bool:
    """Whether another letter stands beside the chosen one: "A or C", "A, C", "A C"."""
    others = [at for at in _ALONE_IN_TEXT.finditer(text) if at[1] in letters and at[1] != chosen]
    gaps = [text[at.end() : place[0]] if at.end() <= place[0] else text[place[1] : at.start()] for at in others]
    return any(joined(gap) or (bool(gap) and not gap.strip(" ")) for gap in gaps)


def _names(text: str, words: str) -> bool:
    """Whether a text has the words of a choice, and does not refuse them: as a whole, so not 5 in -5 and in 2.5."""
    pattern = r"[^a-z0-9]+".join(re.findall(r"(?:(?<![a-z0-9])-(?=[0-9]))?[a-z0-9]+", words.lower()))
    whole = rf"(?<![a-z0-9])(?<![a-z0-9]-)(?!(?<=-)[0-9])(?<![0-9][.,/]){pattern}(?![a-z0-9]|[.,/][0-9])"
    found = re.search(whole, text.lower()) if pattern else None
    return found is not None and not taken_back(text[: found.start()], text[found.end() :])


def choice(text: str) -> str | None:
    """The capital letter that an answer chooses; None where it chooses none."""
    if (boxes := boxed_answers(text)) is not None:
        letters = {found and found[1] for found in map(_BOXED.fullmatch, boxes)}
        return letters.pop() if len(letters) == 1 else None
    text = text[-LAST_CHARACTERS:]
    *_, stated = (None, *_STATED.finditer(text))
    if stated:
        found = _ONE.match(text, stated.end())
        return found[1] if found and not taken_back(text[: found.start(1)], text[found.end(1) :]) else None
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
    text_of = "the text or number of one of the metadata's choices, and of no second"
    expected = f"a letter from A to {letters[-1:]}, or {text_of}"
    raise RewardError(f"the label is {label!r:.80}", where=where(sample, "rm_hub.gpqa"), expected=expected)
