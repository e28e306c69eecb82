"""What the engines of a run can do of what its options ask for, looked at before anything starts.

Engines that the run starts are asked by way of their launcher, others by their ``/server_info``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from buffer_rl.args import Args
from buffer_rl.cluster.process import starts_engines
from buffer_rl.data.eval_sets import eval_sets_of
from buffer_rl.engines.control import EngineControlClient
from buffer_rl.engines.external import urls_of
from buffer_rl.errors import ConfigError, DataError
from buffer_rl.files.hf_config import max_positions, read_config
from buffer_rl.options.checks import refuse
from buffer_rl.options.section import flag_of, required
from buffer_rl.plan.algorithm import is_supervised
from buffer_rl.plan.schedule import train_only
from buffer_rl.plugin.calls import call
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import Prompt
from buffer_rl.rollout.options import generate_path, is_built_in_rollout
from buffer_rl.rollout.prompts import PromptEncoder, load_tokenizer
from buffer_rl.verbs.row_sources import RowSource, encode_row, is_evaluation

ASK_TIMEOUT_S = 20.0
MAX_REPORTED = 10
TEMPLATE_BYTES = 1024  # more than what a chat template adds to a message; templates with tools are longer
PROMPT_MARGIN, SEQUENCE_MARGIN = 7, 2
"""Tokens of its context C that a SGLang server (0.5.23) lets no prompt, and no prompt with its response, fill: it ends
responses at C - 2, and refuses requests for more than C."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLimit:
    """The longest prompt, and the longest prompt and response together, in tokens. of: what says so, for the user."""

    prompt: int
    sequence: int
    of: str


def check_engines(args: Args, registry: PluginRegistry) -> list[ContextLimit]:
    """The limits of the engines. Raises ConfigError if they cannot serve what the options ask for, EngineError if one
    that runs elsewhere does not answer, and PluginError."""
    if train_only(args) or (is_supervised(args) and not _evaluates(args)):
        return []
    if args.router_url is None:
        _check_plugin("router", args.router, args, registry)
    own = max_positions(read_config("--hf-checkpoint", required(args.hf_checkpoint, "hf_checkpoint")))
    if starts_engines(args):
        launcher = _check_plugin("engine", args.rollout_engine, args, registry)
        differs = args.deterministic and not getattr(launcher, "deterministic", False)
        what = f"--deterministic and --rollout-engine {args.rollout_engine}: its engines do not promise equal tokens"
        refuse(differs, what, "--rollout-engine embedded, or a launcher that says so: deterministic = True")
        lengths = {"--engine-context-length": args.engine_context_length, "the model's max_position_embeddings": own}
        known = {of: most for of, most in lengths.items() if most is not None}
        found = [ContextLimit(prompt=most - 1, sequence=most, of=of) for of, most in known.items()]
    else:
        found = _limits_of_servers(args, own)
    _check_lengths(args, found)
    return found


def check_eval_prompts(args: Args, engines: list[ContextLimit], sources: Sequence[RowSource]) -> None:
    """Raises DataError naming the evaluation prompts that leave no room for a response.

    An evaluation over some of its rows could not be compared with others, so such rows are refused, not skipped.
    ``--rollout-max-prompt-len`` is about training prompts. The tokenizer is loaded only if a prompt may be too long.
    """
    limits = [(limit.prompt, limit.of) for limit in engines]
    if args.rollout_max_context_len is not None:
        limits.insert(0, (args.rollout_max_context_len - 1, "--rollout-max-context-len"))
    if not limits or train_only(args) or not _evaluates(args):
        return
    limit, of = min(limits, key=lambda each: each[0])
    rows = [(source, row) for source in sources if is_evaluation(source) for row in source.dataset]
    rows = [(source, row) for source, row in rows if _most_tokens(row.prompt) > limit]
    if not rows:
        return
    tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=args.trust_remote_code)
    encoder = PromptEncoder.from_args(args, tokenizer)
    lengths = [(source.dataset.where(row), len(encode_row(encoder, source, row))) for source, row in rows]
    long = [f"{where}: {length} tokens" for where, length in lengths if length > limit]
    if long:
        more = [f"... and {len(long) - MAX_REPORTED} more"] if len(long) > MAX_REPORTED else []
        what = "\n".join(["evaluation prompts leave no room for a response", *long[:MAX_REPORTED], *more])
        where, expected = "--eval-prompt-data and --eval-config", f"fewer than {limit + 1} tokens ({of})"
        hint = "take the rows out, or raise the limit if the model has room"
        raise DataError(what, where=where, expected=expected, hint=hint)


def _evaluates(args: Args) -> bool:
    return bool(args.eval_prompt_data or args.eval_config)


def _check_plugin(kind: str, reference: str, args: Args, registry: PluginRegistry) -> Any:
    """The launcher of engines or of a router, once its own check has passed."""
    launcher: Any = registry.resolve(kind, reference)
    if (check := getattr(launcher, "check", None)) is not None:
        call(kind, reference, check, args, at="check", error_class=ConfigError)
    return launcher


def _limits_of_servers(args: Args, own: int | None) -> list[ContextLimit]:
    """own: the context of the model, which is that of a server that names none."""
    urls = [*args.engine_urls, *urls_of(args)]
    with EngineControlClient(urls, timeout_s=ASK_TIMEOUT_S, api_key=args.engine_api_key) as control:
        found = control.server_info()
    other = next((url for url, info in found.items() if args.deterministic and not info.deterministic), "")
    what = "--deterministic: the engine {} does not promise equal tokens for equal seeds"
    refuse(other, what, "start embedded engines with --deterministic", "deterministic: true in its /server_info")
    limits = []
    for url, info in found.items():
        if (length := own if info.context_length is None else info.context_length) is not None:
            prompt, sequence = (1, 0) if info.is_ours else (PROMPT_MARGIN, SEQUENCE_MARGIN)
            of = f"{url}, with a context of {length} tokens"
            limits.append(ContextLimit(prompt=length - prompt, sequence=length - sequence, of=of))
    return limits


def _check_lengths(args: Args, limits: list[ContextLimit]) -> None:
    """Raises ConfigError if the engines would refuse requests as too long, or end the responses early. A function of
    the user's may ask for less than the options say."""
    if not limits or not is_built_in_rollout(args) or generate_path(args) is not None:
        return
    limit = min(limits, key=lambda each: each.sequence)
    prompt, most = args.rollout_max_prompt_len, args.rollout_max_context_len
    what = f"--rollout-max-prompt-len: {prompt} tokens are too many for the engines ({limit.of})"
    refuse(prompt is not None and prompt > limit.prompt, what, expected=f"at most {limit.prompt}")
    for where, response, of_prompt in _response_lengths(args):
        longest = min(response + of_prompt, most or response + of_prompt)
        what = f"prompt and response may have {longest} tokens, too many for the engines ({limit.of})"
        hint = f"lower it, or add --rollout-max-context-len {limit.sequence}"
        refuse(longest > limit.sequence, f"{where}: {what}", hint, f"at most {limit.sequence} tokens together")


def _response_lengths(args: Args) -> Iterator[tuple[str, int, int]]:
    """What sets the length of responses, that length, and a length that prompts may have, in tokens."""
    name = "rollout_max_response_len"
    if args.num_rollout != 0:
        yield flag_of(name), getattr(args, name), args.rollout_max_prompt_len or 1
    name = name if args.eval_max_response_len is None else "eval_max_response_len"
    for chosen in eval_sets_of(args):
        if chosen.max_response_len is not None:
            yield f"--eval-config {args.eval_config}, the set {chosen.name!r}", chosen.max_response_len, 1
        else:
            yield flag_of(name), getattr(args, name), 1


def _most_tokens(prompt: Prompt) -> int:
    """More tokens than any tokenizer makes of it: a token is a byte at least."""
    if isinstance(prompt, str):
        return len(prompt.encode()) + TEMPLATE_BYTES
    return sum(len(str(message).encode()) + TEMPLATE_BYTES for message in prompt)
