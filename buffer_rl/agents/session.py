"""One attempt at one sample by an agent: its turns, and the way to the next one.

Belongs to the rollout worker's event loop. What is sampled here is recorded, and what is recorded is trained, whatever
became of the client that asked. A session ends with its attempt; what asks later gets ``SessionEndedError``.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from buffer_rl.agents.conversation import Cause, Conversation, NextPrompt
from buffer_rl.agents.journal import Play
from buffer_rl.agents.messages import Answer, Message
from buffer_rl.agents.template_reader import reader_of
from buffer_rl.agents.turns import Turn, continued, turn_digest
from buffer_rl.args import Args
from buffer_rl.engines.protocol import seed_of
from buffer_rl.errors import BufferRLError, EngineError, RewardError, RolloutError, short_repr
from buffer_rl.kinds.reward import check_reward
from buffer_rl.records.groups import Sample
from buffer_rl.rollout.lease import Lease
from buffer_rl.rollout.requests import answer_for

if TYPE_CHECKING:
    from buffer_rl.agents.finish import Finish


class End(StrEnum):
    """Why a session takes no more requests."""

    DONE = "done"  # the agent returned, or failed
    TIMEOUT = "timeout"
    TURNS = "max_turns"
    TOKENS = "max_tokens"
    OVERFLOW = "context_length"
    STOPPED = "stopped"  # the rollout has enough groups
    ENGINE = "engine"  # an engine failed: the group's attempt has failed, whatever the agent does


LIMITS = frozenset({End.TIMEOUT, End.TURNS, End.TOKENS, End.OVERFLOW})
"""Ends at which the sample is truncated with what there is."""


class SessionEndedError(RolloutError):
    """A request after the end. ``end``: why."""

    def __init__(self, end: End) -> None:
        super().__init__(f"the session has ended: {end}", hint="do not repeat the request")
        self.end = end


class AgentFailedError(RolloutError):
    """An agent raised, returned what is no reward, asked for no answer, or named one that there is not."""


class AgentKilledError(RolloutError):
    """An agent was ended from outside: by a signal, or its heartbeat was lost."""


class UnknownRepeatError(RolloutError):
    """A repeat of a request that is not known: whether it was answered, and as what, cannot be said."""


class TooLongError(RolloutError):
    """A prompt that leaves no room for an answer in the context. num_tokens: of the prompt; limit: of the context."""

    def __init__(self, num_tokens: int, limit: int, where: str) -> None:
        what = f"This model's maximum context length is {limit} tokens, and the messages have {num_tokens}"
        super().__init__(what, where=where)
        self.num_tokens, self.limit = num_tokens, limit


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One recorded turn. prompt, messages and answer: of ``chat``, else None. id: what the client knows it by.
    train: whether its tokens are trained; else they are context of those that are."""

    id: str
    turn: Turn
    train: bool = True
    prompt: NextPrompt | None = None
    messages: list[Message] = field(default_factory=list)
    answer: Answer | None = None

    @property
    def reply(self) -> Answer:
        """The answer of ``chat``."""
        assert self.answer is not None
        return self.answer


class TurnOptions(TypedDict, total=False):
    """What may be said of a request; see ``Session.generate``."""

    max_tokens: int | None
    stop: Sequence[str]
    call: str
    train: bool


class Session:
    """See the module. play: that of the sample, with what is recorded of it.

    exchanges: in the order in which they were recorded. end: None as long as requests are taken; ``ended`` is done
    then. overflowed: the last prompt left no room for an answer. scored: the id of the exchange that the reward is
    about; empty for the last one. running: requests that are not answered yet. params: the run's, of sampling.
    reported: what the agent sent of its end over HTTP, in place of what it returns. turn_rewards: of exchanges, by id.
    replayed: turns that the journal answered.
    """

    def __init__(self, lease: Lease, sample: Sample, params: Mapping[str, Any], play: Play | None = None) -> None:
        self.exchanges: list[Exchange] = []
        self.end: End | None = None
        self.failure: BufferRLError | None = None
        self.ended = asyncio.get_running_loop().create_future()
        self.overflowed = False
        self.scored: str | Mapping[str, Any] = ""
        self.causes: Counter[Cause] = Counter()
        self.running = self.replayed = 0
        self.reported: Finish | None = None
        self.turn_rewards: Counter[str] = Counter()
        self.params = dict(params)
        self._lease, self._sample, self._play = lease, sample, play or Play()
        self._args: Args = lease.context.args
        sizes = (self._args.rollout_max_context_len, self._args.engine_context_length)
        self._max_context = min((size for size in sizes if size is not None), default=math.inf)
        self._replays_experts = self._args.replay_routed_experts and not lease.evaluation
        self._seed = f"{lease.context.seed}|{sample.uid}|{sample.sample_index}|{self._play.number}"
        self._ordinals: Counter[str] = Counter()
        self._named: dict[str, asyncio.Task[Exchange]] = {}  # requests with a key of their own, by digest
        self._num_turns = self._num_tokens = 0

    @property
    def evaluation(self) -> bool:
        """Whether the sample is one of an evaluation."""
        return self._lease.evaluation

    @cached_property
    def _conversation(self) -> Conversation:
        """Made for the first chat: an agent that asks by token ids needs no chat template."""
        context, args, tokenizer = self._lease.context, self._args, self._lease.context.tokenizer
        if (read := context.shared.get(reader_of)) is None:
            read = context.shared[reader_of] = reader_of(tokenizer, args.response_template)
        history, template_kwargs = args.agent_history, args.apply_chat_template_kwargs
        return Conversation(tokenizer, history=history, template_kwargs=template_kwargs, read=read)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        known: bool = False,
        **options: Unpack[TurnOptions],
    ) -> Exchange:
        """The answer to ``messages``, in OpenAI's form; ``tools`` as there. The rest as in ``generate``.

        Raises DataError (status 400) for messages that cannot be rendered, and what ``generate`` raises."""
        self._require_open()
        prompt = self._conversation.prompt(messages, tools)
        exchange = await self.generate(prompt.ids, known=known, **options)
        if exchange.answer is None:  # else it was asked before, under its name
            self.causes[prompt.cause] += 1
            exchange.prompt, exchange.messages = prompt, [dict(message) for message in messages]
            exchange.answer = self._conversation.record(prompt, exchange.turn)
        return exchange

    def num_prompt_tokens(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> int:
        """How many ids would be sent for a request. Raises what ``chat`` raises for messages."""
        return len(self._conversation.prompt(messages, tools).ids)

    async def generate(
        self,
        input_ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        call: str = "",
        train: bool = True,
        known: bool = False,
    ) -> Exchange:
        """The turn behind ``input_ids``. max_tokens and stop may shorten it. call: a name, in place of how often the
        same was asked: one name and equal ids are one turn, which is sampled once, however often it is asked for, and
        trained if the first request for it is. train: see ``Exchange``. known: answered from the journal alone.

        Raises SessionEndedError after the end, TooLongError if the ids leave no room, UnknownRepeatError if a known
        turn is not, and EngineError if the engine fails, which ends the session."""
        self._require_open()
        params = self._bounded(len(input_ids), max_tokens, stop)
        digest = turn_digest(input_ids, {**params, "call": call} if call else params)
        if not call:
            return await self._exchange(input_ids, params, digest, train, known)
        if (task := self._named.get(digest)) is None:
            task = self._named[digest] = asyncio.ensure_future(self._exchange(input_ids, params, digest, train, known))
            self.ended.add_done_callback(lambda _: task.cancel())
        await asyncio.wait({task})  # it goes on for others if this caller is cancelled
        if task.cancelled():
            raise SessionEndedError(self.end or End.DONE)
        return task.result()

    async def _exchange(
        self, input_ids: Sequence[int], params: dict[str, Any], digest: str, train: bool, known: bool
    ) -> Exchange:
        ordinal = self._ordinals[digest]
        turn = self._play.find(input_ids, digest, ordinal)
        if turn is not None and turn.experts_start:
            turn = turn.on(continued(self._turns(), input_ids))
        if turn is None and known:
            raise UnknownRepeatError("the request is marked as a repeat, and no such request is known")
        self._bound_by_session(params)  # behind the digest: what is left depends on the order of concurrent answers
        self._num_turns += 1
        self._ordinals[digest] += 1
        if turn is None:
            turn = await self._sampled(input_ids, params, digest, ordinal)
            self._play.record(turn)
        else:
            self.replayed += 1
        self._num_tokens += len(turn.output_ids)
        self.overflowed = False
        exchange = Exchange(id=f"{digest[:24]}-{ordinal}", turn=turn, train=train)
        self.exchanges.append(exchange)
        return exchange

    def _turns(self) -> list[Turn]:
        return [exchange.turn for exchange in self.exchanges]

    async def _sampled(self, input_ids: Sequence[int], params: dict[str, Any], digest: str, ordinal: int) -> Turn:
        self.running += 1
        try:
            seeded = params | {"sampling_seed": seed_of(f"{self._seed}|{digest}|{ordinal}")}
            base = continued(self._turns(), input_ids) if self._replays_experts else None
            start = 0 if base is None else base.num_tokens - 1
            result = await answer_for(self._sample, list(input_ids), seeded, lease=self._lease, experts_start=start)
        except EngineError as error:
            self.fail(error)
            raise
        finally:
            self.running -= 1
        if result.finish_reason == "abort":
            self.close(End.STOPPED)
        self._require_open()
        return Turn(
            prompt_ids=tuple(input_ids),
            output_ids=tuple(result.output_ids),
            log_probs=tuple(result.log_probs),
            spans=tuple(result.spans),
            kept=None if result.kept is None else tuple(result.kept),
            experts=getattr(result, "experts", None) if self._replays_experts else None,
            experts_start=getattr(result, "experts_start", 0) if self._replays_experts else 0,
            base=base,
            finish_reason=result.finish_reason,
            matched=result.matched,
            digest=digest,
            ordinal=ordinal,
        )

    def close(self, end: End) -> None:
        """Take no more requests; the first end counts."""
        if self.end is None:
            self.end = end
            self.ended.set_result(end)

    def fail(self, error: BufferRLError) -> None:
        """End because nothing can answer, whatever the agent makes of it."""
        self.failure = error
        self.close(End.ENGINE)

    def finish(self, reported: Finish) -> Finish:
        """End with what the agent has sent, unless it has sent something before. Returns what counts, with its fault.

        Raises SessionEndedError after another end."""
        if self.reported is None:
            self._require_open()
            self.scored = reported.answer or self.scored
            try:
                for name, number in reported.turn_rewards.items():
                    self.reward(number, name)
            except RolloutError as error:
                reported = replace(reported, fault=str(error))
            self.reported = reported
            self.close(End.DONE)
        return self.reported

    def reward(self, number: float, answer: str | Mapping[str, Any] = "") -> None:
        """Add a reward to one answer, by its id or message; empty for the last one. Raises RolloutError without
        ``--turn-rewards``, AgentFailedError if there is no such answer."""
        where = f"session.reward, row {self._sample.row_id}"
        if not self._args.turn_rewards:
            hint = "add --turn-rewards to the run, or leave rewards of single answers to the sample's"
            raise RolloutError("this run has no rewards of single answers", where=where, hint=hint)
        found = self._answered(answer)
        if found is None:
            raise AgentFailedError(f"no answer is {short_repr(answer or 'there')}", where=where)
        self.turn_rewards[found.id] += number  # type: ignore[assignment]  # a sum of numbers, whole or not

    def exchange_to_score(self) -> Exchange | None:
        """The one that the agent named, else the one recorded last, of those that are trained and have tokens; None
        without any. Of several equal messages the last one is meant, unless ``chat`` returned one of them.

        Raises AgentFailedError if the name is of none of these."""
        found = self._answered(self.scored)
        if found is None and self.scored:
            what = f"no answer is {short_repr(self.scored)}"
            expected = "the id of a completion that is trained, or a message that chat returned"
            raise AgentFailedError(what, where=f"session.score, row {self._sample.row_id}", expected=expected)
        return found

    def _answered(self, name: str | Mapping[str, Any]) -> Exchange | None:
        """The trained exchange with tokens that ``name`` means; of an empty name the one that was recorded last."""
        answers = [each for each in reversed(self.exchanges) if each.turn.output_ids and each.train]
        if not name:
            return next(iter(answers), None)
        if isinstance(name, str):  # as a client got it
            return next((each for each in answers if name.endswith(each.id)), None)
        equal = [each for each in answers if each.answer is not None and each.reply.message == name]
        return next((each for each in equal if each.reply.message is name), next(iter(equal), None))

    def close_if_stopped(self) -> None:
        """Take no more requests if the rollout has enough groups."""
        if self._lease.stopped:
            self.close(End.STOPPED)

    def _require_open(self) -> None:
        self.close_if_stopped()
        if self.end is not None:
            raise SessionEndedError(self.end)

    def _bounded(self, prompt_length: int, max_tokens: int | None, stop: Sequence[str]) -> dict[str, Any]:
        """The run's sampling parameters with the limits of this turn."""
        room = self._max_context - prompt_length
        if room < 1:
            self.overflowed = True
            raise TooLongError(prompt_length, int(self._max_context), f"row {self._sample.row_id}")
        params = dict(self.params)
        params["max_new_tokens"] = min(params["max_new_tokens"], room, math.inf if max_tokens is None else max_tokens)
        if stop:
            params["stop"] = [*(params.get("stop") or ()), *([stop] if isinstance(stop, str) else stop)]
        return params

    def _bound_by_session(self, params: dict[str, Any]) -> None:
        """Requests that run at the same time have the same number of tokens left."""
        left = math.inf if self._args.agent_max_tokens is None else self._args.agent_max_tokens - self._num_tokens
        if self._num_turns >= self._args.agent_max_turns or left < 1:
            self.close(End.TURNS if self._num_turns >= self._args.agent_max_turns else End.TOKENS)
            self._require_open()
        params["max_new_tokens"] = min(params["max_new_tokens"], left)


def check_turn_reward(number: object) -> float:
    """The number. Raises RewardError for what is no finite one."""
    checked = None
    with suppress(RewardError):
        checked = check_reward(number, where="")
    if not isinstance(checked, float):
        raise RewardError(f"one of turn_rewards is {short_repr(number)}", expected="a finite number")
    return checked


class SessionHandle:
    """What an agent holds of its session: implements ``buffer_rl.kinds.agent.AgentSession``.

    blocking: for a plain agent, whose methods block its thread; those of an ``async`` one are awaited in its loop.
    Made in the worker's event loop."""

    def __init__(self, session: Session, base_url: str, api_key: str, *, blocking: bool) -> None:
        self.base_url, self.api_key = base_url, api_key
        self._session, self._blocking = session, blocking
        self._loop = asyncio.get_running_loop()
        self._running: set[asyncio.Task[Any]] = set()

    def close(self) -> None:
        """End the requests that are under way. Called in the worker's event loop."""
        for task in self._running:
            task.cancel()

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        **options: Unpack[TurnOptions],
    ) -> Any:
        """See ``AgentSession``; raises what ``Session.chat`` raises."""
        return self._asked(self._message(messages, tools, **options))

    def generate(self, input_ids: Sequence[int], **options: Unpack[TurnOptions]) -> Any:
        """See ``AgentSession``; raises what ``Session.generate`` raises."""
        return self._asked(self._turn(input_ids, **options))

    def score(self, answer: str | Mapping[str, Any]) -> None:
        """See ``AgentSession``."""
        self._session.scored = answer

    def reward(self, number: float, answer: str | Mapping[str, Any] = "") -> None:
        """See ``AgentSession``."""
        self._session.reward(check_turn_reward(number), answer)

    async def _message(self, messages: Any, tools: Any, **options: Unpack[TurnOptions]) -> Message:
        return (await self._session.chat(messages, tools, **options)).reply.message

    async def _turn(self, input_ids: Sequence[int], **options: Unpack[TurnOptions]) -> Turn:
        return (await self._session.generate(input_ids, **options)).turn

    async def _tracked(self, work: Coroutine[Any, Any, Any]) -> Any:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            return await work
        finally:
            self._running.discard(task)

    def _asked(self, work: Coroutine[Any, Any, Any]) -> Any:
        future = asyncio.run_coroutine_threadsafe(self._tracked(work), self._loop)
        if not self._blocking:
            return asyncio.wrap_future(future)
        try:
            return future.result()
        except CancelledError as error:
            raise SessionEndedError(self._session.end or End.DONE) from error
