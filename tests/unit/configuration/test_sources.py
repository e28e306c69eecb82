from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from buffer_rl.config import Options, Section, compose, option
from buffer_rl.configuration.help import FlagParser, add_options, flags_of, given_flags, normalise_flags
from buffer_rl.configuration.sources import resolve
from buffer_rl.configuration.unknown_flags import take_unknown
from buffer_rl.errors import ConfigError
from buffer_rl.options import CORE_SECTIONS


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
    parser.add_argument("--config", default=None)
    options_class = compose(sections)
    add_options(parser, sections)
    namespace, extra = parser.parse_known_args(normalise_flags(argv))
    take_unknown(namespace, extra, flags_of(parser), prog="buffer-rl")
    flags = given_flags(namespace)
    return resolve(options_class, flags=flags, environ=environ, config_path=namespace.config).args


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
        compose([Mixed]), flags={"rate": "0.3"}, environ={"BUFFER_RL_NAME": "x", "HOME": "/"}, config_path=path
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
    assert "cannot read the file" in refusal(["--config", str(tmp_path / "absent.yaml")])
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
        (["stray"], ["unexpected argument 'stray'"]),
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


def test_parsing_imports_neither_torch_nor_ray() -> None:
    program = (
        "import sys\nfrom buffer_rl.config import compose\n"
        "from buffer_rl.configuration.help import FlagParser, add_options, given_flags\n"
        "from buffer_rl.configuration.sources import resolve\n"
        "from buffer_rl.options import CORE_SECTIONS\n"
        "parser = FlagParser()\nadd_options(parser, CORE_SECTIONS)\n"
        "flags = given_flags(parser.parse_args(['--lr', '1e-3']))\n"
        "assert resolve(compose(CORE_SECTIONS), flags=flags, environ={}, config_path=None).args.lr == 1e-3\n"
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
