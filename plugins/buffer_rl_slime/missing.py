"""What cannot be had under slime's names: an error at import that says why, and the page to read."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

PAGE = "docs/coming_from_slime.md"


def missing(module: str, reasons: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """A ``__getattr__`` for ``module``, which raises ImportError for a name that is not there. Of a package it imports
    the module of that name, as ``from package import module`` asks for it.

    reasons: what is in place of a name, for those that have an answer shorter than the page."""

    def found(name: str) -> Any:
        if name.startswith("__"):  # Python's own questions, such as for __path__
            raise AttributeError(name)
        if hasattr(sys.modules[module], "__path__"):
            return importlib.import_module(f"{module}.{name}")  # names the page where it is not there
        reason = (reasons or {}).get(name, "buffer_rl has nothing that does the same")
        raise ImportError(f"{module}.{name} cannot be had here: {reason}; see {PAGE}", name=f"{module}.{name}")

    return found
