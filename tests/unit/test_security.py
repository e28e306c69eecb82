"""What no module of the packages may do, read from their syntax trees; and secrets on the command line."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

import buffer_rl
import filter_hub
import rm_hub
from buffer_rl.args import CORE_SECTIONS
from buffer_rl.cli import main
from buffer_rl.errors import ConfigError
from buffer_rl.options.redaction import mask_secrets
from buffer_rl.options.section import Section, compose, env_of, option
from buffer_rl.options.sources import Source, resolve

PACKAGES = [Path(package.__file__).parent for package in (buffer_rl, filter_hub, rm_hub)]
UNPICKLING = {
    (module, name)
    for module in ("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal")
    for name in ("load", "loads", "Unpickler", "open")
} | {("yaml", "load"), ("yaml", "unsafe_load"), ("pandas", "read_pickle"), ("builtins", "eval"), ("builtins", "exec")}
# The child of the reward pool reads what its own parent wrote into a socket pair that nobody else has.
# A trial in a process of its own, and what started it, read each other's files in a folder of mode 0700. So does a run
# that a Python program starts.
KNOWN = {
    ("buffer_rl/api.py", "pickle.loads"),
    ("buffer_rl/rollout/reward_process.py", "pickle.load"),
    ("buffer_rl/rollout/reward_process.py", "pickle.loads"),
    ("buffer_rl/verbs/train.py", "pickle.load"),
    ("buffer_rl/verbs/trial.py", "pickle.load"),
}


def sources() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for path in sorted(package.rglob("*.py")):
            yield str(path.relative_to(package.parent)), ast.parse(path.read_text(encoding="utf-8"))


def imported(tree: ast.Module) -> dict[str, str]:
    """Full name of each name that an import binds, anywhere in the module."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    names = imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            text = ast.unparse(node.func)
            head, dot, rest = text.partition(".")
            default = head if dot else f"builtins.{head}"
            yield names.get(head, default) + dot + rest, node


def keyword(call: ast.Call, name: str) -> str | None:
    return next((ast.unparse(item.value) for item in call.keywords if item.arg == name), None)


def offences(path: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    for name, call in calls(tree):
        module, _, function = name.rpartition(".")
        if (module.partition(".")[0], function) in UNPICKLING:
            yield path, name
        if function == "load" and module == "torch" and keyword(call, "weights_only") != "True":
            yield path, name
        if function in ("load", "read_array") and module in ("numpy", "np") and keyword(call, "allow_pickle"):
            yield path, name
        if keyword(call, "trust_remote_code") == "True":
            yield path, f"{name}(trust_remote_code=True)"


def test_nothing_from_outside_is_unpickled_or_run() -> None:
    found = {offence for path, tree in sources() for offence in offences(path, tree)}
    assert found == KNOWN


@pytest.mark.parametrize(
    "line",
    [
        "import pickle; pickle.load(file)",
        "from pickle import loads as read; read(data)",
        "import pickle as p; p.Unpickler(file)",
        "import torch; torch.load(path)",
        "import torch; torch.load(path, weights_only=False)",
        "import cloudpickle; cloudpickle.loads(data)",
        "import yaml; yaml.load(text)",
        "eval(text)",
        "model.from_pretrained(path, trust_remote_code=True)",
        "import numpy; numpy.load(path, allow_pickle=True)",
    ],
)
def test_the_search_finds(line: str) -> None:
    assert list(offences("example.py", ast.parse(line)))


def test_every_model_is_loaded_with_an_explicit_word_on_its_code() -> None:
    """Without one, transformers asks at the terminal whether to run the folder's code."""
    silent = [
        (path, call.lineno)
        for path, tree in sources()
        for name, call in calls(tree)
        if name.endswith(".from_pretrained") and "Auto" in name and keyword(call, "trust_remote_code") is None
    ]
    assert silent == []


def test_a_secret_is_refused_as_a_flag_and_taken_from_the_environment() -> None:
    options = compose(CORE_SECTIONS)
    with pytest.raises(ConfigError, match="every user of the machine") as caught:
        resolve(options, flags={"engine_api_key": "hunter2"}, environ={})
    assert "hunter2" not in str(caught.value)
    environ = {env_of("engine_api_key"): "hunter2"}
    resolved = resolve(options, flags={}, environ=environ)
    assert resolved.args.engine_api_key == "hunter2"  # type: ignore[attr-defined]
    assert resolved.origins["engine_api_key"].source is Source.ENVIRONMENT


def test_a_secret_variable_is_refused_in_a_flag_of_several_and_taken_from_the_environment() -> None:
    options = compose(CORE_SECTIONS)
    text = '{"NCCL_DEBUG": "INFO", "HF_TOKEN": "hunter2"}'
    with pytest.raises(ConfigError, match=r"^--train-env-vars HF_TOKEN: .* every user of the machine") as caught:
        resolve(options, flags={"train_env_vars": text}, environ={})
    assert "hunter2" not in str(caught.value)
    resolved: Any = resolve(options, flags={}, environ={env_of("train_env_vars"): text}).args
    assert resolved.train_env_vars == {"NCCL_DEBUG": "INFO", "HF_TOKEN": "hunter2"}
    assert "hunter2" not in str(mask_secrets(resolved.model_dump()))


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("rm_url", "http://user:hunter2@127.0.0.1/x"),
        ("rm_url", "http://127.0.0.1/x?token=hunter2"),
        ("save", "s3://key:hunter2@bucket/runs"),
        ("prompt_data", ["a.jsonl", "s3://key:hunter2@bucket/b.jsonl@[0:3]"]),
        ("eval_prompt_data", ["dev=https://host/d.jsonl?X-Amz-Signature=hunter2"]),
    ],
)
def test_an_address_with_credentials_is_refused_as_a_flag_and_taken_from_the_environment(name: str, raw: Any) -> None:
    options = compose(CORE_SECTIONS)
    with pytest.raises(ConfigError, match="every user of the machine") as caught:
        resolve(options, flags={name: raw}, environ={})
    assert "hunter2" not in str(caught.value)
    assert env_of(name) in str(caught.value)
    text = raw if isinstance(raw, str) else json.dumps(raw)
    resolved = resolve(options, flags={}, environ={env_of(name): text})
    assert getattr(resolved.args, name) == raw


class KeyedOptions(Section):
    """An option that is a secret and no text."""

    heading: ClassVar[str] = "Keyed"

    judge_api_key: int = option(0, "key")


def test_a_wrong_value_that_is_or_holds_a_secret_is_not_shown(tmp_path: Path) -> None:
    options = compose([*CORE_SECTIONS, KeyedOptions])
    file = tmp_path / "c.yaml"
    file.write_text("train_env_vars: {HF_TOKEN: [hunter2]}")
    with pytest.raises(ConfigError, match="train-env-vars") as caught:
        resolve(options, flags={}, environ={}, config_paths=[str(file)])
    assert "hunter2" not in str(caught.value)
    for text in ("engine_api_key: [hunter2, b]", "engine_api_key: {a: hunter2}", "judge_api_key: hunter2"):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"api-key: '\*\*\*' is not") as caught:
            resolve(options, flags={}, environ={}, config_paths=[str(file)])
        assert "hunter2" not in str(caught.value)
    environ = {env_of("num_rollout"): "s3://key:hunter2@bucket/x"}
    with pytest.raises(ConfigError, match=r"num-rollout: 's3://\*\*\*@bucket/x' is not"):
        resolve(options, flags={}, environ=environ)


def test_the_command_line_says_so_with_status_2_and_without_the_secret(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--engine-api-key", "hunter2", "--num-rollout", "1"]) == 2
    said = capsys.readouterr()
    assert "--engine-api-key" in said.err
    assert "BUFFER_RL_ENGINE_API_KEY" in said.err
    assert "hunter2" not in said.err + said.out
