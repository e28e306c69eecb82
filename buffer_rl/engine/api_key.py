"""The API key of a run's engines and router: made here, carried by options and environment, never by an argument list.

What stands on a command line can be read by every user of the machine; the environment of a process by its owner alone.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from buffer_rl.config import env_of

if TYPE_CHECKING:
    from buffer_rl.options import Args

KEY_VARIABLE = env_of("engine_api_key")
KEY_BYTES = 32


def with_engine_key(args: Args) -> Args:
    """``args`` with a key for the engines that this run starts: the one that was given, or a new one.

    Without one where ``--no-engine-auth`` says so; as they are where the engines are somebody else's."""
    if args.router_url is not None:
        return args
    key = args.engine_api_key or secrets.token_urlsafe(KEY_BYTES)
    return args.model_copy(update={"engine_api_key": key if args.engine_auth else None})


def auth_headers(key: str | None) -> dict[str, str]:
    """What a request to an engine or the router says; nothing without a key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def key_environment(key: str | None) -> dict[str, str]:
    """What a server process gets in its environment. Empty for no key, also where this process has one."""
    return {KEY_VARIABLE: key or ""}


def take_key(environ: MutableMapping[str, str] = os.environ) -> str | None:
    """In a server process: its key, which is then no longer in the environment that its own children get."""
    return environ.pop(KEY_VARIABLE, "") or None
