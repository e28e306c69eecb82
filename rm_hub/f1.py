"""Token F1 and exact match of reading comprehension.

Source: Rajpurkar et al. 2016, SQuAD, arXiv:1606.05250, section 6.1: ignore case, punctuation, articles and white
space; the best score over all reference answers. F1 pays for a part of the answer; ``score_exact`` does not. An answer
or label that is yes, no or "noanswer" has no parts, as in the evaluation script of HotpotQA (Yang et al. 2018,
arXiv:1809.09600).
"""

from __future__ import annotations

import operator
import re
import string
from collections import Counter
from collections.abc import Callable
from typing import Any

from buffer_rl.kinds.marks import rows_may_choose
from buffer_rl.records.groups import Sample, Status
from rm_hub.answers import answer_of, labels_of

WHOLE = (["yes"], ["no"], ["noanswer"])
"""Answers of which no part is right: "yes and no" is no half of "yes"."""

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@rows_may_choose
def score(args: Any, sample: Sample) -> float:
    """F1 of the response's and the label's tokens, 0 to 1, the best over a list of labels.

    What follows the reasoning is graded. 0.0 if the sample did not end by itself. Raises RewardError without a label.
    """
    return _best(args, sample, f1)


@rows_may_choose
def score_exact(args: Any, sample: Sample) -> float:
    """1.0 if the tokens are the same, in the same order, as those of one label, else 0.0; otherwise as ``score``."""
    return float(_best(args, sample, operator.eq))


def tokens(text: str) -> list[str]:
    """Lower-case words without punctuation and articles; a text of nothing else (the choice "A") keeps them."""
    words = text.lower().translate(_PUNCTUATION)
    return _ARTICLE.sub(" ", words).split() or words.split() or text.split()


def _best(args: Any, sample: Sample, measure: Callable[[list[str], list[str]], float]) -> float:
    labels = labels_of(sample, reward="rm_hub.f1")
    if sample.status is not Status.COMPLETED:
        return 0.0
    answer = tokens(answer_of(args, sample))
    return max(measure(answer, tokens(label)) for label in labels)


def f1(answer: list[str], label: list[str]) -> float:
    """Harmonic mean of precision and recall over the bags of tokens; of two empty ones 1. One of ``WHOLE``: 1 or 0."""
    if not answer or not label or answer in WHOLE or label in WHOLE:
        return float(answer == label)
    num_same = (Counter(answer) & Counter(label)).total()
    return 2 * num_same / (len(answer) + len(label))
