"""Options of agents, and their checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from buffer_rl.errors import ConfigError
from buffer_rl.options.section import Section, flag_of, option

if TYPE_CHECKING:
    from buffer_rl.args import Args


class AgentOptions(Section):
    """Agents: programs that ask the model several times for one sample."""

    heading: ClassVar[str] = "Agents"

    agent_path: str | None = option(
        None, "your agent, which plays a sample through an OpenAI endpoint: module:fn or ./file.py:fn", kind="agent"
    )
    tools_path: list[str] = option(
        [], "functions that the built-in agent offers to the model as tools: module:fn or ./file.py:fn"
    )
    agent_history: Literal["template", "append"] = option(
        "template",
        "tokens of earlier answers: as the chat template renders them, which may strip reasoning; or always as they "
        "were sampled",
    )
    agent_max_turns: int = option(64, "maximum number of answers per sample", ge=1)
    agent_max_tokens: int | None = option(None, "maximum number of sampled tokens per sample, over all answers", ge=1)
    agent_overflow: Literal["truncate", "give-up"] = option(
        "truncate",
        "if a conversation is longer than --rollout-max-context-len: train what there is, with the lowest reward; or "
        "mask the sample",
    )
    agent_timeout_s: float = option(
        600.0, "deadline for one sample of an agent, in seconds; then it is truncated, with the lowest reward", gt=0
    )


def check_agents(args: Args) -> None:
    """Raises ConfigError for options that contradict an agent."""
    given = [flag_of(name) for name in ("agent_path", "tools_path") if getattr(args, name)]
    if not given:
        return
    if len(given) == 2:
        raise ConfigError(
            "an agent of yours calls tools itself",
            where="--agent-path and --tools-path",
            hint="--tools-path alone is the built-in agent",
        )
    refused = {
        "custom_generate_function_path": "an agent takes its place",
        "custom_convert_samples_to_train_data_path": "it returns values per row, and an agent's sample may be several",
        "partial_rollout": "an answer that was aborted is asked for again",
    }
    for name, why in refused.items():
        if getattr(args, name):
            raise ConfigError(why, where=f"{given[0]} and {flag_of(name)}", hint=f"take {flag_of(name)} out")
    if 2 * args.agent_timeout_s > args.rollout_timeout_s:
        raise ConfigError(
            f"a sample may be played twice, {args.agent_timeout_s:g} s each, and the rollout ends after "
            f"{args.rollout_timeout_s:g} s",
            where="--agent-timeout-s and --rollout-timeout-s",
            expected="a rollout's deadline of at least twice a sample's",
        )
