"""Flags that no option takes: those of slime's and Megatron's scripts that mean nothing, or something else, here, and
mistakes, which are reported all at once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from buffer_rl.config import did_you_mean, flag_of
from buffer_rl.configuration.help import given_flags, set_flag
from buffer_rl.configuration.slime_flags import Verdict, known_flag
from buffer_rl.errors import ConfigError

PAGE = "docs/coming_from_slime.md; 'buffer-rl import slime SCRIPT' translates a launch script"


def accept_known(namespace: argparse.Namespace, extra: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments ``extra`` without those flags of slime's scripts that may be left out or are other options here
    (which are set), and a notice for each reason. Only commands with options take them.

    Raises ConfigError for a flag that says something else than the option that it stands for."""
    if not hasattr(namespace, "sections"):
        return list(extra), []
    rest: list[str] = []
    ignored: dict[str, list[str]] = {}
    notices = []
    for flag, tokens, values in _by_flag(extra):
        known = known_flag(flag[2:], values) if flag.startswith("--") else None
        if known is None or known.verdict not in (Verdict.NOT_NEEDED, Verdict.RENAMED):
            rest += tokens
            continue
        for option, value in known.options:
            if given_flags(namespace).get(option, value) != value:
                raise ConfigError(f"both are given, and differ: {known.why}", where=f"{flag} and {flag_of(option)}")
            set_flag(namespace, option, value)
        if known.options:
            notices.append(f"{flag}: {known.why}")
        else:
            ignored.setdefault(known.why, []).append(flag)
    notices += [f"ignored, as {why}: {' '.join(flags)}" for why, flags in ignored.items()]
    return rest, notices


def refuse_unknown(extra: Sequence[str], flags: Sequence[str], *, prog: str) -> None:
    """Raises ConfigError naming every argument that no flag took, with what is known of it or the nearest of
    ``flags``."""
    if not extra:
        return
    groups = _by_flag(extra)
    unknown = [group for group in groups if group[0].startswith("-")]
    if not unknown:
        raise ConfigError(f"unexpected argument {extra[0]!r}", hint=f"see {prog} --help")
    lines = {flag: _explain(flag, values, flags) for flag, _, values in unknown}
    ours = any(known_flag(flag.lstrip("-"), values) for flag, _, values in unknown)
    if len(lines) == 1:
        flag, why = next(iter(lines.items()))
        if ours:
            raise ConfigError(f"unknown flag {flag}: {why}", hint=PAGE)
        raise ConfigError(f"unknown flag {flag}", hint=why or f"see {prog} --help")
    text = "\n".join(f"  {flag}: {why}" if why else f"  {flag}" for flag, why in lines.items())
    raise ConfigError(f"{len(lines)} unknown flags\n{text}", hint=PAGE if ours else f"see {prog} --help")


def _explain(flag: str, values: Sequence[str], flags: Sequence[str]) -> str:
    known = known_flag(flag.lstrip("-"), values)
    return f"{known.verdict}: {known.why}" if known else did_you_mean(flag, flags)


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
