"""Flags that no option takes: those that a plugin knows from another program's scripts, and mistakes, which are
reported all at once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from buffer_rl.errors import ConfigError
from buffer_rl.options.help import given_flags, set_flag
from buffer_rl.options.section import did_you_mean, flag_of
from buffer_rl.plugin.calls import returned
from buffer_rl.plugin.hookspecs import FlagMeaning
from buffer_rl.plugin.registry import PluginRegistry


def take_unknown(namespace: argparse.Namespace, extra: Sequence[str], flags: Sequence[str], *, prog: str) -> list[str]:
    """Take those flags among the arguments ``extra`` that, as a plugin says, may be left out or stand for options,
    which are set. Returns a notice for each reason. flags: those of the command ``prog``.

    Raises ConfigError for a flag that says something else than the option that it stands for, and for all others
    together."""
    if not extra:
        return []
    registry = PluginRegistry.from_flags(given_flags(namespace).get("plugin") or ())
    rest, notices = _accept_known(namespace, extra, flags, registry)
    _refuse_unknown(rest, flags, registry, prog=prog)
    return notices


def explain(registry: PluginRegistry, name: str, values: Sequence[str]) -> FlagMeaning | None:
    """What a flag means to the first plugin that knows it, by its name without dashes and its values. Raises
    PluginError for an answer that is none."""
    hook = "buffer_rl_explain_flag"
    for plugin, meaning in registry.call_hook(hook, name=name, values=values):
        if not isinstance(meaning, FlagMeaning):
            raise returned("plugin", plugin, meaning, "FlagMeaning or None", at=hook)
        return meaning
    return None


def _accept_known(
    namespace: argparse.Namespace, extra: Sequence[str], flags: Sequence[str], registry: PluginRegistry
) -> tuple[list[str], list[str]]:
    """The arguments that remain, and the notices. Only commands with options take flags of others."""
    if not hasattr(namespace, "sections"):
        return list(extra), []
    rest: list[str] = []
    ignored: dict[str, list[str]] = {}
    notices = []
    for flag, tokens, values in _by_flag(extra):
        known = explain(registry, flag[2:], values) if flag.startswith("--") else None
        if known is None or not known.accepted:
            rest += tokens
            continue
        for option, value in known.options:
            if flag_of(option) not in flags:
                raise ConfigError(f"a plugin takes it for {option!r}, which is no option", where=flag)
            if given_flags(namespace).get(option, value) != value:
                raise ConfigError(f"both are given, and differ: {known.reason}", where=f"{flag} and {flag_of(option)}")
            set_flag(namespace, option, value)
        if known.options:
            notices.append(f"{flag}: {known.reason}")
        else:
            ignored.setdefault(known.reason, []).append(flag)
    notices += [f"ignored, as {why}: {' '.join(same)}" for why, same in ignored.items()]
    return rest, notices


def _refuse_unknown(extra: Sequence[str], flags: Sequence[str], registry: PluginRegistry, *, prog: str) -> None:
    """Raises ConfigError naming every argument that no flag took, with what is known of it or the nearest of
    ``flags``."""
    if not extra:
        return
    groups = _by_flag(extra)
    unknown = [group for group in groups if group[0].startswith("-")]
    if not unknown:
        is_file = "--config" in flags and extra[0].endswith((".yaml", ".yml"))
        hint = f"did you mean --config {extra[0]}?" if is_file else f"see {prog} --help"
        raise ConfigError(f"unexpected argument {extra[0]!r}", hint=hint)
    known = {flag: explain(registry, flag.lstrip("-"), values) for flag, _, values in unknown}
    lines = {
        flag: f"{meaning.kind}: {meaning.reason}" if meaning else did_you_mean(flag, flags)
        for flag, meaning in known.items()
    }
    page = next((meaning.page for meaning in known.values() if meaning), "")
    if len(lines) == 1:
        flag, why = next(iter(lines.items()))
        if known[flag]:
            raise ConfigError(f"unknown flag {flag}: {why}", hint=page)
        raise ConfigError(f"unknown flag {flag}", hint=why or f"see {prog} --help")
    text = "\n".join(f"  {flag}: {why}" if why else f"  {flag}" for flag, why in lines.items())
    raise ConfigError(f"{len(lines)} unknown flags\n{text}", hint=page or f"see {prog} --help")


def _by_flag(extra: Sequence[str]) -> list[tuple[str, list[str], list[str]]]:
    """Each flag with its tokens and its values; what comes before the first flag is one without a name."""
    groups: list[tuple[str, list[str], list[str]]] = []
    for token in extra:
        if token.startswith("--") or (token.startswith("-") and not _is_number(token)):
            flag, equals, value = token.partition("=")
            groups.append((flag, [token], [value] if equals else []))
        elif groups:
            groups[-1][1].append(token)
            groups[-1][2].append(token)
        else:
            groups.append(("", [token], [token]))
    return groups


def _is_number(token: str) -> bool:
    try:
        float(token)
    except ValueError:
        return False
    return True
