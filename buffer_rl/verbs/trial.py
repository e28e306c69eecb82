"""A trial of a few rows before a run starts: they are rendered and encoded, and answers to them are scored.

No engine and no model is loaded. This module imports what the command line must not wait for.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
import time
from collections.abc import Sequence
from itertools import compress
from typing import Any

from buffer_rl.args import Args
from buffer_rl.data.dataset import PromptRow
from buffer_rl.data.reader import MAX_PROBLEMS
from buffer_rl.errors import BufferRLError, ConfigError, DataError
from buffer_rl.files.hf_config import read_config, vocab_size
from buffer_rl.options.redaction import mask_url
from buffer_rl.options.section import flag_of, load_args
from buffer_rl.plan.algorithm import is_supervised, loss_flag, loss_of
from buffer_rl.plan.schedule import train_only
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.rollout.context import RolloutContext
from buffer_rl.rollout.options import generate_path, is_built_in_rollout
from buffer_rl.rollout.prompts import load_tokenizer
from buffer_rl.rollout.sft import SFTRollout, fill, is_conversation
from buffer_rl.verbs.engine_checks import ContextLimit, check_eval_prompts
from buffer_rl.verbs.preflight import model_folders
from buffer_rl.verbs.reward_trial import score_sources
from buffer_rl.verbs.row_sources import RowSource, Trial, TriedPrompts, at_row, encode_row, is_evaluation, read_rows

MAX_WALKED = 50_000
"""Rows of a source among which the longest is looked for."""
MAX_ENCODED = 1000
"""Prompts of a source whose lengths are compared with a limit."""
MASKS_S = 30.0
"""Time for the answers of all supervised rows; those of others are checked as they are trained on."""
Limit = tuple[int, str, str]
"""Tokens that a training prompt may have, what says so, and what becomes of a longer one."""


def try_rows(
    args: Args, registry: PluginRegistry, sources: Sequence[RowSource], engines: Sequence[ContextLimit]
) -> Trial:
    """Encode and score a few rows of each source, and make the loss masks of all conversations.

    engines: their limits, of which that of a prompt counts here.

    Raises DataError, naming file and line, for a row that cannot be used; ConfigError for a tokenizer that does not fit
    the model, and for a limit that no prompt meets; PluginError for a reward that fails or returns what it must not.
    """
    trial = Trial()
    if train_only(args):
        trial.unchecked.append("prompts and rewards (recorded rollouts have both)")
        return trial
    tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=args.trust_remote_code)
    trial.tokens = len(tokenizer)
    if args.custom_model_provider_path is None:
        check_vocabulary(args, tokenizer, trial)
    if args.data_source_path is not None and args.num_rollout != 0:
        trial.unchecked.append("training prompts (--data-source-path gives them)")

    async def try_all() -> None:
        context = RolloutContext.build(args, registry=registry, engine=None, tokenizer=tokenizer)
        limits = prompt_limits(args, () if _is_sft(args, registry) else engines)
        own, scored = generate_path(args), []
        try:
            for source in sources:
                if not is_evaluation(source) and args.num_rollout == 0:
                    continue
                if reason := _own_function(args, registry, source):
                    trial.unchecked.append(f"prompts and rewards of {source.use} ({reason})")
                    continue
                supervised = not is_evaluation(source) and _is_sft(args, registry)
                try:
                    if supervised:
                        if not is_supervised(args):
                            trial.notices.append(_without_rewards(args))
                        trial.prompts.append(try_answers(context, source, limits, trial))
                        continue
                    trial.prompts.append(try_prompts(context, source, () if is_evaluation(source) else limits))
                    scored.append(source)
                except DataError as error:
                    if own is None or supervised:
                        raise
                    trial.unchecked.append(f"prompts of {source.use} ({own} may encode what fails here: {error.what})")
            check_lengths(limits, trial)
            check_templates(trial)
            await score_sources(context, registry, scored, trial)
        finally:
            await context.aclose()

    asyncio.run(try_all())
    return trial


def check_vocabulary(args: Args, tokenizer: Any, trial: Trial) -> None:
    """Raises ConfigError if the tokenizer has tokens for which a model of the run has no embedding. A model may have
    more rows than there are tokens, and special tokens beyond them that no text uses are common."""
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    special -= {tokenizer.eos_token_id, tokenizer.pad_token_id}
    tokens = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    for name, folder in model_folders(args):
        rows = vocab_size(read_config(flag_of(name), folder))
        beyond = [(number, token) for number, token in tokens if rows is not None and number >= rows]
        used = [(number, token) for number, token in beyond if number not in special]
        where = f"{flag_of(name)} {folder}"
        if used:
            number, token = used[0]
            what = (
                f"{len(used)} tokens of the tokenizer have ids that the model does not have, such as {token!r} with "
                f"{number}"
            )
            expected = f"ids below {rows}, the vocab_size in config.json"
            hint = "the tokenizer of another model; or tokens were added and the embedding was not resized"
            raise ConfigError(what, where=where, expected=expected, hint=hint)
        if beyond:
            trial.notices.append(
                f"{where}: the model has {rows} embedding rows, and none for {len(beyond)} special tokens, such as "
                f"{beyond[0][1]!r}: a prompt that holds one cannot be computed"
            )


def _without_rewards(args: Args) -> str:
    loss = f"{loss_flag(args)} {loss_of(args)}"
    what = f"--rollout-function-path sft gives no rewards, and {loss} is not the supervised loss"
    return f"{what}: if it trains by rewards, nothing is learned; the loss on the answers is --loss-type sft_loss"


def _is_sft(args: Args, registry: PluginRegistry) -> bool:
    return registry.resolve("rollout", args.rollout_function_path) is SFTRollout


def _own_function(args: Args, registry: PluginRegistry, source: RowSource) -> str:
    """The reason why nothing is known of what becomes of the source's rows; empty if it is known."""
    chosen = args.eval_function_path if is_evaluation(source) and args.eval_function_path else None
    reference = chosen or args.rollout_function_path
    function = registry.resolve("rollout", reference)
    if function is SFTRollout or is_built_in_rollout(args.model_copy(update={"rollout_function_path": reference})):
        return ""
    return f"the rollout function {reference} reads them in its own way"


def try_prompts(context: RolloutContext, source: RowSource, limits: Sequence[Limit]) -> TriedPrompts:
    """Render and encode the first and the longest prompt, and many others if the longest exceeds a limit."""
    first, longest = source.dataset[0], max(source.spread(MAX_WALKED), key=_size)
    text = source.rendered(first, context.prompts)
    found = TriedPrompts(use=source.use, text=text, templated=text != first.prompt)
    rows = {first.row: first, longest.row: longest}
    for row in rows.values():
        found.add(len(encode_row(context.prompts, source, row)), source.dataset.where(row))
    if any(found.longest > limit for limit, _, _ in limits):
        for row in (other for other in source.spread(MAX_ENCODED) if other.row not in rows):
            found.add(len(encode_row(context.prompts, source, row)), source.dataset.where(row))
    return found


def _size(row: PromptRow) -> int:
    """Characters of the prompt, about."""
    prompt = row.prompt
    return len(prompt) if isinstance(prompt, str) else sum(len(str(message)) for message in prompt)


def try_answers(context: RolloutContext, source: RowSource, limits: Sequence[Limit], trial: Trial) -> TriedPrompts:
    """Make training rows of supervised rows: of all conversations; of the others, of which a label is all that is
    needed, the first, the longest, and as many as a limit of their length needs."""
    dataset, args = source.dataset, context.args
    unlimited = args.model_copy(update={"rollout_max_prompt_len": None})
    chosen = {0, max(source.spread(MAX_WALKED), key=_size).row}
    chosen |= {row.row for row in source.spread(MAX_ENCODED)} if limits else set()
    found, bad, endless = TriedPrompts(use=source.use), list[DataError](), list[str]()
    special = {*context.tokenizer.all_special_ids}
    ends = time.monotonic() + MASKS_S
    for row in dataset:
        if row.row not in chosen and isinstance(row.label, str) and row.label:
            continue
        if time.monotonic() > ends:
            trial.unchecked.append(f"answers of the last {len(dataset) - row.row} rows of {mask_url(source.path)}")
            break
        sample = source.sample(row)
        try:
            with at_row(source, row):
                fill(unlimited, context.prompts, sample)
        except DataError as error:
            bad.append(error)
            continue
        if is_conversation(sample):
            found.masks += 1
            answer = compress(sample.tokens[-sample.response_length :], sample.loss_mask or ())
            if [*answer][-1] not in special:
                endless.append(dataset.where(row))
        if row.row == 0:
            found.text = context.tokenizer.decode(sample.tokens)
        found.add(len(sample.tokens) - sample.response_length, dataset.where(row))
    if bad:
        first, *others = bad
        lines = [first.what, *(f"{error.where}: {error.what}" for error in others[: MAX_PROBLEMS - 1])]
        lines += [f"... and {len(bad) - MAX_PROBLEMS} more rows"] if len(bad) > MAX_PROBLEMS else []
        raise DataError("\n".join(lines), where=first.where, expected=first.expected, hint=first.hint)
    if endless:
        trial.notices.append(
            f"the last answer of {len(endless)} of {found.masks} conversations ends without a special token "
            f"({endless[0]}), so it does not teach the model to stop: the chat template writes none there"
        )
    return found


def prompt_limits(args: Args, engines: Sequence[ContextLimit]) -> list[Limit]:
    """The limits of training prompts."""
    limits = [(limit.prompt, limit.of, "is refused by the engines, so its group fails") for limit in engines]
    if args.rollout_max_context_len is not None:
        what = "leaves no room for a response, so its group fails"
        limits.append((args.rollout_max_context_len - 1, flag_of("rollout_max_context_len"), what))
    longest: int | None = args.rollout_max_prompt_len
    if longest is None:
        return limits
    others = [limit for limit in limits if limit[0] < longest]  # what is longer is rejected before it meets them
    return [(longest, flag_of("rollout_max_prompt_len"), "is rejected (prompt_too_long)"), *others]


def check_lengths(limits: Sequence[Limit], trial: Trial) -> None:
    """Raises ConfigError if no training prompt is short enough; a notice counts those that are not."""
    lengths = [length for prompts in trial.prompts if prompts.use == "train" for length in prompts.lengths]
    hint = "the chat template and a row's tools are part of the prompt"
    for limit, of, what in limits if lengths else ():
        long = sum(length > limit for length in lengths)
        counted = f"{long} of {len(lengths)} training prompts that were encoded have more than {limit} tokens"
        expected = f"at least {min(lengths)}, the tokens of the shortest"
        if long == len(lengths):
            raise ConfigError(counted, where=of, expected=expected, hint=hint)
        if long:
            trial.notices.append(f"{counted} ({of}); such a prompt {what}")


def check_templates(trial: Trial) -> None:
    """A notice for each evaluation set that is asked with the chat template if training is not, or the reverse."""
    ways = {True: "with the chat template", False: "as plain text"}
    trained = {prompts.templated for prompts in trial.prompts if prompts.use == "train"}
    for prompts in trial.prompts:
        if prompts.templated is not None and trained == {not prompts.templated}:
            trial.notices.append(
                f"the prompts of {prompts.use} are read {ways[prompts.templated]}, those of training "
                f"{ways[not prompts.templated]}; --apply-chat-template renders texts, too"
            )


def main(given: str, answer: str) -> None:
    """The trial in a process of its own: read what ``TrialProcess`` has written to ``given``, write what was found, or
    the error, to ``answer``."""
    with open(given, "rb") as file:
        args_text, engines, sys.path[:] = pickle.load(file)
    args = load_args(args_text)
    registry = PluginRegistry.from_flags(args.plugin)
    try:
        sources = read_rows(args)
        check_eval_prompts(args, engines, sources)
        found: Trial | BufferRLError = try_rows(args, registry, sources, engines)
    except BufferRLError as error:
        found = error
    with open(answer, "wb") as file:
        pickle.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
