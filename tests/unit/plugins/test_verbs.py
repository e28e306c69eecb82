"""Verbs that plugins add to the command line."""

from __future__ import annotations

from typing import Any

import pytest

from buffer_rl.cli import main
from buffer_rl.verbs.completion import completion_script

GREETING = """
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
    assert "of the plugin greeting" in capsys.readouterr().out
    assert "--name" in completion_script("bash")


def test_a_plugin_replaces_no_verb(place: Any, capsys: pytest.CaptureFixture[str]) -> None:
    place.install("third-party", {"buffer_rl.verb": {"export": "greeting"}}, greeting=GREETING)
    assert main(["export", "--name", "you"]) == 2
    assert "--load" in capsys.readouterr().err


def test_a_verb_whose_module_is_broken_is_named(place: Any, capsys: pytest.CaptureFixture[str]) -> None:
    place.install("third-party", {"buffer_rl.verb": {"greet": "greeting"}}, greeting="import nowhere_at_all")
    assert main(["greet"]) == 2
    assert "verb greet of greeting: its module cannot be used: ModuleNotFoundError" in capsys.readouterr().err


def test_a_verb_of_a_plugin_is_off_with_autoload(
    place: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place.install("third-party", {"buffer_rl.verb": {"greet": "greeting"}}, greeting=GREETING)
    monkeypatch.setenv("BUFFER_RL_DISABLE_PLUGIN_AUTOLOAD", "1")
    assert main(["greet", "--name", "you"]) == 2
    assert "there is no verb 'greet'" in capsys.readouterr().err
