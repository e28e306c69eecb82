"""The process that computes synchronous rewards: batches from its socket, one sample after another, until the parent's
end closes. The parent's side is ``reward_pool``.

Towards this process go pickles, one after another; towards the parent, which therefore never unpickles what user code
produced, frames of a 4-byte big-endian length and JSON. Answers to samples are not frames: each is appended to a file
in memory, as a line of JSON, as soon as it is there, and an empty frame says that the batch is done. The file outlives
this process, so the parent knows which sample was at work, and keeps the answers before it, without a wake-up per
sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import json
import os
import pickle
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from buffer_rl.args import Args
from buffer_rl.cluster.fork_server import die_with_parent, keep_descendants
from buffer_rl.errors import BufferRLError, RewardError
from buffer_rl.kinds.reward import check_group_rewards, check_reward
from buffer_rl.options.section import load_args
from buffer_rl.options.user_args import user_args
from buffer_rl.plugin.calls import contained, contained_task, error_text
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import Sample, SampleGroup
from buffer_rl.rollout.failures import FailureKind, kind_of

HEADER = struct.Struct(">I")
DONE = HEADER.pack(0)


class RewardTarget(NamedTuple):
    """Which reward function: the user's reference, or (``registered``) a name that data may choose.

    of_group: it scores a whole ``SampleGroup``, and answers with one number a sample. of_several: it is one of several
    rewards of a row, and abstains with None.
    """

    reference: str
    registered: bool
    of_group: bool = False
    of_several: bool = False

    @property
    def kind(self) -> str:
        """The plugin kind of the function."""
        return "group_reward" if self.of_group else "reward"

    def resolve(self, registry: PluginRegistry) -> Callable[..., Any]:
        """The function. Raises PluginError."""
        find = registry.resolve_registered if self.registered else registry.resolve
        return cast("Callable[..., Any]", find(self.kind, self.reference))

    def check(self, value: object, count: int) -> Any:
        """The function's answer for ``count`` samples, as JSON values. Raises RewardError if it cannot be used; the
        caller says where."""
        if self.of_group:
            return check_group_rewards(value, count, where=self.reference)
        if value is None and self.of_several:
            return None
        try:
            return check_reward(value, where=self.reference)
        except RewardError as error:
            if isinstance(value, list):
                error.hint = "a function of all samples of a prompt, which returns a list, is --custom-group-rm-path"
            raise


def main(socket_fd: int, answers_fd: int) -> None:
    """Serve the socket until the parent closes it."""
    die_with_parent()  # even while user code hangs
    keep_descendants()  # for the pool, which kills them
    for stream in (sys.stdout, sys.stderr):  # what user code prints is read while it runs, and after it was killed
        cast("io.TextIOWrapper", stream).reconfigure(line_buffering=True, errors="backslashreplace")
    with socket.socket(fileno=socket_fd) as channel, channel.makefile("rb") as messages:
        try:
            _serve(channel, messages, answers_fd)
        except (EOFError, ConnectionError):
            return  # the parent has ended or has closed the pool


def _serve(channel: socket.socket, messages: io.BufferedReader, answers_fd: int) -> None:
    try:
        args = load_args(pickle.load(messages))
        registry = PluginRegistry.from_flags(args.plugin)
    except BufferRLError as error:
        _send(channel, {"error": str(error)})
        return
    _send(channel, {"ok": None})
    functions: dict[RewardTarget, Callable[..., Any]] = {}
    while True:
        target, items = pickle.load(messages)
        if target not in functions:
            try:
                functions[target] = target.resolve(registry)
            except BufferRLError as error:
                _send(channel, {"error": str(error)})
                continue
            _send(channel, {"ok": None})
        for item in items:
            answer = _outcome(functions[target], user_args(args), target, item)
            answer["at"] = time.monotonic()  # the same clock in every process of a machine
            os.write(answers_fd, json.dumps(answer).encode() + b"\n")
        channel.sendall(DONE)


def _outcome(
    function: Callable[..., Any], args: Args, target: RewardTarget, item: Sample | SampleGroup
) -> dict[str, Any]:
    samples = [item] if isinstance(item, Sample) else list(item)
    before = [pickle.dumps(sample.metadata) for sample in samples]
    try:
        with contained():
            value = function(args, item)
            if inspect.isawaitable(value):
                value = asyncio.run(contained_task(value))
    except Exception as error:  # fault boundary: user code
        return {"error": error_text(error), "kind": kind_of(error)}
    try:
        answer: dict[str, Any] = {"ok": target.check(value, len(samples))}
    except BufferRLError as error:
        return {"error": error.what, "expected": error.expected, "hint": error.hint, "kind": FailureKind.INVALID}
    changes = [changed_metadata(old, sample.metadata) for old, sample in zip(before, samples, strict=True)]
    return answer | {"metadata": changes} if any(changes) else answer


def changed_metadata(pickled: bytes, now: object) -> dict[str, Any]:
    """What a reward changed of a sample's metadata, as JSON values; empty if nothing. pickled: them before it ran.

    set: new or changed entries; removed: names; not_json: names of entries that JSON cannot hold, with their types.
    """
    if not isinstance(now, dict):
        return {"not_json": {"metadata": type(now).__name__}}
    with contextlib.suppress(Exception):  # an entry that is new and cannot be pickled
        if pickle.dumps(now) == pickled:
            return {}
    before: dict[Any, Any] = pickle.loads(pickled)
    new: dict[str, Any] = {}
    not_json: dict[str, str] = {}
    for name, value in now.items():
        text, is_new = _json_text({name: value}), name not in before
        if text is not None and (is_new or text != _json_text({name: before[name]})):
            new |= json.loads(text)
        elif text is None and (is_new or _copied(value) != _copied(before[name])):
            not_json[str(name)] = type(value).__name__
    found = {"set": new, "removed": [str(name) for name in before if name not in now], "not_json": not_json}
    return found if any(found.values()) else {}


def _json_text(value: object) -> str | None:
    try:
        return json.dumps(value)
    except Exception:  # fault boundary: objects of the user's own, of any depth
        return None


def _copied(value: object) -> bytes | None:
    """The value's pickle, of a copy, so that equal values have equal ones; None if it cannot be pickled."""
    try:
        return pickle.dumps(pickle.loads(pickle.dumps(value)))
    except Exception:  # fault boundary: objects of the user's own
        return None


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    channel.sendall(HEADER.pack(len(body)) + body)


if __name__ == "__main__":  # forked from a process that has imported this module
    sys.path[:] = json.loads(sys.argv[1])
    main(*map(int, sys.argv[2:]))
