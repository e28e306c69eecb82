"""Exact match: 1 if the whole answer equals the label, else 0.

Source: the exact-match metric of reading comprehension (Rajpurkar et al. 2016, SQuAD, arXiv:1606.05250, section
6.1), without its normalisation of case, articles and punctuation: credit for a part of the answer, or for a
rewritten one, is what a policy learns to exploit.
"""

from __future__ import annotations

from typing import Any

from buffer_rl.errors import RewardError
from buffer_rl.kinds.marks import at_once, rows_may_choose
from buffer_rl.records.groups import Sample, Status
from rm_hub.answers import response_of, where


@at_once
@rows_may_choose
def score(args: Any, sample: Sample) -> float:
    """1.0 if the response equals the label (any one of a list of labels) and the sample ended by itself.

    White space around the response and the label is ignored, because tokenizers put it there, and so is a stop string
    of ``--rollout-stop`` at the end; everything else counts, case too. A truncated or aborted answer earns 0.0 even if
    its text is right: no end token was emitted. Raises RewardError if there is no label that is text or a number.
    """
    labels = sample.label if isinstance(sample.label, list) else [sample.label]
    if not labels or not all(isinstance(label, str | int | float) for label in labels):
        what, expected = f"the label is {sample.label!r}", "text or a number, or a list of them"
        hint = "name the field that holds it with --label-key"
        raise RewardError(what, where=where(sample, "rm_hub.exact_match"), expected=expected, hint=hint)
    if sample.status is not Status.COMPLETED:
        return 0.0
    answer = response_of(args, sample).strip()
    return float(any(answer == str(label).strip() for label in labels))
