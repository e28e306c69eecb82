"""Names of the Hugging Face Hub on the command line, with a Hub on 127.0.0.1."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.cli import main
from buffer_rl.errors import ConfigError
from buffer_rl.options.section import compose
from buffer_rl.testing.tiny import make_tiny_model
from buffer_rl_hub import buffer_rl_local_paths
from harness.checkpoints import write_checkpoint
from harness.hub import FakeHub, fake_hub

ROWS = b'{"prompt": "a", "label": "b"}\n{"prompt": "b", "label": "c"}\n'
Train = Callable[..., int]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = Path(make_tiny_model(tmp_path_factory.mktemp("tiny")))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """What HF_ENDPOINT and HF_HOME set when the library is imported; this process has imported it long ago."""
    with fake_hub() as served:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", served.url)
        template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.chdir(tmp_path)
        yield served


def train(*argv: str) -> int:
    options = ("--rm-type", "exact_match", "--num-rollout", "1", "--rollout-batch-size", "2")
    return main(["train", "--dry-run", "--json", *options, "--rollout-max-response-len", "4", *argv])


def resolved(facts: Any = None, **options: Any) -> dict[str, Any]:
    return dict(buffer_rl_local_paths(compose(CORE_SECTIONS)(**options), facts or {}))


def values(out: str) -> dict[str, Any]:
    return {name: option["value"] for name, option in json.loads(out)["options"].items()}


def test_a_dry_run_takes_model_and_data_from_the_hub_and_a_second_one_from_the_cache(
    hub: FakeHub, model: dict[str, bytes], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    useless = {"README.md": b"#", "pytorch_model.bin": b"x", "onnx/config.json": b"{}", "modeling.py": b"raise"}
    commit = hub.push("models/org/tiny", model | useless)
    of_data = hub.push("datasets/org/rows", {"data/train.jsonl": ROWS, "data/test.jsonl": ROWS[:30]})
    names = ("--hf-checkpoint", "org/tiny", "--prompt-data", "hf://datasets/org/rows@[0:1]")
    names += ("--eval-prompt-data", "dev=hf://datasets/org/rows")
    assert train(*names) == 0
    out, err = capsys.readouterr()
    options = values(out)
    assert options["hf_checkpoint"].endswith(f"models--org--tiny/snapshots/{commit}")
    folder = f"datasets--org--rows/snapshots/{of_data}/data"
    assert options["prompt_data"][0].endswith(f"{folder}/train.jsonl@[0:1]")
    assert options["eval_prompt_data"][0].startswith("dev=/")
    assert options["eval_prompt_data"][0].endswith(f"{folder}/test.jsonl")
    assert f"--hf-checkpoint org/tiny: {options['hf_checkpoint']}" in err
    assert [(file["use"], file["num_rows"]) for file in json.loads(out)["data"]] == [("train", 1), ("eval/dev", 1)]
    fetched = {re.sub(".*/resolve/[0-9a-f]{40}/", "", path) for path in hub.downloads}
    assert fetched == {*(name for name in model if name != "README.md"), "data/train.jsonl", "data/test.jsonl"}

    hub.downloads.clear()
    assert train(*names) == 0
    assert values(capsys.readouterr().out)["hf_checkpoint"] == options["hf_checkpoint"]
    assert hub.downloads == []
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert train(*names) == 0
    assert values(capsys.readouterr().out) == options


def test_a_resumed_run_keeps_the_commit_unless_a_revision_is_named(hub: FakeHub, tmp_path: Path) -> None:
    first = hub.push("models/org/tiny", {"config.json": b"{}"})
    then = resolved(hf_checkpoint="org/tiny")
    facts = {"options": {"hf_checkpoint": then["hf_checkpoint"], "lr": 0.1}}
    second = hub.push("models/org/tiny", {"config.json": b'{"a": 1}'})
    assert first != second
    assert resolved(facts, hf_checkpoint="org/tiny") == then
    assert resolved(hf_checkpoint="org/tiny")["hf_checkpoint"].endswith(second)
    assert resolved(facts, hf_checkpoint=f"org/tiny@{second}")["hf_checkpoint"].endswith(second)


@pytest.mark.slow
def test_a_run_that_loads_a_checkpoint_asks_for_its_commits(
    hub: FakeHub, model: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = hub.push("models/org/tiny", model)
    (tmp_path / "train.jsonl").write_bytes(ROWS)
    names = ("--hf-checkpoint", "org/tiny", "--prompt-data", "train.jsonl", "--save", "saves", "--load", "auto")
    assert train(*names) == 0
    options = values(capsys.readouterr().out)
    write_checkpoint(tmp_path / "saves", 1, facts={"options": options})
    hub.push("models/org/tiny", model | {"generation_config.json": b'{"a": 1}'})
    assert train(*names) == 0
    assert values(capsys.readouterr().out)["hf_checkpoint"] == options["hf_checkpoint"]
    assert commit in options["hf_checkpoint"]


def test_an_existing_folder_wins_and_other_texts_are_left_alone(hub: FakeHub, tmp_path: Path) -> None:
    hub.push("models/org/tiny", {"config.json": b"{}"})
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    texts = {"hf_checkpoint": "org/tiny", "ref_load": "./org/x", "critic_load": "tiny", "rm_model": "/a/b"}
    assert resolved(**texts, prompt_data=["a/b", "s3://a/b"], eval_prompt_data=["dev=a/b"]) == {}


def test_every_option_that_names_a_model_is_resolved(hub: FakeHub) -> None:
    hub.push("models/org/tiny", {"config.json": b"{}"})
    options = ("hf_checkpoint", "ref_load", "opd_teacher_load", "critic_load", "rm_model")
    assert set(resolved(**dict.fromkeys(options, "org/tiny"))) == set(options)


def test_python_files_come_only_with_trust_remote_code(hub: FakeHub) -> None:
    hub.push("models/org/tiny", {"config.json": b"{}", "modeling_own.py": b"1"})
    path = resolved(hf_checkpoint="org/tiny")["hf_checkpoint"]
    assert sorted(child.name for child in Path(path).iterdir()) == ["config.json"]
    path = resolved(hf_checkpoint="org/tiny", trust_remote_code=True)["hf_checkpoint"]
    assert sorted(child.name for child in Path(path).iterdir()) == ["config.json", "modeling_own.py"]


SHARDS = {
    f"data/{split}-0000{n}-of-00002.parquet": f"{split}{n}".encode() for split in ("train", "test") for n in (0, 1)
}


@pytest.mark.parametrize(
    ("files", "path", "evaluation", "chosen"),
    [
        (SHARDS, "", False, ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]),
        (SHARDS, "", True, ["data/test-00000-of-00002.parquet", "data/test-00001-of-00002.parquet"]),
        (SHARDS, "/data/train-00001-of-00002.parquet", False, ["data/train-00001-of-00002.parquet"]),
        (SHARDS, "/data/*-00000-*", False, ["data/test-00000-of-00002.parquet", "data/train-00000-of-00002.parquet"]),
        ({"rows.jsonl": b"", "README.md": b""}, "", True, ["rows.jsonl"]),
        ({"train.jsonl": b"", "dev.jsonl": b""}, "", True, ["dev.jsonl"]),
        ({"test_set/train/0.parquet": b"", "test_set/test/0.parquet": b""}, "", False, ["test_set/train/0.parquet"]),
    ],
)
def test_of_a_data_set_the_files_of_one_split_are_chosen(
    hub: FakeHub, files: dict[str, bytes], path: str, evaluation: bool, chosen: list[str]
) -> None:
    commit = hub.push("datasets/org/rows", files)
    url = f"hf://datasets/org/rows{path}"
    options: dict[str, Any] = {"eval_prompt_data": [f"dev={url}"]} if evaluation else {"prompt_data": [url]}
    (found,) = (items[0] for items in resolved(**options).values())
    folder, relative = found.removeprefix("dev=").split(f"{commit}/")
    matched = sorted(str(file.relative_to(folder + commit)) for file in Path(folder + commit).glob(relative))
    assert matched == chosen


@pytest.mark.parametrize(
    ("files", "path", "words"),
    [
        ({"a/train.jsonl": b"", "b/train.jsonl": b""}, "", "a/train.jsonl, b/train.jsonl"),
        ({"train.jsonl": b"", "train.parquet": b""}, "", "not clear"),
        ({"test.jsonl": b""}, "", "not clear"),
        ({"train.jsonl": b""}, "/trian.jsonl", "train.jsonl"),
        ({"README.md": b""}, "", "none"),
    ],
)
def test_a_data_set_whose_files_are_not_clear_is_refused_with_their_names(
    hub: FakeHub, files: dict[str, bytes], path: str, words: str
) -> None:
    hub.push("datasets/org/rows", files)
    with pytest.raises(ConfigError) as caught:
        resolved(prompt_data=[f"hf://datasets/org/rows{path}"])
    assert words in str(caught.value)
    assert f"--prompt-data hf://datasets/org/rows{path}" in caught.value.where


def test_without_a_network_the_error_comes_soon_and_says_what_to_type(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    begin = time.monotonic()
    assert train("--hf-checkpoint", "org/tiny", "--prompt-data", "train.jsonl") == 2
    assert time.monotonic() - begin < 10
    error = capsys.readouterr().err
    for words in (
        "--hf-checkpoint org/tiny",
        "ConnectError",
        "HF_HUB_OFFLINE=1",
        "hf download org/tiny",
        "HF_ENDPOINT",
    ):
        assert words in error


def test_a_hub_that_does_not_answer_is_given_up(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buffer_rl_hub.ANSWER_S", 0.2)
    monkeypatch.setattr(hub, "api", lambda _: time.sleep(2))
    with pytest.raises(ConfigError, match=re.compile("timed? ?out|no answer", re.IGNORECASE)):
        resolved(hf_checkpoint="org/tiny")


def test_a_model_that_the_hub_does_not_have_is_named(hub: FakeHub) -> None:
    with pytest.raises(ConfigError, match="there is no such folder, and the Hub gave nothing: RepositoryNotFound"):
        resolved(hf_checkpoint="org/absent")


ALONE = """
import sys
from buffer_rl.cli import main
sys.exit(main(["generate", "--hf-checkpoint", "org/tiny", "--prompt-data", "hf://datasets/org/rows/rows.jsonl"]))
"""


@pytest.mark.slow
def test_the_variables_of_the_hub_count(hub: FakeHub, tmp_path: Path) -> None:
    """In a process of its own, up to the first mistake in what was downloaded."""
    hub.push("models/org/tiny", {"config.json": b"[]"})
    hub.push("datasets/org/rows", {"rows.jsonl": ROWS})
    environ = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_sesame"}
    done = subprocess.run([sys.executable, "-c", ALONE], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "the file holds no JSON object" in done.stderr
    assert f"{tmp_path}/home/hub/models--org--tiny" in done.stderr
    assert "sesame" not in done.stderr + done.stdout
    assert "Bearer hf_sesame" in hub.tokens
