"""The short forms of option checks, and the checks that sections bring."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from buffer_rl.errors import ConfigError, PluginError
from buffer_rl.options.checks import check_options, first, given, needs, notices, refuse
from buffer_rl.options.section import Section, compose, option


class Depth(Section):
    """Options with a check and a notice."""

    heading: ClassVar[str] = "Depth"

    depth: int = option(0, "number of levels")
    depth_file: str | None = option(None, "file with the levels", metavar="PATH")
    depth_names: list[str] = option([], "names of the levels")
    deep: bool = option(False, "whether there are levels")
    depth_unit: str = option("m", "unit of each level", needs="depth_file")

    @staticmethod
    def check(args: Any) -> None:
        needs(args, "deep", "there are no levels", "depth", "depth_names")
        needs(args, "depth_file", "no level is read", "deep")
        refuse(args.depth > 9, f"--depth: {args.depth} levels", expected="at most 9")

    @staticmethod
    def notices(args: Any) -> Any:
        if args.depth == 9:
            yield "--depth 9: this takes long"


class Quits(Section):
    """A section of a plugin that ends the process."""

    @staticmethod
    def check(args: Any) -> None:
        raise SystemExit("no")

    @staticmethod
    def notices(args: Any) -> Any:
        raise KeyboardInterrupt


def args_of(*sections: type[Section], **options: Any) -> Any:
    return compose(sections or (Depth,)).model_validate(options)


def test_an_option_counts_as_given_by_its_value_and_the_first_one_is_named() -> None:
    names = ("depth", "depth_file", "depth_names")
    assert given(args_of(), *names) == ""
    assert given(args_of(depth=0, depth_names=[]), *names) == ""
    assert given(args_of(depth_names=["a"], depth_file="f"), *names) == "--depth-file"


def test_the_flag_that_was_found_replaces_the_braces_of_every_text() -> None:
    with pytest.raises(ConfigError) as caught:
        refuse("--depth", "--flat and {}: {} is deep: 1", "take {} out", "no {}")
    error = caught.value
    texts = ["--depth is deep: 1", "--flat and --depth", "no --depth", "take --depth out"]
    assert [error.what, error.where, error.expected, error.hint] == texts
    refuse("", "{}: it is deep")
    with pytest.raises(ConfigError, match=r"^--to: 'x_\{\}' is a path\n"):
        refuse(True, "--to: 'x_{}' is a path")
    assert first({"a": 0, "b": [], "c": 1, "d": 2}) == "c"
    assert first({"a": None}) == ""


@pytest.mark.parametrize(
    ("texts", "rest"),
    [
        (("--a: no",), "--a: no\n  hint: take it out"),
        (("--a and --b: no",), "--a and --b: no\n  hint: take one of them out"),
        (("--a: this and that",), "--a: this and that\n  hint: take it out"),
        (("--a: no", "", "1"), "--a: no\n  expected: 1"),
        (("--a: no", "add --b", "1"), "--a: no\n  expected: 1\n  hint: add --b"),
    ],
)
def test_every_refusal_says_what_to_do(texts: tuple[str, ...], rest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse(True, *texts)
    assert str(caught.value) == rest


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 1}, "--depth: there are no levels\n  hint: add --deep, or take it out"),
        ({"depth_names": ["a"]}, "--depth-names: there are no levels\n  hint: add --deep, or take it out"),
        ({"deep": True}, "--deep: no level is read\n  hint: add --depth-file PATH, or take it out"),
        ({"deep": True, "depth_file": "f", "depth": 10}, "--depth: 10 levels\n  expected: at most 9"),
    ],
)
def test_an_option_that_nothing_reads_is_named_with_what_to_add(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_options(args_of(**options))
    assert str(caught.value) == message
    check_options(args_of(deep=True, depth_file="f", depth=9))


def test_an_option_that_declares_what_it_needs_is_refused_without_it_and_its_help_says_so() -> None:
    assert Depth.model_fields["depth_unit"].description == "unit of each level; needs --depth-file"
    with pytest.raises(ConfigError) as caught:
        check_options(args_of(depth_unit="km"))
    assert str(caught.value) == (
        "--depth-unit: nothing reads it without --depth-file\n  hint: add --depth-file PATH, or take it out"
    )
    check_options(args_of(depth_unit="m"))
    check_options(args_of(depth_unit="km", depth_file="f", deep=True))


def test_the_sections_of_plugins_check_and_notify_with_those_of_the_core() -> None:
    args = args_of(Depth, deep=True, depth_file="f", depth=9)
    check_options(args)
    assert notices(args) == ["--depth 9: this takes long"]
    assert notices(args_of()) == []


def test_whatever_a_section_of_a_plugin_raises_is_an_error_that_names_it() -> None:
    args = args_of(Depth, Quits)
    with pytest.raises(ConfigError, match="test_checks:Quits', check: it raised SystemExit: no"):
        check_options(args)
    with pytest.raises(PluginError, match="test_checks:Quits', notices: it raised KeyboardInterrupt"):
        notices(args)
