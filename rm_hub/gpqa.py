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
_ALONE = re.compile(r"[*$( ]*([A-Z])[*$) .:]*")
_BOXED = re.compile(r"(?:\\(?:text|mathrm|textbf)\{)?\(?([A-Z])\)?\}?[.:]?")


@rows_may_choose
def score(args: Any, sample: Sample) -> float:
    r"""1.0 if the response chooses the label's letter and ended by itself, else 0.0.

    The choice is, after the reasoning, the last ``\boxed{C}``; else the last "answer is C" or "Answer: C", where the
    letter comes next (not "Answer: I think C") and is the only one (not "C or D"; an earlier sentence does not count
    then); else a last line that is a letter alone. The label is a letter; or, with ``choices`` in the metadata, the
    text of one of them or its number counted from 0. Raises RewardError if it is none of these.
    """
    letter = _label(sample)
    return float(sample.status is Status.COMPLETED and choice(response_of(args, sample)) == letter)


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


def _label(sample: Sample) -> str:
    label, choices = sample.label, sample.metadata.get("choices")
    choices = choices if isinstance(choices, list) else None
    letters = string.ascii_uppercase if choices is None else string.ascii_uppercase[: len(choices)]
    if isinstance(label, str):
        letter = label.strip().strip("().").upper()
        found = [at for at, text in zip(letters, choices or (), strict=False) if text == label]
        found += [letter] if len(letter) == 1 and letter in letters else []
        if len(set(found)) == 1:  # more, where a choice's text is another's letter, or comes twice
            return found[0]
    elif isinstance(label, int) and not isinstance(label, bool) and choices is not None and 0 <= label < len(letters):
        return letters[label]
    raise RewardError(
        f"the label is {label!r:.80}",
        where=where(sample, "rm_hub.gpqa"),
        expected=f"a letter from A to {letters[-1:]}, or the text or number of one of the metadata's choices, "
        "and of no second",
    )
