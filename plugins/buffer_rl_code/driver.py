"""Runs a candidate on the tests' inputs. This file is the program in the sandbox: standard library alone, no imports
of ours. Whatever happens here, the verdict is made outside.

Standard input: ``{"nonce", "limit", "code", "inputs": [text, …]}`` or ``{"nonce", "limit", "code", "calls": [{"fn",
"args", "kwargs"}, …]}``, without what is expected; limit: of an answer's bytes. Standard output: a line
``NONCE ready``, then for each test, in order, ``NONCE {"stdout": text}``, ``NONCE {"value": VALUE}`` or
``NONCE {"error": text}``. The nonce tells these lines from what the candidate prints; a candidate that learns it can
only answer, and answers are compared outside.

A VALUE is a number, text, boolean or null, or ``[NAME, items]`` with the name of its type; a dict has pairs as items.
"""

import atexit
import json
import os
import sys
import threading
from types import ModuleType
from typing import Any

MAX_DEPTH = 32


def main() -> None:
    task = json.loads(sys.stdin.buffer.read())
    out = os.dup(1)  # what the candidate prints goes elsewhere
    say(out, task["nonce"], "ready")
    if "calls" in task:
        answer_calls(out, task)
    else:
        for text in task["inputs"]:
            say(out, task["nonce"], json.dumps(output_of(task["code"], text, task["limit"])))


def say(out: int, nonce: str, text: str) -> None:
    with open(out, "wb", closefd=False) as file:
        file.write((f"\n{nonce} {text}\n").encode("utf-8", "replace"))


def answer_calls(out: int, task: dict[str, Any]) -> None:
    sink = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(sink, number)
    names = names_of("candidate")
    try:
        exec(compile(task["code"], "candidate.py", "exec"), names)
    except BaseException as error:
        say(out, task["nonce"], json.dumps({"error": error_text(error)}))
        return
    for call in task["calls"]:
        try:
            args = [unpacked(item) for item in call["args"]]
            kwargs = {name: unpacked(item) for name, item in call["kwargs"].items()}
            answer = {"value": packed(names[call["fn"]](*args, **kwargs))}
            text = json.dumps(answer)
        except BaseException as error:
            text = json.dumps({"error": error_text(error)})
        say(out, task["nonce"], text[: task["limit"]])


def output_of(code: str, text: str, limit: int) -> dict[str, Any]:
    """What a process of its own prints for one input. limit: of bytes."""
    given, (reader, writer) = write_input(text), os.pipe()
    child = os.fork()
    if child == 0:
        for number, file in enumerate((given, writer, os.open("/dev/null", os.O_WRONLY))):
            os.dup2(file, number)
        os.closerange(3, 1 << 10)
        run(code)
    os.close(given)
    os.close(writer)
    kept = bytearray()
    while len(kept) <= limit and (block := os.read(reader, 1 << 16)):
        kept += block
    os.close(reader)
    if len(kept) > limit:
        os.kill(child, 9)
    status = os.waitpid(child, 0)[1]
    if status or len(kept) > limit:
        return {"error": f"exit status {os.waitstatus_to_exitcode(status)} after {len(kept)} bytes"}
    return {"stdout": kept.decode("utf-8", "replace")}


def write_input(text: str) -> int:
    """The input as a file, so that it may be longer than a pipe holds."""
    number = os.open("/tmp", os.O_RDWR | os.O_TMPFILE)
    with open(number, "wb", closefd=False) as file:
        file.write(text.encode())
    os.lseek(number, 0, os.SEEK_SET)
    return number


def run(code: str) -> None:
    """The candidate as a script, to the end of this process: as the interpreter's, but much quicker."""
    status: Any = None
    try:
        try:
            exec(compile(code, "candidate.py", "exec"), names_of("__main__"))
        finally:
            threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.__stdout__.flush()  # type: ignore[union-attr]
    except SystemExit as error:
        status = error.code
    except BaseException:
        status = 1
    os._exit(int(status not in (None, 0)))


def names_of(module: str) -> dict[str, Any]:
    """The names of a new module, which the standard library finds by its name, with what ``site`` adds to scripts."""
    found = sys.modules[module] = ModuleType(module)
    found.__dict__.update(exit=sys.exit, quit=sys.exit)
    return found.__dict__


def error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


def packed(value: Any, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError("the value is nested too deep")
    if value is None or type(value) in (bool, int, float, str):
        return value
    for plain in (int, float, str):
        if isinstance(value, plain):
            return plain(value)
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return [kind.__name__, [packed(item, depth + 1) for item in value]]
    if isinstance(value, dict):
        return ["dict", [[packed(key, depth + 1), packed(item, depth + 1)] for key, item in value.items()]]
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", list(value)]
    raise TypeError(f"a value of the type {type(value).__name__} cannot be compared")


def unpacked(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    name, items = value
    if name == "dict":
        return {unpacked(key): unpacked(item) for key, item in items}
    if name == "complex":
        return complex(*items)
    kinds = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "bytes": bytes}
    return kinds[name](unpacked(item) for item in items)


if __name__ == "__main__":
    main()
