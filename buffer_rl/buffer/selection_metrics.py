"""What the rows of a selection say about a step, from the columns that the Buffer has in its own memory."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from buffer_rl.buffer.columns import Cell, ColumnStore
from buffer_rl.buffer.window import Window
from buffer_rl.records.groups import GroupUid, equal_rewards, sample_means

_MEANS = {
    "raw_reward": "rollout/raw_reward",
    "response_length": "rollout/response_len/mean",
    "truncated": "rollout/truncated_ratio",
    "baseline_reward": "rollout/baseline_reward",
}
_OLDEST, _NEWEST = "weight_version", "newest_weight_version"
_READ = (*_MEANS, _OLDEST, _NEWEST)


def selection_metrics(store: ColumnStore, uids: Iterable[GroupUid], window: Window | None = None) -> dict[str, float]:
    """Flat numbers of the groups that a step trains on: ``rollout/*`` as a rollout reports them of its own groups, and
    ``staleness/mixed``, the share of samples with tokens of several versions. A sample of several parts counts once,
    with their mean. What a column is missing for, or in an object store, is left out.

    window: after the groups were taken from it; adds ``production/live_groups``, ``production/finished_groups`` (of the
    live ones) and ``production/passes``, the most younger groups that passed a live one.
    """
    values: dict[str, list[float]] = {}
    longest, zero_std, mixed = 0.0, [], []
    for uid in uids:
        cells = store.cells(uid)
        samples = [row.sample_index for row in store.rows(uid)]
        columns = {name: np.asarray(cells[name].inline) for name in _READ if _is_inline(cells.get(name))}
        for name in _MEANS.keys() & columns.keys():
            means = sample_means(samples, columns[name].astype(np.float64).tolist())
            values.setdefault(name, []).extend(means)
            if name == "raw_reward":
                zero_std.append(equal_rewards(means))
        if "response_length" in columns:
            longest = max(longest, float(columns["response_length"].max()))
        if _OLDEST in columns and _NEWEST in columns:
            several = columns[_NEWEST] > columns[_OLDEST]
            mixed += [share > 0 for share in sample_means(samples, several.astype(np.float64).tolist())]
    # Groups come in the order of their leases, and the last bits of a sum depend on its order.
    metrics = {_MEANS[name]: float(np.mean(sorted(values[name]))) for name in _MEANS if name in values}
    if "raw_reward" in values:
        metrics["rollout/raw_reward_std"] = float(np.std(sorted(values["raw_reward"])))
        metrics["rollout/zero_std"] = sum(zero_std) / len(zero_std)
    if "response_length" in values:
        metrics["rollout/response_len/max"] = longest
    if mixed:
        metrics["staleness/mixed"] = sum(mixed) / len(mixed)
    if window is not None:
        metrics["production/live_groups"] = float(len(window))
        metrics["production/finished_groups"] = float(window.num_finished)
        metrics["production/passes"] = float(window.num_passed)
    return metrics


def _is_inline(cell: Cell | None) -> bool:
    return cell is not None and cell.inline is not None
