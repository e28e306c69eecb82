"""What agents write to the service: a trajectory, in one of three forms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from buffer_rl.agents.turns import Turn, turn_digest
from buffer_rl.errors import RolloutError
from buffer_rl.records.groups import VersionSpan

MAX_TURNS = 1024

Id = Annotated[
    str,
    StringConstraints(min_length=1, max_length=256),
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
]
"""A text, or an integer, which is read as its digits."""
Number = Annotated[float, Field(strict=True, ge=-3e38, le=3e38)]  # finite in float32
Token = Annotated[int, Field(strict=True, ge=0)]
Bit = Annotated[int, Field(strict=True, ge=0, le=1)]
Version = Annotated[
    int,
    Field(strict=True, ge=0, lt=2**31),
    BeforeValidator(lambda value: int(value) if isinstance(value, str) and value.isdecimal() else value),
]
"""Of weights: a whole number, or its digits as text, as engines report it."""


class Message(BaseModel):
    """One message of a chat; keys beside these reach the chat template, ``"loss": false`` leaves an answer out."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: Any = None


class Span(BaseModel):
    """The response tokens ``start`` to ``end`` (exclusive, counted from the first one) are of weights ``version``."""

    version: Version
    start: int = Field(strict=True, ge=0)
    end: int = Field(strict=True, ge=1)


class TurnRecord(BaseModel):
    """One answer of the model, as ``buffer_rl.agents.turns.Turn`` has it. version: of all its tokens, in place of
    ``spans``. digest: of what was asked beside ``prompt_ids``; without one, of these alone."""

    prompt_ids: list[Token] = Field(min_length=1)
    output_ids: list[Token]
    log_probs: list[Number]
    spans: list[Span] = Field(default_factory=list)
    version: Version | None = None
    finish_reason: Literal["stop", "length", "abort"] = "stop"
    matched: int | str | None = None
    digest: str = Field(default="", max_length=256)

    def turn(self, ordinals: Counter[str]) -> Turn:
        """The turn; ``ordinals`` counts those before it with its digest. Raises RolloutError."""
        digest = self.digest or turn_digest(self.prompt_ids, {})
        ordinals[digest] += 1
        spans = [VersionSpan(span.version, span.start, span.end) for span in self.spans]
        if not spans and self.version is not None and self.output_ids:
            spans = [VersionSpan(self.version, 0, len(self.output_ids))]
        return Turn(
            prompt_ids=tuple(self.prompt_ids),
            output_ids=tuple(self.output_ids),
            log_probs=tuple(self.log_probs),
            spans=tuple(spans),
            finish_reason=self.finish_reason,
            matched=self.matched,
            digest=digest,
            ordinal=ordinals[digest] - 1,
        )


class Trajectory(BaseModel):
    """What an agent did on one problem, in one of three forms: ``messages``, ``tokens`` with ``response_length``, or
    ``turns``, of which rows are made as of an agent's of the run.

    instance_id: of the problem; trajectories of one problem make a group. uid: of the trajectory, unique within its
    problem; what is written again under it is not counted twice. finish_reason: ``length`` where the agent ran out of
    tokens. extra_info: becomes the sample's metadata.
    tokens: prompt and response, ``[num_tokens]``; the last ``response_length`` are the response, to which ``loss_mask``
    (1: trained on; absent: all of them) and ``rollout_log_probs`` (nats), ``[response_length]``, belong.
    weight_version: of the weights that sampled the whole response; or, with ``tokens``, weight_versions: the spans of
    its trained tokens by version, in order, which are stronger. Engines report both in ``meta_info``.
    Fields beside these are ignored.
    """

    instance_id: Id
    uid: Id
    reward: Number
    messages: list[Message] | None = Field(default=None, min_length=2)
    tools: list[Any] | None = None
    tokens: list[Token] | None = Field(default=None, min_length=2)
    response_length: int | None = Field(default=None, strict=True, ge=1)
    response: str = ""
    loss_mask: list[Bit] | None = None
    rollout_log_probs: list[Number] | None = None
    turns: list[TurnRecord] | None = Field(default=None, min_length=1, max_length=MAX_TURNS)
    weight_version: Version | None = None
    weight_versions: list[Span] | None = Field(default=None, min_length=1)
    finish_reason: str | None = None
    extra_info: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        if sum(form is not None for form in (self.messages, self.tokens, self.turns)) != 1:
            raise ValueError("a trajectory has either messages or tokens or turns")
        if self.turns is not None:
            self._check_turns()
            return self
        if self.messages is not None:
            if not any(message.role == "assistant" for message in self.messages):
                raise ValueError("messages: no message has the role 'assistant'")
            if self.loss_mask is not None or self.rollout_log_probs is not None:
                raise ValueError("loss_mask and rollout_log_probs belong to tokens, not to messages")
            if self.weight_versions is not None:
                raise ValueError("weight_versions belong to tokens; weight_version goes with messages")
            return self
        assert self.tokens is not None
        if self.response_length is None or self.response_length >= len(self.tokens):
            raise ValueError(f"response_length: expected 1 to {len(self.tokens) - 1}, one less than its tokens")
        for name in ("loss_mask", "rollout_log_probs"):
            values = getattr(self, name)
            if values is not None and len(values) != self.response_length:
                raise ValueError(f"{name}: {len(values)} values, expected response_length, {self.response_length}")
        if self.weight_versions is not None:
            _check_spans(self.weight_versions, self.loss_mask or [1] * self.response_length)
        return self

    def _check_turns(self) -> None:
        others = ("response_length", "loss_mask", "rollout_log_probs", "weight_versions")
        if given := [name for name in others if getattr(self, name) is not None]:
            raise ValueError(f"turns: {given[0]} belongs to tokens")
        try:
            turns = self.made_turns()
        except RolloutError as error:
            raise ValueError(f"turns: {error}") from error
        if not any(turn.output_ids for turn in turns):
            raise ValueError("turns: no turn has output_ids")
        with_versions = {bool(turn.spans) for turn in turns if turn.output_ids}
        if len(with_versions) > 1:
            raise ValueError("turns: some tell their versions, some do not")

    def made_turns(self) -> list[Turn]:
        """The turns; ``weight_version`` is that of those that do not tell theirs. Raises RolloutError."""
        ordinals: Counter[str] = Counter()
        records = self.turns or []
        if self.weight_version is not None:
            own = {"version": self.weight_version}
            records = [each.model_copy(update=own) if each.version is None else each for each in records]
        return [record.turn(ordinals) for record in records]

    def spans(self, response_length: int) -> list[VersionSpan]:
        """The versions of so many response tokens; none if the agent did not send them."""
        if self.weight_versions is None:
            return [] if self.weight_version is None else [VersionSpan(self.weight_version, 0, response_length)]
        return [VersionSpan(span.version, span.start, span.end) for span in self.weight_versions]


def _check_spans(spans: Sequence[Span], mask: Sequence[int]) -> None:
    """Raises ValueError if the spans are empty, overlap, end behind the response or leave out a trained token."""
    end = 0
    for span in [*spans, Span.model_construct(version=0, start=len(mask), end=len(mask) + 1)]:
        if span.start < end or span.start >= span.end:
            raise ValueError(
                f"weight_versions: expected spans in order within response_length, {len(mask)}, counted from the first "
                f"response token; got {[(each.start, each.end) for each in spans]}"[:400]
            )
        if any(mask[end : span.start]):
            raise ValueError(f"weight_versions: tokens {end} to {span.start} are trained on and have no version")
        end = span.end
