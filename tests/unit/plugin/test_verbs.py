"""Verbs that plugins add to the command line."""

from __future__ import annotations

from typing import Any

import pytest

from buffer_rl.cli import main
from buffer_rl.verbs.completion import completion_script

GREETING = """
    '``buffer-rl greet``: greet 50% of them.'

    def add_parser(subparsers, argv):
        parser = subparsers.add_parser("greet", description="Greets.")
        parser.add_argument("--name", required=True)
        parser.set_defaults(run=run)

    def run(namespace):
        print(f"hello {namespace.name}")
        return 3
"""


def test_a_verb_of_a_plugin_is_listed_runs_and_is_completed(place: Any, capsys: pytest.CaptureFixture[str]) -> None:
    place.install("third-party", {"buffer_rl.verb": {"greet": "greeting"}}, greeting=GREETING)
    assert main(["greet", "--name", "you"]) == 3
    assert capsys.readouterr().out == "hello you\n"
    assert main(["--help"]) == 0
    assert "greet 50% of them" in capsys.readouterr().out
    assert "--name" in completion_script("bash")


def test_a_plugin_replaces_no_verb(place: Any, capsys: pytest.CaptureFixture[str]) -> None:
    place.install("third-party", {"buffer_rl.verb": {"export": "greeting"}}, greeting=GREETING)
    assert main(["export", "--name", "you"]) == 2
    assert "--load" in capsys.readouterr().err


def test_a_verb_whose_module_is_broken_is_named(place: Any, capsys: pytest.CaptureFixture[str]) -> None:
    place.install("third-party", {"buffer_rl.verb": {"greet": "greeting"}}, greeting="import nowhere_at_all")
    assert main(["--help"]) == 0
    assert "of the plugin greeting" in capsys.readouterr().out
    place.install("third-party", {"buffer_rl.verb": {"greet": "greeting"}}, greeting="def")
    assert main(["--help"]) == 0
    assert "its module cannot be read" in capsys.readouterr().out
    for text, problem in (("import nowhere_at_all", "ModuleNotFoundError"), ("raise SystemExit(3)", "SystemExit: 3")):
        place.install("third-party", {"buffer_rl.verb": {"greet": "greeting"}}, greeting=text)
        assert main(["greet"]) == 2
        assert f"verb greet of greeting: its module cannot be used: {problem}" in capsys.readouterr().err


def test_a_verb_of_a_plugin_is_off_with_autoload(
    place: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place.install("third-party", {"buffer_rl.verb": {"greet": "greeting"}}, greeting=GREETING)
    monkeypatch.setenv("BUFFER_RL_DISABLE_PLUGIN_AUTOLOAD", "1")
    assert main(["greet", "--name", "you"]) == 2
    assert "there is no verb 'greet'" in capsys.readouterr().err


FLAGS = """
    from buffer_rl.plugin.hookspecs import FlagMeaning, hookimpl

    @hookimpl
    def buffer_rl_explain_flag(name, values):
        if name == "steps":
            return FlagMeaning(kind="renamed", reason="it is --num-rollout", accepted=True,
                               options=(("num_rollout", values[0]),))
        if name == "epochs":
            return FlagMeaning(kind="renamed", reason="it is --laps", accepted=True, options=(("laps", "3"),))
        if name == "turbo":
            return FlagMeaning(kind="not there", reason="runs have one speed", page="the manual")
"""


def test_a_plugin_explains_flags_of_another_program(place: Any, capsys: pytest.CaptureFixture[str]) -> None:
    place.install("third-party", {"buffer_rl": {"other": "other"}}, other=FLAGS)
    assert main(["train", "--steps", "3", "--turbo", "9", "--num-rolout", "1"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "buffer-rl: error: 2 unknown flags",
        "  --turbo: not there: runs have one speed",
        "  --num-rolout: did you mean --num-rollout?",
        "  hint: the manual",
    ]
    assert main(["train", "--steps", "3", "--num-rollout", "4"]) == 2
    assert "both are given, and differ: it is --num-rollout" in capsys.readouterr().err
    assert main(["train", "--epochs", "3"]) == 2
    assert "--epochs: a plugin takes it for 'laps', which is no option" in capsys.readouterr().err
    assert main(["train", "-p", "no:other", "--turbo", "9"]) == 2
    assert "hint: see buffer-rl train --help" in capsys.readouterr().err
    assert main(["train", "--steps", "3"]) == 2  # what is missing is said behind the notice
    assert "notice: --steps: it is --num-rollout" in capsys.readouterr().err
