"""Pluggy plugins: what they provide, lifecycle hooks, and what happens to broken ones."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.driver.launch import launch_training
from buffer_rl.errors import PluginError
from buffer_rl.kinds.table import KINDS
from buffer_rl.observe.observer import RunObserver
from buffer_rl.options.section import compose
from buffer_rl.options.sources import explain
from buffer_rl.plugin.hookspecs import Hooks, hookimpl
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.verbs.preflight import with_local_paths
from buffer_rl.verbs.train import sections_of

PLUGIN = """
from buffer_rl.plugin.hookspecs import hookimpl
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
    assert len(hook_names()) == 8
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
    registry.call_hook("buffer_rl_on_train_step", rollout_id=3, step=4, metrics={"loss": 0.5})
    assert ("plug", ["plug:Options"]) in registry.call_hook("buffer_rl_add_options")
    events = registry.manager.get_plugin("plug").events
    assert events.count("reward") == 1, "a plugin is asked once a kind"
    assert events[-1] == (4, 0.5)
    assert "plug" in [info.name for info in registry.infos() if info.kind == ""]
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
    place.write("wrong_plug.py", "from buffer_rl.plugin.hookspecs import hookimpl\n" + body)
    registry = PluginRegistry()
    with pytest.raises(PluginError, match=problem):
        registry.load_plugin("wrong_plug")
    assert not registry.manager.has_plugin("wrong_plug")
    registry.call_hook("buffer_rl_on_train_step", rollout_id=0, step=0, metrics={})


@pytest.mark.parametrize("answer", ["raise SystemExit('no')", pytest.param("return ['eight']", marks=pytest.mark.slow)])
def test_a_plugin_whose_provider_fails_does_not_stop_the_others(place: Any, answer: str) -> None:
    body = f"from buffer_rl.plugin.hookspecs import hookimpl\n@hookimpl\ndef buffer_rl_provide(kind):\n    {answer}\n"
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
        "from buffer_rl.plugin.hookspecs import hookimpl\nclass Plug:\n    @hookimpl\n"
        "    def buffer_rl_provide(self, kind):\n"
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


WRONG = """
from buffer_rl.plugin.hookspecs import hookimpl
class Plug:
    @hookimpl
    def {hook}(self):
        raise SystemExit("my bug")
plug = Plug()
"""


def run_hook(hook: str, registry: PluginRegistry, tmp_path: Path) -> None:
    """Have the code that calls the hook in a run call it."""
    args: Any = compose(CORE_SECTIONS)(run_dir=str(tmp_path / "run"), progress="none", logger=[])
    if hook == "buffer_rl_provide":
        registry.resolve("reward", "eight")
    elif hook == "buffer_rl_add_options":
        sections_of(["./wrong_plug.py:plug"])
    elif hook == "buffer_rl_explain_flag":
        explain(registry, "steps", ["3"])
    elif hook == "buffer_rl_local_paths":
        with_local_paths(args, registry)
    elif hook == "buffer_rl_configure":
        launch_training(args, registry)
    else:
        with RunObserver(args, registry) as observer:
            if hook == "buffer_rl_on_rollout_end":
                observer.rollout_ended(3, False, {"rollout/raw_reward": 0.5}, [])
            elif hook == "buffer_rl_on_train_step":
                observer.trained(3, 4, {"train/loss": 0.5})
            elif hook == "buffer_rl_on_weight_update":
                observer.published(4, {})


@pytest.mark.parametrize("hook", [name for name in dir(Hooks) if name.startswith("buffer_rl_on_")])
def test_a_lifecycle_hook_gets_what_it_is_promised_from_every_plugin_once(tmp_path: Path, hook: str) -> None:
    names = list(inspect.signature(getattr(Hooks, hook)).parameters)[1:]
    seen: list[tuple[str, dict[str, Any]]] = []
    registry = PluginRegistry()
    for plugin in ("first", "second"):
        scope: dict[str, Any] = {"note": lambda facts, plugin=plugin: seen.append((plugin, facts))}
        exec(f"def {hook}({', '.join(names)}): note(dict(locals()))", scope)
        registry.manager.register(type("Plugin", (), {hook: staticmethod(hookimpl(scope[hook]))})(), plugin)
    run_hook(hook, registry, tmp_path)
    given = {
        "buffer_rl_on_rollout_end": {"rollout_id": 3, "evaluation": False, "metrics": {"rollout/raw_reward": 0.5}},
        "buffer_rl_on_train_step": {"rollout_id": 3, "step": 4, "metrics": {"train/loss": 0.5}},
        "buffer_rl_on_weight_update": {"version": 4, "metrics": {}},
    }[hook]
    assert seen == [("second", given), ("first", given)], "pluggy's order: the last registered comes first"


@pytest.mark.parametrize("hook", [name for name in dir(Hooks) if name.startswith("buffer_rl_")])
def test_a_hook_that_raises_is_named_with_its_plugin(place: Any, hook: str, tmp_path: Path) -> None:
    place.write("wrong_plug.py", WRONG.format(hook=hook))
    registry = PluginRegistry.from_flags(["./wrong_plug.py:plug"])
    with pytest.raises(PluginError) as caught:
        run_hook(hook, registry, tmp_path)
    message = str(caught.value)
    assert message.startswith("plugin './wrong_plug.py:plug'")
    assert hook in message
    assert "SystemExit: my bug" in message
    if hook != "buffer_rl_provide":
        assert "wrong_plug.py" in message.partition("Traceback")[2]


def test_what_explains_no_flag_is_named_with_its_plugin(place: Any) -> None:
    body = "def buffer_rl_explain_flag(name, values):\n    return 'it is --num-rollout'\n"
    place.write("wrong_plug.py", f"from buffer_rl.plugin.hookspecs import hookimpl\n@hookimpl\n{body}")
    with pytest.raises(PluginError, match="it returned 'it is --num-rollout'") as caught:
        explain(PluginRegistry.from_flags(["wrong_plug"]), "steps", ["3"])
    assert "expected: FlagMeaning or None" in str(caught.value)


@pytest.mark.parametrize("answer", ["'plug:Options'", "[int]", "3"])
def test_options_that_are_no_sections_are_named_with_their_plugin(place: Any, answer: str) -> None:
    body = "from buffer_rl.plugin.hookspecs import hookimpl\n@hookimpl\n"
    body += f"def buffer_rl_add_options():\n    return {answer}\n"
    place.write("odd_plug.py", body)
    with pytest.raises(PluginError, match=r"plugin 'odd_plug', buffer_rl_add_options: it returned") as caught:
        sections_of(["odd_plug"])
    assert "expected: a list of subclasses of buffer_rl.options.section.Section" in str(caught.value)


def test_an_object_can_be_a_hook_plugin_of_the_manager() -> None:
    class Counter:
        seen = 0

        @hookimpl
        def buffer_rl_on_weight_update(self, version: int) -> None:
            self.seen += version

    registry, counter = PluginRegistry(), Counter()
    registry.manager.register(counter)
    registry.call_hook("buffer_rl_on_weight_update", version=5, metrics={})
    assert counter.seen == 5
