"""A local Ray that only its own run can use: a token of its own, listeners on the loopback interface alone.

Ray has no public way to either. All of its private names that this takes stand here."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

import ray

from buffer_rl.cluster.environment import variables
from buffer_rl.errors import ClusterError

MODE = "RAY_AUTH_MODE"
TOKEN = "RAY_AUTH_TOKEN"
TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
_MULTIPLE_NODES = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # Ray's name; "0" means one node and loopback on Linux too
_ALL = (MODE, TOKEN, TOKEN_PATH, _MULTIPLE_NODES)
TOKEN_BYTES = 32
ON_LOOPBACK: dict[str, Any] = {"_node_ip_address": "127.0.0.1"}
"""Private arguments of ``ray.init``."""


@contextmanager
def isolated_ray() -> Iterator[None]:
    """For a block that starts Ray and ends it again.

    ``ray.init`` asks for a token by itself, and keeps it in the home folder, readable by others, for all clusters to
    come. Here it is new for each run, in a file of mode 0600 whose path Ray's processes find in their environment.
    A token that the caller's environment names is used instead, and ``RAY_AUTH_MODE=disabled`` is obeyed.

    Unless a flag says that there are no other machines, Ray replaces the node address 127.0.0.1 by the one that they
    reach, and its daemons listen on all interfaces.

    Raises ClusterError if the installed version of Ray lacks one of the private names.
    """
    own: dict[str, str | None] = {name: os.environ.get(name) for name in _ALL}
    constants, tokens = _private("_private.ray_constants"), _private("_raylet.AuthenticationTokenLoader")
    multiple_nodes = _private(
        "_private.ray_constants.ENABLE_RAY_CLUSTER"
    )  # read from the environment once, when ray was imported
    with tempfile.TemporaryDirectory(prefix="buffer_rl_token_") as folder:
        if own[TOKEN] is None and own[TOKEN_PATH] is None:
            own[TOKEN_PATH] = str(_write_token(Path(folder)))
        with variables({**own, _MULTIPLE_NODES: "0"}):
            try:
                constants.ENABLE_RAY_CLUSTER = False
                tokens.instance().reset_cache()  # a process keeps the token that it read first
                yield
            finally:
                constants.ENABLE_RAY_CLUSTER = multiple_nodes
        tokens.instance().reset_cache()  # the next cluster has another one


def _write_token(folder: Path) -> Path:
    path = folder / "token"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(TOKEN_BYTES))
    return path


def _private(name: str) -> Any:
    try:
        return attrgetter(name)(ray)
    except AttributeError as error:
        raise ClusterError(
            f"Ray {ray.__version__} has no ray.{name}, so a local Ray cannot be closed to other users",
            where="the local Ray",
            hint="install another version of Ray, or join a running cluster with --ray-address",
        ) from error
