"""``Sample``: one prompt with one response, and what it consists of (standard library and numpy only).

It has slime's field names and methods where the meaning is the same, for functions that were written for it, and keeps
attributes of the user's own.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from buffer_rl.records.ids import GroupUid, RowId, VersionSpan, version_number

Prompt = str | list[dict[str, Any]]
"""Plain text, or chat messages (``[{"role": ..., "content": ...}, ...]``)."""


class RenderedPrompt(str):
    """The text that the chat template made of ``source``, for functions that read ``sample.prompt`` as text."""

    source: Prompt

    @classmethod
    def of(cls, text: str, source: Prompt) -> RenderedPrompt:
        """``text``, made of ``source``."""
        rendered = cls(text)
        rendered.source = source
        return rendered


class Status(StrEnum):
    """What became of one sample."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(slots=True)
class SpecInfo:
    """Counts of speculative decoding over the requests of one sample."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    @property
    def spec_accept_rate(self) -> float:
        """Accepted tokens over drafted ones; 0 without any."""
        return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num else 0.0

    @property
    def spec_accept_length(self) -> float:
        """Tokens a verification; 0 without any."""
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Add the counts of one answer of ``/generate``."""
        self.spec_accept_token_num += meta_info.get("spec_accept_token_num", 0)
        self.spec_draft_token_num += meta_info.get("spec_draft_token_num", 0)
        self.spec_verify_ct += meta_info.get("spec_verify_ct", 0)
        self.completion_token_num += meta_info.get("completion_tokens", 0)

    def to_dict(self) -> dict[str, int]:
        """The counts by name."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, int]) -> SpecInfo:
        """The inverse of ``to_dict``; counts may be left out."""
        return cls(**values)


@dataclass(slots=True)
class PrefixCacheInfo:
    """How many prompt tokens of one sample's requests an engine had in its cache."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Cached tokens over all prompt tokens; 0 without any."""
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Add the counts of one answer of ``/generate``."""
        self.cached_tokens += meta_info.get("cached_tokens", 0)
        self.total_prompt_tokens += meta_info.get("prompt_tokens", 0)

    def to_dict(self) -> dict[str, int]:
        """The counts by name."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, int]) -> PrefixCacheInfo:
        """The inverse of ``to_dict``; counts may be left out."""
        return cls(**values)


def kept_tokens(meta_info: Mapping[str, Any]) -> list[bytes] | None:
    """What ``meta_info`` of an answer of ``/generate`` says about ``Sample.rollout_kept_tokens``; None for nothing.

    The embedded engine, and slime's, send ``top_p_token_ids`` and ``top_p_token_offsets``, a SGLang server
    ``output_token_sampling_mask``, a list of ids for each token."""
    if (masks := meta_info.get("output_token_sampling_mask")) is not None:
        return [np.asarray(ids, dtype="<i4").tobytes() for ids in masks]
    if meta_info.get("top_p_token_ids") is None:
        return None
    raw = binascii.a2b_base64(meta_info["top_p_token_ids"])
    offsets = np.frombuffer(binascii.a2b_base64(meta_info["top_p_token_offsets"]), dtype="<i4").tolist()
    return [raw[4 * start : 4 * end] for start, end in pairwise(offsets)]


@dataclass(kw_only=True)
class Sample:
    """One prompt with one response. A function of the user's may set attributes of its own, which stay with the sample
    wherever it goes; in the Buffer's queue they are what JSON holds, bytes or arrays of numbers.

    tokens: prompt and response token ids, ``[prompt_length + response_length]``.
    rollout_log_probs: the engine's log-probability of each response token, ``[response_length]``, in nats.
    teacher_log_probs: the same under a teacher (``--use-opd``), where a function of the user's asks it.
    rollout_kept_tokens: for each response token the ids of the tokens that top-k, top-p and min-p left to draw it from,
    as bytes of int32, ``[response_length]``; empty for the whole vocabulary, as where the token was not sampled. Of
    ``--replay-kept-tokens``, under which ``rollout_log_probs`` are renormalised over them.
    rollout_routed_experts: of ``--replay-routed-experts``: the experts that computed each token in the layers that have
    some, ``[num_tokens - 1, layers, experts a token]`` uint8 or int16: the last token of the response was not computed.
    A sampled token has those of the request that sampled it, others those of the first request that held them; behind
    the last turn observations have none, and the array ends before them.
    experts_recomputed: how many response tokens have experts that other weights chose than those that sampled
    them.
    loss_mask: 1 for each response token that is trained on, ``[response_length]``; None means all of them.
    reward: a finite number, or a mapping of names to numbers with the one to train on under ``--reward-key``.
    remove_sample: set by a sample filter: keep the row, but with a loss mask of zeros.
    train_metadata: what training needs beside: ``baseline_reward``, the reward of a greedy response, for ReMax.

    Of agents: messages, the conversation that the reward is about, its last answer included; parts, the further rows of
    the sample, which have its reward and its place in a group; lowest_reward, whether it was cut at a limit, and gets
    the lowest reward of its group.
    turn_rewards: (response token, reward) of its row, with ``--turn-rewards`` (see ``TrainBatch``).
    rewards_by_name: the reward of each name that the row chose (``rm_type``, ``rewards``), None if it abstained.

    Fields that functions written for slime set and read, and which nothing here reads: rollout_id (the parts of one
    sample differ in ``sample_index``), rollout_top_p_token_ids and -offsets, multimodal_train_inputs,
    multimodal_train_input_id, generate_function_path, custom_rm_path, non_generation_time, spec_info,
    prefix_cache_info, apply_chat_template_kwargs.
    """

    uid: GroupUid | None = None
    sample_index: int = 0
    part: int = 0
    group_index: int | None = None
    index: int | None = None
    prompt: Prompt = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[VersionSpan] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    teacher_log_probs: list[float] | None = None
    rollout_kept_tokens: list[bytes] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    remove_sample: bool = False
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    rollout_id: int | None = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    rollout_routed_experts: Any = None
    multimodal_train_inputs: dict[str, Any] | None = None
    generate_function_path: str | None = None
    non_generation_time: float = 0.0

    Status = Status  # slime's functions write ``Sample.Status.COMPLETED``
    SpecInfo = SpecInfo
    PrefixCacheInfo = PrefixCacheInfo
    # No fields: an instance has these where a function sets or reads them, and nearly none does. With more than 30
    # attributes CPython keeps a table of names for each instance, at twice the time and memory.
    multimodal_train_input_id = cached_property(lambda self: None)
    custom_rm_path = cached_property(lambda self: None)
    spec_info = cached_property(lambda self: SpecInfo())
    prefix_cache_info = cached_property(lambda self: PrefixCacheInfo())
    apply_chat_template_kwargs = cached_property(lambda self: dict[str, Any]())
    messages = cached_property(lambda self: list[dict[str, Any]]())
    parts = cached_property(lambda self: list[Sample]())
    lowest_reward = cached_property(lambda self: False)
    rewards_by_name = cached_property(lambda self: dict[str, float | None]())
    turn_rewards = cached_property(lambda self: list[tuple[int, float]]())
    experts_recomputed = cached_property(lambda self: 0)

    def as_prompt(self, number: int = 0, copied: Callable[[Any], Any] = lambda value: value) -> Sample:
        """A sample with the prompt alone, ``number`` places further in its group; its values are ``copied``.

        Attributes of the user's own go along, as metadata do."""
        prompt = Sample(
            uid=self.uid,
            sample_index=self.sample_index + number,
            group_index=self.group_index,
            index=None if self.index is None else self.index + number,
            prompt=copied(self.prompt),
            multimodal_inputs=None if self.multimodal_inputs is None else dict(self.multimodal_inputs),
            label=copied(self.label),
            metadata=copied(dict(self.metadata)) if self.metadata else {},
            session_id=self.session_id,
        )
        if len(self.__dict__) != NUM_FIELDS:
            for name, value in self.own_attributes().items():
                setattr(prompt, name, copied(value))
        return prompt

    def own_attributes(self) -> dict[str, Any]:
        """The attributes that the user's functions added."""
        if len(self.__dict__) == NUM_FIELDS:
            return {}
        return {name: value for name, value in self.__dict__.items() if name not in _KNOWN}

    def changed(self, **values: Any) -> Sample:
        """A shallow copy with other ``values``; unlike ``dataclasses.replace`` with the user's own attributes."""
        other = copy(self)
        other.__dict__.update(values)
        return other

    @property
    def row_id(self) -> RowId:
        """Raises ``ValueError`` for a sample that no data source gave a uid."""
        if self.uid is None:
            raise ValueError("this sample has no uid: it did not come from Buffer.get_samples")
        return RowId(self.uid, self.sample_index, self.part)

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens."""
        return len(self.tokens) - self.response_length

    @property
    def rows(self) -> list[Sample]:
        """The sample and its further rows, if an agent played it."""
        parts = self.__dict__.get("parts")
        return [self, *parts] if parts else [self]

    @property
    def effective_response_length(self) -> int:
        """Number of response tokens that are trained on."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    @property
    def oldest_version(self) -> int | None:
        """The oldest weight version that any response token was sampled from; None without a response."""
        return min((span.version for span in self.weight_versions), default=None)

    def get_reward_value(self, args: Any) -> float:
        """The number to train on: ``reward``, or ``reward[args.reward_key]`` where it is a mapping."""
        if isinstance(self.reward, dict):
            key = getattr(args, "reward_key", None)
            if key not in self.reward:
                raise ValueError(
                    f"{self._name}: the reward is a mapping with keys {sorted(self.reward)}; "
                    f"name the one to train on with --reward-key (now {key!r})"
                )
            if isinstance(value := self.reward[key], str | None):
                raise ValueError(f"{self._name}: the reward under --reward-key {key!r} is {value!r:.80}, not a number")
            return float(value)
        if self.reward is None:
            raise ValueError(f"{self._name}: no reward was set")
        return float(self.reward)

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Any = None,
        log_probs: Any = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append tokens to the response, in place, with what belongs to them; slime's method of this name.

        tokens: ``[num_tokens]`` ids, as a list or an array. log_probs: of each, in nats; needed where ``trainable``
        (the model generated them: loss mask 1), else absent (an observation: loss mask and log-probability 0).
        meta_info: of the answer of ``/generate`` that the tokens came with: version spans, kept tokens and, if
        ``update_terminal_info``, the status and the counts. text: appended to ``response``.
        args: ``sglang_speculative_algorithm`` is read. Raises ValueError where lengths do not fit.
        """
        ids, values = _numbers(tokens, int), None if log_probs is None else _numbers(log_probs, float)
        self._check_appended(len(ids), values, trainable)
        before = self.response_length
        self.response += text or ""
        if ids:
            self.tokens += ids
            self.response_length += len(ids)
            if self.loss_mask is None:
                self.loss_mask = [1] * before
            self.loss_mask += [int(trainable)] * len(ids)
        if values is not None or (ids and not trainable):
            if self.rollout_log_probs is None:
                self.rollout_log_probs = [0.0] * before
            self.rollout_log_probs += [0.0] * len(ids) if values is None else values
        meta = meta_info or {}
        if ids:
            self._append_kept(kept_tokens(meta) if trainable else [b""] * len(ids), before)
        self._append_versions(meta, before, len(ids))
        if update_terminal_info and meta.get("finish_reason"):
            self._end(args, meta)
        for name in ("loss_mask", "rollout_log_probs", "rollout_kept_tokens"):
            column = getattr(self, name)
            if column is not None and len(column) != self.response_length:
                what = f"{self._name}: {name} has {len(column)} entries for {self.response_length} response tokens"
                raise ValueError(what)

    def to_dict(self) -> dict[str, Any]:
        """All attributes by name, the user's own too; the status, uid, versions and counts as plain values."""
        values = {
            **self.__dict__,
            "status": str(self.status),
            "uid": None if self.uid is None else str(self.uid),
            "spec_info": self.spec_info.to_dict(),
            "prefix_cache_info": self.prefix_cache_info.to_dict(),
        }
        values["weight_versions"] = [
            [span.version, span.start, span.end] if isinstance(span, VersionSpan) else span
            for span in self.weight_versions
        ]
        return values

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Sample:
        """The inverse of ``to_dict``. Entries may be absent; names that are no fields become attributes.

        Raises ValueError for what is no status or no uid."""
        values = dict(data)
        for name, read in _READ.items():
            if values.get(name) is not None:
                values[name] = read(values[name])
        sample = Sample(**{name: values.pop(name) for name in _FIELDS & values.keys()})
        sample.__dict__.update(values)
        return sample

    @property
    def _name(self) -> str:
        return f"sample {self.index}" if self.uid is None else str(self.row_id)

    def _check_appended(self, num_tokens: int, log_probs: list[float] | None, trainable: bool) -> None:
        if log_probs is not None and len(log_probs) != num_tokens:
            raise ValueError(f"{self._name}: {len(log_probs)} log_probs for {num_tokens} tokens")
        if not num_tokens:
            return
        if trainable and log_probs is None:
            raise ValueError(f"{self._name}: tokens that are trained on need their log_probs")
        if not trainable and log_probs is not None:
            raise ValueError(f"{self._name}: log_probs of tokens that no model generated (trainable=False)")
        if trainable and self.rollout_log_probs is None and self.response_length:
            raise ValueError(f"{self._name}: the response before these tokens has no rollout_log_probs")

    def _append_kept(self, kept: list[bytes] | None, before: int) -> None:
        if self.rollout_kept_tokens is None and before == 0:
            self.rollout_kept_tokens = kept if kept and any(kept) else None
        elif self.rollout_kept_tokens is not None:
            self.rollout_kept_tokens += kept or []

    def _append_versions(self, meta: Mapping[str, Any], before: int, num_tokens: int) -> None:
        spans, version = meta.get("weight_versions"), meta.get("weight_version")
        if num_tokens and spans is None and str(version).isdecimal():
            spans = [{"version": version, "start": 0, "end": num_tokens}]
        if spans is not None:
            self.weight_versions += [
                VersionSpan(version_number(span["version"]), before + span["start"], before + end)
                for span in spans
                if span["start"] < (end := min(span["end"], num_tokens))
            ]
        elif version is not None and not str(version).isdecimal():
            self.weight_versions.append(version)  # a name, as slime keeps it: no statement about a number of weights

    def _end(self, args: Any, meta: Mapping[str, Any]) -> None:
        if getattr(args, "sglang_speculative_algorithm", None):
            self.spec_info.add(meta)
        self.prefix_cache_info.add(meta)
        self.status = STATUS_OF_REASON.get(meta["finish_reason"]["type"], self.status)


STATUS_OF_REASON = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
"""What an engine's finish reason says about a sample."""
OF_SLIME = (
    *("rollout_id", "rollout_top_p_token_ids", "rollout_top_p_token_offsets", "rollout_routed_experts"),
    "multimodal_train_inputs",
)
"""Fields about a response that functions written for slime set, None where they do not."""
_FIELDS = {field.name for field in fields(Sample)}
NUM_FIELDS = len(_FIELDS)
_KNOWN = _FIELDS | {name for name, value in vars(Sample).items() if isinstance(value, cached_property)}
_READ: dict[str, Callable[[Any], Any]] = {
    "status": Status,
    "uid": lambda uid: uid if isinstance(uid, GroupUid) else GroupUid.parse(uid),
    "spec_info": SpecInfo.from_dict,
    "prefix_cache_info": PrefixCacheInfo.from_dict,
    "weight_versions": lambda spans: [VersionSpan(*s) if isinstance(s, list | tuple) else s for s in spans],
}


def _numbers(values: Any, kind: Callable[[Any], Any]) -> list[Any]:
    if values is None:
        return []
    flat = values.reshape(-1).tolist() if hasattr(values, "reshape") else values
    return [kind(value) for value in flat]
