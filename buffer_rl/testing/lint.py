"""What the linters of losses and of advantage estimators share: their findings, and rows made from a seed.

Without torch. A batch made here has the columns of a finished group, and those that roles add, as random numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import numpy as np

from buffer_rl.buffer.columns import RowSizes, concat_columns, sample_sizes
from buffer_rl.errors import BufferRLError
from buffer_rl.records.groups import SAMPLE_SIZES, Column, GroupUid, RowId, TrainBatch

REMEDIES: Mapping[str, str] = MappingProxyType(
    {
        "finite": "guard divisions and logarithms: rewards may be equal, rows without tokens or masked entirely",
        "order": "take group and sample of a row from row_ids, not from its place",
        "micro-batches": "return numbers that are not divided, for the step's total divides them; a loss that compares "
        "the rows of a prompt declares @loss_unit('group')",
        "ranks": "as for micro-batches: use no mean over the rows that are there",
        "padding": "let torch.where(loss_mask != 0, ...) choose; a product with the mask keeps NaN",
        "masked": "let torch.where(loss_mask != 0, ...) choose; a product with the mask keeps NaN",
        "fan-out": "use no mean over a row, or declare @loss_unit('row')",
        "unit": "declare what the loss sees together: @loss_unit('row') or @loss_unit('group')",
        "gradient": "detach what is a weight or a metric, and nothing that is to be trained",
        "deterministic": "draw no random numbers, and keep nothing between calls",
        "columns": "work on copies, and set advantages and returns alone",
        "scope": "declare what the estimator reads together: @scoped('group') or @scoped('rollout')",
    }
)
"""What to do about a property that fails; ``form`` and ``needs`` say it themselves."""
_INDENT = " " * 10


class Result(StrEnum):
    """Whether a property holds; ``notice``: it does not, or needs not, and a run may still be right."""

    PASS = "pass"
    FAIL = "fail"
    NOTICE = "notice"


@dataclass(frozen=True, slots=True)
class Finding:
    """One property of a plugin. text: what is wrong, with row, token, expected and found numbers."""

    property: str
    result: Result
    text: str = ""

    def __str__(self) -> str:
        line = f"{self.result:<7} {self.property}{': ' if self.text else ''}{self.text}"
        remedy = REMEDIES.get(self.property) if self.result is Result.FAIL else None
        return line + (f"\n{_INDENT}to do: {remedy}" if remedy else "")


def failures(findings: Iterable[Finding]) -> list[Finding]:
    """Those that fail: ``assert not failures(lint_loss(my_loss))``."""
    return [finding for finding in findings if finding.result is Result.FAIL]


def checked(name: str, check: Callable[[], str | Finding]) -> Finding:
    """The finding of a check, which returns what is wrong, or a finding. What the plugin raises on the way is a
    failure of the property."""
    try:
        found = check()
    except Exception as error:  # fault boundary: a plugin's code
        return Finding(name, Result.FAIL, _text_of(error))
    if isinstance(found, Finding):
        return found
    return Finding(name, Result.FAIL if found else Result.PASS, found)


def checked_by_name(*checks: Callable[[], str | Finding]) -> list[Finding]:
    """The findings of methods, each of the property that it is named after."""
    return [checked(check.__name__.replace("_", "-"), check) for check in checks]


def finding_of_needs(declared: Iterable[str], undeclared: Iterable[str], optional: set[str], read: set[str]) -> Finding:
    """The finding of the columns that a plugin declares as needed, and of those that it reads.

    undeclared: columns without which it fails; optional: those that it asks for and does without."""
    name = "needs"
    if missing := sorted(undeclared):
        return Finding(name, Result.FAIL, f"it reads the column {missing[0]!r}: declare it, needs=({missing[0]!r},)")
    if unused := sorted(set(declared) - read):
        return Finding(name, Result.NOTICE, f"it never reads the column {unused[0]!r} that it declares as needed")
    if optional:
        return Finding(name, Result.NOTICE, f"it asks for the column {min(optional)!r}, which it does not declare")
    return Finding(name, Result.PASS)


def column_forms(names: Iterable[str]) -> Iterator[dict[str, str]]:
    """The ways in which columns of unknown form may hold numbers: one a token, or one a row. At most 16."""
    ordered = sorted(names)
    for forms in itertools.islice(itertools.product(("token", "row"), repeat=len(ordered)), 16):
        yield dict(zip(ordered, forms, strict=True))


def _text_of(error: Exception) -> str:
    """What is wrong, and of an error of this package what was expected, or the plugin's line that raised."""
    lines = (str(error) or type(error).__name__).splitlines()
    if not isinstance(error, BufferRLError):
        return lines[0]
    return f"\n{_INDENT}".join(line.removeprefix("  ") for line in lines)


def try_forms(
    declared: frozenset[str],
    undeclared: set[str],
    forms: Mapping[str, str] | None,
    call: Callable[[dict[str, str]], str],
    missing: Callable[[Exception], set[str]],
) -> str:
    """What ``call`` says of the first form of the columns ``declared`` with which it does not fail; those that are
    ``missing`` by its error are added to ``undeclared``, and it is tried again. Else the last error."""
    text = ""
    for _ in range(4):
        lacks: set[str] = set()
        named = declared | undeclared
        for form in [{**dict.fromkeys(named, "token"), **forms}] if forms else column_forms(named):
            try:
                return call(form)
            except (BufferRLError, RuntimeError) as error:
                text, lacks = _text_of(error), missing(error)
                if lacks:
                    break
        if not lacks:
            break
        undeclared |= lacks
    return text


LAYOUT: tuple[Mapping[int, tuple[int, ...]], ...] = (
    {0: (4,), 1: (3,), 2: (2, 1, 3)},  # the third sample fanned out
    {0: (5,)},  # a group of one
    {0: (2, 3), 1: (1,), 2: (4,), 3: (0,)},
    {0: (3,), 1: (3,)},  # equal rewards
)
"""Response lengths of the parts of each sample, by group."""
MASKED_ENTIRELY = (2, 2)
"""Group and sample whose loss mask is 0."""
EQUAL_REWARDS = 3


def lint_rows(seed: int, forms: Mapping[str, str], *, more: Sequence[str] = ()) -> TrainBatch:
    """Rows of ``LAYOUT`` with the columns of finished groups and of roles, and ``forms``: positive numbers, one a token
    or one a row. more: further columns, of the outputs of a model."""
    rng = np.random.default_rng(seed)
    rows: list[RowId] = []
    lengths: list[int] = []
    for group, samples in enumerate(LAYOUT):
        for index, parts in samples.items():
            rows += [RowId(GroupUid("lint", group, 0), index, part) for part in range(len(parts))]
            lengths += parts
    rewards = {(row.uid, row.sample_index): rng.normal() for row in rows}
    reward = np.asarray([rewards[row.uid, row.sample_index] for row in rows], dtype=np.float32)
    reward[[row.uid.row == EQUAL_REWARDS for row in rows]] = rng.normal()

    def tokens(make: Callable[[int], Any]) -> list[np.ndarray]:
        return [np.asarray(make(n), dtype=np.float32) for n in lengths]

    def near(column: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.minimum(row + 0.1 * rng.normal(size=len(row)), 0).astype(np.float32) for row in column]

    policy = tokens(lambda n: -rng.exponential(size=n) - 0.01)
    masks = tokens(lambda n: np.where(np.arange(n) == 0, 1, rng.random(n) < 0.7))
    columns: dict[str, Column] = {
        "loss_mask": [m * ((r.uid.row, r.sample_index) != MASKED_ENTIRELY) for r, m in zip(rows, masks, strict=True)],
        "reward": reward,
        "raw_reward": reward.copy(),
        "rollout_log_probs": near(policy),
        "old_log_probs": near(policy),
        "ref_log_probs": near(policy),
    }
    for name in ("advantages", "returns", "values"):
        columns[name] = tokens(lambda n: rng.normal(size=n))
    for name, form in forms.items():
        if name not in columns:
            own = np.asarray(rng.uniform(0.1, 1, len(rows)), dtype=np.float32)
            columns[name] = own if form == "row" else tokens(lambda n: rng.uniform(0.1, 1, n))
    outputs = {
        "log_probs": policy,
        "entropy": tokens(lambda n: rng.uniform(0.1, 2, n)),
        "critic_values": tokens(lambda n: rng.normal(size=n)),
    }
    return with_sizes(batch_of(rows, {**columns, **{name: outputs[name] for name in more}}))


def batch_of(row_ids: Sequence[RowId], columns: Mapping[str, Column]) -> TrainBatch:
    """Rows with these columns. Columns of tokens and lengths are made from the loss mask where they are absent."""
    lengths = np.asarray([len(row) for row in columns["loss_mask"]], dtype=np.int32)
    given = {"tokens": [np.zeros(n + 2, dtype=np.int32) for n in lengths], "response_length": lengths, **columns}
    return TrainBatch(rollout_id=0, task="train_0", row_ids=list(row_ids), columns=given)


def with_sizes(batch: TrainBatch) -> TrainBatch:
    """The columns of samples' sizes as the Buffer writes them, group by group. Rows of a group must be adjacent."""
    blocks = []
    for uid in dict.fromkeys(row.uid for row in batch.row_ids):
        rows = [row for row in batch.row_ids if row.uid == uid]
        masks = [mask for row, mask in zip(batch.row_ids, batch.columns["loss_mask"], strict=True) if row.uid == uid]
        blocks.append(sample_sizes(rows, RowSizes.of({"loss_mask": masks}, len(rows))))
    batch.columns |= concat_columns(blocks)
    return batch


def mixed(one: TrainBatch, other: TrainBatch, kept: Sequence[np.ndarray], *, rows: Sequence[bool]) -> TrainBatch:
    """The numbers of ``one`` where ``kept``, per row ``[response_length]`` bool, and those of ``other`` elsewhere;
    of columns of one number a row those of ``one`` where ``rows``. Sizes of samples stay."""
    columns = dict(one.columns)
    for name in columns.keys() - {"tokens", "response_length", *SAMPLE_SIZES}:
        ours, theirs = one.columns[name], other.columns[name]
        if isinstance(ours, np.ndarray):
            columns[name] = np.where(np.asarray(rows), ours, theirs)
        else:
            columns[name] = [np.where(keep, a, b) for keep, a, b in zip(kept, ours, theirs, strict=True)]
    return TrainBatch(rollout_id=one.rollout_id, task=one.task, row_ids=one.row_ids, columns=columns)


def halves(batch: TrainBatch, of: str) -> list[list[bool]]:
    """Two ways to keep half of the rows, each the other's complement. of: ``row``, or ``group`` for whole groups."""
    uids = list(dict.fromkeys(row.uid for row in batch.row_ids))
    numbers = [index if of == "row" else uids.index(row.uid) for index, row in enumerate(batch.row_ids)]
    return [[number % 2 == half for number in numbers] for half in (0, 1)]


def groups_of(batch: TrainBatch) -> list[list[int]]:
    """The indices of each group's rows."""
    uids = dict.fromkeys(row.uid for row in batch.row_ids)
    return [[index for index, row in enumerate(batch.row_ids) if row.uid == uid] for uid in uids]


def first_difference(
    batch: TrainBatch, found: Sequence[np.ndarray], wanted: Sequence[np.ndarray], *, rtol: float = 1e-4
) -> str:
    """The first number of per-row arrays that differs, with its row and token; empty if none does."""
    for row, ours, theirs in zip(batch.row_ids, found, wanted, strict=True):
        if ours.shape != theirs.shape:
            return f"row {row}: expected {len(theirs)} numbers, found {len(ours)}"
        wrong = np.flatnonzero(~np.isclose(ours, theirs, rtol=rtol, atol=1e-5, equal_nan=True))
        if wrong.size:
            at = int(wrong[0])
            return f"row {row}, token {at}: expected {float(theirs[at]):.6g}, found {float(ours[at]):.6g}"
    return ""


def first_infinite(batch: TrainBatch, values: Sequence[np.ndarray]) -> str:
    """The first number of per-row arrays that is not finite, with its row and token; empty if all are."""
    for row, own in zip(batch.row_ids, values, strict=True):
        if not np.isfinite(own).all():
            at = int(np.flatnonzero(~np.isfinite(own))[0])
            return f"row {row}, token {at}: expected a finite number, found {float(own[at])}"
    return ""
