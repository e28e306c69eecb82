"""Pluggy plugins: what they provide, lifecycle hooks, and what happens to broken ones."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import pytest

from buffer_rl.errors import PluginError
from buffer_rl.hookspecs import Hooks, hookimpl
from buffer_rl.kinds import KINDS
from buffer_rl.plugins import PluginRegistry

PLUGIN = """
from buffer_rl.hookspecs import hookimpl
events = []
def score(args, sample):
    return 8.0
@hookimpl
def buffer_rl_provide(kind):
    events.append(kind)
    return {"eight": score} if kind == "reward" else {}
@hookimpl
def buffer_rl_on_train_step(step, metrics):
    events.append((step, metrics["loss"]))
@hookimpl
def buffer_rl_add_options():
    return ["plug:Options"]
"""


def hook_names() -> list[str]:
    return [name for name in dir(Hooks) if name.startswith("buffer_rl_")]


def test_every_hook_and_every_kind_has_a_docstring() -> None:
    assert len(hook_names()) == 6
    for name in hook_names():
        function = getattr(Hooks, name)
        assert function.__doc__, name
        hints = inspect.get_annotations(function)
        assert set(inspect.signature(function).parameters) - {"self"} <= set(hints), name
    for kind in KINDS.values():
        assert kind.protocol.__doc__, kind.name


def test_an_installed_plugin_provides_names_and_hears_of_events(place: Any) -> None:
    place.install("plug-party", {"buffer_rl": {"plug": "plug"}}, plug=PLUGIN)
    registry = PluginRegistry()
    assert registry.resolve("reward", "eight")(None, None) == 8.0
    assert registry.resolve_registered("reward", "eight") is registry.resolve("reward", "eight")
    assert registry.locate("reward", "eight").provider == "plug"
    registry.hook.buffer_rl_on_train_step(rollout_id=3, step=4, metrics={"loss": 0.5})
    assert registry.hook.buffer_rl_add_options() == [["plug:Options"]]
    events = registry.manager.get_plugin("plug").events
    assert events.count("reward") == 1, "a plugin is asked once a kind"
    assert events[-1] == (4, 0.5)
    assert [info.name for info in registry.infos() if info.kind == ""] == ["plug"]
    with pytest.raises(PluginError, match="blocked by -p no:eight"):
        PluginRegistry(blocked=["eight"]).resolve("reward", "eight")
    assert "eight" not in PluginRegistry(blocked=["eight"]).names("reward")


def test_a_broken_plugin_is_named_and_skipped_unless_it_is_asked_for(
    place: Any, caplog: pytest.LogCaptureFixture
) -> None:
    place.install("bad-party", {"buffer_rl": {"bad": "bad_plug"}}, bad_plug="import not_installed_anywhere\n")
    place.install("plug-party", {"buffer_rl": {"plug": "plug"}}, plug=PLUGIN)
    registry = PluginRegistry()
    with caplog.at_level(logging.WARNING):
        assert registry.resolve("reward", "eight")
    assert "the plugin bad is skipped" in caplog.text
    assert "No module named 'not_installed_anywhere'" in {i.name: i.error for i in registry.infos()}["bad"]
    with pytest.raises(PluginError, match="these plugins are broken: bad"):
        registry.resolve("reward", "nonesuch")
    with pytest.raises(PluginError, match=r"plugin 'bad'.*its own import failed"):
        registry.load_plugin("bad")
    blocked = PluginRegistry(blocked=["bad"])
    assert blocked.resolve("reward", "eight")
    with pytest.raises(PluginError, match="blocked by -p no:bad"):
        blocked.load_plugin("bad")


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("@hookimpl\ndef buffer_rl_on_train_stop(step): pass\n", "did you mean 'buffer_rl_on_train_step'"),
        ("@hookimpl\ndef buffer_rl_on_train_step(stepp): pass\n", "stepp"),
        ("def buffer_rl_on_train_step(step): pass\n", "it implements no hook"),
    ],
)
def test_a_plugin_with_wrong_hooks_is_refused(place: Any, body: str, problem: str) -> None:
    place.write("wrong_plug.py", "from buffer_rl.hookspecs import hookimpl\n" + body)
    registry = PluginRegistry()
    with pytest.raises(PluginError, match=problem):
        registry.load_plugin("wrong_plug")
    assert not registry.manager.has_plugin("wrong_plug")
    registry.hook.buffer_rl_on_train_step(rollout_id=0, step=0, metrics={})


@pytest.mark.parametrize("answer", ["raise RuntimeError('no')", "return ['eight']"])
def test_a_plugin_whose_provider_fails_does_not_stop_the_others(place: Any, answer: str) -> None:
    body = f"from buffer_rl.hookspecs import hookimpl\n@hookimpl\ndef buffer_rl_provide(kind):\n    {answer}\n"
    place.install("bad-party", {"buffer_rl": {"bad": "bad_plug"}}, bad_plug=body)
    place.install("plug-party", {"buffer_rl": {"plug": "plug"}}, plug=PLUGIN)
    registry = PluginRegistry()
    assert registry.resolve("reward", "eight")
    errors = {info.name: info.error for info in registry.infos()}
    assert "buffer_rl_provide('reward') failed: " in errors["bad"]
    assert errors["plug"] == ""
    with pytest.raises(PluginError, match=r"plugin 'bad': buffer_rl_provide\('reward'\) failed"):
        PluginRegistry.from_flags(["bad"]).resolve("reward", "eight")


def test_a_plugin_can_be_loaded_by_flag_as_a_module_a_class_or_an_installed_name(
    place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write("local_plug.py", PLUGIN)
    place.write(
        "class_plug.py",
        "from buffer_rl.hookspecs import hookimpl\nclass Plug:\n    @hookimpl\n    def buffer_rl_provide(self, kind):\n"
        "        return {'model': print} if kind == 'model_provider' else {}\n",
    )
    place.install("plug-party", {"buffer_rl": {"plug": "plug"}}, plug=PLUGIN.replace("eight", "installed_eight"))
    monkeypatch.setenv("BUFFER_RL_DISABLE_PLUGIN_AUTOLOAD", "1")
    registry = PluginRegistry.from_flags(["local_plug", "./class_plug.py:Plug", "plug"])
    assert {"eight", "installed_eight"} <= set(registry.names("reward"))
    assert registry.names("model_provider") == ["model"]
    with pytest.raises(PluginError, match=r"plugin 'local_plugg'.*\n.*\n.*did you mean 'local_plug'"):
        registry.load_plugin("local_plugg")


def test_two_distributions_that_offer_one_plugin_are_both_named(place: Any) -> None:
    place.install("first-party", {"buffer_rl": {"plug": "plug"}}, plug=PLUGIN)
    place.install("second-party", {"buffer_rl": {"plug": "plug2"}}, plug2=PLUGIN)
    registry = PluginRegistry()
    assert "eight" not in registry.names("reward")
    (error,) = [info.error for info in registry.infos() if info.name == "plug"]
    assert "first-party" in error
    assert "second-party" in error
    assert PluginRegistry(blocked=["second-party"]).resolve("reward", "eight")


def test_an_object_can_be_a_hook_plugin_of_the_manager() -> None:
    class Counter:
        seen = 0

        @hookimpl
        def buffer_rl_on_weight_update(self, version: int) -> None:
            self.seen += version

    registry, counter = PluginRegistry(), Counter()
    registry.manager.register(counter)
    registry.hook.buffer_rl_on_weight_update(version=5, metrics={})
    assert counter.seen == 5
