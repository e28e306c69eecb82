"""One finished group to columns: what the Buffer stores and the trainer reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import KW_ONLY, dataclass
from functools import cache, partial
from itertools import accumulate, chain, combinations, pairwise
from typing import Any, TypeVar

import numpy as np

from buffer_rl.algo.rewards import normalized, rewards_kind, shaped
from buffer_rl.args import Args
from buffer_rl.errors import BufferRLError, RolloutError, raised_as, short_repr
from buffer_rl.files.hf_config import expert_sizes
from buffer_rl.options.user_args import user_args
from buffer_rl.plan.algorithm import is_supervised
from buffer_rl.plan.schedule import Schedule
from buffer_rl.plugin.calls import contained, error_text
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.experts import ExpertSizes
from buffer_rl.records.groups import Column, GroupUid, RowId, Sample, SampleGroup
from buffer_rl.rollout.baseline import BASELINE, baseline_of, needs_baseline, rollout_log_probs_reader
from buffer_rl.rollout.stats import penalised_lengths
from buffer_rl.rollout.user_functions import UserFunction

REQUIRED_COLUMNS = frozenset({"tokens", "response_length", "loss_mask", "reward"})
NO_VERSION = -1  # rows that no engine sampled, such as those of supervised fine-tuning
INT32_MAX = int(np.iinfo(np.int32).max)
# What a sample has for each token of its response, beside the tokens.
_PER_TOKEN = (
    *("loss_mask", "rollout_log_probs", "teacher_log_probs"),
    *("rollout_kept_tokens", "rollout_routed_experts"),
)
FLOAT32_MAX = float(np.finfo(np.float32).max)
Values = TypeVar("Values", bound=Sized)


@dataclass(eq=False)
class GroupConverter:
    """Turns groups into rows and columns; a ``buffer_rl.buffer.rollout_client.GroupEncoder``.

    Columns of a training group, one row a sample: ``tokens`` list of ``[num_tokens]`` int32; ``response_length``
    ``[num_rows]`` int32; ``loss_mask`` list of ``[response_length]`` float32 (zeros where a filter set
    ``remove_sample``); ``raw_reward`` ``[num_rows]`` float32; ``reward`` ``[num_rows]`` float32, normalised within the
    group as the algorithm says; ``rollout_log_probs`` list of ``[response_length]`` float32, absent if no sample has
    them, NaN in rows of a foreign group that lack them; ``truncated`` ``[num_rows]`` bool; ``weight_version``
    ``[num_rows]`` int32, the oldest of its trained tokens, -1 if none; with ``baseline``, ``baseline_reward``
    ``[num_rows]`` float32, of the samples' ``train_metadata``; ``turn_rewards`` with ``--turn-rewards``. After a
    conversion of the user's too: under ``--replay-kept-tokens`` ``kept_tokens`` and ``kept_counts``, under
    ``--replay-routed-experts`` ``routed_experts`` and ``experts_recomputed`` (see ``TrainBatch``); with
    ``mixes_versions``, ``weight_version`` and, in the same form, ``newest_weight_version``. A removed sample may have
    neither response nor reward: its row then has one masked token, the ``reward`` 0, and as ``raw_reward`` the mean of
    the others, which are normalised without it. An evaluation group has the same columns, except that ``tokens`` and
    ``rollout_log_probs`` are left out and that ``reward`` is the raw one.

    mixes_versions: whether a step may train on tokens of several weight versions. log_probs_reader: the flag by which
    the run reads ``rollout_log_probs``, empty if it does not; asked for the first row without them, since it imports
    the user's loss. experts: of the model, if rows have those of their tokens.
    """

    args: Args
    _: KW_ONLY
    post_process: UserFunction | None = None
    to_train_data: UserFunction | None = None
    baseline: bool = False
    mixes_versions: bool = False
    log_probs_reader: Callable[[], str] = str
    experts: ExpertSizes | None = None

    @classmethod
    def from_args(cls, args: Args, registry: PluginRegistry) -> GroupConverter:
        """With the functions that ``--custom-reward-post-process-path`` and
        ``--custom-convert-samples-to-train-data-path`` name. Raises PluginError."""
        named = partial(UserFunction.named, registry)
        return cls(
            args,
            post_process=named("reward_post_process", args.custom_reward_post_process_path),
            to_train_data=named("samples_to_train_data", args.custom_convert_samples_to_train_data_path),
            baseline=needs_baseline(args, registry),
            mixes_versions=Schedule.of(args).max_staleness > 0,
            log_probs_reader=cache(partial(rollout_log_probs_reader, args, registry)),
            experts=expert_sizes(args),
        )

    def encode(self, group: SampleGroup, evaluation: bool) -> tuple[list[RowId], dict[str, Column]]:
        """The group's row ids and columns. Raises RolloutError, naming the row, for what cannot be used."""
        try:
            with contained():
                return self._encode(group, evaluation)
        except BufferRLError:
            raise
        except Exception as error:  # fault boundary: the user's code filled the samples, with whatever types
            what = f"the group cannot be converted: {error_text(error)}"
            raise RolloutError(what, where=f"group {group.uid}") from error

    def _encode(self, group: SampleGroup, evaluation: bool) -> tuple[list[RowId], dict[str, Column]]:
        samples = group.samples if evaluation else [_with_a_token(sample) for sample in group]
        row_ids = _row_ids(group.uid, samples)
        if self.to_train_data is not None and not evaluation:
            at = f"group {group.uid}"
            answer = self.to_train_data.call(user_args(self.args), samples, at=at)
            own = checked_columns(answer, samples, self.to_train_data.place(at))
            return row_ids, self._replay_columns(group, samples) | own
        scored = [s for s in samples if s.reward is not None or not s.remove_sample]
        if not scored and not evaluation:
            raise RolloutError("no sample of it has a reward", where=f"group {group.uid}", expected="at least one")
        raw = self._raw_rewards(scored)
        shown, reward = (raw, raw) if evaluation else self._rewards(scored, raw, at=f"group {group.uid}")
        if len(scored) < len(samples):
            places = [i for i, sample in enumerate(samples) if sample.reward is not None]
            mean = shown.mean() if scored else 0.0
            shown, reward = _spread(shown, places, len(samples), mean), _spread(reward, places, len(samples), 0)
        truncated = np.asarray([s.status is s.Status.TRUNCATED for s in samples], dtype=np.bool_)
        if not evaluation and group.rows is not group.samples:
            numbers = [len(s.rows) for s in samples]
            shown, reward, truncated = (np.repeat(each, numbers) for each in (shown, reward, truncated))
            samples = [row for sample in samples for row in _with_its_rows(sample)]
            row_ids = _row_ids(group.uid, samples)
        columns: dict[str, Column] = {
            "response_length": np.asarray([_response_length(s, evaluation) for s in samples], dtype=np.int32),
            "loss_mask": _loss_masks(samples),
            "raw_reward": shown.astype(np.float32),
            "truncated": truncated,
            "weight_version": np.asarray([_oldest_version(s) for s in samples], dtype=np.int32),
        }
        if evaluation:
            columns["reward"] = columns["raw_reward"]
            return row_ids, columns
        columns["tokens"] = _tokens(samples)
        columns["reward"] = reward.astype(np.float32)
        foreign = group.foreign and not is_supervised(self.args)
        if foreign:
            columns["rollout_log_probs"] = [self._foreign_log_probs(s) for s in samples]
        for name in ("teacher_log_probs",) if foreign else ("rollout_log_probs", "teacher_log_probs"):
            if any(getattr(s, name) is not None for s in samples):
                columns[name] = _log_probs(samples, name)
        if self.args.turn_rewards:
            columns["turn_rewards"] = [_turn_rewards(s, self.args.reward_scale) for s in samples]
        if self.baseline:
            columns[BASELINE] = np.asarray([baseline_of(s) for s in samples], dtype=np.float32)
        return row_ids, columns | self._replay_columns(group, samples)

    def _foreign_log_probs(self, sample: Sample) -> np.ndarray:
        """The engine's log-probabilities of a sample that perhaps no engine generated: NaN then."""
        if sample.rollout_log_probs is None and not sample.remove_sample:
            if reader := self.log_probs_reader():
                what = f"{reader} reads rollout_log_probs, and this foreign group has none"
                raise _unusable(sample, what, "those under the policy that sampled the tokens")
            return np.full(sample.response_length, np.nan, dtype=np.float32)
        return _log_probs([sample], "rollout_log_probs")[0]

    def _replay_columns(self, group: SampleGroup, samples: Sequence[Sample]) -> dict[str, Column]:
        """What the engine said about its tokens, whatever the user's conversion makes of them."""
        columns: dict[str, Column] = {}
        if self.args.replay_kept_tokens:
            rows = [_kept(self.args, sample) for sample in samples]
            columns["kept_tokens"] = [np.frombuffer(b"".join(row), dtype=np.int32) for row in rows]
            columns["kept_counts"] = [np.array([len(ids) // 4 for ids in row], dtype=np.int32) for row in rows]
        if self.mixes_versions:
            newest = [max((span.version for span in s.weight_versions), default=NO_VERSION) for s in samples]
            columns["weight_version"] = np.asarray([_oldest_version(s) for s in samples], dtype=np.int32)
            columns["newest_weight_version"] = np.asarray(newest, dtype=np.int32)
        if self.experts is not None:
            foreign = group.foreign
            columns["routed_experts"] = [_experts(self.args, self.experts, sample, foreign) for sample in samples]
            recomputed = [sample.__dict__.get("experts_recomputed", 0) for sample in samples]
            columns["experts_recomputed"] = np.asarray(recomputed, dtype=np.int32)
        return columns

    def _raw_rewards(self, samples: Sequence[Sample]) -> np.ndarray:
        rewards = []
        for sample in samples:
            try:
                rewards.append(reward := sample.get_reward_value(self.args))
            except (TypeError, ValueError) as error:
                raise _unusable(sample, f"its reward cannot be used: {error}", "one finite number") from error
            if not abs(reward) <= FLOAT32_MAX:
                raise _unusable(sample, f"its reward is {reward}", "a number that is finite in float32")
        return np.asarray(rewards, dtype=np.float64)

    def _rewards(self, samples: list[Sample], raw: np.ndarray, *, at: str) -> tuple[np.ndarray, np.ndarray]:
        """Raw and post-processed rewards ``[num_rows]``: normalised within the group, or by the user's function."""
        if self.post_process is None:
            return raw, self._normalised(samples, raw)
        answer = self.post_process.call(user_args(self.args), samples, at=at)
        expected = f"(raw_rewards, rewards), {len(raw)} finite numbers each, of float32"
        try:
            raw_rewards, rewards = (np.asarray(values, dtype=np.float64) for values in answer)
        except (TypeError, ValueError) as error:
            raise self.post_process.returned(answer, expected, at=at, hint=str(error)) from error
        for values in (raw_rewards, rewards):
            if values.shape != raw.shape or not (np.abs(values) <= FLOAT32_MAX).all():
                raise self.post_process.returned(values.tolist(), expected, at=at)
        return raw_rewards, rewards

    def _normalised(self, samples: Sequence[Sample], raw: np.ndarray) -> np.ndarray:
        """Shaped, and normalised as the algorithm says, over ``sample_index``: a sample that fanned out counts once,
        with the mean of its parts, and every part gets its sample's value, of raw rewards as well."""
        shaped_rewards = shaped(self.args, raw, penalised_lengths(self.args, samples))
        if all(sample.sample_index == place for place, sample in enumerate(samples)):  # no sample fanned out
            return normalized(rewards_kind(self.args), shaped_rewards, self.args.pass_at_k)
        _, place = np.unique([s.sample_index for s in samples], return_inverse=True)
        per_sample = np.bincount(place, weights=shaped_rewards) / np.bincount(place)
        normalised: np.ndarray = normalized(rewards_kind(self.args), per_sample, self.args.pass_at_k)[place]
        return normalised


def checked_columns(answer: object, samples: Sequence[Sample], where: str) -> dict[str, Column]:
    """The columns that a user's conversion returned, with the types that the trainer reads. Raises RolloutError if a
    required column is missing, or a column lacks a row for a sample. Other columns than the required ones pass as they
    are."""
    num_rows = len(samples)
    if not isinstance(answer, dict) or REQUIRED_COLUMNS - answer.keys():
        got = f"a dict of {', '.join(map(str, answer))}" if isinstance(answer, dict) else short_repr(answer)
        expected = f"a dict with at least {', '.join(sorted(REQUIRED_COLUMNS))}"
        plural = isinstance(answer, dict) and any(f"{name}s" in answer for name in REQUIRED_COLUMNS - {"tokens"})
        hint = "the names are response_length, loss_mask and reward, not their plurals" if plural else ""
        raise RolloutError(f"it returned {got}", where=where, expected=expected, hint=hint)
    for name, column in answer.items():
        rows = len(column) if isinstance(column, Sized) else None
        if rows != num_rows:
            what = short_repr(column) if rows is None else f"{rows} rows"
            raise RolloutError(f"column {name!r} has {what}", where=where, expected=f"{num_rows} rows")
    columns: dict[str, Column] = dict(answer)
    with raised_as(RolloutError, "a column holds no numbers", (TypeError, ValueError, OverflowError), where=where):
        columns["tokens"] = [np.asarray(row, dtype=np.int32) for row in answer["tokens"]]
        columns["response_length"] = np.asarray(answer["response_length"], dtype=np.int32)
        columns["loss_mask"] = [np.asarray(row, dtype=np.float32) for row in answer["loss_mask"]]
        columns["reward"] = np.asarray(answer["reward"], dtype=np.float32)
    if not np.isfinite(columns["reward"]).all():
        raise RolloutError("column 'reward' is not finite", where=where)
    for length, mask, tokens in zip(columns["response_length"], columns["loss_mask"], columns["tokens"], strict=True):
        if not 1 <= length <= len(tokens) or len(mask) != length:
            raise RolloutError(
                f"a row has {len(tokens)} tokens, response_length {length} and a loss_mask of {len(mask)}",
                where=where,
                expected="response_length from 1 to the number of tokens, and a loss_mask of that length",
            )
        if not np.isin(mask, (0.0, 1.0)).all():  # losses are divided by the number of unmasked tokens
            raise RolloutError("a loss_mask holds something else", where=where, expected="0 or 1 for each token")
    return columns


def _row_ids(uid: GroupUid, samples: Sequence[Sample]) -> list[RowId]:
    if not samples:
        raise RolloutError("a finished group has no samples", where=f"group {uid}")
    row_ids = []
    for sample in samples:
        if sample.uid is not uid and sample.uid != uid:
            what = f"a sample of this group has the uid {sample.uid}"
            raise RolloutError(what, where=f"group {uid}", expected="the group's")
        row_ids.append(sample.row_id)
    if len(set(row_ids)) != len(row_ids):
        twice = next(row for row in row_ids if row_ids.count(row) > 1)
        raise RolloutError("two samples have this row id", where=f"row {twice}", expected="parts numbered 0, 1, …")
    return row_ids


def _with_its_rows(sample: Sample) -> list[Sample]:
    """The rows of a sample that an agent played, all masked if the sample is."""
    if not sample.remove_sample:
        return sample.rows
    return [sample, *(_with_a_token(row.changed(remove_sample=True)) for row in sample.rows[1:])]


def _with_a_token(sample: Sample) -> Sample:
    """A removed sample without a response gets one token, so that it is a row; its loss mask is zeros."""
    if not sample.remove_sample or sample.response_length != 0:
        return sample
    tokens = [*(sample.tokens or [0]), 0]
    absent = dict.fromkeys(_PER_TOKEN)
    return sample.changed(tokens=tokens, response_length=1, weight_versions=[], turn_rewards=[], **absent)


def _turn_rewards(sample: Sample, scale: float) -> np.ndarray:
    """``[response_length]`` float32."""
    column = np.zeros(sample.response_length, dtype=np.float32)
    for token, reward in sample.__dict__.get("turn_rewards", ()):
        column[token] += scale * reward
    return column


def _spread(values: np.ndarray, places: list[int], length: int, fill: float) -> np.ndarray:
    spread = np.full(length, fill, dtype=np.float64)
    spread[places] = values
    return spread


def _response_length(sample: Sample, evaluation: bool) -> int:
    length = sample.response_length
    if length < (0 if evaluation else 1):
        raise _unusable(sample, f"its response has {length} tokens", "at least one token to train on")
    if length > len(sample.tokens):
        raise _unusable(
            sample, f"response_length is {length}, but there are {len(sample.tokens)} tokens", "at most that"
        )
    return length


def _at_once(rows: Sequence[Any], dtype: Any, holds: Callable[[np.ndarray], bool]) -> list[np.ndarray] | None:
    """Lists of numbers as rows of ``dtype``, views of one array that is made and checked at once: several times faster
    than row by row. None where they are something else, and have to be looked at one by one."""
    if set(map(type, rows)) != {list}:
        return None
    try:
        joined = np.asarray(list(chain.from_iterable(rows)))
    except (TypeError, ValueError, OverflowError):
        return None
    if joined.ndim != 1 or not holds(joined):
        return None
    return _cut(joined.astype(dtype), map(len, rows))


def _cut(joined: np.ndarray, lengths: Iterable[int]) -> list[np.ndarray]:
    return [joined[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]


def _are_ids(tokens: np.ndarray) -> bool:
    return tokens.dtype.kind in "iu" and bool(((tokens >= 0) & (tokens <= INT32_MAX)).all())


def _tokens(samples: Sequence[Sample]) -> list[np.ndarray]:
    if converted := _at_once([sample.tokens for sample in samples], np.int32, _are_ids):
        return converted
    rows = [_array(sample, sample.tokens, "tokens") for sample in samples]
    for sample, tokens in zip(samples, rows, strict=True):
        if tokens.dtype.kind not in "iu":
            raise _unusable(sample, f"its tokens are of type {tokens.dtype}", "integers")
    if all(map(_are_ids, rows)):
        return [tokens.astype(np.int32) for tokens in rows]
    at = next(i for i, tokens in enumerate(rows) if tokens.min() < 0 or tokens.max() > INT32_MAX)
    what = f"its tokens go from {rows[at].min()} to {rows[at].max()}"
    raise _unusable(samples[at], what, "ids that fit into int32")


def _loss_masks(samples: Sequence[Sample]) -> list[np.ndarray]:
    if all(sample.loss_mask is None and not sample.remove_sample for sample in samples):
        lengths = [sample.response_length for sample in samples]
        return _cut(np.ones(sum(lengths), dtype=np.float32), lengths)
    rows = []
    for sample in samples:
        if sample.remove_sample or sample.loss_mask is None:
            rows.append(np.full(sample.response_length, not sample.remove_sample, dtype=np.float32))
        else:
            rows.append(_per_token(sample, sample.loss_mask, "loss_mask"))
    at = next((i for i, mask in enumerate(rows) if not ((mask == 0.0) | (mask == 1.0)).all()), None)
    if at is not None:
        raise _unusable(samples[at], "its loss_mask holds something else", "0 or 1 for each response token")
    return rows


def _log_probs(samples: Sequence[Sample], name: str) -> list[np.ndarray]:
    lists = [getattr(sample, name) for sample in samples]
    if all(type(row) is list and len(row) == s.response_length for row, s in zip(lists, samples, strict=True)) and (
        converted := _at_once(lists, np.float32, _are_log_probs)
    ):
        return converted
    rows = []
    for sample in samples:
        given: list[float] | None = getattr(sample, name)
        if given is None and not sample.remove_sample:
            raise _unusable(sample, f"it has no {name}, but others of its group have", "all or none")
        rows.append(_per_token(sample, [0.0] * sample.response_length if given is None else given, name))
    at = next((i for i, row in enumerate(rows) if not np.isfinite(row).all()), None)
    if at is not None:
        place = int(np.flatnonzero(~np.isfinite(rows[at]))[0])
        raise _unusable(samples[at], f"{name}[{place}] is {rows[at][place]}", "finite numbers")
    return rows


def _are_log_probs(values: np.ndarray) -> bool:
    return values.dtype.kind in "fiu" and bool((np.abs(values) <= FLOAT32_MAX).all())


def _kept(args: Args, sample: Sample) -> list[bytes]:
    kept = sample.rollout_kept_tokens
    if kept is None and sample.remove_sample:
        return [b""] * sample.response_length
    if kept is None:
        raise _not_replayed(
            args,
            sample,
            "kept_tokens",
            "top_p_token_ids and top_p_token_offsets in the answers of /generate, as of the embedded engine (of one of "
            "your own, with its --return-kept-tokens), or output_token_sampling_mask, as of SGLang with --router smg; "
            "kept by the generate function",
        )
    return _one_each(sample, kept, "rollout_kept_tokens")


def _not_replayed(args: Args, sample: Sample, name: str, expected: str) -> RolloutError:
    what = f"--replay-{name.replace('_', '-')}: it has no rollout_{name}, of the engine {args.rollout_engine!r}"
    return _unusable(sample, what + (f" at {args.router_url}" if args.router_url else ""), expected)


def _experts(args: Args, sizes: ExpertSizes, sample: Sample, foreign: bool) -> np.ndarray:
    """The experts of its tokens, as far as a trained token needs them: nothing behind the last one does."""
    experts = sample.rollout_routed_experts
    if experts is None and (foreign or sample.remove_sample):
        return sizes.none()
    if experts is None:
        raise _not_replayed(
            args,
            sample,
            "routed_experts",
            "routed_experts in the answers of /generate, as of the embedded engine (of one of your own, with its "
            "--return-routed-experts), or of SGLang with --router smg; kept by the generate function",
        )
    rows = _array(sample, experts, "rollout_routed_experts")
    form = (len(sizes.layers), sizes.top_k)
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
    needed = len(sample.tokens) - 1 - next((n for n, one in enumerate(reversed(mask)) if one), len(mask))
    if rows.ndim != 3 or rows.shape[1:] != form or not needed <= len(rows) < max(len(sample.tokens), 1):
        expected = f"[{len(sample.tokens) - 1}, {form[0]} layers, {form[1]} experts]"
        raise _unusable(sample, f"rollout_routed_experts has the shape {list(rows.shape)}", expected)
    pairs = combinations(range(sizes.top_k), 2)  # ten times as fast as sorting them
    twice = any((rows[..., one] == rows[..., other]).any() for one, other in pairs)
    if rows.dtype.kind not in "iu" or not sizes.holds(rows) or twice:
        expected = f"{form[1]} different numbers from 0 to {sizes.num_experts - 1} for each token and layer"
        raise _unusable(sample, "rollout_routed_experts holds something else", expected)
    return rows.astype(sizes.dtype, copy=False)


def _per_token(sample: Sample, values: Sequence[float], name: str) -> np.ndarray:
    return _array(sample, _one_each(sample, values, name), name, np.float32)


def _one_each(sample: Sample, values: Values, name: str) -> Values:
    if len(values) != sample.response_length:
        expected = f"{sample.response_length}, one for each response token"
        raise _unusable(sample, f"{name} has {len(values)} entries", expected)
    return values


def _array(sample: Sample, values: Sequence[Any], name: str, dtype: Any = None) -> np.ndarray:
    try:
        return np.asarray(values, dtype=dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise _unusable(sample, f"its {name} are no numbers: {error}", "numbers") from error


def _oldest_version(sample: Sample) -> int:
    """Of the tokens that are trained on: others may be of any age."""
    spans, mask = sample.weight_versions, sample.loss_mask
    if sample.remove_sample:
        return NO_VERSION
    return min([s.version for s in spans if mask is None or any(mask[s.start : s.end])], default=NO_VERSION)


def _unusable(sample: Sample, what: str, expected: str) -> RolloutError:
    return RolloutError(f"the sample cannot be used: {what}", where=f"row {sample.row_id}", expected=expected)
