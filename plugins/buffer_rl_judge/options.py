"""Options of the judge, and their check before anything starts."""

from __future__ import annotations

import math
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import field_validator

from buffer_rl.errors import ConfigError, raised_as
from buffer_rl.options.checks import first, refuse
from buffer_rl.options.redaction import holds_credentials
from buffer_rl.options.section import Section, option
from buffer_rl.plugin.hookspecs import hookimpl

if TYPE_CHECKING:
    from buffer_rl.args import Args

NAMES = ("judge", "judge_rubric", "judge_pairwise")
MODULE = "buffer_rl_judge.reward:"
FIELDS = frozenset({"prompt", "response", "label", "mark"})


class JudgeOptions(Section):
    """The ``judge`` rewards: the model that judges, its limits, and what it is asked."""

    heading: ClassVar[str] = "Judge"

    judge_url: str | None = option(
        None, "OpenAI address of the model that judges: http://HOST:PORT/v1", pattern="^https?://.", metavar="URL"
    )
    judge_model: str = option("judge", "name of the model that judges, as its server knows it")
    judge_api_key: str | None = option(
        None, "key of --judge-url. Set it in the --config file or as BUFFER_RL_JUDGE_API_KEY, never as a flag"
    )
    judge_params: dict[str, Any] = option(
        {"temperature": 0, "max_tokens": 1024}, "further fields of each request, as JSON or FILE.yaml", metavar="JSON"
    )
    judge_prompt: str | None = option(
        None,
        "text file with the request of the reward 'judge': $prompt, $response, $label, and $mark around them; by "
        "default a mark from 0 to 10",
        metavar="FILE",
    )
    judge_opponents: int = option(
        2, "judge_pairwise: number of other responses to the same prompt that each is compared with", ge=1
    )
    judge_concurrency: int = option(16, "maximum number of requests at once, over all rollout workers", ge=1)
    judge_requests_per_minute: int | None = option(
        None, "maximum number of requests per minute, over all rollout workers", ge=1
    )
    judge_tokens_per_minute: int | None = option(
        None, "maximum number of tokens of requests and answers per minute, over all rollout workers", ge=1
    )

    @field_validator("judge_url")
    @classmethod
    def _has_no_credentials(cls, value: str | None) -> str | None:
        if value and holds_credentials(value):
            raise ValueError("an address here has no credentials: set BUFFER_RL_JUDGE_API_KEY")
        return value

    @staticmethod
    def check(args: Any) -> None:
        """For a judge without an address, with a prompt that cannot be filled in, or with limits under which its
        rewards miss their deadline."""
        from buffer_rl.data.eval_sets import rewards_named  # needs packages that naming a plugin does not

        chosen = next((name for name in rewards_named(args) if name in NAMES or name.startswith(MODULE)), "")
        if not chosen:
            return
        what, hint = f"--judge-url: the reward {chosen!r} has no judge", "add --judge-url http://HOST:PORT/v1"
        refuse(args.judge_url is None, what, hint)
        if args.judge_prompt is not None:
            prompt_of(args.judge_prompt)
        pairwise = "pairwise" in chosen
        if pairwise:
            _check_pairs(args)
        _check_limits(args, pairwise=pairwise)


if TYPE_CHECKING:

    class JudgeArgs(Args, JudgeOptions):
        """The options of a run with those of this plugin, for a type checker."""


@hookimpl
def buffer_rl_add_options() -> list[str]:
    """The section above, by reference."""
    return [f"{__name__}:JudgeOptions"]


def prompt_of(path: str) -> Template:
    """The template in a file. Raises ConfigError if it cannot be read, names another field, or leaves the response
    out."""
    where, expected = f"--judge-prompt {path}", "$response, and perhaps $prompt, $label and $mark; a dollar sign is $$"
    with raised_as(ConfigError, "the prompt cannot be read", (OSError, UnicodeDecodeError), where=where):
        template = Template(Path(path).read_text(encoding="utf-8"))
    fields = set(template.get_identifiers()) if template.is_valid() else set()
    bad = "response" not in fields or bool(fields - FIELDS)
    refuse(bad, f"{where}: the prompt has other fields, or no response", expected=expected)
    return template


def _check_pairs(args: JudgeArgs) -> None:
    """One response to a prompt has no other to be compared with."""
    from buffer_rl.data.eval_sets import eval_sets_of  # its readers need packages that naming a plugin does not

    evaluated = [each.n_samples_per_eval_prompt or args.n_samples_per_eval_prompt for each in eval_sets_of(args)]
    alone = {
        "--n-samples-per-prompt": args.n_samples_per_prompt == 1,
        "--n-samples-per-eval-prompt": 1 in evaluated,
        "--advantage-estimator remax": args.advantage_estimator == "remax",
    }
    what = "{}: judge_pairwise compares the responses to a prompt, and there is one"
    refuse(first(alone), what, "or another reward", "at least two")


def _check_limits(args: JudgeArgs, *, pairwise: bool) -> None:
    """A step's rewards are asked for at about the same time, and each has ``--rm-timeout-s``."""
    limit, samples, most = args.judge_requests_per_minute, args.n_samples_per_prompt, args.rm_timeout_s
    each = 2 * min(args.judge_opponents * samples, samples * (samples - 1) // 2) if pairwise else samples
    number = args.rollout_batch_size * each
    seconds, where = 60 * number / (limit or math.inf), "--judge-requests-per-minute"
    what = f"{where}: the {number} requests of a step take {seconds:.0f} s at {limit}, and a reward has {most:g} s"
    refuse(seconds > most, what, f"--rm-timeout-s {2 * seconds:.0f}, or a smaller --rollout-batch-size")
