"""The one style of errors about plugins: kind, reference, origin; what is wrong; expected; nearest and known names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from buffer_rl.errors import PluginError
from buffer_rl.kinds import PluginKind

_MOST_NAMES_SHOWN = 12


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known name most like ``name``, or None. ``cutoff`` is difflib's ratio, from 0 to 1."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def list_names(names: Iterable[str]) -> str:
    """Names for a message, shortened after the first dozen."""
    ordered = sorted(set(names))
    shown = ", ".join(ordered[:_MOST_NAMES_SHOWN])
    left = len(ordered) - _MOST_NAMES_SHOWN
    return f"{shown} and {left} more" if left > 0 else shown


def plugin_error(
    kind: PluginKind | None,
    reference: str,
    what: str,
    *,
    origin: str = "",
    actual: str = "",
    suggestion: str | None = None,
    known: Iterable[str] = (),
    hint: str = "",
) -> PluginError:
    """Build the error; the caller raises it.

    kind: None where none was named: for a whole pluggy plugin (``-p NAME``), or while the kind is guessed.
    origin: file, line, distribution, as far as known.
    actual: the signature that was found. suggestion: the reference that was probably meant.
    """
    named = list_names(known)
    question = f"did you mean {suggestion!r}?" if suggestion else ""
    facts = "; ".join(part for part in (f"known names: {named}" if named else "", hint) if part)
    if kind is None:
        subject = "plugin"
        expected = "package.module:name, ./file.py:name, or a name that is installed or registered"
    else:
        subject = kind.name
        expected = f"{kind.signature}, for {' or '.join(kind.flags)}"
    return PluginError(
        f"{what}; found {actual}" if actual else what,
        where=f"{subject} {reference!r}" + (f" ({origin})" if origin else ""),
        expected=expected,
        hint=f"{question} {facts}".strip(),
    )


def short_repr(value: object) -> str:
    """A value for a message: its shortened ``repr`` and its type."""
    text = repr(value)
    return f"{text[:80]}{'…' if len(text) > 80 else ''} ({type(value).__name__})"
