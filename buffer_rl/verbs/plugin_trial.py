"""``buffer-rl plugins check --on FILE``: one function called on the rows of a file, and what it answered.

A reward runs in a process of its own, a filter on groups with rewards made up here, a generate function, an agent or
an environment against an engine that answers each prompt with the row's label. Answers are checked as in a run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from buffer_rl.args import Args
from buffer_rl.data.dataset import PromptRow, RowKeys
from buffer_rl.data.reader import read_dataset
from buffer_rl.errors import BufferRLError, DataError, PluginError
from buffer_rl.options.checks import refuse
from buffer_rl.options.section import dump_args
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import Sample, SampleGroup, Ticket
from buffer_rl.rollout.context import RolloutContext
from buffer_rl.rollout.conversion import GroupConverter
from buffer_rl.rollout.generate import sampling_params_for
from buffer_rl.rollout.lease import Lease
from buffer_rl.rollout.options import plays_agents
from buffer_rl.rollout.production import generate_group
from buffer_rl.rollout.requests import Requests
from buffer_rl.rollout.reward_pool import RewardPool
from buffer_rl.rollout.reward_process import RewardTarget
from buffer_rl.rollout.stats import RolloutStats
from buffer_rl.rollout.user_functions import UserFunction, apply_filter
from buffer_rl.verbs.dry_run import score_lines
from buffer_rl.verbs.reward_trial import NUM_SCORED, answers_to, judged, label_text, score_answers
from buffer_rl.verbs.row_sources import RowSource, TriedRow

if TYPE_CHECKING:
    from buffer_rl.testing.fake_engine import FakeEngine

CALL_S = 30.0
"""Deadline of one call of a filter, a generate function, an agent or an environment."""
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content or '' }}"
    "{{ '<eos>' if message.role == 'assistant' else '\n' }}{% endfor %}{{ 'assistant: ' if add_generation_prompt }}"
)
"""What follows an answer goes on behind its end token, so that the turns of a conversation are one row."""
REWARDS = {"one of them right": (1.0, 0.0, 0.0), "all right": (1.0, 1.0, 1.0), "all wrong": (0.0, 0.0, 0.0)}
"""Rewards of the groups that a filter sees."""


def try_plugin(registry: PluginRegistry, kind: str, reference: str, path: str, args: Args) -> list[str]:
    """Call the plugin on a few rows of the file ``path``; one line an answer, and notices.

    args: the options of a run, which name the fields of the rows. Raises ConfigError for a kind that cannot be tried,
    DataError for the file, and PluginError or RolloutError for a function that fails or answers what it must not.
    """
    trials: Mapping[str, Callable[..., Coroutine[Any, Any, list[str]]]] = {
        **dict.fromkeys(("reward", "group_reward"), _try_reward),
        "filter": _try_filter,
        **dict.fromkeys(("generate", "agent", "environment"), _try_samples),
    }
    refuse(kind not in trials, f"--on: a plugin of the kind {kind!r} is not called on rows", expected=", ".join(trials))
    try:
        dataset = read_dataset(path, RowKeys.from_args(args))
    except DataError as error:  # whose hint names a flag that this verb lacks
        error.hint += " (here as an option in the file of --config)" if "--" in error.hint else ""
        raise
    source = RowSource(use="answers", path=path, dataset=dataset)
    return asyncio.run(trials[kind](registry, kind, reference, source, args))


async def _try_reward(registry: PluginRegistry, kind: str, reference: str, source: RowSource, args: Args) -> list[str]:
    target = RewardTarget(reference, registered=False, of_group=kind == "group_reward")
    pool = RewardPool(dump_args(args), num_workers=1, timeout_s=args.rm_timeout_s)
    rows = []
    try:
        for row in source.spread(NUM_SCORED):
            where = source.dataset.where(row)
            try:
                scores = await score_answers(args, registry, pool, target, _answers(source, row), where=where)
            except PluginError as error:
                error.hint = ""  # of a run
                raise
            if scores is None:
                return ["  it needs what exists only while a rollout runs, so it was not called"]
            rows.append(TriedRow(use=source.use, where=where, reward=reference, scores=scores))
    finally:
        await pool.aclose()
    return [*score_lines(rows), *(f"  notice: {text}" for text in judged(rows))]


def _answers(source: RowSource, row: PromptRow) -> dict[str, Sample]:
    """Answers to the row, with a token for each byte of their text."""
    sample = source.sample(row)
    return answers_to(sample, list(str(sample.prompt).encode()), lambda text: list(text.encode()), None)


async def _try_filter(registry: PluginRegistry, kind: str, reference: str, source: RowSource, args: Args) -> list[str]:
    chosen = UserFunction(kind, reference, registry.resolve(kind, reference))
    lines = []
    for row in source.spread(NUM_SCORED):
        for name, rewards in REWARDS.items():
            samples = list(_answers(source, row).values())
            for sample, reward in zip(samples, rewards, strict=False):
                sample.reward = reward if args.reward_key is None else {args.reward_key: reward}
            group = SampleGroup(uid=samples[0].row_id.uid, samples=samples)
            with _naming(source.dataset.where(row)):
                decision = await _in_time(apply_filter(chosen, args, group), reference)
            kept = "keep" if decision.keep else f"drop: {decision.reason}"
            lines.append(f"  {name:<17}  {kept}  {source.dataset.where(row)}")
    return lines


async def _try_samples(registry: PluginRegistry, kind: str, reference: str, source: RowSource, args: Args) -> list[str]:
    """Generate a sample of each row, against an engine in this process."""
    from buffer_rl.engines.client import EngineClient
    from buffer_rl.testing.fake_engine import FakeEngine
    from buffer_rl.testing.tiny import DEFAULT_CHARACTERS, make_char_tokenizer

    rows = list(source.spread(NUM_SCORED))
    text = DEFAULT_CHARACTERS + "".join(f"{row.prompt}{row.label}{row.metadata}" for row in rows)
    tokenizer = make_char_tokenizer(text)
    tokenizer.chat_template = TEMPLATE
    lines = []
    with FakeEngine(decode=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True))) as engine:
        urls = {"router_url": engine.url, "engine_urls": [engine.url]}
        args = args.model_copy(update={**_options_of(kind, reference), **urls})
        async with EngineClient(engine.url, [engine.url], timeout_s=CALL_S) as client:
            context = RolloutContext.build(args, registry=registry, engine=client, tokenizer=tokenizer)
            try:
                with context.active():
                    for row in rows:
                        lines += await _generate(context, engine, source, row)
            finally:
                await context.aclose()
    return lines


def _options_of(kind: str, reference: str) -> dict[str, Any]:
    """The options with which a run plays a sample by the plugin."""
    if kind == "generate":
        return {"custom_generate_function_path": reference, "custom_generate_timeout_s": CALL_S}
    none: dict[str, Any] = {"agent_path": None, "agent_command": None, "tools_path": [], "environment": None}
    return {**none, "environment" if kind == "environment" else "agent_path": reference, "agent_timeout_s": CALL_S}


async def _generate(context: RolloutContext, engine: FakeEngine, source: RowSource, row: PromptRow) -> list[str]:
    """Generate one sample, make rows of it as a run does, and say what came out."""
    from buffer_rl.testing.fake_buffer import FakeBuffer

    where, sample = source.dataset.where(row), source.sample(row)
    answer = [*context.prompts.encode_text(label_text(row.label) or "yes"), context.tokenizer.eos_token_id]
    engine.respond = lambda input_ids, seed: answer
    before = engine.log.num_posts
    group = SampleGroup(uid=sample.row_id.uid, samples=[sample], incarnation="check")
    ticket = Ticket(rollout_id=0, evaluation=False, num_groups=1, version=0, incarnation="check", max_staleness=None)
    params = sampling_params_for(context.args, evaluation=False)
    with _naming(where):
        await generate_group(Lease.of(context, FakeBuffer([group], ticket), group, Requests()), params, RolloutStats())
        scored = replace(group, samples=[part.changed(reward=_reward_of(context.args, part)) for part in group])
        GroupConverter(context.args).encode(scored, evaluation=False)
    asked = engine.log.num_posts - before
    requests = f"{asked} request{'' if asked == 1 else 's'}"
    return [
        f"  {part.status}, {_rows_text(part)}, {requests}, reward {part.reward}: {part.response!r:.60}  {where}"
        for part in group
    ]


def _reward_of(args: Args, part: Sample) -> Any:
    """That of an agent, whose number is the run's reward; for the others one is made up."""
    return part.reward if plays_agents(args) and part.reward is not None else 0.0


def _rows_text(part: Sample) -> str:
    sampled = sum(row.effective_response_length for row in part.rows) if part.parts else part.response_length
    rows = f"{len(part.rows)} rows, " if part.parts else ""
    return f"{rows}{sampled} tokens{', masked' if part.remove_sample else ''}"


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Errors name the row's file and line first."""
    try:
        yield
    except BufferRLError as error:
        error.where = f"{where}, {error.where}" if error.where else where
        raise


async def _in_time(work: Awaitable[Any], reference: str) -> Any:
    try:
        async with asyncio.timeout(CALL_S):
            return await work
    except TimeoutError as error:
        raise PluginError(f"no answer within {CALL_S:g} s", where=reference) from error
