"""Agent programs of others, unchanged, over a session: a framework, and two coding agents.

    make test-harnesses

installs them into a folder of their own, lets each do at least one call of a tool and answer, and prints the table of
``docs/agents.md``. The model's answers are given texts. Each sampled token must be in the rows exactly once. Needs
Python's and npm's package registries, and no other address.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from buffer_rl.agents.session import Exchange
from buffer_rl.agents.turns import rows
from harness.agent_play import AgentEngine
from harness.dialects import address_over

AGENTS, CLAUDE, CODEX = "0.24.0", "2.1.332", "0.171.0"
TASK = "please multiply"
DONE = "All done."
TIMEOUT_S = 180.0
FRAMEWORK = f'''
from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

set_tracing_disabled(True)
set_default_openai_api("API")


@function_tool
def multiply(a: int, b: int) -> str:
    """The product of two numbers."""
    return f"{{a * b}}x"


agent = Agent(name="calculator", instructions="Use the tool.", model="policy", tools=[multiply])
print(Runner.run_sync(agent, {TASK!r}).final_output)
'''
CODEX_SETTINGS = """
model = "policy"
model_provider = "session"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.session]
name = "session"
base_url = "{url}"
env_key = "SESSION_KEY"
wire_api = "responses"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Harness:
    """name and version: as the table has them. calls: name and arguments of what the model asks for. command: in the
    folder of the installed programs. environment, files (in the home folder): with ``{url}``, ``{root}``, ``{key}``."""

    name: str
    version: str
    dialect: str
    calls: tuple[tuple[str, dict[str, Any]], ...]
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


SHELL = ("echo $((6*7))x", "echo $((2*3))x")
PRODUCTS = tuple(("multiply", {"a": a, "b": b}) for a, b in ((6, 7), (2, 3)))
HARNESSES = (
    *(
        Harness(
            name="openai-agents",
            version=AGENTS,
            dialect=dialect,
            calls=PRODUCTS,
            command=("python/bin/python", "agent.py"),
            environment={"OPENAI_BASE_URL": "{url}", "OPENAI_API_KEY": "{key}"},
            files={"agent.py": FRAMEWORK.replace("API", api)},
        )
        for dialect, api in (("chat completions", "chat_completions"), ("responses", "responses"))
    ),
    Harness(
        name="Claude Code (`claude -p`)",
        version=CLAUDE,
        dialect="Messages",
        calls=tuple(("Bash", {"command": each, "description": "multiplies"}) for each in SHELL),
        command=("node_modules/.bin/claude", "-p", TASK, "--model", "policy", "--allowedTools", "Bash"),
        environment={
            "ANTHROPIC_BASE_URL": "{root}",
            "ANTHROPIC_API_KEY": "{key}",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    ),
    Harness(
        name="Codex (`codex exec`)",
        version=CODEX,
        dialect="responses",
        calls=tuple(("exec_command", {"cmd": each}) for each in SHELL),
        command=(
            "node_modules/.bin/codex",
            "exec",
            "--skip-git-repo-check",
            "--sandbox",
            "danger-full-access",
            TASK,
        ),
        environment={"SESSION_KEY": "{key}"},
        files={".codex/config.toml": CODEX_SETTINGS},
    ),
)


def install(folder: Path) -> None:
    """Install what is not there yet."""
    if not (folder / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", folder / "python"], check=True)
        pip: list[str | Path] = [folder / "python/bin/python", "-m", "pip", "install", "-q", f"openai-agents=={AGENTS}"]
        subprocess.run(pip, check=True)
    if not (folder / "node_modules").exists():
        packages = [f"@anthropic-ai/claude-code@{CLAUDE}", f"@openai/codex@{CODEX}"]
        npm = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *packages]
        subprocess.run(npm, check=True, stdout=subprocess.DEVNULL)


async def play(harness: Harness, folder: Path) -> list[Exchange]:
    """What ``harness`` made the model say. Raises AssertionError if it did not do its task."""
    forms = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in harness.calls]
    asks = "<think>hm</think>" + "".join(f"<tool_call>{each}</tool_call>" for each in forms)

    def say(prompt: str, params: dict[str, Any]) -> str:
        return DONE if "42x" in prompt and "6x" in prompt else asks if TASK in prompt else "ok"

    with tempfile.TemporaryDirectory() as home:
        async with address_over(AgentEngine(say), rollout_max_response_len=4096) as (session, url, key):
            values = {"{url}": url, "{root}": url.removesuffix("/v1"), "{key}": key}
            for name, text in harness.files.items():
                (path := Path(home) / name).parent.mkdir(exist_ok=True)
                path.write_text(_filled(text, values), encoding="utf-8")
            own = {name: _filled(value, values) for name, value in harness.environment.items()}
            kept = {"PATH": os.environ["PATH"], "HOME": home, "IS_SANDBOX": "1"}
            settings = [each for each in os.environ if each.lower().endswith("_proxy")]
            process = await asyncio.create_subprocess_exec(
                folder / harness.command[0],
                *harness.command[1:],
                cwd=home,
                env=kept | {name: os.environ[name] for name in settings} | {"NO_PROXY": "127.0.0.1"} | own,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            try:
                said, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
            finally:
                if process.returncode is None:
                    process.kill()
            output = said.decode(errors="replace")
            ended = f"{harness.name}: {process.returncode}\n{output[-3000:]}"
            assert process.returncode == 0, ended
            assert DONE in output, ended
            return list(session.exchanges)


def line_of(harness: Harness, exchanges: list[Exchange]) -> str:
    """The row of the table. Raises AssertionError if a sampled token is not in the rows exactly once."""
    turns = [each.turn for each in exchanges]
    made = rows(turns)
    found = sorted(turn.order for row in made for turn in row.turns)
    assert found == sorted(turn.order for turn in turns), "a turn is in no row, or in two"
    trained = []
    for row in made:
        response = row.tokens[len(row.tokens) - row.response_length :]
        trained.append([token for token, is_trained in zip(response, row.loss_mask, strict=True) if is_trained])
        assert trained[-1] == [token for turn in row.turns for token in turn.output_ids], "other tokens are trained"
    sampled = sum(len(turn.output_ids) for turn in turns)
    causes = ", ".join(f"`{each.prompt.cause}`" for each in exchanges if each.prompt)
    counts = f"{len(turns)} | {len(made)} | {sum(map(len, trained))} of {sampled}"
    return f"| {harness.name} | {harness.version} | {harness.dialect} | {counts} | {causes} |"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the programs are installed; a temporary one by default")
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as temporary:
        at = (folder or Path(temporary)).resolve()
        install(at)
        print("| program | version | dialect | turns | rows | trained | prompts |\n|---|---|---|---|---|---|---|")
        for harness in HARNESSES:
            print(line_of(harness, asyncio.run(play(harness, at))), flush=True)


def _filled(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(name, value)
    return text


if __name__ == "__main__":
    main()
