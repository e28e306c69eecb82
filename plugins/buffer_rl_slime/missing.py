"""What cannot be had under slime's names: an error at import that says why, and the page to read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

PAGE = "docs/coming_from_slime.md"


def missing(module: str, reasons: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """A ``__getattr__`` for ``module``, which raises ImportError for a name that is not there.

    reasons: what is in place of a name, for those that have an answer shorter than the page."""

    def refuse(name: str) -> NoReturn:
        if name.startswith("__"):  # Python's own questions, such as for __path__
            raise AttributeError(name)
        reason = (reasons or {}).get(name, "buffer_rl has nothing that does the same")
        raise ImportError(f"{module}.{name} cannot be had here: {reason}; see {PAGE}", name=f"{module}.{name}")

    return refuse
