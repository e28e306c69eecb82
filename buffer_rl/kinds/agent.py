"""What an agent receives and returns."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol

from buffer_rl.kinds.kind import PluginKind
from buffer_rl.records.groups import Sample


class GiveUp(Exception):
    """An agent raises it if a sample cannot be judged, such as one whose environment is broken: the sample is masked,
    and its group stays. ``reason`` is counted: a few words, the same for the same cause."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class AgentSession(Protocol):
    """One attempt at one sample, as the agent sees it.

    base_url, api_key: of an OpenAI endpoint that is this session's alone, for any client, in any process of the node.
    In a plain agent the methods block; in an ``async`` one they are awaited.
    """

    base_url: str
    api_key: str

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        call: str = "",
        train: bool = True,
    ) -> Any:
        """The assistant's message to ``messages``, in OpenAI's form: ``role``, ``content``, perhaps
        ``reasoning_content`` and ``tool_calls``.

        call: a name for this request. Requests that are equal and run at once are told apart by it, also after a
        death, and a request that is repeated under its name gets its answer once more.
        train: whether the answer is trained, or is context of those that are, such as that of another player."""

    def generate(
        self,
        input_ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        call: str = "",
        train: bool = True,
    ) -> Any:
        """The turn (``buffer_rl.agents.turns.Turn``) behind exactly these ids. call, train: see ``chat``."""

    def score(self, answer: str | Mapping[str, Any]) -> None:
        """Score this answer in place of the last one: the id of a completion, or a message that ``chat`` returned."""

    def reward(self, number: float, answer: str | Mapping[str, Any] = "") -> None:
        """Of the sample's reward, ``number`` belongs to this answer, which is named as for ``score``; empty: to the
        last one. With ``--turn-rewards`` alone. The agent returns the reward of the sample, these included."""


class Agent(Protocol):
    """Plays one sample by asking ``session`` any number of times. ``async`` agents share an event loop of their own;
    plain ones have a thread each.

    None: the run's reward scores the sample, on the answer that ``session.score`` names or the last one, with the
    conversation in ``sample.messages``. A number, or a mapping with an entry for ``--reward-key``, is the reward.
    What it raises is a failure, never a number: the sample is played once more, then its group has failed.
    """

    def __call__(
        self, args: Any, sample: Sample, session: AgentSession
    ) -> float | Mapping[str, float] | Awaitable[float | Mapping[str, float] | None] | None: ...


KINDS = (
    PluginKind(
        name="agent",
        flags=("--agent-path",),
        protocol=Agent,
        signature="[async] (args, sample, session) -> None | number | mapping",
        may_be_async=True,
    ),
)
