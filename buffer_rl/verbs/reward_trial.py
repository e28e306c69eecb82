"""Answers to a few rows, scored by the run's reward before the run starts.

Rewards run in a process of their own, under the deadline of a run; what they print goes to standard error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from buffer_rl.args import Args
from buffer_rl.errors import ConfigError, PluginError
from buffer_rl.options.section import dump_args
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import Sample, SampleGroup, Status
from buffer_rl.rollout.context import RolloutContext
from buffer_rl.rollout.failures import FailureKind
from buffer_rl.rollout.lease import NO_CONTEXT
from buffer_rl.rollout.options import generate_path
from buffer_rl.rollout.reward_pool import Outcome, RewardPool
from buffer_rl.rollout.reward_process import RewardTarget
from buffer_rl.rollout.scoring import MODEL
from buffer_rl.rollout.user_functions import is_async
from buffer_rl.verbs.row_sources import RowSource, Trial, TriedRow, at_row

NUM_SCORED = 3
"""Rows of a source whose answers are scored."""
SCORES_S = 20.0
"""After so long no other row is scored."""
LABEL, EMPTY, CUT = "label", "empty", "truncated"
FORMS = ("\\boxed{{{}}}", "Answer: {}", "#### {}", "<answer>{}</answer>")
"""How rewards ask for an answer that is no label as it is."""
OFF = "--no-trial starts without this trial"


async def score_sources(
    context: RolloutContext, registry: PluginRegistry, sources: Sequence[RowSource], trial: Trial
) -> None:
    """Score answers to a few rows of each source. Raises PluginError for a reward that fails or returns what it must
    not; ConfigError if there is none."""
    args = context.args
    pool = RewardPool(dump_args(args), num_workers=1, timeout_s=args.rm_timeout_s, stdout=2)
    try:
        for source in sources:
            try:
                reason = await _score_source(context, registry, pool, source, trial)
            except PluginError as error:
                if generate_path(args) is None:
                    raise
                reason = f"on an answer that {generate_path(args)} did not give: {error.where}: "
                reason += error.what.partition("\n")[0]
            if reason:
                trial.unchecked.append(f"rewards of {source.use} ({reason})")
    finally:
        await pool.aclose()


async def _score_source(
    context: RolloutContext, registry: PluginRegistry, pool: RewardPool, source: RowSource, trial: Trial
) -> str:
    """Score a few rows. Returns why it was not done; empty if it was."""
    args, scorer = context.args, context.scorer
    if args.rm_url is not None or args.rm_servers:
        return "they ask the server of --rm-url"
    begun, scored = time.monotonic(), []
    for row in source.spread(NUM_SCORED):
        sample = source.sample(row)
        if args.use_opd and not scorer.scores(sample):
            return "the teacher is all that there is to learn from"
        try:
            with at_row(source, row):
                targets = scorer.targets_of(sample, source.eval_set.chosen_reward() or "" if source.eval_set else "")
        except ConfigError:
            if generate_path(args) is None:
                raise
            return f"{generate_path(args)} scores"
        if MODEL in targets:
            return "--rm-model scores them"
        with at_row(source, row):
            prompt_ids, end = context.prompts.encode(sample), context.tokenizer.eos_token_id
            if context.renders:
                sample.prompt = context.prompts.rendered(sample)
            answers = answers_to(sample, prompt_ids, context.prompts.encode_text, end)
        for target in targets:
            at, reward = source.dataset.where(row), target.reference
            of_row = at if sample.label is not None else f"{at}, a row without a label"
            found = await score_answers(args, registry, pool, target, answers, where=of_row)
            if found is None:
                return f"{reward} needs what exists only while a rollout runs"
            scored.append(TriedRow(use=source.use, where=at, reward=reward, scores=found))
            if LABEL in found and not _is_best(found) and not target.of_group:
                await _try_forms(args, pool, target, answers[LABEL], scored[-1])
        if time.monotonic() - begun > SCORES_S:
            break
    trial.rows += scored
    trial.notices += judged(scored)
    return ""


def answers_to(
    sample: Sample, prompt_ids: list[int], encode: Callable[[str], list[int]], end: int | None
) -> dict[str, Sample]:
    """Answers to the row, by name: the label if it is text, nothing, and half an answer that was cut. encode: of text,
    to token ids; end: the token that ends a response."""
    label = label_text(sample.label)
    text = label or str(sample.prompt)
    chosen = {LABEL: (label, Status.COMPLETED)} if label else {}
    chosen |= {EMPTY: ("", Status.COMPLETED), CUT: (text[: len(text) // 2], Status.TRUNCATED)}
    answers = {}
    for index, (name, (response, status)) in enumerate(chosen.items()):
        ids = encode(response) + ([end] if status is Status.COMPLETED and end is not None else [])
        answer = sample.as_prompt(index)
        answer.tokens, answer.response, answer.response_length = [*prompt_ids, *ids], response, len(ids)
        answer.rollout_log_probs, answer.status = [0.0] * len(ids), status
        answers[name] = answer
    return answers


def label_text(label: Any) -> str:
    """The label, or the first of several, as the text of an answer; empty if it is none."""
    first = label[0] if isinstance(label, list) and label else label
    return str(first) if isinstance(first, str | int | float) else ""


async def score_answers(
    args: Args,
    registry: PluginRegistry,
    pool: RewardPool,
    target: RewardTarget,
    answers: Mapping[str, Sample],
    *,
    where: str,
) -> dict[str, float] | None:
    """The score of each answer to the row at ``where``; None for an asynchronous reward that needs a rollout, within
    which a run calls it. Raises PluginError if it fails."""
    samples = list(answers.values())
    group = SampleGroup(uid=samples[0].row_id.uid, samples=samples)
    items: Sequence[Sample | SampleGroup] = [group] if target.of_group else samples
    outcomes = await pool.score(target, items)
    for name, outcome in zip(["group"] if target.of_group else answers, outcomes, strict=True):
        if outcome.kind not in (None, FailureKind.ABSTAINED):
            if NO_CONTEXT in outcome.text and is_async(target.resolve(registry)):
                return None
            raise _failed(target, outcome, f"{where}, {_shown(name, answers)}")
    values = outcomes[0].value if target.of_group else [outcome.value for outcome in outcomes]
    scores = {}
    for (name, sample), value in zip(answers.items(), values, strict=True):
        if value is None:  # it abstains
            continue
        sample.reward = value
        try:
            scores[name] = sample.get_reward_value(args)
        except ValueError as error:
            text = str(error).partition(": ")[2] or str(error)
            raise _failed(target, Outcome(text=text), f"{where}, {_shown(name, answers)}") from error
    return scores


def _shown(name: str, answers: Mapping[str, Sample]) -> str:
    return f"the {name} answer {answers[name].response!r:.60}" if name in answers else "a group of three answers"


def _failed(target: RewardTarget, outcome: Outcome, at: str) -> PluginError:
    where = f"{target.kind} {target.reference!r}, {at}"
    hint = outcome.hint or ("" if outcome.expected else OFF)
    return PluginError(outcome.text, where=where, expected=outcome.expected, hint=hint)


async def _try_forms(args: Args, pool: RewardPool, target: RewardTarget, answer: Sample, row: TriedRow) -> None:
    """Write the label in the forms that rewards ask for, until one scores better than other answers."""
    samples = [answer.changed(response=form.format(answer.response)) for form in FORMS]
    for form, outcome in zip(FORMS, await pool.score(target, samples), strict=True):
        with suppress(ValueError):  # of no reward, or of a mapping of other names
            score = answer.changed(reward=outcome.value).get_reward_value(args)
            if score > row.scores[LABEL]:
                row.scores[LABEL], row.form = score, form


def _is_best(scores: Mapping[str, float]) -> bool:
    return all(scores[LABEL] > score for name, score in scores.items() if name != LABEL)


def judged(rows: Sequence[TriedRow]) -> list[str]:
    """Notices about rewards that do not tell the answers of ``rows``, of one source, apart."""
    with_label = [row for row in rows if LABEL in row.scores]
    values = {score for row in with_label for score in row.scores.values()}
    if len(values) == 1:
        what = f"the reward {with_label[0].reward!r} gives {values.pop():g} to every answer that was tried"
        tried = f"{with_label[0].use}: labels, empty and truncated answers"
        return [f"{what} ({tried}): equal rewards train nothing"]
    for row in with_label:
        if not _is_best(row.scores):
            shown = ", ".join(f"{name} {row.scores[name]:g}" for name in sorted(row.scores, key=lambda n: n != LABEL))
            what = f"the reward {row.reward!r} does not score the label best at {row.where}: {shown}"
            return [f"{what} (the label was tried as it is, and as \\boxed{{}} or 'Answer: ')"]
    return []
