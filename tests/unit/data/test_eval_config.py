from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.data.dataset import PromptRow
from buffer_rl.data.eval_sets import EvalSet, eval_datasets, eval_sets_of, read_eval_config
from buffer_rl.data.source import EvalSource
from buffer_rl.errors import ConfigError
from buffer_rl.options.section import compose

TEXT = """\
defaults: {temperature: 0.6, n_samples_per_eval_prompt: 4}
datasets:
  - name: aime
    path: ${here}/rows.jsonl
    temperature: 1e-1
    top_p: 0.9
    min_p: 0.05
    top_k: 20
    max_response_len: 64
    stop: ["\\n"]
    rm_type: numeric
  - {name: dev, path: "${here}/rows.jsonl@[:1]", prompt_key: question, metadata_overrides: {level: 3, n: 7}}
"""


def write(folder: Path, text: str = TEXT) -> str:
    rows = [{"prompt": f"p{n}", "question": f"q{n}", "metadata": {"n": n}} for n in range(2)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "eval.yaml").write_text(text)
    return str(folder / "eval.yaml")


def options(**values: Any) -> Any:
    return compose(CORE_SECTIONS).model_validate(values)


def test_each_set_has_its_own_options_and_the_defaults(tmp_path: Path) -> None:
    aime, dev = read_eval_config(write(tmp_path), environ={})
    assert aime.sampling_params() == {
        "temperature": 0.1,
        "top_p": 0.9,
        "min_p": 0.05,
        "top_k": 20,
        "max_new_tokens": 64,
        "stop": ["\n"],
    }
    assert dev.sampling_params() == {"temperature": 0.6}
    assert (aime.n_samples_per_eval_prompt, dev.n_samples_per_eval_prompt) == (4, 4)
    assert (aime.rm_type, dev.rm_type) == ("numeric", None)
    assert aime.path == f"{tmp_path}/rows.jsonl"


def test_groups_carry_what_their_set_says(tmp_path: Path) -> None:
    path = write(tmp_path)
    args = options(eval_config=path, eval_prompt_data=[f"plain={tmp_path}/rows.jsonl"], n_samples_per_eval_prompt=2)
    source = EvalSource(args)
    assert list(source.datasets) == ["plain", "aime", "dev"]
    (dev,) = source.groups("dev")
    assert (dev[0].prompt, dev[0].metadata, len(dev)) == ("q0", {"n": 7, "level": 3}, 4)
    assert [group[0].metadata["rm_type"] for group in source.groups("aime")] == ["numeric"] * 2
    assert [group.as_prompts().rm_type for group in source.groups("aime")] == ["numeric"] * 2
    assert dev.rm_type == ""
    assert source.groups("aime")[0].as_prompts().sampling_params["max_new_tokens"] == 64
    plain = source.groups("plain")[0]
    assert (plain.sampling_params, len(plain), plain[0].metadata) == ({}, 2, {"n": 0})


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ("", None),
        ("rm_type: f1", "f1"),
        ("metadata_overrides: {rm_type: math}", "math"),
        ("rm_type: f1, metadata_overrides: {rm_type: math}", "math"),
        ("rm_type: f1, metadata_overrides: {rm_type: null}", ""),
        ("metadata_overrides: {rm_type: ''}", ""),
    ],
)
def test_a_set_chooses_a_reward_by_either_option(tmp_path: Path, options: str, chosen: str | None) -> None:
    (own,) = read_eval_config(write(tmp_path, f"datasets:\n- {{name: a, path: p, {options}}}\n"), environ={})
    assert own.chosen_reward() == chosen


def test_sets_may_be_a_mapping_under_the_key_eval(tmp_path: Path) -> None:
    text = "eval:\n  datasets:\n    dev: {path: '${env:ROWS}'}\n    test: {path: b}\n"
    sets = read_eval_config(write(tmp_path, text), environ={"ROWS": "a"})
    assert [(s.name, s.path) for s in sets] == [("dev", "a"), ("test", "b")]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("[]", 1, "not a mapping"),
        ("datasets: []", 1, "no evaluation sets"),
        ("datasets: 3", 1, "no evaluation sets"),
        ("defaults: {}", None, "no evaluation sets"),
        ("dataset: []", 1, "did you mean datasets?"),
        ("datasets:\n- {name: a}", 2, "'path' is missing"),
        ("datasets:\n- {path: a}", 2, "'name' is missing"),
        ("datasets:\n- name: a\n  path: p\n  temprature: 1", 4, "did you mean temperature?"),
        ("datasets:\n- name: a\n  path: p\n  temperature: -1", 4, "'temperature': -1: Input should be greater than"),
        ("datasets:\n- name: a\n  path: p\n  top_p: x", 4, "'top_p': 'x'"),
        ("datasets:\n- name: a b\n  path: p", 2, "letters, digits"),
        ("datasets:\n- {name: a, path: p}\n- {name: a, path: q}", 3, "two evaluation sets have the name 'a'"),
        ("datasets:\n- name: a\n  name: b\n  path: p", 3, "comes twice"),
        ("defaults: {name: x}\ndatasets: [{name: a, path: p}]", 1, "cannot be a default"),
        ("defaults:\n  top_k: -3\ndatasets:\n- {name: a, path: p}", 4, "'top_k': -3"),
        ("datasets: {a: {path: '${env:NONE}'}}", 1, "'NONE' is not set"),
        ("datasets: [", 1, "invalid YAML"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_line(tmp_path: Path, text: str, line: int | None, words: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_eval_config(path, environ={})
    assert str(caught.value).startswith(f"{path}:{line}:" if line else f"{path}:")
    assert words in str(caught.value)


def test_everything_wrong_in_the_file_is_one_error(tmp_path: Path) -> None:
    text = (
        "defualts: {}\ndefaults: {temprature: 1}\ndatasets:\n- {name: a, path: p, top_p: 2}\n- {name: b}\n"
        "- {name: c, path: '${env:NONE}'}\n- name: d\n  path: p\n  top_k: x\n  min_p: 7\n"
    )
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_eval_config(path, environ={})
    lines = [line for line in str(caught.value).splitlines() if not line.startswith("  ")]
    assert [line.removeprefix(f"{path}:").partition(": ")[0] for line in lines] == [*"1245699"[:5], "9", "10"]
    assert [
        word in line
        for word, line in zip(("defualts", "temprature", "top_p", "path", "NONE", "top_k", "min_p"), lines, strict=True)
    ] == [True] * 7


def test_evaluation_sets_have_names_of_fields_of_their_own(tmp_path: Path) -> None:
    rows = {"messages": [{"role": "user", "content": "m"}], "question": "q", "problem": "p", "answer": "a", "gold": "g"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows))
    (tmp_path / "eval.yaml").write_text(
        "datasets:\n- {name: own, path: '${here}/rows.jsonl', input_key: problem}\n"
        "- {name: gold, path: '${here}/rows.jsonl', label_key: gold}\n"
    )
    args = options(
        input_key="messages",
        label_key=None,
        eval_input_key="question",
        eval_label_key="answer",
        eval_prompt_data=[f"plain={tmp_path}/rows.jsonl"],
        eval_config=str(tmp_path / "eval.yaml"),
    )
    source = EvalSource(args)
    found = {name: (source.groups(name)[0][0].prompt, source.groups(name)[0][0].label) for name in source.datasets}
    assert found == {"plain": ("q", "a"), "own": ("p", "a"), "gold": ("q", "g")}
    assert [(each.input_key, each.label_key) for each in eval_datasets(args)] == [
        ("question", "answer"),
        ("problem", "answer"),
        ("question", "gold"),
    ]


def test_without_names_of_their_own_evaluation_sets_have_those_of_training(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "q", "answer": "a"}')
    args = options(input_key="question", label_key="answer", eval_prompt_data=[f"dev={tmp_path}/rows.jsonl"])
    ((sample,),) = EvalSource(args).groups("dev")
    assert (sample.prompt, sample.label) == ("q", "a")


def test_a_leading_tilde_of_a_sets_path_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    args = options(eval_prompt_data=["dev=~/d.jsonl"], eval_config=write(tmp_path, "datasets: {a: {path: ~/a.jsonl}}"))
    assert [each.path for each in eval_sets_of(args)] == ["/home/me/d.jsonl", "/home/me/a.jsonl"]


def test_a_name_of_the_command_line_and_of_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'dev' is named twice"):
        eval_sets_of(options(eval_config=write(tmp_path), eval_prompt_data=["dev=x"]))
    with pytest.raises(ConfigError, match="cannot read the file"):
        eval_sets_of(options(eval_config=str(tmp_path / "absent.yaml")))


@pytest.mark.parametrize(
    ("of_row", "of_set", "found"),
    [
        ({"rewards": {"f1": 1.0}, "level": 2}, {"rm_type": "math"}, {"rm_type": "math", "level": 2}),
        ({"rm_type": "f1"}, {"metadata_overrides": {"rewards": {"math": 1}}}, {"rewards": {"math": 1}}),
        ({"rm_type": "f1"}, {"metadata_overrides": {"level": 3}}, {"rm_type": "f1", "level": 3}),
    ],
)
def test_what_a_set_says_about_rewards_takes_the_place_of_what_a_row_says(of_row: Any, of_set: Any, found: Any) -> None:
    row = PromptRow(prompt="p", metadata=of_row, row=0, line=1)
    assert EvalSet(name="dev", path="x.jsonl", **of_set).adapt(row).metadata == found
