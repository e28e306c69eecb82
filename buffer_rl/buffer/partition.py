"""Splitting rows over data-parallel ranks so that every rank gets about as many tokens, and what may be split."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from enum import StrEnum


class Splitting(StrEnum):
    """What of a batch goes to one rank as a whole: single rows; the rows of a prompt group; or groups where there are
    as many as ranks, and rows where there are fewer."""

    ROWS = "rows"
    GROUPS = "groups"
    GROUPS_OR_ROWS = "groups or rows"


def balanced_partition(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Row indices in ``num_parts`` parts whose sums of ``lengths`` (tokens a row) are about equal.

    Longest processing time first (Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17,
    1969): the largest part exceeds the best possible one by at most a third. Every row is in exactly one part; no
    part is empty where there are at least as many rows as parts; row counts may differ. Equal input gives equal
    output, and each part is in ascending order.

    Raises ValueError if ``num_parts`` is below 1 or a length is negative.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts must be at least 1, not {num_parts}")
    if any(length < 0 for length in lengths):
        raise ValueError("lengths must not be negative")
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    # Entries are (tokens, rows, part): of equally loaded parts the one with the fewest rows takes the next row, so
    # that rows of length 0 spread too, and no part stays empty.
    heap = [(0, 0, part) for part in range(num_parts)]
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, rows, part = heapq.heappop(heap)
        parts[part].append(row)
        heapq.heappush(heap, (tokens + int(lengths[row]), rows + 1, part))
    return [sorted(part) for part in parts]
