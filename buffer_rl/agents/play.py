"""The generate function of a run with agents: plays a sample, and makes rows of what was sampled meanwhile.

What an agent raises is a failure of its sample, never a number: the sample is played once more, while its siblings
stay; then the group's attempt has failed. An agent that was killed from outside is played again with the answers that
it had (``buffer_rl.agents.journal``). At a limit (time, turns, tokens, context) the sample is truncated with what
there is. A failure of an engine is one of the infrastructure, whatever the agent makes of it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from buffer_rl.agents.command import Commands
from buffer_rl.agents.environment import Environments
from buffer_rl.agents.gateway import Gateway
from buffer_rl.agents.journal import Journal, Play
from buffer_rl.agents.remote import Leases, Remote, file_of
from buffer_rl.agents.runner import AgentTimeoutError, Functions
from buffer_rl.agents.session import (
    LIMITS,
    AgentFailedError,
    AgentKilledError,
    End,
    Exchange,
    Session,
    SessionHandle,
)
from buffer_rl.agents.tools import ToolAgent, num_errors
from buffer_rl.agents.turns import Row, rows
from buffer_rl.args import Args
from buffer_rl.errors import RolloutError
from buffer_rl.kinds.agent import GiveUp
from buffer_rl.kinds.reward import check_reward
from buffer_rl.plugin.calls import place, raised
from buffer_rl.records.groups import GroupUid, Sample, Status
from buffer_rl.rollout.context import RolloutContext
from buffer_rl.rollout.generate import reset_to_prompt
from buffer_rl.rollout.lease import Lease, current_lease

_log = logging.getLogger(__name__)
_NO_NAME = re.compile(r"[^\w.-]+")
MOST_REASON = 40
"""Characters of a reason to give up, in the name of a metric."""
PLAYS = 2
"""How often a sample is played in one attempt at its group, if the agent fails."""
GRACE_S = 5.0
"""In which an agent may end by itself after its session has."""
STOPPED_S = 0.5
"""In which an agent is cancelled that the rollout does not need any more, though it asks for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one play ended. reward: the agent's; None if the run's reward scores it. end: a limit, or DONE.
    gave_up: why the sample is masked; empty if it is not."""

    end: End
    reward: float | dict[str, Any] | None = None
    gave_up: str = ""


async def play(args: Args, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Play ``sample``; its further rows are in ``parts``.

    Raises AgentFailedError, naming the row, if the agent fails twice, and EngineError if an engine fails."""
    lease = current_lease()
    if (agents := lease.context.shared.get(Agents)) is None:
        agents = lease.context.shared[Agents] = Agents(lease.context)
    return await agents.play(lease, sample, sampling_params)


class Agents:
    """What the agents of one rollout worker share. Belongs to the worker's event loop."""

    def __init__(self, context: RolloutContext) -> None:
        args = self._args = context.args
        self._kind = "environment" if args.environment else "agent"
        self._reference = args.environment or args.agent_path or args.agent_command or ", ".join(args.tools_path)
        self._leases: Leases | None = None
        self._runner: Functions | Commands | Leases | Environments
        if isinstance(context.agent, Remote):
            log = None if context.run_dir is None else f"{context.run_dir}/logs/agents_{context.worker}_{{}}.log"
            file, programs = file_of(context.run_dir, context.worker), context.agent.programs(args)
            self._runner = self._leases = Leases(args, file, programs, log)
        elif args.agent_command:
            self._runner = Commands(args)
        elif context.environment is not None:
            self._runner = Environments(context.environment, args)
        else:
            self._runner = Functions(context.agent or ToolAgent(context.tools), args)
        port = args.agent_port and args.agent_port + context.worker
        self._gateway = Gateway(context.tokenizer, host=args.agent_host, port=port, leases=self._leases)
        self._journal = Journal.of(context)
        self._noticed = False
        self._failed: Counter[tuple[GroupUid, int]] = Counter()

    async def play(self, lease: Lease, sample: Sample, params: Mapping[str, Any]) -> Sample:
        """See ``play``."""
        current = Play.begun(self._journal, lease, sample)
        if current.was_killed:
            lease.count("agent/killed")
            if not current.kills:
                lease.count("agent/failed")
        failures = 0
        try:
            while True:
                session = Session(lease, sample, params, current)
                try:
                    prompt = reset_to_prompt(sample)
                    outcome = await self._played(session, prompt)
                    played = _sample_of(lease, session, prompt, outcome)
                    self._count(lease, session, played, outcome)
                    return played
                except AgentKilledError as error:
                    lease.count("agent/killed")
                    if not current.kill():
                        _log.info("%s; it is played again with the same answers", error)
                        continue
                    failure: RolloutError = error
                except AgentFailedError as error:
                    current.fail()
                    failure = error
                lease.count("agent/failed")
                failures += 1
                if failures == PLAYS:
                    return self._masked(lease, reset_to_prompt(sample), failure)
                level = logging.INFO if self._kind == "agent" else logging.WARNING
                _log.log(level, "%s; the sample is played once more", failure)
        finally:
            current.end()

    def _masked(self, lease: Lease, prompt: Sample, failure: RolloutError) -> Sample:
        """A sample whose environment failed, which is not trained, so that its siblings are.

        Raises ``failure`` for an agent, in an evaluation, and if all samples of the group failed."""
        group = lease.group
        if self._kind == "agent" or lease.evaluation or group is None:
            raise failure
        key = (group.uid, lease.attempt)
        self._failed[key] += 1
        if self._failed[key] >= len(group.samples):
            del self._failed[key]
            raise failure
        _log.warning("%s; the sample is masked, its siblings stay", failure)
        lease.count("agent/samples")
        lease.count("agent/masked")
        return prompt.changed(status=Status.FAILED, remove_sample=True)

    async def aclose(self) -> None:
        """Stop the gateway and the agents."""
        await self._runner.aclose()
        await self._gateway.aclose()
        if self._journal is not None:
            self._journal.close()

    async def _played(self, session: Session, prompt: Sample) -> Outcome:
        name = f"the {self._kind} of row {prompt.row_id}"
        async with self._gateway.opened(session) as address:
            handle = SessionHandle(session, *address, blocking=self._runner.blocking)
            task = asyncio.ensure_future(self._runner.run(session, handle, prompt, name=name))
            try:
                while not task.done() and session.end is None:
                    await asyncio.wait({task, session.ended}, timeout=STOPPED_S, return_when=asyncio.FIRST_COMPLETED)
                    session.close_if_stopped()
                if session.end is not End.STOPPED and not task.done():
                    await asyncio.wait({task}, timeout=GRACE_S)
            finally:
                task.cancel()
                still_running = session.running
                session.close(End.DONE)
                handle.close()
                await asyncio.wait({task})
        if session.failure is not None:
            raise session.failure
        if still_running and session.end is End.DONE and not self._noticed:
            self._noticed = True
            _log.warning("%s ended while %d of its requests were running: await them", name, still_running)
        if not task.cancelled():
            task.exception()  # what it made of the end is no failure
        if session.end not in (None, End.DONE):
            return Outcome(end=session.end)
        return self._outcome(task, session, prompt)

    def _outcome(self, task: asyncio.Future[Any], session: Session, prompt: Sample) -> Outcome:
        """That of an agent that ended by itself."""
        where = place(self._kind, self._reference, f"row {prompt.row_id}")
        try:
            answer = task.result() if session.reported is None else session.reported.result()
        except AgentTimeoutError:
            return Outcome(end=End.TIMEOUT)
        except GiveUp as given_up:
            return Outcome(end=End.DONE, gave_up=_NO_NAME.sub("_", str(given_up.reason))[:MOST_REASON] or "unnamed")
        except Exception as error:  # fault boundary: the agent is the user's
            if not session.overflowed and isinstance(error, AgentFailedError | AgentKilledError) and not error.where:
                error.where = where  # of an agent that is no function
                raise
            if not session.overflowed:
                at = f"row {prompt.row_id}"
                raise raised(self._kind, self._reference, error, at=at, error_class=AgentFailedError) from error
        if session.overflowed:
            return Outcome(end=End.OVERFLOW, gave_up=End.OVERFLOW if self._args.agent_overflow == "give-up" else "")
        if answer is None and session.turn_rewards:
            expected = "a number: the sample's reward, with those of its answers included"
            raise AgentFailedError("it gave rewards to answers and returned none", where=where, expected=expected)
        if answer is None:
            return Outcome(end=End.DONE)
        try:
            return Outcome(end=End.DONE, reward=check_reward(answer, where=where))
        except Exception as error:
            raise AgentFailedError(str(error), where=where, expected="None, a number or a mapping") from error

    def _count(self, lease: Lease, session: Session, played: Sample, outcome: Outcome) -> None:
        if session.end is End.STOPPED:
            return lease.count("agent/end_stopped")
        own = {
            "late": self._gateway.take_late(),
            "samples": 1,
            "turns": len(session.exchanges),
            "rows": len(played.rows) if played.response_length else 0,
            "observed_tokens": sum(row.response_length - row.effective_response_length for row in played.rows),
        }
        own |= {f"prompt_{cause}": count for cause, count in session.causes.items()}
        num_tool_errors = num_errors(session.exchanges[-1].messages) if session.exchanges else 0
        untrained = sum(not each.train for each in session.exchanges)
        rare = {"tool_errors": num_tool_errors, "replayed": session.replayed, "untrained": untrained}
        own |= {name: count for name, count in rare.items() if count}
        if outcome.gave_up:
            own[f"gave_up_{outcome.gave_up}"] = 1
        elif outcome.end in LIMITS:
            own[f"end_{outcome.end}"] = 1
        for name, count in own.items():
            lease.count(f"agent/{name}", count)
        return None


def _text_of(lease: Lease, scored: Exchange) -> str:
    """The text that a reward function sees as the response."""
    if scored.answer is not None:
        return str(scored.answer.message.get("content") or "")
    skip = lease.context.args.rollout_skip_special_tokens
    return str(lease.context.tokenizer.decode(list(scored.turn.output_ids), skip_special_tokens=skip))


def _sample_of(lease: Lease, session: Session, prompt: Sample, outcome: Outcome) -> Sample:
    """``prompt`` with the row that the reward is about, and its other rows as parts.

    An evaluation needs a number for each sample: one that its agent gave up has the lowest reward there."""
    if outcome.end is End.STOPPED:
        return prompt.changed(status=Status.ABORTED)
    made = rows(each.turn for each in session.exchanges if each.train)
    scored = session.exchange_to_score()
    evaluates = lease.ticket is not None and lease.ticket.evaluation
    masked, cut = bool(outcome.gave_up) and not evaluates, bool(outcome.gave_up) or outcome.end in LIMITS
    if scored is None:
        if outcome.end is End.DONE and not outcome.gave_up:
            what = "it returned and had asked for no answer" + (" that is trained" if session.exchanges else "")
            hint = "its client must be made with session.base_url and session.api_key"
            raise AgentFailedError(what, where=f"row {prompt.row_id}", hint=hint)
        if evaluates:
            return prompt.changed(status=Status.TRUNCATED, lowest_reward=True)
        return prompt.changed(status=Status.FAILED, remove_sample=True)
    made.sort(key=lambda row: scored.turn not in row.turns)  # its row comes first
    chosen, *parts = (row.sample(prompt, part) for part, row in enumerate(made))
    chosen.response = _text_of(lease, scored)
    chosen.messages = [*scored.messages, *([scored.answer.message] if scored.answer else [])]
    chosen.parts, chosen.reward, chosen.remove_sample = parts, outcome.reward, masked
    if session.turn_rewards:
        _give_turn_rewards(session, [chosen, *parts], made)
    if masked:
        chosen.status = Status.FAILED  # so that nothing scores it
    elif cut:
        chosen.status, chosen.lowest_reward = Status.TRUNCATED, True
    elif chosen.status is Status.ABORTED:
        chosen.status = Status.TRUNCATED
    return chosen


def _give_turn_rewards(session: Session, samples: Sequence[Sample], made: Sequence[Row]) -> None:
    """Each turn's reward at its last token, and minus the sum of all at the last sampled token of each row."""
    numbers = {each.turn.order: session.turn_rewards[each.id] for each in session.exchanges}
    total = math.fsum(numbers.values())
    for sample, row in zip(samples, made, strict=True):
        ends = row.turn_ends()
        given = [(end, numbers[turn.order]) for turn, end in zip(row.turns, ends, strict=True) if numbers[turn.order]]
        sample.turn_rewards = [*given, (ends[-1], -total)]
