"""Resolving references that are paths and objects: every route and every error."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.errors import ConfigError, PluginError
from buffer_rl.plugin.hookspecs import hookimpl
from buffer_rl.plugin.reference import Form
from buffer_rl.plugin.registry import PluginRegistry

REWARD = """
def score(args, sample):
    return 1.0
"""


def message(registry: PluginRegistry, reference: object, kind: str = "reward") -> str:
    """The error of resolving a reference."""
    with pytest.raises(PluginError) as caught:
        registry.resolve(kind, reference)
    return str(caught.value)


@pytest.mark.parametrize(
    "reference",
    ["my_reward:score", "./my_reward.py:score", "my_reward.py:score", "my_reward.score", "sub/more.py:score"],
)
def test_every_spelling_of_a_path_resolves_from_the_working_directory(place: Any, reference: str) -> None:
    place.write("my_reward.py", REWARD)
    place.write("sub/more.py", REWARD)
    registry = PluginRegistry()
    function = registry.resolve("reward", reference)
    assert function(None, None) == 1.0
    assert registry.resolve("reward", reference) is function
    assert registry.manager.has_plugin(reference)
    assert registry.manager.get_plugin(reference).buffer_rl_provide("reward") == {reference: function}


def test_two_spellings_of_one_file_run_it_once(place: Any) -> None:
    place.write("counting.py", "import os\nos.mkdir('ran')\n" + REWARD)
    registry = PluginRegistry()
    first = registry.resolve("reward", "./counting.py:score")
    assert registry.resolve("reward", f"{place.folder}/counting.py:score") is first


def test_relative_files_and_modules_are_searched_in_the_search_path(place: Any, tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "distant.py").write_text(REWARD)
    registry = PluginRegistry(search_path=[str(tmp_path / "far")])
    assert registry.resolve("reward", "distant.py:score")(None, None) == 1.0
    assert registry.resolve("reward", "distant:score")(None, None) == 1.0


def test_folders_are_appended_to_the_import_path_and_never_hide_an_installed_module(place: Any) -> None:
    place.write("shlex.py", REWARD)
    registry = PluginRegistry()
    text = message(registry, "shlex:score")
    assert "the module 'shlex' of the standard library hides the file shlex.py" in text
    assert "write ./shlex.py:score" in text
    place.write("late.py", REWARD)
    registry.resolve("reward", "late:score")
    assert sys.path[-1] == str(place.folder)


@pytest.mark.parametrize(
    ("file", "reference", "own"),
    [
        ("statistics.py", "statistics:mean", "./statistics.py:mean"),
        ("statistics.py", "statistics.mean", "./statistics.py:mean"),
        ("math.py", "math:floor", "./math.py:floor"),
        ("test.py", "test:score", "./test.py:score"),
        ("json/tool.py", "json.tool:main", "./json/tool.py:main"),
        ("numpy/testing.py", "numpy.testing:suppress", "./numpy/testing.py:suppress"),
        ("test/reward.py", "test.reward:score", "./test/reward.py:score"),
    ],
)
def test_a_file_that_another_module_hides_is_named_with_the_reference_to_it(
    place: Any, file: str, reference: str, own: str
) -> None:
    name = own.rpartition(":")[2]
    place.write(file, f"def {name}(args, sample):\n    return 2.0\n")
    registry = PluginRegistry()
    with pytest.raises(PluginError) as caught:
        registry.locate("reward", reference)
    assert f"hidden by another module; write {own}" in str(caught.value)
    assert registry.resolve("reward", own)(None, None) == 2.0


IN_CHILDREN = """
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

def length(text):
    return float(len(text))

def score(args, sample):
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(length, sample).result(timeout=60)
"""


def test_processes_that_the_code_of_a_file_starts_find_its_functions(place: Any) -> None:
    place.write("rewards/in_children.py", IN_CHILDREN)
    score: Any = PluginRegistry().resolve("reward", "./rewards/in_children.py:score")
    assert score(None, "four") == 4.0


def test_files_of_one_name_are_modules_of_their_own_and_hide_nothing(place: Any) -> None:
    for folder, number in (("one", 1.0), ("two", 2.0)):
        place.write(f"{folder}/of_a_name.py", f"def score(args, sample):\n    return {number}\n")
        place.write(f"{folder}/__init__.py", f"def score(args, sample):\n    return {number + 10}\n")
    registry = PluginRegistry()
    names = [f"./{folder}/{file}.py:score" for folder in ("one", "two") for file in ("of_a_name", "__init__")]
    rewards: list[Any] = [registry.resolve("reward", name) for name in names]
    assert [reward(None, None) for reward in rewards] == [1.0, 11.0, 2.0, 12.0]
    import of_a_name  # type: ignore[import-not-found]

    assert of_a_name.score is rewards[0]


def test_a_file_with_the_text_of_the_installed_module_is_not_hidden(place: Any) -> None:
    import statistics

    place.write("statistics.py", Path(statistics.__file__).read_text())
    assert PluginRegistry().locate("reward", "statistics:mean").file == statistics.__file__


def test_locating_runs_nothing(place: Any) -> None:
    place.write("package/__init__.py", "raise RuntimeError('ran')")
    place.write("package/inner.py", "raise RuntimeError('ran')\n" + REWARD)
    origin = PluginRegistry().locate("reward", "package.inner:score")
    assert (origin.form, origin.module, origin.attr, origin.line) == (Form.MODULE, "package.inner", "score", 3)
    assert origin.verified
    assert "package" not in sys.modules


def test_a_namespace_package_is_searched_too(place: Any) -> None:
    place.write("spread/deep/inner.py", REWARD)
    registry = PluginRegistry()
    assert registry.locate("reward", "spread.deep.inner:score").verified
    assert registry.resolve("reward", "spread.deep.inner:score")(None, None) == 1.0


def test_what_the_source_cannot_tell_is_left_to_the_import(place: Any) -> None:
    place.write(
        "dynamic.py",
        "def __getattr__(name):\n    if name == 'score':\n        return lambda args, sample: 2.0\n"
        "    raise AttributeError(name)\n",
    )
    registry = PluginRegistry()
    assert not registry.locate("reward", "dynamic:score").verified
    assert not registry.locate("reward", "dynamic:other").verified
    assert registry.resolve("reward", "dynamic:score")(None, None) == 2.0
    assert "'dynamic' has no 'other'" in message(registry, "dynamic:other")


def test_a_missing_module_names_the_nearest_one_and_where_it_was_searched(place: Any) -> None:
    place.write("my_reward.py", REWARD)
    text = message(PluginRegistry(), "my_rewrd:scor")
    assert "reward 'my_rewrd:scor': there is no module 'my_rewrd'" in text
    assert "did you mean 'my_reward:score'?" in text
    assert str(place.folder) in text
    assert "(args, sample) -> float | dict, for --rm-type or --custom-rm-path" in text


def test_a_missing_submodule_names_the_nearest_sibling(place: Any) -> None:
    assert "did you mean 'rm_hub.exact_match:score'?" in message(PluginRegistry(), "rm_hub.exact_macth:score")


def test_a_missing_attribute_names_the_nearest_one_without_an_import(place: Any) -> None:
    place.write("my_reward.py", "raise RuntimeError('ran')\n" + REWARD + "\nlimit = 3\n")
    text = message(PluginRegistry(), "my_reward:scroe")
    assert "(my_reward.py): the module 'my_reward' has no 'scroe'" in text
    assert "did you mean 'my_reward:score'? known names: score" in text


def test_a_missing_file_names_the_nearest_one(place: Any) -> None:
    place.write("lib/my_reward.py", REWARD)
    text = message(PluginRegistry(), "lib/my_rewrd.py:score")
    assert "there is no file 'lib/my_rewrd.py'" in text
    assert "did you mean 'lib/my_reward.py:score'?" in text


@pytest.mark.parametrize("reference", ["my_reward", "my_reward.py", "./my_reward.py"])
def test_a_module_or_file_alone_asks_for_what_is_in_it(place: Any, reference: str) -> None:
    place.write("my_reward.py", REWARD)
    text = message(PluginRegistry(), reference)
    assert "but nothing in it" in text
    assert f"did you mean '{reference}:score'?" in text


@pytest.mark.parametrize("reference", [":", ":f", "a b:f", "a:", "", "a..b", "a:b:c"])
def test_nonsense_is_an_error_and_not_a_traceback(place: Any, reference: str) -> None:
    assert f"reward {reference!r}" in message(PluginRegistry(), reference)


def test_a_syntax_error_shows_file_line_and_text(place: Any) -> None:
    place.write("broken.py", "x = 1\ndef score(args, sample)\n    return 1\n")
    for reference in ("broken:score", "./broken.py:score"):
        text = message(PluginRegistry(), reference)
        assert "(broken.py:2): SyntaxError: expected ':' in 'def score(args, sample)'" in text


def test_a_module_whose_own_import_fails_shows_that_error_and_its_line(place: Any) -> None:
    place.write("needs.py", "import os\nimport not_installed_anywhere\n" + REWARD)
    place.write("raises.py", REWARD + "\nlimit = int('many')\n")
    place.write("leaves.py", "import sys\n" + REWARD + "\nsys.exit(3)\n")
    registry = PluginRegistry()
    text = message(registry, "needs:score")
    assert "(needs.py:2): its own import failed: ModuleNotFoundError: No module named 'not_installed_anywhere'" in text
    assert "install what provides 'not_installed_anywhere'" in text
    assert "(raises.py:5): its own import failed: ValueError: invalid literal" in message(registry, "./raises.py:score")
    assert "(leaves.py:6): its own import failed: SystemExit: 3" in message(registry, "leaves:score")
    place.write("interrupts.py", REWARD + "\nraise KeyboardInterrupt\n")
    assert "(interrupts.py:5): its own import failed: KeyboardInterrupt" in message(registry, "interrupts:score")


def test_a_syntax_error_in_an_imported_neighbour_is_placed_there(place: Any) -> None:
    place.write("helper.py", "def (\n")
    place.write("uses.py", "import helper\n" + REWARD)
    assert "(helper.py:1): its own import failed: SyntaxError" in message(PluginRegistry(), "uses:score")


def test_a_file_may_import_its_neighbours(place: Any) -> None:
    place.write("lib/neighbour.py", "VALUE = 4.0\n")
    place.write("lib/uses.py", "from neighbour import VALUE\ndef score(args, sample):\n    return VALUE\n")
    assert PluginRegistry().resolve("reward", "lib/uses.py:score")(None, None) == 4.0


def test_what_is_not_callable_or_has_the_wrong_signature_is_refused_with_both_signatures(place: Any) -> None:
    place.write("wrong.py", "LIMIT = 3\ndef score(sample):\n    return 1\ndef rest(*args): return 1\n")
    registry = PluginRegistry()
    assert "(wrong.py:1): int is not callable; found 3 (int)" in message(registry, "wrong:LIMIT")
    text = message(registry, "wrong:score")
    assert "(wrong.py:2): it cannot be called with (args, sample): too many positional arguments" in text
    assert "found score(sample)" in text
    assert "expected: (args, sample) -> float | dict" in text
    assert callable(registry.resolve("reward", "wrong:rest"))


def test_objects_are_accepted_as_they_are() -> None:
    def function(args: Any, sample: Any) -> float:
        return 1.0

    class Judge:
        def __call__(self, args: Any, sample: Any) -> float:
            return 2.0

    def scaled(factor: float, args: Any, sample: Any) -> float:
        return factor

    async def slow(args: Any, sample: Any) -> float:
        return 3.0

    registry = PluginRegistry()
    for obj in (function, Judge(), functools.partial(scaled, 2.0), slow):
        assert registry.resolve("reward", obj) is obj
    assert "too many positional arguments; found partial(" in message(registry, functools.partial(scaled, factor=1.0))
    assert {info.kind for info in registry.infos("reward") if info.loaded} == {"reward"}
    assert "NoneType is not callable" in message(registry, None)


def test_an_attribute_of_a_class_can_be_named(place: Any) -> None:
    place.write("grouped.py", "class Rewards:\n    @staticmethod\n    def score(args, sample):\n        return 5.0\n")
    registry = PluginRegistry()
    for reference in ("grouped:Rewards.score", "grouped.Rewards.score"):
        assert registry.resolve("reward", reference)(None, None) == 5.0
    assert "has no 'scor'; the nearest name is 'score'" in message(registry, "grouped:Rewards.scor")


def test_one_reference_can_serve_two_kinds(place: Any) -> None:
    place.write("both.py", "def run(args, thing):\n    return True\n")
    registry = PluginRegistry()
    assert registry.resolve("filter", "both:run") is registry.resolve("reward", "both:run")
    assert [info.kind for info in registry.infos() if info.name == "both:run"] == ["filter", "reward"]


def test_data_may_choose_only_registered_names(place: Any) -> None:
    place.write("my_reward.py", REWARD)
    registry = PluginRegistry()
    registry.resolve("reward", "my_reward:score")
    registry.resolve("reward", "my_reward.score")
    for reference in ("my_reward:score", "./my_reward.py:score", "my_reward.score", "/etc/passwd", "my_reward.py"):
        with pytest.raises(PluginError, match="only registered names"):
            registry.resolve_registered("reward", reference)
    with pytest.raises(PluginError, match="did you mean 'exact_match'"):
        registry.resolve_registered("reward", "exact_mach")
    with pytest.raises(PluginError, match="there is no reward of that name"):
        registry.resolve_registered("reward", "my_reward")
    assert registry.resolve_registered("reward", "exact_match") is registry.resolve("reward", "exact_match")


def test_a_name_can_be_provided_in_the_process(place: Any) -> None:
    def constant(args: Any, sample: Any) -> float:
        return 7.0

    class Own:
        @hookimpl
        def buffer_rl_provide(self, kind: str) -> dict[str, object]:
            names = {"seven": constant, "numeric": constant, "wrong": lambda sample: 1.0}
            return dict(names) if kind == "reward" else {}

    registry = PluginRegistry()
    registry.manager.register(Own(), "own")
    assert registry.resolve_registered("reward", "seven") is constant
    assert registry.resolve("reward", "seven") is constant
    assert registry.locate("reward", "seven").provider == "own"
    text = message(registry, "numeric")
    assert "several plugins have this name: buffer-rl" in text
    assert "plugin own" in text
    with pytest.raises(PluginError, match="cannot be called"):
        registry.resolve("reward", "wrong")


def test_an_unknown_kind_lists_the_kinds() -> None:
    with pytest.raises(ConfigError, match="there is no plugin kind 'rewards'"):
        PluginRegistry().resolve("rewards", "exact_match")


def test_the_list_says_where_a_loaded_file_is_from(place: Any) -> None:
    import hashlib

    file = place.write("my_reward.py", REWARD)
    registry = PluginRegistry()
    registry.resolve("reward", "my_reward:score")
    registry.resolve("reward", "rm_hub.numeric:score")
    infos = {info.name: info for info in registry.infos("reward")}
    own = infos["my_reward:score"]
    assert (own.file, own.line, own.loaded, own.distribution) == (str(file), 2, True, "")
    assert own.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert infos["rm_hub.numeric:score"].distribution == "buffer-rl"
    assert not infos["exact_match"].loaded


def test_a_missing_reference_answers_fast_and_importing_plugins_brings_neither_torch_nor_ray(place: Any) -> None:
    code = (
        "import sys\n"
        "from buffer_rl.plugin.registry import PluginRegistry\n"
        "import buffer_rl.kinds.table, buffer_rl.plugin.hookspecs\n"
        "try:\n    PluginRegistry().locate('trainer', 'buffer_rl.trainer.torch_trainr:TorchTrainer')\n"
        "except ValueError as error:\n    print(error)\n"
        "PluginRegistry().locate('trainer', 'torch')\n"
        "print(sorted({'torch', 'ray', 'transformers'} & set(sys.modules)))\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=dict(os.environ)
    )
    assert "did you mean 'buffer_rl.trainer.torch_trainer:TorchTrainer'?" in answer.stdout
    assert answer.stdout.splitlines()[-1] == "[]"
