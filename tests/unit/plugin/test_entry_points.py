"""Names of installed distributions: lazy, blocked, switched off, broken, offered twice."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from buffer_rl.errors import PluginError
from buffer_rl.plugin.registry import PluginRegistry

REWARD = "def score(args, sample):\n    return 9.0\n"


def test_a_third_party_name_is_listed_without_an_import_and_imported_when_asked_for(place: Any) -> None:
    place.install("third-party", {"buffer_rl.reward": {"nine": "third:score"}}, third=REWARD)
    registry = PluginRegistry()
    (info,) = [info for info in registry.infos("reward") if info.name == "nine"]
    assert (info.distribution, info.version, info.target, info.loaded) == ("third-party", "1.5", "third:score", False)
    assert "third" not in sys.modules
    assert registry.resolve("reward", "nine")(None, None) == 9.0
    assert [info.loaded for info in registry.infos("reward") if info.name == "nine"] == [True]
    assert registry.resolve_registered("reward", "nine") is sys.modules["third"].score


def test_a_broken_third_party_plugin_is_named_and_the_others_work(place: Any) -> None:
    place.install(
        "broken-party",
        {"buffer_rl.reward": {"gone": "not_there:score", "syntax": "syntax:score", "bare": "syntax"}},
        syntax="def (\n",
    )
    registry = PluginRegistry()
    errors = {info.name: info.error for info in registry.infos("reward")}
    assert "there is no module 'not_there'" in errors["gone"]
    assert "SyntaxError" in errors["syntax"]
    assert errors["bare"]
    assert errors["exact_match"] == ""
    assert registry.resolve("reward", "exact_match")
    with pytest.raises(PluginError, match="reward 'gone': there is no module 'not_there'"):
        registry.resolve("reward", "gone")


def test_entry_points_that_cannot_be_read_are_named_and_the_others_work(place: Any) -> None:
    place.install("torn-party", {"buffer_rl.reward": {"nine": "third:score"}})
    (place.site / "torn_party-1.5.dist-info" / "entry_points.txt").write_text("[buffer_rl.reward]\nno equals sign\n")
    registry = PluginRegistry()
    assert registry.resolve("reward", "exact_match")
    assert [info.name for info in registry.infos() if "cannot be read" in info.error] == ["torn-party"]


def test_a_group_of_no_kind_is_named_with_the_nearest_one(place: Any) -> None:
    groups = {"buffer_rl.rewards": {"nine": "third:score"}, "buffer_rl.zzz": {"ten": "third:score"}}
    place.install("third-party", groups, third=REWARD)
    errors = {(info.kind, info.name): info.error for info in PluginRegistry().infos() if info.error}
    assert errors == {
        ("rewards", "nine"): "buffer_rl.rewards is no group of entry points; did you mean buffer_rl.reward?",
        ("zzz", "ten"): "buffer_rl.zzz is no group of entry points",
    }


def test_two_distributions_that_offer_one_name_are_both_named_when_it_is_asked_for(place: Any) -> None:
    place.install("first-party", {"buffer_rl.reward": {"nine": "first:score"}}, first=REWARD)
    place.install("second-party", {"buffer_rl.reward": {"nine": "second:score"}}, second=REWARD)
    registry = PluginRegistry()
    with pytest.raises(PluginError, match="several plugins have this name") as caught:
        registry.locate("reward", "nine")
    assert "first-party 1.5 (first:score)" in str(caught.value)
    assert "second-party 1.5 (second:score)" in str(caught.value)
    assert registry.resolve("reward", "exact_match")
    assert registry.resolve("reward", "second:score")
    chosen = PluginRegistry(blocked=["First_Party"])
    assert chosen.locate("reward", "nine").distribution == "second-party"


def test_a_blocked_name_is_refused_and_says_why(place: Any) -> None:
    place.write("my_reward.py", REWARD)
    place.install("third-party", {"buffer_rl.reward": {"nine": "third:score"}}, third=REWARD)
    registry = PluginRegistry.from_flags(["no:nine", "no:my_reward:score", "no:numeric"])
    for name in ("nine", "my_reward:score", "numeric"):
        with pytest.raises(PluginError, match=f"blocked by -p no:{name}"):
            registry.resolve("reward", name)
    assert [i.error for i in registry.infos("reward") if i.name == "nine"] == ["blocked by -p no:nine"]
    with pytest.raises(PluginError, match="blocked by -p no:third-party"):
        PluginRegistry(blocked=["third-party"]).resolve("reward", "nine")
    with pytest.raises(PluginError, match="blocked"):
        registry.resolve_registered("reward", "nine")


@pytest.mark.parametrize("by_environment", [True, False])
def test_without_autoload_only_own_names_stay(
    place: Any, monkeypatch: pytest.MonkeyPatch, by_environment: bool
) -> None:
    hooks = "raise RuntimeError('imported')\n"
    groups = {"buffer_rl.reward": {"nine": "third:score"}, "buffer_rl": {"thirdplug": "third_hooks"}}
    place.install("third-party", groups, third=REWARD, third_hooks=hooks)
    if by_environment:
        monkeypatch.setenv("BUFFER_RL_DISABLE_PLUGIN_AUTOLOAD", "1")
    registry = PluginRegistry(autoload=by_environment)
    assert "nine" not in registry.names("reward")
    assert "exact_match" in registry.names("reward")
    assert registry.resolve("reward", "third:score")
    with pytest.raises(PluginError, match="BUFFER_RL_DISABLE_PLUGIN_AUTOLOAD"):
        registry.resolve("reward", "nine")
    assert "third_hooks" not in sys.modules
    assert all("thirdplug" not in info.name for info in registry.infos())


def test_an_unknown_name_lists_the_known_ones_and_the_nearest(place: Any) -> None:
    with pytest.raises(PluginError) as caught:
        PluginRegistry().locate("reward", "exactmatch")
    assert "there is no reward of that name" in str(caught.value)
    assert "did you mean 'exact_match'? known names: " in str(caught.value)
    assert ", dapo, dapo_binary, deepscaler, exact_match, " in str(caught.value)


def test_a_name_with_dots_comes_before_a_module_path(place: Any) -> None:
    place.write("acme.py", "def judge(args, sample):\n    return 1.0\n")
    place.install("third-party", {"buffer_rl.reward": {"acme.judge": "third:score"}}, third=REWARD)
    assert PluginRegistry().resolve("reward", "acme.judge")(None, None) == 9.0
    assert PluginRegistry(blocked=["third-party"]).resolve("reward", "acme.judge")(None, None) == 1.0


def test_every_own_entry_point_leads_somewhere() -> None:
    infos = [info for info in PluginRegistry(autoload=False).infos() if info.distribution == "buffer-rl"]
    assert {info.kind for info in infos} >= {"reward", "filter", "advantage", "loss", "trainer", "engine", "rollout"}
    assert [(info.name, info.error) for info in infos if info.error] == []
