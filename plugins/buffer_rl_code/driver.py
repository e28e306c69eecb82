"""Runs a candidate on the tests' inputs. This file is the program in the sandbox: standard library alone, no imports
of ours. Whatever happens here, the verdict is made outside.

Standard input: ``{"nonce", "code", "inputs": [text, …]}`` or ``{"nonce", "code", "calls": [{"fn", "args", "kwargs"},
…]}``, without what is expected. Standard output: a line ``NONCE ready``, then for each test, in order,
``NONCE {"stdout": text}``, ``NONCE {"value": VALUE}`` or ``NONCE {"error": text}``. The nonce tells these lines from
what the candidate prints; a candidate that learns it can only answer, and answers are compared outside.

A VALUE is a number, text, boolean or null, or ``[NAME, items]`` with the name of its type; a dict has pairs as items.
"""

import json
import os
import sys

MAX_TEXT = 1 << 18
MAX_DEPTH = 32


def main():
    task = json.loads(sys.stdin.buffer.read())
    out = os.dup(1)  # what the candidate prints goes elsewhere
    say(out, task["nonce"], "ready")
    if "calls" in task:
        answer_calls(out, task)
    else:
        for text in task["inputs"]:
            say(out, task["nonce"], json.dumps(output_of(out, task["code"], text)))


def say(out, nonce, text):
    data = memoryview(("\n%s %s\n" % (nonce, text)).encode("utf-8", "replace"))
    while data:
        data = data[os.write(out, data) :]


def answer_calls(out, task):
    sink = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(sink, number)
    names = {"__name__": "candidate"}
    try:
        exec(compile(task["code"], "candidate.py", "exec"), names)
    except BaseException as error:
        say(out, task["nonce"], json.dumps({"error": told(error)}))
        return
    for call in task["calls"]:
        try:
            args = [unpacked(item) for item in call["args"]]
            kwargs = {name: unpacked(item) for name, item in call["kwargs"].items()}
            answer = {"value": packed(names[call["fn"]](*args, **kwargs))}
            text = json.dumps(answer)
        except BaseException as error:
            text = json.dumps({"error": told(error)})
        say(out, task["nonce"], text[:MAX_TEXT])


def output_of(out, code, text):
    """What a process of its own prints for one input."""
    given, reader, writer = write_input(text), *os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(given, 0)
        os.dup2(writer, 1)
        os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
        for number in (out, given, reader, writer):
            os.close(number)
        run(code)
    os.close(given)
    os.close(writer)
    kept = b""
    while block := os.read(reader, 1 << 16):
        kept += block
        if len(kept) > MAX_TEXT:
            os.kill(child, 9)
            break
    os.close(reader)
    status = os.waitpid(child, 0)[1]
    if len(kept) > MAX_TEXT:
        return {"error": "more than %d bytes" % MAX_TEXT}
    if status:
        return {"error": "exit status %d" % os.waitstatus_to_exitcode(status)}
    return {"stdout": kept.decode("utf-8", "replace")}


def write_input(text):
    """The input as a file, so that it may be longer than a pipe holds."""
    number = os.open("/tmp", os.O_RDWR | os.O_TMPFILE)
    data = memoryview(text.encode())
    while data:
        data = data[os.write(number, data) :]
    os.lseek(number, 0, os.SEEK_SET)
    return number


def run(code):
    """The candidate as a script, to the end of this process."""
    sys.stdin = open(0, encoding="utf-8", closefd=False)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)
    status = 0
    try:
        exec(compile(code, "candidate.py", "exec"), {"__name__": "__main__"})
    except SystemExit as error:
        status = 0 if error.code is None else error.code if isinstance(error.code, int) else 1
    except BaseException:
        status = 1
    try:
        sys.stdout.flush()
    except BaseException:
        status = 1
    os._exit(status & 255)


def told(error):
    return "%s: %s" % (type(error).__name__, str(error)[:200])


def packed(value, depth=0):
    if depth > MAX_DEPTH:
        raise ValueError("the value is nested too deep")
    if value is None or type(value) in (bool, int, float, str):
        return value
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return [kind.__name__, [packed(item, depth + 1) for item in value]]
    if isinstance(value, dict):
        return ["dict", [[packed(key, depth + 1), packed(item, depth + 1)] for key, item in value.items()]]
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", list(value)]
    raise TypeError("a value of the type %s cannot be compared" % type(value).__name__)


def unpacked(value):
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
