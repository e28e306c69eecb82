from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.errors import ConfigError
from buffer_rl.options.help import (
    FlagParser,
    add_config_flag,
    add_options,
    flags_of,
    given_flags,
    normalise_flags,
)
from buffer_rl.options.section import Options, Section, compose, declared, option
from buffer_rl.options.sources import Resolved, resolve, take_unknown


class Mixed(Section):
    heading: ClassVar[str] = "Mixed"
    count: int = option(1, "a whole number", ge=1)
    rate: float = option(0.5, "a number", gt=0, le=1)
    name: str = option("plain", "a text")
    maybe: str | None = option(None, "a text or none")
    limit: int | None = option(3, "a number or none")
    on: bool = option(False, "a switch")
    off: bool = option(True, "another switch")
    words: list[str] = option(["x"], "several texts")
    ids: list[int] = option([], "several numbers")
    level: Literal["none", "some"] = option("some", "a choice")
    size: Literal[1, 2] = option(1, "a choice of numbers")
    extra: dict[str, Any] = option({}, "a mapping")
    some_long_name: int = option(0, "with underscores")


def parse(argv: Sequence[str], *, sections: Sequence[str | type[Section]], environ: Mapping[str, str]) -> Options:
    """Options from flags (``--config FILE`` among them), environment and file, as the verbs read them."""
    parser = FlagParser(add_help=False)
    add_config_flag(parser)
    options_class = compose(sections)
    add_options(parser, sections)
    namespace, extra = parser.parse_known_args(normalise_flags(argv))
    take_unknown(namespace, extra, flags_of(parser), prog="buffer-rl")
    flags = given_flags(namespace)
    return resolve(options_class, flags=flags, environ=environ, config_paths=namespace.config).args


def read(argv: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Any:
    return parse(argv, sections=[Mixed], environ=environ or {})


def write(folder: Path, text: str) -> str:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def refusal(argv: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        read(argv, environ)
    return str(caught.value)


def test_flags_win_over_environment_and_environment_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "count: 10\nname: file\nrate: 0.1\n")
    environ = {"BUFFER_RL_NAME": "environment", "BUFFER_RL_RATE": "0.2"}
    args = read(["--config", path, "--rate", "0.3"], environ)
    assert (args.count, args.name, args.rate, args.maybe) == (10, "environment", 0.3, None)


def test_every_origin_is_told(tmp_path: Path) -> None:
    path = write(tmp_path, "# a comment\n\ncount: 10\nname: file\n")
    resolved = resolve(
        compose([Mixed]), flags={"rate": "0.3"}, environ={"BUFFER_RL_NAME": "x", "HOME": "/"}, config_paths=[path]
    )
    told = {name: str(origin) for name, origin in resolved.origins.items() if str(origin) != "default"}
    assert told == {"count": f"file {path}:3", "name": "environment BUFFER_RL_NAME", "rate": "flag --rate"}
    assert list(resolved.origins) == list(Mixed.model_fields)


@pytest.mark.parametrize("argv", [["--some-long-name", "4"], ["--some_long_name", "4"], ["--some_long-name=4"]])
def test_flags_are_read_in_every_spelling(argv: list[str]) -> None:
    assert read(argv).some_long_name == 4


def test_underscores_in_values_stay() -> None:
    assert read(["--name=a_b", "--maybe", "c_d"]).name == "a_b"
    assert read(["--words=--x_y"]).words == ["--x_y"]


@pytest.mark.parametrize(
    ("argv", "on", "off"),
    [
        ([], False, True),
        (["--on", "--no-off"], True, False),
        (["--on", "--no_on"], False, True),
        (["--on=true", "--off", "false"], True, False),
    ],
)
def test_switches(argv: list[str], on: bool, off: bool) -> None:
    args = read(argv)
    assert (args.on, args.off) == (on, off)


def test_lists_take_several_values_and_repeated_flags_extend() -> None:
    assert read(["--words", "a", "b c", "--count", "2"]).words == ["a", "b c"]
    assert read(["--words", "a", "--words=b"]).words == ["a", "b"]
    assert read(["--words"]).words == []
    assert read(["--ids", "3", "-4"]).ids == [3, -4]


def test_lists_from_the_environment_split_as_a_shell_does_or_are_json() -> None:
    assert read(environ={"BUFFER_RL_WORDS": "a 'b c'"}).words == ["a", "b c"]
    assert read(environ={"BUFFER_RL_WORDS": '["a b", "c"]'}).words == ["a b", "c"]
    assert read(environ={"BUFFER_RL_WORDS": ""}).words == []


def test_none_is_none_only_where_the_option_may_be_none() -> None:
    args = read(["--maybe", "none", "--limit", "None", "--name", "none", "--level", "none"])
    assert (args.maybe, args.limit, args.name, args.level) == (None, None, "none", "none")
    assert "an integer >= 1 (flag --count)" in refusal(["--count", "none"])


def test_yaml_values_read_as_the_same_text_on_the_command_line(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "rate: 1e-1\nname: 2024\nmaybe: ~\nlimit:\non: yes\nwords: [a, 1, true]\nids: [1, 2]\nlevel: none\nsize: 2\n"
        "extra: {a: {b: 1}}\nsome-long-name: 7\n",
    )
    args = read(["--config", path])
    assert (args.rate, args.name, args.maybe, args.limit, args.on) == (0.1, "2024", None, None, True)
    assert (args.words, args.ids, args.level, args.size) == (["a", "1", "true"], [1, 2], "none", 2)
    assert (args.extra, args.some_long_name) == ({"a": {"b": 1}}, 7)


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert read(["--config", write(tmp_path, "# nothing\n")]) == read()


def test_mappings_on_the_command_line_are_json_or_pairs() -> None:
    assert read(["--extra", '{"a": [1]}']).extra == {"a": [1]}
    assert read(["--extra", "a=1, b=x=y"]).extra == {"a": "1", "b": "x=y"}
    for text in ("a", "a=1,b", "a=1,a=2", "=1", "[1]"):
        assert "mapping (NAME=VALUE,..., JSON or FILE.yaml)" in refusal(["--extra", text])


def test_a_mapping_may_be_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("max_turns: 3\nlimits: [0.5, null]\nplace: ${here}/x\n")
    assert read(["--extra", str(path)]).extra == {"max_turns": 3, "limits": [0.5, None], "place": f"{tmp_path}/x"}
    path.write_text("")
    assert read(["--extra", str(path)]).extra == {}
    assert read(["--extra", "a=b.yaml"]).extra == {"a": "b.yaml"}
    path.write_text("[1, 2]")
    assert f"{path}: the file is not a mapping" in refusal(["--extra", str(path)])
    assert "cannot read the file" in refusal(["--extra", str(tmp_path / "absent.yaml")])


def test_a_scalar_in_a_file_is_one_item_of_a_list(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("words: a b\n")
    assert read(["--config", str(path)]).words == ["a b"]
    path.write_text('words: \'["a", "b"]\'\n')
    assert read(["--config", str(path)]).words == ["a", "b"]


def test_placeholders_are_filled(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        'name: ${here}/d.jsonl\nwords: ["dev=${here}/e", "$${here}"]\n'
        "maybe: ${env:MINE}-${env:MINE}\ncount: ${env:N}\n",
    )
    args = read(["--config", path], {"MINE": "me", "N": "4"})
    assert args.name == f"{tmp_path}/d.jsonl"
    assert args.words == [f"dev={tmp_path}/e", "${here}"]
    assert (args.maybe, args.count) == ("me-me", 4)


def test_here_is_the_files_own_folder_also_for_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub", "name: ${here}\n")
    monkeypatch.chdir(tmp_path)
    assert read(["--config", "sub/run.yaml"]).name == str(tmp_path / "sub")


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("count: 1\ncuont: 2\n", 2, ["cuont", "did you mean count?"]),
        ("count: 1\n\ncount: 2\n", 3, ["set twice", ":1"]),
        ("some-long-name: 1\nsome_long_name: 2\n", 2, ["set twice"]),
        ("count: 1\nname: ${nowhere}\n", 2, ["${nowhere}", "${here}"]),
        ("name: ${env:ABSENT}\n", 1, ["ABSENT", "not set"]),
        ("count: 1\nname: [a\n", 3, ["invalid YAML"]),
        ("- a\n- b\n", 1, ["not a mapping"]),
        ("count: 1\nwords: [[a]]\n", 2, ["plain value"]),
        ("count: 1\n---\ncount: 2\n", 2, ["invalid YAML"]),
        # The parser stops at a later line than the one without a blank.
        ("count:200\nname: a\n", 1, ["a blank follows the colon: 'count: 200'"]),
        ("name: a\ncount:200  # rows\n\n# more\nwords: [a]\n", 2, ["a blank follows the colon: 'count: 200'"]),
        ("name: a\n\tcount: 1\n", 2, ["not with tabs"]),
        ("name: a\n count: 1\n", 2, ["the same indentation"]),
        ("name: @a\n", 1, ["in quotes"]),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_line(tmp_path: Path, text: str, line: int, words: list[str]) -> None:
    path = write(tmp_path, text)
    message = refusal(["--config", path])
    assert f"{path}:{line}: " in message
    for word in words:
        assert word in message


def test_line_numbers_are_those_of_editors_whatever_line_ends_a_text_holds(tmp_path: Path) -> None:
    path = write(tmp_path, 'name: "a\u2028b\u2029c\u0085d"\nnonsense: 1\n')
    assert f"{path}:2: unknown option 'nonsense'" in refusal(["--config", path])
    path = write(tmp_path, 'name: "a\u2028b"\ncount: [1\n')
    assert refusal(["--config", path]).startswith(f"{path}:3: invalid YAML")


def test_a_nested_file_is_refused_because_options_are_flat(tmp_path: Path) -> None:
    path = write(tmp_path, "name:\n  deep: 1\n")
    assert f"is not text (file {path}:1)" in refusal(["--config", path])


def test_a_file_that_is_absent_or_not_text_is_refused(tmp_path: Path) -> None:
    text = refusal(["--config", str(tmp_path / "absent.yaml")])
    assert "cannot read the file" in text
    assert f"the current folder is {Path.cwd()}" in text
    (tmp_path / "run.yaml").write_bytes(b"name: \xff\n")
    assert "not UTF-8" in refusal(["--config", str(tmp_path / "run.yaml")])


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--count", "eight"], "--count: 'eight' is not an integer >= 1 (flag --count)"),
        (["--count", "0"], "--count: '0' is not an integer >= 1 (flag --count)"),
        (["--count", "1.5"], "--count: '1.5' is not an integer >= 1"),
        (["--rate", "2"], "--rate: '2' is not a number > 0 and <= 1"),
        (["--rate", "nan"], "--rate: 'nan' is not a number"),
        (["--limit", "x"], "--limit: 'x' is not an integer, or none"),
        (["--ids", "1", "b"], "--ids: ['1', 'b'] is not a list of integer"),
        (["--level", "sone"], "--level: 'sone' is not one of none, some (flag --level); did you mean some?"),
        (["--on=perhaps"], "--on: 'perhaps' is not true or false"),
    ],
)
def test_a_wrong_value_names_flag_value_type_and_source(argv: list[str], expected: str) -> None:
    assert expected in refusal(argv)


def test_a_wrong_value_names_the_variable_or_the_line_that_it_is_from(tmp_path: Path) -> None:
    assert "(environment BUFFER_RL_COUNT)" in refusal(environ={"BUFFER_RL_COUNT": "x"})
    path = write(tmp_path, "name: a\ncount: true\n")
    assert f"'true' is not an integer >= 1 (file {path}:2)" in refusal(["--config", path])


def test_all_wrong_values_are_told_at_once() -> None:
    assert len(refusal(["--count", "x", "--rate", "y"]).splitlines()) == 2


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--cuont", "3"], ["--cuont", "did you mean --count?"]),
        (["--cou", "3"], ["unknown flag --cou"]),
        (["--no-onn"], ["did you mean --no-on?"]),
        (["--no-count"], ["unknown flag --no-count"]),
        (["stray"], ["unexpected argument 'stray'", "--help"]),
        (["run.yaml"], ["unexpected argument 'run.yaml'", "did you mean --config run.yaml?"]),
        (["a.count=8"], ["unexpected argument 'a.count=8'", "did you mean --count?"]),
        (["--count"], ["--count", "expected one argument"]),
    ],
)
def test_unknown_flags_are_errors_with_the_nearest_one(argv: list[str], words: list[str]) -> None:
    message = refusal(argv)
    for word in words:
        assert word in message


def test_unknown_variables_are_errors_with_the_nearest_one() -> None:
    message = refusal(environ={"BUFFER_RL_CUONT": "3"})
    assert "BUFFER_RL_CUONT" in message
    assert "did you mean BUFFER_RL_COUNT?" in message
    assert read(environ={"BUFFER_RL_TRACEBACK": "1", "OTHER": "x"}) == read()


class Rivals(Section):
    named: str | None = option(None, "a name", one_of="reward")
    own: str | None = option(None, "a path", one_of="reward")
    model: str | None = option(None, "a folder", one_of="reward", metavar="PATH")
    style: str = option("plain", "a style", one_of="style")
    own_style: str | None = option(None, "your style", one_of="style")
    steps: int = option(0, "a number", one_of="steps")
    steps_too: int = option(0, "the same number", one_of="steps")


def rivals(flags: dict[str, Any], environ: dict[str, str], *paths: str) -> Resolved:
    return resolve(compose([Rivals]), flags=flags, environ=environ, config_paths=paths)


def test_of_options_that_exclude_each_other_the_one_from_the_strongest_source_counts(tmp_path: Path) -> None:
    path = write(tmp_path, "own: mine:score\nown_style: mine:style\nsteps: 5\n")
    resolved = rivals({"named": "letters", "steps_too": "0"}, {"BUFFER_RL_STYLE": "plain"}, path)
    args: Any = resolved.args
    assert (args.named, args.own, args.style, args.own_style, args.steps, args.steps_too) == (
        *("letters", None, "plain", None),
        *(0, 0),
    )
    assert str(resolved.origins["own"]) == "default"
    assert resolved.notices == [
        f"--named letters (flag --named) replaces --own mine:score (file {path}:1)",
        f"--style plain (environment BUFFER_RL_STYLE) replaces --own-style mine:style (file {path}:2)",
        f"--steps-too 0 (flag --steps-too) replaces --steps 5 (file {path}:3)",
    ]


def test_a_stronger_source_that_turns_an_option_off_takes_along_what_needs_it(tmp_path: Path) -> None:
    saving = "save: c\nsave_interval: 5\nkeep_last: 2\nkeep_best: eval/a\n"
    correction = "use_tis: true\ncustom_tis_function_path: mine:weights\n"
    path = write(tmp_path, f"{saving}schedule: async\nmax_staleness: 3\n{correction}")
    options_class = compose(CORE_SECTIONS)

    def read_with(**flags: str) -> Resolved:
        return resolve(options_class, flags=flags, environ={}, config_paths=[path])

    whole: Any = read_with(schedule="async", save="d").args
    assert (whole.save_interval, whole.keep_last, whole.max_staleness) == (5, 2, 3)
    off = read_with(schedule="lockstep", save="none", use_tis="false")
    args: Any = off.args
    left_out = ("save_interval", "keep_last", "keep_best", "max_staleness", "custom_tis_function_path")
    assert [getattr(args, name) for name in left_out] == [None] * 5
    assert {str(off.origins[name]) for name in left_out} == {"default"}
    assert sorted(off.notices) == [
        f"--save none (flag --save) leaves out --save-interval (file {path}:2), --keep-last (file {path}:3)",
        f"--schedule lockstep (flag --schedule) leaves out --max-staleness (file {path}:6)",
        f"--use-tis false (flag --use-tis) leaves out --custom-tis-function-path (file {path}:8)",
        f"no --keep-last leaves out --keep-best (file {path}:4)",
    ]
    args = read_with(save="none", save_interval="7").args
    assert (args.save, args.save_interval) == (None, 7)  # of one source: the check refuses it


def test_none_empties_a_list_of_a_file(tmp_path: Path) -> None:
    path = write(tmp_path, "eval_prompt_data: [a=b.jsonl]\n")
    for value in (["none"], []):
        flags: dict[str, Any] = {"eval_prompt_data": value}
        args: Any = resolve(compose(CORE_SECTIONS), flags=flags, environ={}, config_paths=[path]).args
        assert args.eval_prompt_data == []


def test_what_a_run_would_read_in_place_of_another_option_is_in_a_group_with_it() -> None:
    groups: dict[str, set[str]] = {}
    for name, field in compose(CORE_SECTIONS).model_fields.items():
        if group := declared(field, "one_of"):
            groups.setdefault(group, set()).add(name)
    assert sorted(map(sorted, groups.values())) == [
        ["advantage_estimator", "custom_advantage_function_path"],
        ["custom_convert_samples_to_train_data_path", "custom_reward_post_process_path"],
        ["custom_group_rm_path", "custom_rm_path", "rm_model", "rm_type"],
        ["custom_loss_function_path", "loss_type"],
        ["custom_tis_function_path", "tis_mode"],
        ["num_critic_only_steps", "num_freeze_actor_steps"],
        ["num_epoch", "num_rollout"],
        ["rollout_external_engine_addrs", "router_url"],
    ]


def test_an_empty_list_replaces_nothing() -> None:
    flags: dict[str, Any] = {"rollout_external_engine_addrs": []}
    environ = {"BUFFER_RL_ROUTER_URL": "http://r:1"}
    resolved = resolve(compose(CORE_SECTIONS), flags=flags, environ=environ)
    args: Any = resolved.args
    assert (args.router_url, resolved.notices) == ("http://r:1", [])


def test_an_option_that_is_none_replaces_nothing(tmp_path: Path) -> None:
    resolved = rivals({"named": "none"}, {}, write(tmp_path, "named: letters\nown: mine:score\n"))
    args: Any = resolved.args
    assert (args.named, args.own, resolved.notices) == (None, "mine:score", [])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("named: letters\nown: mine:score\n", "--named letters (file PATH:1) and --own mine:score (file PATH:2)"),
        ("own: f:g\nmodel: m\nnamed: n\n", "--named n (file PATH:3) and --own f:g (file PATH:1) and --model m"),
        ("style: plain\nown_style: f:g\n", "--style plain (file PATH:1) and --own-style f:g (file PATH:2)"),
        ("steps: 1\nsteps_too: 2\n", "--steps 1 (file PATH:1) and --steps-too 2 (file PATH:2)"),
    ],
)
def test_options_of_one_source_that_exclude_each_other_are_an_error(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match="these options exclude each other") as caught:
        rivals({}, {}, path)
    assert words.replace("PATH", path) in str(caught.value)


def test_of_several_files_a_later_one_wins_option_by_option(tmp_path: Path) -> None:
    base, over = tmp_path / "base.yaml", tmp_path / "over.yaml"
    base.write_text("count: 2\nname: base\nextra: {a: 1, b: 2}\n")
    over.write_text("# comment\nname: over\nextra: {c: 3}\n")
    resolved = resolve(compose([Mixed]), flags={}, environ={}, config_paths=[str(base), str(over)])
    args: Any = resolved.args
    assert (args.count, args.name, args.extra) == (2, "over", {"c": 3})
    assert (str(resolved.origins["count"]), str(resolved.origins["name"])) == (f"file {base}:1", f"file {over}:2")
    assert read(["--config", str(over), "--config", str(base)]).name == "base"


def test_items_of_a_later_file_are_added_to_those_of_an_earlier_one(tmp_path: Path) -> None:
    class Tools(Section):
        tool_args: dict[str, Any] = option({}, "arguments", prefix="tool_")

    base, over = tmp_path / "base.yaml", tmp_path / "over.yaml"
    base.write_text("tool_level: 1\ntool_depth: 2\n")
    over.write_text("tool_level: 3\n")
    paths = [str(base), str(over)]
    args: Any = resolve(compose([Tools]), flags={}, environ={}, config_paths=paths).args
    assert args.tool_args == {"level": 3, "depth": 2}


def test_an_option_of_a_later_file_replaces_its_rival_of_an_earlier_one(tmp_path: Path) -> None:
    base, over = tmp_path / "base.yaml", tmp_path / "over.yaml"
    base.write_text("own: mine:score\n")
    over.write_text("\nnamed: letters\n")
    resolved = rivals({}, {}, str(base), str(over))
    args: Any = resolved.args
    assert (args.named, args.own) == ("letters", None)
    assert resolved.notices == [f"--named letters (file {over}:2) replaces --own mine:score (file {base}:1)"]


def test_everything_wrong_in_files_variables_and_values_is_one_error(tmp_path: Path) -> None:
    base, over = tmp_path / "base.yaml", tmp_path / "over.yaml"
    base.write_text("count: x\nnmae: a\nlearning_rate: 1\nname: '${env:NOWHERE}'\n")
    over.write_text("on: true\non: false\n")
    argv = ["--config", str(base), "--config", str(over), "--rate", "7"]
    lines = refusal(argv, {"BUFFER_RL_LIMTI": "1"}).splitlines()
    assert lines == [
        f"{base}:2: unknown option 'nmae'",
        "  hint: did you mean name?",
        f"{base}:3: unknown option 'learning_rate'",
        "  hint: buffer-rl train --help lists the options",
        f"{base}:4: the environment variable 'NOWHERE' is not set",
        f"{over}:2: the option 'on' is set twice",
        f"  hint: see {over}:1",
        "BUFFER_RL_LIMTI: this environment variable names no option",
        "  hint: did you mean BUFFER_RL_LIMIT?",
        f"--count: 'x' is not an integer >= 1 (file {base}:1)",
        "--rate: '7' is not a number > 0 and <= 1 (flag --rate)",
    ]


@pytest.mark.parametrize("source", ["file", "variable", "flag"])
def test_a_leading_tilde_of_a_path_is_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    environ = {"BUFFER_RL_MODEL": "~/m"} if source == "variable" else {}
    flags = {"model": "~/m"} if source == "flag" else {}
    path = write(tmp_path, "model: ~/m\nown_style: ~/no/path\n" if source == "file" else "own_style: ~/no/path\n")
    args: Any = rivals(flags, environ, "~/run.yaml").args
    assert (args.model, args.own_style) == (f"{tmp_path}/m", "~/no/path")
    assert path == f"{tmp_path}/run.yaml"


def test_a_mapping_may_be_in_a_file_of_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").write_text("turns: 3\n")
    assert read(["--extra", "~/mine.yaml"]).extra == {"turns": 3}


def test_parsing_imports_neither_torch_nor_ray() -> None:
    program = (
        "import sys\nfrom buffer_rl.options.section import compose\n"
        "from buffer_rl.options.help import FlagParser, add_options, given_flags\n"
        "from buffer_rl.options.sources import resolve\n"
        "from buffer_rl.args import CORE_SECTIONS\n"
        "parser = FlagParser()\nadd_options(parser, CORE_SECTIONS)\n"
        "flags = given_flags(parser.parse_args(['--lr', '1e-3']))\n"
        "assert resolve(compose(CORE_SECTIONS), flags=flags, environ={}).args.lr == 1e-3\n"
        "print([name for name in ('torch', 'ray', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_every_core_option_can_be_set_by_a_flag_to_its_own_default() -> None:
    defaults = parse([], sections=CORE_SECTIONS, environ={})
    argv: list[str] = []
    for name, value in defaults.model_dump().items():
        values = [str(item) for item in value] if isinstance(value, list) else [str(value).lower()]
        argv += [f"--{name}", *([str(value)] if isinstance(value, str) else values)]
    assert parse(argv, sections=CORE_SECTIONS, environ={}) == defaults
