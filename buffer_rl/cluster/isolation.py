"""Ray of one run, closed to everybody else: a token of its own, listeners on the loopback interface alone."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import ray

MODE = "RAY_AUTH_MODE"
TOKEN = "RAY_AUTH_TOKEN"
TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
_MULTIPLE_NODES = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # Ray's name; "0" means one node and loopback on Linux too
_ALL = (MODE, TOKEN, TOKEN_PATH, _MULTIPLE_NODES)
TOKEN_BYTES = 32


@contextmanager
def isolated_ray() -> Iterator[None]:
    """For a block that starts Ray and ends it again.

    ``ray.init`` asks for a token by itself, and keeps it in the home folder, readable by others, for all clusters to
    come. Here it is new for each run, in a file of mode 0600 whose path Ray's processes find in their environment.
    A token that the caller's environment names is used instead, and ``RAY_AUTH_MODE=disabled`` is obeyed.

    Ray replaces the node address 127.0.0.1 by the one that other machines reach, unless it is told that there are no
    other machines; its daemons then listen on all interfaces.
    """
    before = {name: os.environ.get(name) for name in _ALL}
    constants = cast(Any, ray)._private.ray_constants
    multiple_nodes = constants.ENABLE_RAY_CLUSTER  # read from the environment once, when ray was imported
    with tempfile.TemporaryDirectory(prefix="buffer_rl_token_") as folder:
        try:
            if before[TOKEN] is None and before[TOKEN_PATH] is None:
                os.environ[TOKEN_PATH] = str(_write_token(Path(folder)))
            os.environ[_MULTIPLE_NODES] = "0"
            constants.ENABLE_RAY_CLUSTER = False
            _forget_token()
            yield
        finally:
            constants.ENABLE_RAY_CLUSTER = multiple_nodes
            _restore(before)
            _forget_token()


def _write_token(folder: Path) -> Path:
    path = folder / "token"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(TOKEN_BYTES))
    return path


def _forget_token() -> None:
    """A process keeps the token that it read first; the next cluster has another one."""
    cast(Any, ray)._raylet.AuthenticationTokenLoader.instance().reset_cache()


def _restore(before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
