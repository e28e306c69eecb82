"""``buffer-rl generate``: ask a model, with the engine and the sampling of a training run, but without a run."""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

from buffer_rl.args import Args
from buffer_rl.cluster.environment import direct_variables, variables
from buffer_rl.cluster.process import starts_engines, with_engine_key
from buffer_rl.data.dataset import RowKeys
from buffer_rl.data.options import check_template_kwargs
from buffer_rl.data.reader import read_dataset
from buffer_rl.errors import DataError
from buffer_rl.files.checkpoint import opened_checkpoint
from buffer_rl.files.hf_config import max_positions, read_config
from buffer_rl.observe.terminal import say
from buffer_rl.options.checks import refuse
from buffer_rl.options.help import add_config_flag, add_help, add_options, keep_in_help, reword_help
from buffer_rl.options.section import flag_of, required
from buffer_rl.options.sources import Resolved, Source, resolve_namespace
from buffer_rl.plan.counts import with_counts
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import GroupUid, Sample, prompt_copies
from buffer_rl.rollout.prompts import PromptEncoder, load_tokenizer
from buffer_rl.verbs.engine_checks import check_engines
from buffer_rl.verbs.preflight import check_folders, with_local_paths
from buffer_rl.verbs.row_sources import RowSource, encode_row
from buffer_rl.verbs.table import print_notices
from buffer_rl.verbs.train import plugins_named, sections_of

if TYPE_CHECKING:
    from buffer_rl.engines.fleet import EngineFleet

T = TypeVar("T")

FLEET_CHECK_S = 1.0
_PLAYERS = ("agent_path", "agent_command", "tools_path", "environment", "custom_generate_function_path")
_SHOWN = ("sample_index", "prompt", "label", "response", "status")
_DESCRIPTION = """\
Sample responses to prompts, as the rollouts of a run would. The options, their file (--config) and their variables
are those of train; --load CHECKPOINT asks the model of a checkpoint. Options that have nothing to do with sampling
change nothing.
"""
_ACTS = """plugin load hf_checkpoint trust_remote_code deterministic prompt_data input_key label_key metadata_key
tool_key id_key multimodal_keys decode_json add_special_tokens apply_chat_template apply_chat_template_kwargs
rollout_seed rollout_temperature rollout_top_p rollout_top_k rollout_min_p rollout_max_response_len
rollout_max_context_len rollout_stop rollout_stop_token_ids rollout_skip_special_tokens rollout_concurrency
generate_timeout_s"""
_MEANINGS = {
    "load": "model to ask: a checkpoint, or a folder or URL of them, then the newest",
    "hf_checkpoint": "model and tokenizer to ask: a folder, or a name of the Hub",
    "prompt_data": "prompts: all rows of these .jsonl or .parquet files (also compressed), folders, patterns "
    "('data/*.parquet') or folders of Hugging Face datasets; PATH@[start:end] is a slice. Local paths, URLs that "
    "fsspec reaches, or hf://datasets/ORG/NAME",
    "deterministic": "equal seeds give equal responses, at some cost in speed (default: false)",
    "rm_type": "also score responses to rows of --prompt-data, by this registered reward function, for example math; "
    "rows may choose another one of --row-rm-types (default: none)",
    "custom_rm_path": "also score responses to rows of --prompt-data, by your reward function: module:fn or "
    "./file.py:fn (default: none)",
}
"""What these options of a run mean here."""
_ACTING_SECTIONS = ("Engine", "SGLang", "Reward")


def add_parser(subparsers: argparse._SubParsersAction[Any], argv: Sequence[str]) -> None:
    """Add the verb."""
    sections = sections_of(plugins_named(argv))
    usage = "buffer-rl generate (--hf-checkpoint FOLDER | --load CHECKPOINT) (--prompt TEXT | --prompt-data FILE)"
    usage += " [-n INT] [--json]"
    parser = subparsers.add_parser("generate", description=_DESCRIPTION, usage=usage, add_help=False)
    add_help(parser, sections)
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be given again")
    parser.add_argument("-n", type=_count, default=1, metavar="INT", help="number of responses per prompt (default: 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per response")
    add_config_flag(parser)
    add_options(parser, sections)
    keep_in_help(parser, lambda heading, name: heading in _ACTING_SECTIONS or name in _ACTS.split())
    reword_help(parser, _MEANINGS)
    parser.set_defaults(run=run, sections=sections)


def run(namespace: argparse.Namespace) -> int:
    """Start an engine, ask it, print, and stop it. Raises BufferRLError."""
    resolved = resolve_namespace(namespace)
    print_notices([*resolved.notices, *_left_out(resolved)])
    with ExitStack() as stack:
        args = with_counts(_without_rows_of_file(resolved) if namespace.prompt else resolved.args)
        what = "--load and --router-url: the engines there serve weights of their own, not the checkpoint's"
        hint = "leave out one of them; buffer-rl eval publishes the checkpoint to the engines first"
        refuse(args.load and not starts_engines(args), what, hint)
        if args.load:
            checkpoint = stack.enter_context(opened_checkpoint(args.load))
            args = args.model_copy(update={"hf_checkpoint": str(checkpoint.folder / "hf")})
        answers = _answers(args, namespace)
    for answer in answers:
        _print(answer, as_json=namespace.json)
    return 0


def _left_out(resolved: Resolved) -> list[str]:
    """What is said of an agent that the file of a run names; of a flag it is said already."""
    of_file = [name for name in _PLAYERS if resolved.origins[name].source is not Source.FLAG]
    players = ", ".join(flag_of(name) for name in of_file if getattr(resolved.args, name))
    what = "is left out: each prompt is asked once, without the tools of a run. buffer-rl eval plays it"
    return [f"{players} {what}"] if players else []


def _answers(args: Args, namespace: argparse.Namespace) -> list[dict[str, Any]]:
    from buffer_rl.engines.fleet import EngineFleet

    refuse(not args.hf_checkpoint, "--hf-checkpoint: there is no model to ask", "add --hf-checkpoint PATH")
    unused = ("ref_load", "opd_teacher_load", "critic_load", "load", "save")
    registry = PluginRegistry.from_flags(args.plugin)
    args = with_local_paths(args.model_copy(update=dict.fromkeys(unused)), registry)
    check_folders(args)
    if args.data_source_path is not None:
        args = args.model_copy(update={"prompt_data": None})  # which that source reads, in its own way
        what = "--data-source-path: a data source of your own has no end, and is not asked for prompts here"
        refuse(not namespace.prompt, what, "add --prompt TEXT, or '--data-source-path none --prompt-data FILE'")
    hint = "add --prompt TEXT or --prompt-data FILE"
    refuse(not (namespace.prompt or args.prompt_data), "--prompt: there is no prompt", hint)
    check_template_kwargs(args.apply_chat_template_kwargs)
    samples, encoder = _prompt_samples(args, namespace.prompt, namespace.n)
    rewarded = samples[len(namespace.prompt) * namespace.n :]  # a text has nothing to compare an answer with
    args = _within_context(args)
    check_engines(args, registry)
    args = with_engine_key(args)
    with (
        variables(direct_variables(args)),
        tempfile.TemporaryDirectory(prefix="buffer-rl-") as logs,
        EngineFleet(args, logs, registry) as fleet,
    ):
        fleet.wait_ready()
        args = args.model_copy(update=fleet.addresses)
        answers = asyncio.run(_while_engines_last(fleet, _answers_of_engine(args, samples, encoder)))
    asyncio.run(_score(args, registry, rewarded))
    for sample, answer in zip(samples, answers, strict=True):
        if sample.reward is not None:
            answer["reward"] = sample.reward
    return answers


async def _score(args: Args, registry: PluginRegistry, samples: Sequence[Sample]) -> None:
    """Set the rewards that a run of these options gives, prompt by prompt; what cannot be scored is a notice. Nothing
    without a reward, and with ``--rm-model``, whose processes are not started here."""
    from buffer_rl.rollout.scoring import Scorer

    scorer = Scorer(args, registry)
    if args.rm_model:
        return
    try:
        for _, group in groupby(samples, key=lambda sample: sample.uid):
            scored = [sample for sample in group if args.custom_group_rm_path or scorer.scores(sample)]
            print_notices([str(failure.error) for failure in await scorer.score(scored)])
    finally:
        await scorer.aclose()


def _without_rows_of_file(resolved: Resolved) -> Args:
    """Options without the training prompts of a run's file: who asks with ``--prompt`` wants no answer to each of them.
    Those of a flag stay."""
    if resolved.origins["prompt_data"].source is Source.FLAG:
        return resolved.args
    return resolved.args.model_copy(update={"prompt_data": None})


def _within_context(args: Args) -> Args:
    """The default number of response tokens, which may be too many for the model, is cut to what it takes."""
    config = read_config("--hf-checkpoint", required(args.hf_checkpoint, "hf_checkpoint"))
    limits = (args.rollout_max_context_len, args.engine_context_length, max_positions(config))
    if "rollout_max_response_len" in args.model_fields_set or not any(limits):
        return args
    return args.model_copy(update={"rollout_max_context_len": min(filter(None, limits))})


async def _while_engines_last(fleet: EngineFleet, answers: Coroutine[Any, Any, T]) -> T:
    """What ``answers`` returns. Raises EngineError as soon as no engine is left."""
    task = asyncio.create_task(answers)
    while not (await asyncio.wait([task], timeout=FLEET_CHECK_S))[0]:
        fleet.check()
    return task.result()


def _prompt_samples(args: Args, texts: Sequence[str], count: int) -> tuple[list[Sample], PromptEncoder]:
    """``count`` samples for each text, then for each row of ``args.prompt_data``, and what has encoded their prompts.
    Raises DataError, naming the file and the line of a prompt that cannot be encoded: before an engine is started."""
    tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=args.trust_remote_code)
    encoder = PromptEncoder.from_args(args, tokenizer)
    is_chat = getattr(tokenizer, "chat_template", None) and "apply_chat_template" not in args.model_fields_set
    if texts and is_chat:
        print_notices(["--prompt is a message of the user; --no-apply-chat-template sends it as plain text"])
    prompts = [
        Sample(uid=GroupUid("prompt", row, 0), prompt=[{"role": "user", "content": text}] if is_chat else text)
        for row, text in enumerate(texts)
    ]
    for number, sample in enumerate(prompts, start=1):
        try:
            encoder.encode(sample)
        except DataError as error:
            error.where = f"--prompt, number {number}"
            raise
    for path in args.prompt_data or ():
        source = RowSource(use="train", path=path, dataset=read_dataset(path, RowKeys.from_args(args)))
        for row in source.dataset:
            encode_row(encoder, source, row)
            prompts.append(source.sample(row))
    return [prompt for sample in prompts for prompt in prompt_copies(sample, count)], encoder


async def _answers_of_engine(args: Args, samples: Sequence[Sample], encoder: PromptEncoder) -> list[dict[str, Any]]:
    """One answer a sample, in their order: uid, sample_index, prompt, label, response, status and its tokens' number.
    The samples have their responses then.

    args: with ``router_url`` and ``engine_urls``. Raises EngineError and DeadlineError.
    """
    from buffer_rl.engines.client import EngineClient
    from buffer_rl.rollout.generate import room_for, sampling_params_for
    from buffer_rl.rollout.requests import sampling_seed

    gate = asyncio.Semaphore(args.rollout_concurrency)
    params = sampling_params_for(args, evaluation=False)
    async with EngineClient.from_args(args) as client:

        async def answer(sample: Sample) -> dict[str, Any]:
            prompt_ids = encoder.encode(sample)
            room = room_for(args, sample, len(prompt_ids), params["max_new_tokens"])
            seed = sampling_seed(args.rollout_seed, sample.row_id.uid, sample.sample_index)
            async with gate:
                chosen = {**params, "max_new_tokens": room, "sampling_seed": seed}
                result = await client.agenerate(f"ask:{sample.row_id}", prompt_ids, chosen)
            sample.tokens, sample.response = [*prompt_ids, *result.output_ids], result.text
            sample.response_length, sample.status = len(result.output_ids), result.status
            shown = {name: getattr(sample, name) for name in _SHOWN}
            return {"uid": str(sample.uid), **shown, "tokens": sample.response_length}

        tasks = [asyncio.create_task(answer(sample)) for sample in samples]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # after the first error the others need not end
                task.cancel()


def _print(answer: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        say(json.dumps(answer, ensure_ascii=False))
        return
    if answer["sample_index"] == 0:
        for name in ("prompt", "label"):
            if (value := answer[name]) is not None:
                say(f"{name}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}")
    reward = f", reward {json.dumps(answer['reward'])}" if "reward" in answer else ""
    say(f"  [{answer['sample_index']}, {answer['status']}, {answer['tokens']} tokens{reward}] {answer['response']}")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= 1")
    return int(text)
