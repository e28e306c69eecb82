"""Clients and servers in the process of the tests, of which each test has its own, without what they wait for."""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import uvicorn.server

TICK_S = 0.005


@pytest.fixture(scope="package", autouse=True)
def quick_clients_and_servers() -> Iterator[None]:
    """Each of hundreds of clients would load certificates, which none here needs, and each server would take two tenths
    of a second to end: uvicorn looks so often whether it should."""
    own = {**vars(asyncio), "sleep": lambda seconds: asyncio.sleep(min(seconds, TICK_S))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        patch.setattr(uvicorn.server, "asyncio", SimpleNamespace(**own))
        yield
