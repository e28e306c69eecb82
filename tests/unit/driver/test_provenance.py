"""What a run and its checkpoints write down about code and data."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from buffer_rl import __version__
from buffer_rl.args import CORE_SECTIONS
from buffer_rl.buffer.actor import BufferActor
from buffer_rl.driver.local_roles import RunCheckpoints
from buffer_rl.driver.provenance import changed_plugins, provenance_of
from buffer_rl.errors import ConfigError
from buffer_rl.files.checkpoint import opened_checkpoint
from buffer_rl.observe.run_folder import RUN_FILE, read_facts, write_facts
from buffer_rl.options.section import compose
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.plugin.shipping import MAX_BYTES

REWARD = "import words\n\ndef score(args, sample):\n    return words.VALUE\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "provenance_reward.py").write_text(REWARD)
    (tmp_path / "words.py").write_text("VALUE = 1.0\n")
    return tmp_path


def options(**changes: Any) -> Any:
    return compose(CORE_SECTIONS)(custom_rm_path="provenance_reward:score", **changes)


def test_sources_of_plugins_of_their_imports_and_versions_are_written_down(folder: Path) -> None:
    data = [{"use": "train", "path": "s3://user:hunter2@bucket/a.jsonl", "source_hash": "abc", "num_rows": 3}]
    facts = provenance_of(options(), PluginRegistry(), data)
    sha256 = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ("provenance_reward.py", "words.py")
    }
    assert facts["code"] == sha256
    assert len(facts["code_sha256"]) == 64
    plugins = {entry["option"]: entry for entry in facts["plugins"]}
    assert plugins["custom_rm_path"]["sha256"] == sha256["provenance_reward.py"]
    assert plugins["advantage_estimator"]["distribution"] == "buffer-rl"
    assert len(plugins["advantage_estimator"]["sha256"]) == 64
    assert facts["python"] == platform.python_version()
    assert {"ray", "torch", "transformers", "sglang-router"} <= set(facts["packages"])
    assert ("smg" in facts["packages"]) == (find_spec("smg") is not None)
    assert facts["data"] == [{**data[0], "path": "s3://***@bucket/a.jsonl"}]
    assert "provenance_reward" not in sys.modules


def test_the_size_of_the_code_matters_only_where_it_is_sent_to_other_nodes(folder: Path) -> None:
    (folder / "big").mkdir()
    (folder / "big" / "__init__.py").write_text(REWARD)
    (folder / "big" / "table.csv").touch()
    os.truncate(folder / "big" / "table.csv", MAX_BYTES + 1)
    args = options().model_copy(update={"custom_rm_path": "big:score"})
    code = provenance_of(args, PluginRegistry())["code"]
    assert code["big/table.csv"] == f"{MAX_BYTES + 1} bytes"
    assert code["big/__init__.py"] == hashlib.sha256(REWARD.encode()).hexdigest()
    there = args.model_copy(update={"ray_address": "auto"})
    with pytest.raises(ConfigError, match=r"--ray-address: .*table\.csv \(20\.0 MiB\)") as caught:
        provenance_of(there, PluginRegistry())
    assert "add --no-ship-code" in caught.value.hint
    assert provenance_of(there.model_copy(update={"ship_code": False}), PluginRegistry())["code"] == code


def test_plugins_named_on_the_command_line_and_files_are_among_them(folder: Path) -> None:
    (folder / "a_plugin.py").write_text("")
    args = options(plugin=["a_plugin", "no:other"], dynamic_sampling_filter_path="./words.py:VALUE")
    facts = provenance_of(args, PluginRegistry())
    assert {"provenance_reward.py", "words.py", "a_plugin.py"} == set(facts["code"])


def test_the_file_of_a_run_holds_them_and_no_secrets(folder: Path) -> None:
    args = options(
        save="s3://user:hunter2@bucket/x", rm_url="https://h/score?key=abc", prompt_data=["s3://u:hunter2@b/d"]
    )
    facts = provenance_of(args, PluginRegistry())
    text = write_facts(folder / "run", args, facts).read_text()
    assert json.loads(text)["plugins"] == facts["plugins"]
    assert "hunter2" not in text
    assert "abc" not in text.replace(facts["code_sha256"], "") or "key=***" in text
    assert read_facts(folder / "run").changed["--save"] == "s3://***@bucket/x"
    assert (folder / "run" / RUN_FILE).is_file()


class Silent:
    """A trainer group and a Buffer that write nothing."""

    def call(self, method: Any, path: str = "", *, timeout_s: float = 0.0) -> bool:
        if method is BufferActor.save:
            (Path(path) / "buffer.json").write_text("{}")
        return True


@pytest.mark.parametrize("root", ["memory://test_provenance?token=hunter2", "{folder}/saves"])
def test_a_checkpoint_holds_them_and_no_secrets(folder: Path, root: str) -> None:
    root = root.format(folder=folder)
    args = options(save=root, run_dir=str(folder / "run"), rm_url="https://u:hunter2@h/score")
    facts = provenance_of(args, PluginRegistry())
    peer: Any = Silent()
    writer = RunCheckpoints(args, buffer=peer, trained={"train": peer}, provenance=facts)
    writer.save(3)
    writer.seal()
    with opened_checkpoint(root) as checkpoint:
        assert checkpoint.facts["plugins"] == facts["plugins"]
        assert checkpoint.facts["code_sha256"] == facts["code_sha256"]
        assert "hunter2" not in json.dumps(checkpoint.facts)
        assert (checkpoint.folder / "buffer.json").read_text() == "{}"


def test_a_plugin_that_changed_since_the_checkpoint_is_said_once(folder: Path) -> None:
    before = {"buffer_rl": __version__, **provenance_of(options(), PluginRegistry())}
    assert changed_plugins(before, provenance_of(options(), PluginRegistry())) == []
    (folder / "provenance_reward.py").write_text(REWARD + "\n")
    (line,) = changed_plugins(before, provenance_of(options(), PluginRegistry()))
    assert line.startswith("--custom-rm-path provenance_reward:score: ")
    assert "has changed since the checkpoint was written" in line
    (folder / "provenance_reward.py").write_text(REWARD)
    (folder / "words.py").write_text("VALUE = 2.0\n")
    assert changed_plugins(before, provenance_of(options(), PluginRegistry())) == [
        "words.py has changed since the checkpoint was written"
    ]
    assert changed_plugins({}, provenance_of(options(), PluginRegistry())) == []


def test_another_version_of_buffer_rl_is_said_once_and_not_for_each_of_its_plugins(folder: Path) -> None:
    now = provenance_of(options(), PluginRegistry())
    before = {"buffer_rl": "0.0.1", **now}
    before["plugins"] = [{**entry, "sha256": "0"} for entry in before["plugins"] if entry["distribution"]]
    assert changed_plugins(before, now) == [f"the checkpoint was written by buffer_rl 0.0.1; this is {__version__}"]
