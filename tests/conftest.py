"""What holds for all tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

# A measured time says nothing on a loaded machine; pytest's own time limit holds for each test.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")


@pytest.fixture(autouse=True)
def restored_import_path() -> Iterator[None]:
    """Plugins named by file put their folder on the import path of the process; the next test must not see it."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    added = set(sys.path) - set(path)
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        origin = getattr(sys.modules[name], "__file__", None) or ""
        if any(origin.startswith(f"{folder}/") for folder in added):
            del sys.modules[name]
