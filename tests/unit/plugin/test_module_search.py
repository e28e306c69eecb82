"""Names that a module's source binds, read without running it."""

from __future__ import annotations

import pytest

from buffer_rl.plugin.reference import find_module, nearest_module, read_names

SOURCE = """
import os.path, numpy as np
from json import loads as parse
a, (b, *c) = 1, [unseen for unseen in (2, 3)]
d: int = 4
with open("x") as handle:
    e = 5
if a:
    def f(): inner = 1
else:
    class G: member = 1
try:
    h = 1
except ValueError as problem:
    i = 2
finally:
    j = 3
for k in []:
    m = 1
async def n(): pass
def o():
    global p
    p = 1
match a:
    case [q, *r]:
        s = 1
if (t := 3): pass
"""


def test_all_ways_to_bind_a_name_at_the_top_level_are_seen() -> None:
    names = read_names(SOURCE, "x.py")
    found = {"os", "np", "parse", *"abcdefhijkmnopqrst", "G", "handle", "problem"}
    assert set(names.lines) == found
    assert sorted(names.public) == ["G", "f", "n", "o"]
    assert not names.is_open
    assert names.lines["f"] == 9


@pytest.mark.parametrize(
    "source",
    [
        "from os import *",
        "def __getattr__(name): pass",
        "globals()['x'] = 1",
        "exec('x = 1')",
        "vars()['x'] = 1",
        "import sys\nsys.modules[__name__] = object()",
    ],
)
def test_a_module_that_may_bind_more_than_it_shows_is_open(source: str) -> None:
    assert read_names(source, "x.py").is_open


def test_ordinary_code_is_not_open() -> None:
    assert not read_names("def f(args, model): return vars(args), model.modules()", "x.py").is_open


def test_modules_of_all_sorts_are_found() -> None:
    assert find_module("json.decoder", []) is not None
    assert find_module("sys", []) is not None
    assert find_module("math", []) is not None
    for name in ("json.nothing", "math.nothing", "nothing_at_all", "", "a b", "json.", ".json"):
        assert find_module(name, []) is None, name


def test_the_nearest_module_is_found_through_several_wrong_components() -> None:
    assert nearest_module("buffer_rll.plugins", []) == "buffer_rl.plugin"
    assert nearest_module("buffer_rl.verb.plugins", []) == "buffer_rl.verbs.plugins"
    assert nearest_module("qqqqqq.zzzzzz", []) is None
