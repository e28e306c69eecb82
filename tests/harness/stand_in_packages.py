"""Stand-ins of packages that slime's example for tau-bench imports: an environment of one question, and SGLang's parser
of tool calls, which finds none."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any


class _Info:
    def model_dump(self) -> dict[str, Any]:
        return {"seen": True}


class Environment:
    """Asks a question and ends with the answer; the reward is 1 for the text ``right``."""

    def __init__(self, task: int) -> None:
        self.task = task
        self.tools_info: list[dict[str, Any]] = []
        self.wiki = "rules"

    def reset(self, task_index: int | None = None) -> SimpleNamespace:
        return SimpleNamespace(observation=f"task {self.task}", info=_Info())

    def step(self, action: Any) -> SimpleNamespace:
        right = float(action.kwargs["content"] == "right")
        return SimpleNamespace(observation="thanks", reward=right, done=True, info=_Info())


class _Agent:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class _Parser:
    def __init__(self, **values: Any) -> None:
        pass

    def parse_non_stream(self, text: str) -> tuple[str, list[Any]]:
        return text, []


def install() -> None:
    """Make the packages importable in this process."""
    names = {
        "tau_bench.envs": {"get_env": lambda **given: Environment(given["task_index"])},
        "tau_bench.types": {
            "RunConfig": lambda **given: SimpleNamespace(temperature=0.0, **given),
            "Action": SimpleNamespace,
        },
        "tau_bench.agents.base": {"Agent": _Agent},
        "tau_bench.agents.tool_calling_agent": {"RESPOND_ACTION_NAME": "respond", "ToolCallingAgent": _Agent},
        "sglang.srt.function_call.function_call_parser": {"FunctionCallParser": _Parser},
        "sglang.srt.managers.io_struct": {"Function": SimpleNamespace, "Tool": SimpleNamespace},
    }
    for name, values in names.items():
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            path = ".".join(parts[:count])
            module = sys.modules.setdefault(path, ModuleType(path))
            module.__path__ = []
        module.__dict__.update(values)
