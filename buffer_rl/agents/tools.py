"""The built-in agent: a model with tools, which are functions (``--tools-path``) or methods of an environment."""

from __future__ import annotations

import inspect
import json
import logging
import types
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from buffer_rl.agents.messages import Message, calls_of
from buffer_rl.args import Args
from buffer_rl.errors import ConfigError, raised_as
from buffer_rl.kinds.agent import AgentSession
from buffer_rl.plugin.calls import contained, error_name, error_text
from buffer_rl.records.groups import Sample
from buffer_rl.rollout.user_functions import is_async

if TYPE_CHECKING:
    from buffer_rl.plugin.registry import PluginRegistry

_log = logging.getLogger(__name__)
ERROR = "error:"
"""The beginning of what the model is told of a call that failed."""
MOST_ERROR_TEXT = 500
OF_ENVIRONMENTS = frozenset({"reset", "step", "reward", "close"})
"""Methods that are no tools."""


class ToolAgent:
    """Asks the model, calls the tools that it asks for, and asks again, until an answer has no calls.

    A tool's schema comes from its signature and its docstring, as transformers reads them. What a tool raises is told
    to the model. Raises ConfigError for a function without a schema, and for two tools of one name."""

    def __init__(self, tools: Sequence[Callable[..., Any]]) -> None:
        self._tools: dict[str, Callable[..., Any]] = {}
        self._schemas, self._faults = [], ToolFaults()
        flat = [each for tool in tools for each in (tool if isinstance(tool, list | tuple) else [tool])]
        for tool in flat:  # a reference may name a function, or a list of them
            schema = schema_of(tool, where="--tools-path")
            name = schema["function"]["name"]
            if name in self._tools:
                raise ConfigError(f"two tools have the name {name!r}", where="--tools-path")
            if is_async(tool):
                expected, hint = "a plain function: def", "asyncio.run in it, or a method of an --environment"
                raise ConfigError(f"the tool {name!r} is async", where="--tools-path", expected=expected, hint=hint)
            self._tools[name] = tool
            self._schemas.append(schema)

    def __call__(self, args: Any, sample: Sample, session: AgentSession) -> None:
        """Play a sample. The run's reward scores its last answer."""
        messages = messages_of(sample.prompt)
        while True:
            message = session.chat(messages, self._schemas)
            if not message.get("tool_calls"):
                return
            results = [result_message(call_id, self._result(**called)) for call_id, called in calls_of(message)]
            messages += [message, *results]

    def _result(self, name: str, arguments: Any) -> str:
        if refusal := refusal_of(name, arguments, self._tools):
            return refusal
        try:
            with contained():
                return text_of_result(self._tools[name](**arguments))
        except Exception as error:  # fault boundary: the tool is the user's, and its arguments the model's
            return self._faults.text_of(name, error)


class ToolFaults:
    """What the tools of one rollout worker raised. The model is told the error alone: files and lines are those of this
    machine, and fill its context. The log has the traceback of the first error of each class and tool."""

    def __init__(self) -> None:
        self._named: set[tuple[str, type[Exception]]] = set()

    def text_of(self, tool: str, error: Exception) -> str:
        """What the model is told of what ``tool`` raised."""
        key = (tool, type(error))
        if key not in self._named:
            self._named.add(key)
            what = "the tool %r raised %s\n    the model is told so; later errors of this class are only counted"
            _log.warning(what, tool, error_text(error))
        return f"{ERROR} {error_name(error)}"[:MOST_ERROR_TEXT]


def check_tools(args: Args, registry: PluginRegistry) -> None:
    """Raises PluginError or ConfigError for tools that cannot be used."""
    ToolAgent([registry.load(path) for path in args.tools_path])


def check_environment(args: Args, registry: PluginRegistry) -> None:
    """Raises PluginError or ConfigError for an environment that cannot be played, as far as its class shows it."""
    if args.environment:
        offers_of(registry.resolve("environment", args.environment))


def offers_of(environment: Callable[..., Any]) -> str:
    """What the model can do in it: ``step``, or the names of its tools. Raises ConfigError as ``tools_of``."""
    if not inspect.isclass(environment):
        return "what its object has"
    if hasattr(environment, "step"):
        return "step"
    return "tools: " + ", ".join(schema["function"]["name"] for schema in tools_of(environment))


def tools_of(environment: type) -> list[Message]:
    """The schemas of an environment's tools: of its public methods, in the order of the class.

    Raises ConfigError for a method without a schema, and if there is none."""
    schemas = []
    for name in dict.fromkeys(name for base in reversed(environment.__mro__) for name in vars(base)):
        method = inspect.getattr_static(environment, name)
        if not name.startswith("_") and name not in OF_ENVIRONMENTS and inspect.isfunction(method):
            where = f"--environment, method {name!r} of {environment.__name__}"
            schema = schema_of(types.MethodType(method, object()), where=where)
            schema["function"]["name"] = name
            schemas.append(schema)
    if not schemas:
        what = f"{environment.__name__} has no method for the model"
        expected = "step(action) -> (observation, reward, done), or public methods, which are tools"
        raise ConfigError(what, where="--environment", expected=expected)
    return schemas


def refusal_of(name: str, arguments: Any, tools: Collection[str]) -> str:
    """What the model is told of a call that cannot be made; empty if it can."""
    if name not in tools:
        return f"{ERROR} there is no tool {name!r:.80}; there are {', '.join(tools)}"
    return "" if isinstance(arguments, dict) else f"{ERROR} the arguments are no JSON object"


def text_of_result(answer: Any) -> str:
    """What the model is told of what a tool returned: a text, or JSON. What is no Unicode, as of names of files, is a
    question mark. Raises TypeError or ValueError for what JSON cannot hold."""
    text = answer if isinstance(answer, str) else json.dumps(answer, default=str, ensure_ascii=False)
    return text.encode(errors="replace").decode()


def num_errors(messages: Iterable[Message]) -> int:
    """How many results of tools in a conversation say that the call failed."""
    results = [message.get("content") for message in messages if message.get("role") == "tool"]
    return sum(isinstance(result, str) and result.startswith(ERROR) for result in results)


def messages_of(prompt: Any) -> list[dict[str, Any]]:
    """The conversation that a sample's prompt is."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]


def result_message(call_id: str, content: str) -> dict[str, Any]:
    """The message with the result of a call."""
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def schema_of(tool: Callable[..., Any], *, where: str) -> dict[str, Any]:
    """What the model is told of a tool. where: names it in errors. Raises ConfigError if it has no schema."""
    from transformers.utils.chat_template_utils import get_json_schema

    what = f"{getattr(tool, '__name__', tool)!r} has no schema"
    expected = "type hints, and a docstring with a line 'name: what it is' under 'Args:' for each parameter"
    with raised_as(ConfigError, what, Exception, where=where, expected=expected):  # transformers raises several kinds
        schema: dict[str, Any] = get_json_schema(tool)
    return schema
