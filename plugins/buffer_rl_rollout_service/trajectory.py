"""One trajectory: what an agent writes, checked when it arrives."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Id = Annotated[str, StringConstraints(min_length=1, max_length=256), BeforeValidator(_as_text)]
"""A text, or an integer, which is read as its digits."""
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Token = Annotated[int, Field(strict=True, ge=0)]
Bit = Annotated[int, Field(strict=True, ge=0, le=1)]


class Message(BaseModel):
    """One message of a chat; keys beside these reach the chat template, ``"loss": false`` leaves an answer out."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: Any = None


class Trajectory(BaseModel):
    """What an agent did on one problem, in one of two forms: ``messages``, or ``tokens`` with ``response_length``.

    instance_id: of the problem; trajectories of one problem make a group. uid: of the trajectory, unique within its
    problem; what is written again under it is not counted twice. finish_reason: ``length`` where the agent ran out of
    tokens. extra_info: becomes the sample's metadata.
    tokens: prompt and response, ``[num_tokens]``; the last ``response_length`` are the response, to which ``loss_mask``
    (1: trained on; absent: all of them) and ``rollout_log_probs`` (nats), ``[response_length]``, belong.
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
    finish_reason: str | None = None
    extra_info: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        if (self.messages is None) == (self.tokens is None):
            raise ValueError("a trajectory has either messages or tokens")
        if self.messages is not None:
            if not any(message.role == "assistant" for message in self.messages):
                raise ValueError("messages: no message has the role 'assistant'")
            if self.loss_mask is not None or self.rollout_log_probs is not None:
                raise ValueError("loss_mask and rollout_log_probs belong to tokens, not to messages")
            return self
        assert self.tokens is not None
        if self.response_length is None or self.response_length >= len(self.tokens):
            raise ValueError(f"response_length: expected 1 to {len(self.tokens) - 1}, as there are so many tokens")
        for name in ("loss_mask", "rollout_log_probs"):
            values = getattr(self, name)
            if values is not None and len(values) != self.response_length:
                raise ValueError(f"{name}: {len(values)} values, expected response_length, {self.response_length}")
        return self
