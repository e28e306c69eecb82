"""What a user reads whose code, options or checkpoint still have the names of an earlier version.

``old_run/`` holds the options of a run before the modules moved, and what its checkpoint's manifest said of them.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.driver.provenance import option_changes, resume_notices
from buffer_rl.errors import ConfigError, PluginError
from buffer_rl.options.section import compose, load_section
from buffer_rl.options.sources import Resolved, resolve
from buffer_rl.plugin.old_names import MODULES, NAMES, PACKAGE, new_name
from buffer_rl.plugin.registry import PluginRegistry

OLD_RUN = Path(__file__).parent / "old_run"
OLD_ENGINE, ENGINE = "buffer_rl.engine.embedded.launcher:launch", "buffer_rl.embedded.launcher:launch"


@pytest.fixture(autouse=True)
def nothing_stays_imported() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(PACKAGE) and sys.modules[name].__spec__.origin is None:  # type: ignore[union-attr]
            del sys.modules[name]
            parent, _, child = name.rpartition(".")
            vars(sys.modules.get(parent, sys)).pop(child, None)


def old_options(**flags: str) -> Resolved:
    path = str(OLD_RUN / "run.yaml")
    return resolve(compose(CORE_SECTIONS), flags=flags, environ={}, config_paths=[path])


@pytest.mark.parametrize("old", MODULES)
def test_every_module_of_the_table_has_moved_to_one_that_exists(old: str) -> None:
    assert importlib.util.find_spec(f"{PACKAGE}{MODULES[old]}") is not None
    folder = Path(importlib.import_module("buffer_rl").__file__ or "").parent / old.replace(".", "/")
    assert not folder.with_suffix(".py").exists()
    assert not (folder / "__init__.py").exists()
    assert new_name(f"{PACKAGE}{old}") == f"{PACKAGE}{MODULES[old]}"


def test_every_name_of_the_table_is_where_it_says_and_nowhere_else() -> None:
    for old, new in NAMES.items():
        name = old.rpartition(".")[2]
        assert hasattr(importlib.import_module(f"{PACKAGE}{new}"), name) or name == "Args", old  # of type checkers
        with pytest.raises(ImportError, match=f"is {PACKAGE}{new}.{name} now"):
            exec(f"from {PACKAGE}{old.rpartition('.')[0]} import {name}")


@pytest.mark.parametrize(
    ("name", "new"),
    [
        ("buffer_rl.engine.client", "buffer_rl.engines.client"),
        ("buffer_rl.engine.embedded.launcher.launch", "buffer_rl.embedded.launcher.launch"),
        ("buffer_rl.engine.embedded.model:Decoder", "buffer_rl.embedded.fast_decoder:Decoder"),
        ("buffer_rl.contracts:RewardModel", "buffer_rl.kinds.reward:RewardModel"),
        ("buffer_rl.roles.FieldRole", "buffer_rl.kinds.trainer.FieldRole"),
        ("buffer_rl.roles", "buffer_rl.plan.roles"),
        ("buffer_rl.types_of_mine", ""),
        ("buffer_rl.options.section", ""),
        ("buffer_rl_mine.types", ""),
        ("types", ""),
    ],
)
def test_a_name_is_looked_up_whole_and_then_by_what_it_lies_in(name: str, new: str) -> None:
    assert new_name(name) == new


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("import buffer_rl.types", "buffer_rl.types is buffer_rl.records.groups now"),
        ("from buffer_rl.types import Sample", "buffer_rl.types is buffer_rl.records.groups now"),
        ("from buffer_rl import types", "buffer_rl.types is buffer_rl.records.groups now"),
        ("from buffer_rl import contracts as c; c.Trainer", "contracts.Trainer is buffer_rl.kinds.trainer.Trainer now"),
        ("from buffer_rl.contracts import *", "buffer_rl.contracts.DataSource is buffer_rl.kinds.data.DataSource now"),
        ("from buffer_rl.contracts import LossOutputs", "there is no LossOutputs any more: a loss returns a number"),
        ("from buffer_rl.contracts import Nothing", "cannot import name 'Nothing'"),
        ("from buffer_rl.engine import client", "buffer_rl.engine.client is buffer_rl.engines.client now"),
        (
            "import buffer_rl.engine.embedded.launcher",
            "buffer_rl.engine.embedded.launcher is buffer_rl.embedded.launcher now",
        ),
        ("import buffer_rl.nothing", "No module named 'buffer_rl.nothing'"),
        ("from buffer_rl import nothing", "cannot import name 'nothing'"),
    ],
)
def test_an_import_of_an_old_name_tells_the_new_one(line: str, told: str) -> None:
    with pytest.raises(ImportError) as caught:
        exec(line)
    assert told in str(caught.value)


def test_a_script_whose_first_line_is_such_an_import_is_told_too(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text("from buffer_rl.config import Section\n")
    done = subprocess.run([sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr.endswith("ModuleNotFoundError: buffer_rl.config is buffer_rl.options.section now\n")


@pytest.mark.parametrize("separator", [":", "."])
def test_a_plugin_reference_tells_the_new_one(separator: str) -> None:
    old, new = OLD_ENGINE.replace(":", separator), ENGINE.replace(":", separator)
    with pytest.raises(PluginError, match=f"{old} is {new} now") as caught:
        PluginRegistry().resolve("engine", old)
    assert caught.value.hint == f"did you mean {new!r}?"


def test_an_entry_point_and_a_whole_plugin_are_told_by_the_module_that_they_name(place: Any) -> None:
    place.install("third-party", {"buffer_rl.engine": {"third": OLD_ENGINE}})
    with pytest.raises(PluginError, match=f"{OLD_ENGINE} is {ENGINE} now") as caught:
        PluginRegistry().resolve("engine", "third")
    assert "engine 'third'" in caught.value.where
    with pytest.raises(PluginError, match=r"buffer_rl.hookspecs is buffer_rl.plugin.hookspecs now"):
        PluginRegistry.from_flags(["buffer_rl.hookspecs"])


def test_a_plugin_whose_own_import_has_an_old_name_is_told_with_its_line(place: Any) -> None:
    place.write("mine.py", "import json\nfrom buffer_rl.types import Sample\ndef score(args, sample): ...\n")
    with pytest.raises(PluginError, match=r"buffer_rl.types is buffer_rl.records.groups now") as caught:
        PluginRegistry().resolve("reward", "./mine.py:score")
    assert "mine.py:2" in caught.value.where
    assert "install" not in caught.value.hint


def test_a_file_or_a_flag_with_an_old_reference_means_the_new_one_with_a_notice() -> None:
    resolved = old_options(custom_rm_path="buffer_rl.engine.x:score")
    assert (resolved.args.rollout_engine, resolved.args.custom_rm_path) == (ENGINE, "buffer_rl.engines.x:score")
    engine, reward = sorted(resolved.notices, reverse=True)
    assert engine == f"--rollout-engine {OLD_ENGINE} (file {OLD_RUN / 'run.yaml'}:4) is {ENGINE} now"
    assert "(flag --custom-rm-path)" in reward
    assert resolved.args.train_backend == "buffer_rl.trainer.torch_trainer:TorchTrainer"  # which has not moved


def test_the_section_of_a_plugin_that_has_an_old_name_tells_the_new_one() -> None:
    with pytest.raises(ConfigError, match=r"buffer_rl.engine.options is buffer_rl.cluster.options now"):
        load_section("buffer_rl.engine.options:EngineOptions")


def test_a_checkpoint_with_old_names_differs_only_in_what_they_do_not_name() -> None:
    facts: dict[str, Any] = json.loads((OLD_RUN / "manifest.json").read_text())["facts"]
    assert facts["options"]["rollout_engine"] == OLD_ENGINE
    args = old_options().args
    assert [change for change in option_changes(facts, args) if change.option in facts["options"]] == []
    other = args.model_copy(update={"rollout_engine": "external", "lr": 0.5, "num_rollout": 4})
    changed = [change.option for change in option_changes(facts, other) if change.option in facts["options"]]
    assert changed == ["lr", "rollout_engine"]
    assert f'--rollout-engine "{ENGINE}", now "external"' in resume_notices(facts, 2, other)[0]
