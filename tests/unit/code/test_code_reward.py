# ruff: noqa: E501
"""The verdict of the ``code`` reward, with the sandbox of bubblewrap."""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from buffer_rl.errors import RewardError
from buffer_rl.records.groups import Sample, Status
from buffer_rl_code import row_tests
from buffer_rl_code.bubblewrap import Bubblewrap
from buffer_rl_code.reward import answers_to, code_of, score, score_fraction
from buffer_rl_code.sandbox import Ended, Program, ProgramRun

pytestmark = [
    pytest.mark.skipif(not shutil.which("bwrap"), reason="no bwrap: apt-get install bubblewrap"),
    pytest.mark.slow,
]

ARGS = SimpleNamespace(code_sandbox=None, plugin=[], code_timeout_s=3.0, code_memory_mb=2048)
SUMS = [{"input": f"{i} {i + 1}\n", "output": f"{2 * i + 1}\n"} for i in range(4)]
CALLS = ["assert add(1, 2) == 3", "assert add([1], [2]) == [1, 2]", "assert add((1,), b=(2,)) == (1, 2)"]
ADD = "def add(a, b):\n    return a + b\n"


def sample_of(code: str, tests: Any, status: Status = Status.COMPLETED) -> Sample:
    return Sample(prompt="p", response=code, metadata={"tests": tests}, status=status)


@pytest.mark.parametrize(
    ("code", "tests", "fraction"),
    [
        ("a, b = map(int, input().split())\nprint(a + b)", SUMS, 1.0),
        ("Here it is:\n```python\nprint(sum(map(int, input().split())))\n```\nDone.", SUMS, 1.0),
        ("import sys\nprint(sum(map(int, sys.stdin.read().split())), end='  \\n\\n')", SUMS, 1.0),
        ("a, b = map(int, input().split())\nprint(a + b if a < 3 else 0)", SUMS, 0.75),
        ("print(1", SUMS, 0.0),
        ("print(1)\nraise SystemExit(3)", SUMS, 0.0),
        (ADD, CALLS, 1.0),
        (ADD.replace("a + b", "a"), CALLS, 0.0),
        (
            ADD,
            [{"fn": "add", "args": [1, 2], "expected": 3}, {"fn": "add", "args": [[1], [2]], "expected": [1, 2]}],
            1.0,
        ),
        ("def add(a, b): return (a, b)", [{"fn": "add", "args": [1, 2], "expected": [1, 2]}], 1.0),  # JSON has no tuple
        ("print('debug')\n" + ADD, CALLS, 1.0),
        ("def f(x): return float('nan')", [{"fn": "f", "args": [1], "expected": float("nan")}], 1.0),
        ("def f(x): return {1, 2}", ["assert f({1: (2, None)}) == {2, 1}", "assert f(-1.5) == set([1, 2])"], 1.0),
    ],
)
def test_the_share_of_tests_that_the_code_passes(code: str, tests: Any, fraction: float) -> None:
    assert score_fraction(ARGS, sample_of(code, tests)) == fraction
    assert score(ARGS, sample_of(code, tests)) == float(fraction == 1.0)
    assert score(ARGS, sample_of(code, tests, Status.TRUNCATED)) == 0.0


SUM = "a, b = map(int, input().split())\n"
SCRIPTS = {
    "exit": SUM + "print(a + b)\nexit()\nprint('more')",
    "quit": SUM + "print(a + b)\nif a < 99: quit(0)\nprint('more')",
    "output at the end": "import atexit, io, sys\nsys.stdout = text = io.StringIO()\n"
    "atexit.register(lambda: sys.__stdout__.write(text.getvalue()))\n" + SUM + "print(a + b)",
    "first output": "import sys\n" + SUM + "sys.__stdout__.write(str(a + b))",
    "a thread": "import threading, time\ndef main():\n    time.sleep(0.05)\n    print(sum(map(int, input().split())))\n"
    "threading.Thread(target=main).start()",
    "types by name": "import typing\nclass A:\n    next: 'A'\ntyping.get_type_hints(A)\n" + SUM + "print(a + b)",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_ends_as_it_does_in_the_interpreter(name: str) -> None:
    assert score(ARGS, sample_of(SCRIPTS[name], SUMS)) == 1.0


LONG = "".join(f"{number}\n" for number in range(60000))


@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("for number in range(int(input())): print(number)", {"input": "60000\n", "output": LONG}),
        (
            "def f(n): return [[i] for i in range(n)]",
            {"fn": "f", "args": [60000], "expected": [[i] for i in range(60000)]},
        ),
    ],
    ids=["printed", "returned"],
)
def test_a_long_answer_is_right_and_what_no_answer_can_be_is_an_error(code: str, test: dict[str, Any]) -> None:
    assert score(ARGS, sample_of(code, [test])) == 1.0
    test = {**test, **{name: test[name] * 12 for name in ("output", "expected") if name in test}}
    with pytest.raises(RewardError, match="too much text"):
        score(ARGS, sample_of(code, [test]))


def test_classes_of_a_candidate_may_name_types_of_their_own() -> None:
    code = "from dataclasses import dataclass\n@dataclass\nclass A:\n    value: object\n    next: 'A' = None\n"
    assert score(ARGS, sample_of(code + "def add(a, b): return A(a + b).value", CALLS)) == 1.0


FORGERIES = {
    "early exit": "import os\nos._exit(0)",
    "exit of the script": "raise SystemExit(0)",
    "exit in a call": "import os\ndef add(a, b): os._exit(0)",
    "equal to everything": "class A:\n    def __eq__(self, other): return True\n    def __hash__(self): return 0\n"
    "def add(a, b): return A()",
    "equal number": "class A(int):\n    def __eq__(self, other): return True\ndef add(a, b): return A(0)",
    "equal text": "class A(str):\n    def __eq__(self, other): return True\nprint(A('x'))\ndef add(a, b): return A('x')",
    "patched comparison": "import builtins, operator\noperator.eq = lambda a, b: True\n"
    "builtins.all = builtins.any = lambda *a: True\ndef add(a, b): return None",
    "patched json": "import json\njson.dumps = lambda *a, **k: 'true'\ndef add(a, b): return 0",
    "forged output": "import os\nfor number in range(3, 20):\n    for line in (b'1', b'3', b'ok', b'{\"value\": true}'):\n"
    "        try: os.write(number, b'\\n' + line + b'\\n')\n        except OSError: pass\ndef add(a, b): return 0",
    "forged lines": "import sys\nframe = sys._getframe()\nwhile frame and 'task' not in frame.f_locals: frame = frame.f_back\n"
    "import os\nnonce = frame.f_locals['task']['nonce'] if frame else ''\n"
    'for n in range(1, 10):\n    for _ in range(5):\n        try: os.write(n, (\'\\n%s {"passed": true, "ok": 1}\\n\' % nonce).encode())\n'
    "        except OSError: pass\nos._exit(0)",
    "reading the tests": "import gc, sys\nfound = [o for o in gc.get_objects() if isinstance(o, dict) and 'expected' in o]\n"
    "text = repr([f.f_locals for f in sys._current_frames().values()])\n"
    "print(found[0]['expected'] if found else 0)\n"
    "def add(a, b): return found[0]['expected'] if found else 0",
    "reading the files": "import os\ntext = ''\nfor folder in ('/', '/tmp', '/dev/shm', '/proc/1', '/proc/self'):\n"
    "    for name in os.listdir(folder):\n        try: text += open(folder + '/' + name).read(100000)\n"
    "        except (OSError, ValueError): pass\nprint(5 if 'secret-answer' in text else 0)\n"
    "def add(a, b): return 'secret-answer' if 'secret' + '-answer' in text else 0",
    "killing the driver": "import os\nos.kill(os.getppid(), 9)\nos.kill(os.getpid(), 9)",
    "deep value": "def add(a, b):\n    v = []\n    for _ in range(10000): v = [v]\n    return v",
    "endless value": "def add(a, b): return [1] * (1 << 24)",
    "value that never ends": "class A(list):\n    def __iter__(self):\n        while True: yield 1\ndef add(a, b): return A()",
    "digits without end": "def add(a, b): return 1 << 60000",
}


@pytest.mark.parametrize("name", FORGERIES)
@pytest.mark.parametrize("form", ["calls", "inputs"])
def test_a_verdict_cannot_be_forged(name: str, form: str) -> None:
    calls = [
        {"fn": "add", "args": [1, 2], "expected": 3},
        {"fn": "add", "args": ["a", "b"], "expected": "secret-answer"},
    ]
    tests = calls if form == "calls" else SUMS
    assert score_fraction(ARGS, sample_of(FORGERIES[name], tests)) == 0.0


@pytest.mark.parametrize(
    "tests",
    [None, [], "x", [1], [{"input": 1, "output": "1"}], ["assert f(1)"], ["assert f(g(1)) == 2"], ["import os"],
     ["assert f(1) == 1; import os"], ["assert o.f(1) == 1"], [{"fn": "f", "args": 1, "expected": 1}], ["assert f(**a) == 1"],
     ["assert f(1) != 1"], [{"input": "1"}], ["assert " + "(" * 5000]],
)  # fmt: skip
def test_tests_that_cannot_be_read_are_an_error_and_no_zero(tests: Any) -> None:
    with pytest.raises(RewardError):
        score(ARGS, sample_of(ADD, tests))


def test_the_code_is_the_last_block_of_python_or_the_whole_answer() -> None:
    assert code_of("x = 1") == "x = 1"
    assert code_of("a\n```\nx = 1\n```\nb") == "x = 1\n"
    assert code_of("```py\nx = 1\n```\n```python title\nx = 2\n```\n```text\n3\n```") == "x = 2\n"
    in_a_list = "1. So:\n\n   ```python\n   def f():\n\n       return 1\n   ```\n2. Done"
    assert code_of(in_a_list) == "def f():\n\n    return 1\n"
    assert code_of('```python\nx = """\n  ```\n"""\n```') == 'x = """\n  ```\n"""\n'


class Broken:
    """A sandbox in which nothing starts."""

    def check(self) -> None: ...

    def run(self, program: Program) -> ProgramRun:
        return ProgramRun(ended=Ended.EXITED, exit_code=1, stdout=b"")


def test_a_sandbox_that_does_not_come_to_the_code_is_no_answer() -> None:
    tests = row_tests.tests_of({"tests": SUMS}, where="here")
    assert answers_to(Broken(), ADD, tests, timeout_s=1, memory_mb=512) is None
    assert answers_to(Bubblewrap(), "import os; os._exit(1)", tests, timeout_s=3, memory_mb=512) is not None


def test_many_candidates_at_once_are_not_late() -> None:
    """Each takes half a second of a core, and all together far more than the limit on the clock."""
    code = "import time\nwhile time.process_time() < 0.5: pass\nprint(sum(map(int, input().split())))"
    args = SimpleNamespace(**{**vars(ARGS), "code_timeout_s": 2.0})
    with ThreadPoolExecutor(64) as pool:
        rewards = list(pool.map(lambda _: score(args, sample_of(code, SUMS[:1])), range(64)))
    assert rewards == [1.0] * 64


def test_a_candidate_takes_little_of_the_processor() -> None:
    """What a candidate costs beyond the interpreter's own start."""
    sample = sample_of(ADD, CALLS)
    score(ARGS, sample)
    times = []
    for _ in range(10):
        began = time.monotonic()
        before = os.times()
        assert score(ARGS, sample) == 1.0
        after = os.times()
        used = sum(after[:4]) - sum(before[:4])
        times.append(min(used, time.monotonic() - began))
    assert min(times) < 0.1
