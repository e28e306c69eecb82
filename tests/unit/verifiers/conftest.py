"""A folder with a package ``verifiers``: of the real one's names those that ``program.py`` uses, and a taskset ``toy``
whose episodes do what their prompts say. The program and how it is started are the real ones."""

from __future__ import annotations

from pathlib import Path

import pytest

V1 = """
import asyncio, contextlib, json, os, signal, sys, time, urllib.request
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from pydantic import BaseModel, Field


class AgentConfig(BaseModel):
    harness: Any = None
    runtime: Any = None
    max_turns: int = 1


class EvalClientConfig(BaseModel):
    base_url: str
    api_key_var: str
    headers: dict[str, str] = {}


@dataclass(frozen=True)
class ModelContext:
    model: str
    client: Any


class ToyConfig(BaseModel):
    id: str
    num_tasks: int | None = 5
    task: Any = None


class EnvConfig(BaseModel):
    id: str = ""
    taskset: ToyConfig
    player: AgentConfig = AgentConfig()
    other: AgentConfig = AgentConfig(harness=SimpleNamespace(id="bash"))


class ToyData(BaseModel):
    idx: int
    name: str | None = None
    description: str | None = None
    prompt: str | None = None

    @property
    def prompt_text(self):
        return self.prompt or ""


class ToyTask:
    def __init__(self, data, config):
        self.data = data

    @classmethod
    def data_type(cls):
        return ToyData


class Toy:
    def __init__(self, count):
        self.count = count

    bounded = property(lambda self: self.count is not None)

    def take(self, limit):
        return Toy(limit)

    @classmethod
    def task_type(cls):
        return ToyTask

    def __iter__(self):
        print("noise")
        for idx in range(self.count):
            yield ToyTask(ToyData(idx=idx, prompt=f"say {idx}" if idx else None, name="first"), None)


class Agent:
    def __init__(self, ctx):
        self.ctx, self.trainable = ctx, True

    async def ask(self, text):
        body = json.dumps({"model": self.ctx.model, "messages": [{"role": "user", "content": text}]}).encode()
        headers = {"Content-Type": "application/json", **self.ctx.client.headers}
        request = urllib.request.Request(self.ctx.client.base_url + "/chat/completions", body, headers)
        def send():
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["choices"][0]["message"]["content"]
        return await asyncio.to_thread(send)


def reward(score, weight=1.0):
    return SimpleNamespace(score=score, weight=weight)


def trace(rewards, trainable=True, ok=True, **metrics):
    total = sum(each.score * each.weight for each in rewards.values() if each is not None)
    agent = SimpleNamespace(trainable=trainable)
    return SimpleNamespace(agent=agent, rewards=rewards, reward=total, metrics=metrics, ok=ok, errors=[])


class Env:
    def __init__(self, config):
        assert config.player.harness["id"] == "null" and config.player.runtime == {"type": "subprocess"}
        assert config.other.runtime is None, "a harness that runs code is left to verifiers"
        self.config, self.taskset = config, Toy(config.taskset.num_tasks)

    @contextlib.asynccontextmanager
    async def serving(self):
        yield

    def slots(self, task, n=1):
        return [task]

    async def setup(self, agents):
        agents.other.trainable = False

    async def run_slot(self, task, ctx):
        agents = SimpleNamespace(player=Agent(ctx), other=Agent(ctx))
        await self.setup(agents)
        what, _, mark = task.data.prompt.partition(" ")
        asked = what if what != "two" else await agents.other.ask(what)
        said = await agents.player.ask(asked)
        first = bool(mark) and not os.path.exists(mark)
        if first:
            open(mark, "w").close()
        if what == "raise" and first:
            error = SimpleNamespace(type="ValueError", message="no luck")
            return SimpleNamespace(ok=False, errors=[error], traces=[])
        if what == "exit" and first:
            sys.exit("out")
        if what == "die" and first:
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "hang" and first:
            await asyncio.sleep(600)
        if what == "block" and first:
            time.sleep(600)
        rewards = {"score": reward(0.5), "half": reward(1.0, 0.5), "absent": None}
        traces = [trace(rewards, words=float(len(said))), trace({"score": reward(9.0)}, trainable=False)]
        return SimpleNamespace(ok=True, errors=[], traces=traces)
"""
LOADERS = """
from types import SimpleNamespace
from verifiers.v1 import Env

def environment_class(taskset, env):
    if taskset != "toy":
        raise ModuleNotFoundError(f"taskset {taskset!r} not found")
    return Env

def default_harness_id(taskset):
    return "bash"

def harness_class(name):
    return SimpleNamespace(EXECUTES_CODE=name == "bash")
"""
CONFIGS = """
def agent_config_fields(config):
    return {"player": config.player, "other": config.other}
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that a run is started in, with the package."""
    folder = tmp_path / "here"
    files = {
        "__init__": "",
        "v1/__init__": V1,
        "v1/configs/__init__": "",
        "v1/configs/agent": CONFIGS,
        "v1/utils/__init__": "",
        "v1/utils/generic": "def concrete_type(*_, **__):\n    return None\n",
        "v1/utils/loaders": LOADERS,
    }
    for name, text in files.items():
        path = folder / "verifiers" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder
