"""Options of agents."""

from __future__ import annotations

import shlex
import shutil
from typing import Any, ClassVar, Literal

from buffer_rl.agents.template_reader import TemplateReader
from buffer_rl.args import Args
from buffer_rl.options.checks import given, refuse
from buffer_rl.options.section import Section, option

REMOTE = "remote"
"""The name of agents elsewhere, for ``--agent-path``."""


class AgentOptions(Section):
    """Agents: programs that ask the model several times for one sample."""

    heading: ClassVar[str] = "Agents"

    agent_path: str | None = option(
        None,
        "your agent, which plays a sample through an OpenAI endpoint: module:fn or ./file.py:fn; remote: agents that "
        "lease samples over HTTP",
        kind="agent",
    )
    agent_command: str | None = option(
        None, "your agent as a command: a process for each sample, in any language, without a shell", metavar="COMMAND"
    )
    tools_path: list[str] = option(
        [], "functions that the built-in agent offers to the model as tools: module:fn or ./file.py:fn"
    )
    environment: str | None = option(
        None,
        "your environment, which the built-in agent plays: a class with reset, and step or tools; module:Class or "
        "./file.py:Class",
        kind="environment",
    )
    agent_history: Literal["template", "append"] = option(
        "template",
        "tokens of earlier answers: as the chat template renders them, which may strip reasoning; or always as they "
        "were sampled",
    )
    response_template: dict[str, Any] | None = option(
        None,
        "how answers are read as reasoning, text and calls: a response template of transformers, as JSON or FILE.yaml; "
        "by default the tokenizer's, if it has one",
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
    agent_max_processes: int | None = option(
        None,
        "maximum number of processes of --agent-command per rollout worker; if not set: 4 per core of the machine, "
        "shared by --num-rollout-workers",
        ge=1,
    )
    agent_host: str = option(
        "127.0.0.1", "address on which --agent-path remote offers samples; 0.0.0.0: all", metavar="ADDRESS"
    )
    agent_port: int = option(
        0,
        "port on which --agent-path remote offers samples, plus the number of the rollout worker; 0: any, see "
        "RUN/agents",
        ge=0,
        le=65535,
    )
    agent_heartbeat_s: float = option(
        30.0, "agents of --agent-path remote that send no heartbeat for this many seconds have lost their sample", gt=0
    )
    agent_api_key: str | None = option(
        None,
        "key with which agents of --agent-path remote lease samples; if not set: a new key per rollout worker, see "
        "RUN/agents. Set it in the --config file or as BUFFER_RL_AGENT_API_KEY, never as a flag",
        metavar="KEY",
    )

    @staticmethod
    def check(args: Args) -> None:
        fault = "" if args.agent_command is None else _command_fault(args, args.agent_command)
        refuse(fault, "--agent-command: {}", expected="a program and its arguments, without a shell")
        unread = args.agent_path != REMOTE and given(args, "agent_host", "agent_port", "agent_api_key")
        refuse(unread, "{}: no agents lease samples of this run", "--agent-path remote")
        last = args.agent_port + args.num_rollout_workers - 1
        refuse(last > 65535, f"--agent-port: the last rollout worker's port is {last}", "choose a lower one")
        chosen = [flag for name in AGENTS if (flag := given(args, name))]
        if not chosen:
            return
        what = "a run has one agent"
        if "--environment" in chosen:
            what = "an environment is played by the built-in agent, and its methods are the tools"
        elif "--tools-path" in chosen:
            what = "an agent of yours calls tools itself, and --tools-path alone is the built-in agent"
        refuse(len(chosen) > 1, f"{' and '.join(chosen)}: {what}")
        for name, why in REFUSED_WITH_AGENTS.items():
            refuse(given(args, name), f"{chosen[0]} and {{}}: {why}", "take {} out")
        if args.response_template:
            TemplateReader(args.response_template)  # refuses what is none
        once, most, where = args.agent_timeout_s, args.rollout_timeout_s, "--agent-timeout-s and --rollout-timeout-s"
        what = f"a sample may be played twice, {once:g} s each, and the rollout ends after {most:g} s"
        refuse(2 * once > most, f"{where}: {what}", expected="at least twice as long for the rollout")


AGENTS = ("agent_path", "agent_command", "tools_path", "environment")
REFUSED_WITH_AGENTS = {
    "custom_generate_function_path": "an agent takes its place",
    "custom_convert_samples_to_train_data_path": "it returns values per row, and an agent's sample may be several",
    "partial_rollout": "an answer that was aborted is asked for again",
}


def _command_fault(args: Args, command: str) -> str:
    """What is wrong with ``--agent-command``; empty if nothing is. Other nodes may have other programs."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        return f"it cannot be split into words: {error}"
    if not words:
        return "it is empty"
    is_here = args.ray_address is not None or shutil.which(words[0])
    return "" if is_here else f"there is no program {words[0]!r} here"
