"""Rows of a batch as padded tensors: what the model reads and what the loss reads; micro-batches.

Suffix legend: ``_bl`` is ``[num_rows, max_length]`` (whole rows), ``_bt`` is ``[num_rows, max_response]`` (responses),
``_n`` is ``[num_response_tokens]`` (responses one after another, without padding).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from buffer_rl.args import Args
from buffer_rl.errors import DataError, TrainError
from buffer_rl.kinds.marks import Unit
from buffer_rl.records.groups import SAMPLE_SIZES, GroupUid, TrainBatch
from buffer_rl.trainer.packing import Packing, pack, prompt_keys

PLACES_PER_TOKEN = 3
"""Most places of the padded rows of a micro-batch for each token that ``--max-tokens-per-gpu`` lets it have packed."""
# A number a row would be broadcast over the wrong axis where a micro-batch has as many rows as tokens.
_OF_TOKENS = ("advantages", "returns", "loss_mask", "old_log_probs", "ref_log_probs", "rollout_log_probs", "values")


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """Rows that go through the model together, padded on the right.

    tokens_bl: int64. response_bt: bool, False on padding.
    predictor_n: int64, for each response token the position in the flattened ``tokens_bl`` of the token before it,
        whose logits predict it. target_n: int64, the response tokens.
    response_lengths: tokens of each row's response.
    kept: of ``--replay-kept-tokens``: for each response token how many tokens it was drawn from, 0 for the whole
        vocabulary, and the ids of these, one response token after another; int64. Empty where nothing is replayed.
    packing: the same rows packed, for a model that takes them so.
    experts: of ``--replay-routed-experts``: the experts of each packed token, or else of each place of ``tokens_bl``,
        ``[num_tokens, layers, top_k]`` int16, -1 for a token without any. None where nothing is replayed.
    """

    tokens_bl: torch.Tensor
    response_bt: torch.Tensor
    predictor_n: torch.Tensor
    target_n: torch.Tensor
    response_lengths: list[int]
    kept: tuple[torch.Tensor, ...] = ()
    packing: Packing | None = None
    experts: torch.Tensor | None = None


def no_rows(device: torch.device) -> MicroBatch:
    """A row of one token without a response: a pass with it has every collective of a pass, and contributes nothing."""
    none = torch.zeros(0, dtype=torch.int64, device=device)
    return MicroBatch(
        tokens_bl=torch.zeros((1, 1), dtype=torch.int64, device=device),
        response_bt=torch.zeros((1, 0), dtype=torch.bool, device=device),
        predictor_n=none,
        target_n=none,
        response_lengths=[0],
    )


def collate(batch: TrainBatch, device: torch.device, *, packed: bool = False) -> MicroBatch:
    """The rows of ``batch`` as one micro-batch on ``device``. packed: also as packed rows.

    Raises DataError for a row whose response has no token before it, or is longer than the row, for kept tokens that
    do not belong to its response, and for experts of other tokens.
    """
    lengths_b = np.asarray(batch.lengths, dtype=np.int64)
    response_b = np.asarray(batch.columns["response_length"], dtype=np.int64)
    prompt_b = lengths_b - response_b
    wrong = np.flatnonzero((prompt_b < 1) | (response_b < 0))
    if wrong.size:
        row = int(wrong[0])
        what, where = f"{lengths_b[row]} tokens with a response of {response_b[row]}", str(batch.row_ids[row])
        raise DataError(what, where=where, expected="at least one prompt token, and a response of 0 tokens or more")
    max_length = int(lengths_b.max(initial=1))
    tokens_bl = np.zeros((len(lengths_b), max_length), dtype=np.int64)
    valid_bl = np.arange(max_length) < lengths_b[:, None]
    tokens_bl[valid_bl] = np.concatenate(batch.columns["tokens"])
    steps_t = np.arange(int(response_b.max(initial=0)))
    response_bt = steps_t < response_b[:, None]
    starts_b = np.arange(len(lengths_b)) * max_length + prompt_b - 1
    predictor_n = (starts_b[:, None] + steps_t)[response_bt]
    target_n = tokens_bl.reshape(-1)[predictor_n + 1]
    experts = routed_experts(batch)
    packing = pack(list(batch.columns["tokens"]), prompt_b, device, experts) if packed and len(batch) else None
    places_bl = valid_bl if packing is None else packing.own_bl
    return MicroBatch(
        tokens_bl=torch.from_numpy(tokens_bl).to(device),
        response_bt=torch.from_numpy(response_bt).to(device),
        predictor_n=torch.from_numpy(predictor_n).to(device),
        target_n=torch.from_numpy(target_n).to(device),
        response_lengths=response_b.tolist(),
        kept=tuple(torch.from_numpy(array).to(device) for array in _kept(batch, target_n)),
        packing=packing,
        experts=None if experts is None else _placed(experts, valid_bl, places_bl, packing is None).to(device),
    )


def require_vocabulary(batch: TrainBatch, size: int, model: str) -> None:
    """Raises TrainError for a token that is not among the first ``size``, which ``model`` knows. The vocabulary of a
    reference or a teacher may be smaller than that of the model that sampled."""
    given = [batch.columns[name] for name in ("tokens", "kept_tokens") if name in batch.columns]
    for row_id, *arrays in zip(batch.row_ids, *given, strict=True):
        if (largest := max((int(np.max(ids, initial=0)) for ids in arrays), default=0)) >= size:
            raise TrainError(
                f"the token {largest} is not in the vocabulary of {model}",
                where=str(row_id),
                expected=f"token ids below {size}",
                hint="--ref-load, --opd-teacher-load and --critic-load take models of --hf-checkpoint's vocabulary",
            )


def routed_experts(batch: TrainBatch) -> list[np.ndarray] | None:
    """The column ``routed_experts``, of all tokens of each row, ``[num_tokens, layers, top_k]`` int16: -1 for tokens
    without experts, which are the last one and those behind what the column has. None without the column, or rows.

    Raises DataError for a row with experts of tokens that it does not have, or of other layers than the first row."""
    column = batch.columns.get("routed_experts")
    if column is None or not len(batch):
        return None
    found = []
    form = np.shape(column[0])[1:]
    for row_id, length, given in zip(batch.row_ids, batch.lengths, column, strict=True):
        if given.ndim != 3 or given.shape[1:] != form or len(given) >= max(length, 1) or given.dtype.kind not in "iu":
            what = f"its experts have the shape {list(given.shape)} and the type {given.dtype}, for {length} tokens"
            expected = f"integers, in routed_experts [up to {length - 1}, layers, experts a token], as in other rows"
            raise DataError(what, where=str(row_id), expected=expected)
        whole = np.full((length, *form), -1, dtype=np.int16)
        whole[: len(given)] = given
        found.append(whole)
    return found


def _placed(experts: list[np.ndarray], valid_bl: np.ndarray, places_bl: np.ndarray, is_padded: bool) -> torch.Tensor:
    """The experts of the tokens at ``places_bl``; padded, of all places."""
    whole_bl = np.full((*valid_bl.shape, *experts[0].shape[1:]), -1, dtype=np.int16)
    whole_bl[valid_bl] = np.concatenate(experts)
    return torch.from_numpy(whole_bl.reshape(-1, *whole_bl.shape[2:]) if is_padded else whole_bl[places_bl])


def _kept(batch: TrainBatch, target_n: np.ndarray) -> list[np.ndarray]:
    """The columns ``kept_counts`` and ``kept_tokens`` of all rows, int64, where the batch has them."""
    columns = batch.columns
    if "kept_counts" not in columns or not len(batch):
        return []
    start = 0
    for row_id, length, counts, ids in zip(
        batch.row_ids, *(columns[name] for name in ("response_length", "kept_counts", "kept_tokens")), strict=True
    ):
        target_t = target_n[start : start + length]
        start += length
        fits = len(counts) == length and counts.sum() == len(ids)
        drawn = np.repeat(np.arange(length), counts)[ids == np.repeat(target_t, counts)] if fits else None
        if drawn is None or not np.array_equal(drawn, np.flatnonzero(counts)):
            raise DataError(
                "its kept tokens are not those that its response was drawn from",
                where=str(row_id),
                expected="in kept_counts a number for each response token, 0 for the whole vocabulary, and in "
                "kept_tokens that number of different ids, the response token among them",
            )
    return [np.concatenate(columns[name]).astype(np.int64) for name in ("kept_counts", "kept_tokens")]


def response_mask(batch: TrainBatch, like_bt: torch.Tensor) -> torch.Tensor:
    """The column ``loss_mask`` in the shape and on the device of ``like_bt``, ``[num_rows, width]`` float32, 0 on
    padding; without the column 1 for every response token. Raises DataError as ``padded_column`` does."""
    lengths_b = torch.from_numpy(np.array(batch.columns["response_length"], dtype=np.int64)).to(like_bt.device)
    mask_bt = (torch.arange(like_bt.shape[1], device=like_bt.device) < lengths_b[:, None]).float()
    given_bt = padded_column(batch, "loss_mask", mask_bt)
    return mask_bt if given_bt is None else given_bt


def padded_column(batch: TrainBatch, name: str, like_bt: torch.Tensor) -> torch.Tensor | None:
    """A column as float32 on the device of ``like_bt``: ``[num_rows, width]``, padded with 0 to its width, or
    ``[num_rows]`` where it has a number a row and may have. None where the batch has no such column.

    Raises DataError if a row is not as long as the response, or the column holds no numbers."""
    rows = batch.columns.get(name)
    if rows is None:
        return None
    one_a_row = len(rows) and np.ndim(rows[0]) == 0 and name not in _OF_TOKENS
    if one_a_row or (isinstance(rows, np.ndarray) and rows.shape == (0,)):
        try:
            return torch.from_numpy(np.array(rows, dtype=np.float32)).to(like_bt.device)
        except (TypeError, ValueError) as error:
            what = f"{name} holds no numbers: {error}"
            raise DataError(what, where=batch.task, expected="one for each row") from error
    lengths_b = np.asarray(batch.columns["response_length"], dtype=np.int64)
    for row_id, row, length in zip(batch.row_ids, rows, lengths_b.tolist(), strict=True):
        if np.shape(row)[:1] != (length,):
            what = f"{name} has the shape {np.shape(row)} for a response of {length} tokens"
            raise DataError(what, where=str(row_id), expected="one value for each response token")
    values_bt = np.zeros(tuple(like_bt.shape), dtype=np.float32)
    if len(rows):
        values_bt[np.arange(like_bt.shape[1]) < lengths_b[:, None]] = np.concatenate(list(rows))
    return torch.from_numpy(values_bt).to(like_bt.device)


def sample_sizes(batch: TrainBatch, mask_bt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row's sample, over all its parts, wherever these are: unmasked response tokens ``[num_rows]``, and rows
    ``[num_rows]``; float32. They are columns that the Buffer writes; without them each row is taken for a whole sample.

    Raises DataError if a sample has several parts and the batch lacks the columns."""
    tokens_b, parts_b = (padded_column(batch, name, mask_bt) for name in SAMPLE_SIZES)
    if tokens_b is not None and parts_b is not None:
        return tokens_b, parts_b
    if parts := [row for row in batch.row_ids if row.part]:
        raise DataError(
            "a part of a sample cannot be weighed: its other parts may be elsewhere",
            where=str(parts[0]),
            expected="columns sample_total_tokens and sample_parts: unmasked response tokens of the row's sample over "
            "all its parts, and their number",
        )
    return mask_bt.sum(-1), torch.ones(len(batch), device=mask_bt.device)


def split_rows(values_bt: torch.Tensor, response_lengths: Sequence[int]) -> list[np.ndarray]:
    """The inverse of padding: per row ``[response_length]`` float32 on the CPU."""
    array_bt = values_bt.detach().float().cpu().numpy()
    return [row[:length].copy() for row, length in zip(array_bt, response_lengths, strict=True)]


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
    return _whole_groups([[row] for row in range(len(lengths))], lengths, max_tokens)


def row_blocks(
    args: Args, batch: TrainBatch, unit: Unit = Unit.ROW, *, packed: bool = False, shares_prompts: bool = True
) -> list[list[int]]:
    """Row indices of each micro-batch of ``batch``.

    unit: of the loss; with ``group`` the rows of a prompt stay together, whatever ``max_tokens_per_gpu`` says. packed:
    for a model that takes packed rows, where the tokens of a micro-batch count, those of a prompt once if the model
    ``shares_prompts``; rows of a prompt are together then, as far as the limit allows.
    Under ``--deterministic`` no micro-batch holds rows of two prompts: a row's values then do not depend on which
    groups were ready together, and a schedule that computes them early gets the same bits as one that waits.
    """
    lengths, limit = batch.lengths, args.max_tokens_per_gpu
    if not args.deterministic and unit is not Unit.GROUP and not packed:
        return micro_batches(lengths, limit)
    groups: dict[GroupUid, list[int]] = {}
    for index, row in enumerate(batch.row_ids):
        groups.setdefault(row.uid, []).append(index)
    if packed and len(batch):
        by_length = sorted(groups.values(), key=lambda rows: -max(lengths[row] for row in rows))
        together = [[rows] for rows in groups.values()] if args.deterministic else [by_length]
        whole = unit is Unit.GROUP
        return [block for each in together for block in _packed_blocks(batch, each, limit, whole, shares_prompts)]
    if unit is Unit.GROUP:
        return _whole_groups(list(groups.values()), lengths, 0 if args.deterministic else limit)
    return [block for rows in groups.values() for block in _whole_groups([[row] for row in rows], lengths, limit)]


def _packed_blocks(
    batch: TrainBatch, groups: list[list[int]], max_tokens: int, whole: bool, shares_prompts: bool
) -> list[list[int]]:
    """Row indices in micro-batches of at most ``max_tokens`` packed tokens, group by group; a row, or with ``whole`` a
    group, that has more is a micro-batch of its own.

    Attention has the prompt of each row beside it, and the loss has padded responses: rows x longest row is bounded,
    too."""
    response_b = np.asarray(batch.columns["response_length"], dtype=np.int64)
    lengths, tokens = batch.lengths, list(batch.columns["tokens"])
    prompt_b = np.asarray(lengths, dtype=np.int64) - response_b
    experts = batch.columns.get("routed_experts")
    own = None if experts is None else list(experts)
    keys = prompt_keys(tokens, prompt_b, own) if shares_prompts else [str(row).encode() for row in range(len(tokens))]
    blocks: list[list[int]] = []
    held: set[bytes] = set()  # prompts of the last block
    num_tokens = longest = 0
    for rows in groups if whole else ([row] for group in groups for row in group):
        responses = int(response_b[rows].sum())
        prompts = {keys[row]: int(prompt_b[row]) for row in rows}
        added = responses + sum(length for key, length in prompts.items() if key not in held)
        widest = max(lengths[row] for row in rows)
        width = max(longest, widest)
        places = (len(blocks[-1]) + len(rows)) * width if blocks else 0
        if blocks and num_tokens + added <= max_tokens and places <= PLACES_PER_TOKEN * max_tokens:
            blocks[-1] += rows
            num_tokens, longest = num_tokens + added, width
            held |= prompts.keys()
        else:
            blocks.append(list(rows))
            num_tokens, longest, held = responses + sum(prompts.values()), widest, set(prompts)
    return blocks


def _whole_groups(groups: list[list[int]], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """As ``micro_batches``, of whole groups; a group that is larger than the budget gets a micro-batch of its own."""
    blocks: list[list[int]] = []
    longest = 0
    for rows in sorted(groups, key=lambda rows: -max(lengths[row] for row in rows)):
        if blocks and (len(blocks[-1]) + len(rows)) * longest <= max_tokens:
            blocks[-1] += rows
        else:
            blocks.append(list(rows))
            longest = max(lengths[row] for row in rows)
    return blocks
