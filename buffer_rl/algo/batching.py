"""Grouping the rows of a batch into micro-batches under a token budget (standard library only)."""

from __future__ import annotations

from collections.abc import Sequence


def micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Row indices in micro-batches whose padded cost, rows x longest row, is at most ``max_tokens``.

    lengths: tokens a row, ``[num_rows]``. Rows are taken from the longest to the shortest (ties by index), so that
    rows of one micro-batch have similar lengths and little is padding, and a batch that does not fit into memory
    fails at once. A row that is longer than the budget gets a micro-batch of its own: splitting it would change its
    log-probabilities, and leaving it out would change the loss. Equal input gives equal output.

    Raises ValueError if ``max_tokens`` is below 1.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
    batches: list[list[int]] = []
    longest = 0
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * longest <= max_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
            longest = int(lengths[row])
    return batches
