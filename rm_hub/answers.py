r"""Where the answer stands in a response: after the reasoning, in the last box, in the last line. No reward itself.

``\boxed{...}`` is the convention of MATH (Hendrycks et al. 2021, arXiv:2103.03874, section 3.1); ``</think>`` is that
of reasoning models (DeepSeek-R1, arXiv:2501.12948, table 1). Every function takes time linear in the text.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from buffer_rl.errors import RewardError
from buffer_rl.records.groups import Sample
from rm_hub.doubt import DOUBT, TEXT, joined, taken_back

REASONING, END_OF_REASONING = "<think>", "</think>"

UNIT = re.compile(rf"(?!\\\w+\{{[^{{}}]*{DOUBT}){TEXT.pattern}(?:\^(?:\d|\{{-?\d\}}))?")
"""``TEXT`` without ``DOUBT``, with the exponent of a unit inside or after it."""

END_TOKEN = re.compile("(?:<[|\uff5c][^<>|\uff5c]{1,40}[|\uff5c]>|</s>|<eos>|<end_of_turn>)\\s*\\Z")
"""At the end of a text, as models name it: <|im_end|>, <|eot_id|>, </s>, <eos>, <end_of_turn>; other bars are known."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}|(\w))\s*(?:\{([^{}]*)\}|(\w))")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is text
_BOX_OR_BRACE = re.compile(rf"({_BOX.pattern})|{_BRACE.pattern}", re.DOTALL)


def after_reasoning(text: str) -> str:
    """What follows the last ``</think>``; without one, the whole text. Empty if a ``<think>`` after that never ends."""
    answer = text[text.rfind(END_OF_REASONING) + len(END_OF_REASONING) :] if END_OF_REASONING in text else text
    return "" if REASONING in answer else answer


def has_answer(sample: Sample) -> bool:
    """Whether the reasoning of a response ends: its own, or that of a prompt whose text ends with ``<think>``. What a
    chat template adds to messages is not in the sample."""
    begun = isinstance(sample.prompt, str) and sample.prompt.rstrip().endswith(REASONING)
    text = f"{REASONING * begun}{sample.response}"
    return text.rfind(REASONING) <= text.rfind(END_OF_REASONING)


def answer_of(args: Any, sample: Sample) -> str:
    """What follows the reasoning of the response; empty if that never ends."""
    return after_reasoning(response_of(args, sample)) if has_answer(sample) else ""


def response_of(args: Any, sample: Sample) -> str:
    """The response without what ended it, which is in the text of a response as in its tokens: the stop string of
    ``--rollout-stop``, and the end token where ``--no-rollout-skip-special-tokens`` shows it."""
    stops = getattr(args, "rollout_stop", None) or ()
    ending = max((stop for stop in stops if sample.response.endswith(stop)), key=len, default="")
    response = sample.response.removesuffix(ending)
    return response if getattr(args, "rollout_skip_special_tokens", True) else END_TOKEN.sub("", response)


def last_boxed(text: str) -> str | None:
    r"""What the last ``\boxed{...}`` (or ``\fbox``) holds, without white space around it; None if it never closes."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    opening = _BOX.match(text, start) if start >= 0 else None
    if opening is None:
        return None
    depth = 1
    for brace in _BRACE.finditer(text, opening.end()):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[opening.end() : brace.start()].strip()
    return None


def boxed_answers(text: str) -> list[str] | None:
    r"""What the boxes of an answer hold, in order; None without a box.

    Empty if the last one never closes, is refused by the words beside it ("not \boxed{34}"), or is one of several
    ("\boxed{33} or \boxed{34}").
    """
    last = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if last < 0:
        return None
    boxes: list[tuple[int, int, str]] = []  # start, end, content
    opened: list[tuple[int, int] | None] = []  # None of a brace that is no box
    for found in _BOX_OR_BRACE.finditer(text):
        if found[1] or found.group() == "{":
            opened.append(found.span() if found[1] else None)
            continue
        box = opened.pop() if opened and found.group() == "}" else None
        if box and (not boxes or boxes[-1][0] < box[0]):  # of nested boxes, the inner one
            boxes.append((box[0], found.end(), text[box[1] : found.start()].strip()))
    if not boxes or boxes[-1][0] != last:
        return []
    contents, end = [content for _, _, content in boxes], boxes[-1][1]
    previous = boxes[-2][1] if len(boxes) > 1 else 0
    open_among = previous and contents[-1] != contents[-2] and joined(text[previous:last])
    return [] if open_among or taken_back(text[previous:last], text[end:]) else contents


def full_fractions(text: str) -> str:
    r"""The text with ``\frac12``, ``\dfrac1{2}`` and their like spelled ``\frac{1}{2}``."""
    return _FRACTION.sub(lambda found: f"\\frac{{{found[1] or found[2] or ''}}}{{{found[3] or found[4] or ''}}}", text)


def last_line(text: str) -> str:
    """The last line that is not blank, without white space around it."""
    return text.rstrip().rpartition("\n")[2].strip()


def labels_of(sample: Sample, *, reward: str) -> list[str]:
    """The accepted answers as text: the label, or each of a list of labels, numbers without an exponent.

    Raises RewardError if there is none, or one that is neither text nor a number. ``reward`` names who asks.
    """
    labels = sample.label if isinstance(sample.label, list) else [sample.label]
    if not labels or not all(_is_text_or_number(label) for label in labels):
        what, expected = f"the label is {sample.label!r:.80}", "text or a number, or a list of them"
        hint = "name the field that holds it with --label-key"
        raise RewardError(what, where=where(sample, reward), expected=expected, hint=hint)
    return [format(Decimal(str(label)), "f") if isinstance(label, float) else str(label) for label in labels]


def where(sample: Sample, reward: str) -> str:
    """Names the row in an error of a reward."""
    return str(sample.uid or reward)


def _is_text_or_number(label: Any) -> bool:
    return isinstance(label, str | int | float) and not isinstance(label, bool) and bool(str(label).strip())
