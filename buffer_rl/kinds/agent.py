"""What an agent receives and returns, and what an environment that the built-in agent plays has."""

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

        stop: a string or several, beside the run's.
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


class Environment(Protocol):
    """What the built-in agent plays for one sample: an instance is made for one play, and used once.

    It is made with ``args`` if its constructor has a parameter of that name or cannot do without one, else with
    nothing. It has either ``step`` or other public methods, which are then the model's tools, with a schema from type
    hints and docstring. Its methods are ``async`` or plain. They run in a thread of the play's own, one after another,
    on one event loop. What they raise is a failure of the sample, never a number; what a tool raises is told to the
    model. ``GiveUp`` masks the sample.

    step(action) -> (observation, reward, done)
        action: the text of the model's answer. observation: as ``reset`` returns it; None at the end. reward: a number,
        or None. gymnasium's ``(observation, reward, terminated, truncated, info)`` will do, too.
    reward() -> number | mapping | None
        Added to the rewards of the steps; of a mapping, the entry ``--reward-key``. If no reward was given at all, that
        of the run scores the sample.
    close()
        Called once at the end of the play, whatever ended it.
    """

    def reset(self, **row: Any) -> Any:
        """What the model is told behind the row's prompt: a text, messages or None.

        row: the entries of the sample's ``metadata``, its ``label`` and ``prompt``, and ``seed``: a number that depends
        on the run's seed, the row and the epoch, and is that of all samples of the group; an entry ``seed`` of the
        metadata takes its place. A method without ``**`` gets those that it has parameters for."""


KINDS = (
    PluginKind(
        name="agent",
        flags=("--agent-path",),
        protocol=Agent,
        signature="[async] (args, sample, session) -> None | number | mapping",
        may_be_async=True,
    ),
    PluginKind(
        name="environment",
        flags=("--environment",),
        protocol=Environment,
        signature="class ([args]) with reset(**row), and step(action) -> (observation, reward, done) or tools",
        may_be_async=True,
        constructed=("args",),
        optional=1,
    ),
)
