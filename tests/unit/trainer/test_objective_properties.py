"""A step's loss, metrics and gradients depend on its samples alone: not on micro-batches, ranks, padding or order, nor,
for losses that give a number for each token, on the parts that a sample fanned out into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer_rl.buffer.columns import ColumnStore, assemble
from buffer_rl.buffer.pool import DataPool
from buffer_rl.buffer.readers import Share
from buffer_rl.kinds.marks import Unit, loss_unit
from buffer_rl.kinds.token_loss import LossInputs, Metric, Reduction, TokenLoss
from buffer_rl.records.groups import GroupUid, RowId, TrainBatch, take_rows
from buffer_rl.trainer.collate import row_blocks
from buffer_rl.trainer.objective import Objective
from buffer_rl.trainer.rank import splitting
from harness.losses import (
    MODES,
    Outcome,
    batch_of,
    built_in_losses,
    loss_args,
    objective_of,
    outcome,
    with_sizes,
)

TERMS = {"use_kl_loss": True, "kl_loss_coef": 0.3, "entropy_coef": 0.1}
BY_TOKEN = ("old_log_probs", "ref_log_probs", "rollout_log_probs", "advantages", "keep")


def weighed_tokens(args: Any, inputs: LossInputs) -> TokenLoss:
    """Weights of its own for each token, of a column, and a metric of each reduction."""
    values = -inputs.advantages * inputs.log_probs
    metrics = {f"own_{reduction}": Metric(inputs.log_probs, reduction) for reduction in Reduction}
    return TokenLoss(values, weights=inputs["keep"], metrics=metrics)


def sequences(args: Any, inputs: LossInputs) -> TokenLoss:
    """A number for each row, and a metric of each reduction."""
    mask = inputs.loss_mask
    rows = (inputs.log_probs * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    metrics = {f"own_{reduction}": Metric(rows, reduction) for reduction in Reduction}
    return TokenLoss(-rows.exp(), metrics=metrics)


def weighed_sequences(args: Any, inputs: LossInputs) -> TokenLoss:
    """Weights of its own for each row."""
    mask = inputs.loss_mask
    weights = (inputs["keep"] * mask).sum(-1)
    return TokenLoss((inputs.log_probs * inputs.advantages * mask).sum(-1), weights=weights)


def objective_with(loss: Any, mode: str, **options: Any) -> Objective:
    flag = "loss_type" if isinstance(loss, str) else "custom_loss_function_path"
    return objective_of(**{flag: loss}, loss_agg_mode=mode, **TERMS, **options)


BUILT_IN = built_in_losses()
LOSSES: list[Any] = [*BUILT_IN, weighed_tokens, sequences, weighed_sequences]
TOKEN_LOSSES = [
    *(name for name in BUILT_IN if objective_of(loss_type=name).unit is Unit.TOKEN),
    weighed_tokens,
]


def in_all_modes(losses: Sequence[Any]) -> list[Any]:
    """Each loss with each mode. One mode a loss, in turn, is among the fast tests."""
    return [
        pytest.param(loss, mode, marks=() if index == number % len(MODES) else pytest.mark.slow)
        for number, loss in enumerate(losses)
        for index, mode in enumerate(MODES)
    ]


Step = tuple[TrainBatch, list[np.ndarray], list[np.ndarray]]
"""Rows, and their log-probabilities and entropies."""


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Some groups of samples of one to three parts; responses of 0 to 5 tokens, some masked."""
    groups = draw(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=3))
    rows = [
        RowId(GroupUid("data", group, 0), index, part)
        for group, samples in enumerate(groups)
        for index, parts in enumerate(samples)
        for part in range(parts)
    ]
    masks = [draw(st.lists(st.sampled_from([0.0, 1.0]), max_size=5)) for _ in rows]
    return filled(rows, masks, draw(st.integers(0, 2**32 - 1)))


def filled(rows: Sequence[RowId], masks: Sequence[Sequence[float]], seed: int) -> Step:
    rng = np.random.default_rng(seed)
    columns: dict[str, Any] = {"loss_mask": [np.asarray(mask, dtype=np.float32) for mask in masks]}
    for name in BY_TOKEN:
        columns[name] = [rng.normal(size=len(mask)).astype(np.float32) for mask in masks]
    columns["keep"] = [np.abs(row) for row in columns["keep"]]
    rewards = {(row.uid, row.sample_index): float(rng.normal()) for row in rows}  # of a sample: all its parts have it
    columns["reward"] = np.asarray([rewards[row.uid, row.sample_index] for row in rows], dtype=np.float32)
    given = [[rng.normal(size=len(mask)).astype(np.float32) for mask in masks] for _ in range(2)]
    return with_sizes(batch_of(rows, columns)), given[0], given[1]


def require_equal(found: Outcome, wanted: Outcome) -> None:
    assert found.sums.divisor == pytest.approx(wanted.sums.divisor, rel=1e-6)
    assert found.means == pytest.approx(wanted.means, rel=1e-4, abs=1e-5)
    for name in ("log_prob_gradients", "entropy_gradients"):
        for ours, theirs in zip(getattr(found, name), getattr(wanted, name), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("loss", "mode"), in_all_modes(LOSSES))
@given(step=steps(), data=st.data())
@settings(max_examples=12)
def test_micro_batches_ranks_order_and_padding_change_nothing(
    loss: Any, mode: str, step: Step, data: st.DataObject
) -> None:
    require_same_in_any_blocks(objective_with(loss, mode), step, data)


@pytest.mark.parametrize("tis_mode", ["truncate", "token", "sequence", "geometric"])
@pytest.mark.parametrize("loss", ["policy_loss", "gspo"])
@given(step=steps(), data=st.data())
@settings(max_examples=12)
def test_they_change_nothing_with_a_correction_either(
    loss: str, tis_mode: str, step: Step, data: st.DataObject
) -> None:
    options = {"use_tis": True, "tis_mode": tis_mode, "tis_clip_low": 0.3}
    require_same_in_any_blocks(objective_with(loss, "seq-mean-token-mean", **options), step, data)


def require_same_in_any_blocks(objective: Objective, step: Step, data: st.DataObject) -> None:
    """A partition of the rows is what micro-batches of any ranks are: sums add up over both alike. The rows of a
    prompt stay together where the loss compares them."""
    batch, log_probs, entropy = step
    wanted = outcome(objective, batch, log_probs, entropy)
    pieces: dict[object, list[int]] = {}
    for index, row in enumerate(batch.row_ids):
        pieces.setdefault(row.uid if objective.unit is Unit.GROUP else row, []).append(index)
    order = [data.draw(st.permutations(piece)) for piece in data.draw(st.permutations(list(pieces.values())))]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(order)))) | {len(order)})
    blocks = [[*chain(*order[start:end])] for start, end in zip([0, *cuts], cuts, strict=False)]
    padding = data.draw(st.integers(0, 4))
    require_equal(outcome(objective, batch, log_probs, entropy, blocks=blocks, padding=padding), wanted)


@pytest.mark.parametrize(("loss", "mode"), in_all_modes(TOKEN_LOSSES))
@given(lengths=st.lists(st.integers(0, 4), min_size=5, max_size=5), others=st.integers(0, 2), seed=st.integers(0, 999))
@settings(max_examples=12)
def test_a_response_in_five_parts_is_one_in_one_row(
    loss: Any, mode: str, lengths: list[int], others: int, seed: int
) -> None:
    """The response stands among others, in the same group and in another one."""
    uid, ends = GroupUid("data", 0, 0), np.cumsum(lengths).tolist()
    rows = [RowId(uid, 0), *(RowId(uid, 1 + i) for i in range(others)), RowId(GroupUid("data", 1, 0), 0)]
    rng = np.random.default_rng(seed)
    masks = [(rng.random(size) < 0.7).astype(np.float32) for size in (sum(lengths), *[3] * (len(rows) - 1))]
    batch, log_probs, entropy = filled(rows, masks, seed)

    def cut(column: list[np.ndarray]) -> list[np.ndarray]:
        return [column[0][start:end] for start, end in zip([0, *ends], ends, strict=False)] + column[1:]

    columns: dict[str, Any] = {name: cut(batch.columns[name]) for name in (*BY_TOKEN, "loss_mask")}  # type: ignore[arg-type]
    parts = with_sizes(batch_of([*(RowId(uid, 0, part) for part in range(5)), *rows[1:]], columns))
    objective = objective_with(loss, mode)
    wanted = outcome(objective, batch, log_probs, entropy)
    found = outcome(objective, parts, cut(log_probs), cut(entropy), blocks=[[i] for i in range(len(parts))])
    joined = [[np.concatenate(rows[:5]), *rows[5:]] for rows in (found.log_prob_gradients, found.entropy_gradients)]
    whole = Outcome(sums=found.sums, means=found.means, log_prob_gradients=joined[0], entropy_gradients=joined[1])
    require_equal(whole, wanted)


@given(step=steps(), budget=st.integers(1, 60), deterministic=st.booleans())
@settings(max_examples=40)
def test_the_rows_of_a_prompt_share_a_micro_batch_where_the_loss_compares_them(
    step: Step, budget: int, deterministic: bool
) -> None:
    batch, _, _ = step
    args = loss_args(max_tokens_per_gpu=budget, deterministic=deterministic)
    blocks = row_blocks(args, batch, Unit.GROUP)
    assert sorted(index for block in blocks for index in block) == list(range(len(batch)))
    prompts = [{batch.row_ids[index].uid for index in block} for block in blocks]
    assert sum(map(len, prompts)) == len(set().union(*prompts)), "a prompt is in two micro-batches"
    for block, uids in zip(blocks, prompts, strict=True):
        assert len(uids) == 1 or len(block) * max(batch.lengths[index] for index in block) <= budget
        assert len(uids) == 1 or not deterministic


@loss_unit("group")
def pairwise(args: Any, inputs: LossInputs) -> TokenLoss:
    """Each row against the mean of its prompt, as losses of preferences do."""
    sums = (inputs.log_probs * inputs.loss_mask).sum(-1)
    uids = [row.uid for row in inputs.row_ids]
    same = torch.tensor([[float(one == other) for other in uids] for one in uids])
    return TokenLoss(-torch.nn.functional.logsigmoid(sums - same @ sums / same.sum(-1)))


@given(step=steps(), budget=st.integers(1, 40), ranks=st.integers(1, 2))
@settings(max_examples=40)
def test_a_loss_that_compares_the_rows_of_a_prompt_is_the_same_on_any_number_of_ranks(
    step: Step, budget: int, ranks: int
) -> None:
    batch, log_probs, entropy = step
    args = loss_args(max_tokens_per_gpu=budget)
    objective = objective_with(pairwise, "token-mean")
    assert objective.unit is Unit.GROUP
    place: Callable[[RowId], int] = {row: index for index, row in enumerate(batch.row_ids)}.__getitem__
    pool = pool_of(batch)
    blocks = []
    for rank in range(min(ranks, len(pool.selection.uids))):
        share = assemble(
            pool.share(Share(rank, min(ranks, len(pool.selection.uids)), splitting=splitting(args, objective.unit)))
        )
        blocks += [[place(share.row_ids[i]) for i in block] for block in row_blocks(args, share, objective.unit)]
    wanted = outcome(objective, batch, log_probs, entropy)
    require_equal(outcome(objective, batch, log_probs, entropy, blocks=blocks), wanted)


def pool_of(batch: TrainBatch) -> DataPool:
    store, uids = ColumnStore(), list(dict.fromkeys(row.uid for row in batch.row_ids))
    pool = DataPool(0, "train_0", store, len(uids))
    for uid in uids:
        at = [index for index, row in enumerate(batch.row_ids) if row.uid == uid]
        columns = {name: take_rows(column, at) for name, column in batch.columns.items()}
        store.put(uid, [batch.row_ids[index] for index in at], columns)
        pool.join(uid)
    pool.select(uids)
    return pool
