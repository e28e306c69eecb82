"""A reward that looks at nothing: 0 or 1, each half of the time. What a run gains on it is not the doing of its reward.

Source: Shao et al. 2025, Spurious Rewards, arXiv:2506.10947, section 2, where it is the baseline of other rewards.
"""

from __future__ import annotations

import hashlib
from typing import Any

from buffer_rl.kinds.marks import at_once, rows_may_choose
from buffer_rl.records.groups import Sample


@at_once
@rows_may_choose
def score(args: Any, sample: Sample) -> float:
    """0.0 or 1.0, drawn from ``--seed``, the sample's prompt (its row and epoch), index and response: the same in a run
    that is repeated or resumed. A sample that did not end by itself has one, too."""
    drawn_from = repr((getattr(args, "seed", 0), str(sample.uid), sample.sample_index, sample.response))
    return float(hashlib.sha256(drawn_from.encode("utf-8", "surrogatepass")).digest()[0] % 2)
