"""``python -m buffer_rl_rollout_service --dir DIR --group-size N``: serves until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from buffer_rl.cluster.process import base_url
from buffer_rl.engines.http_server import http_server
from buffer_rl.errors import BufferRLError, ConfigError, raised_as
from buffer_rl.observe.terminal import say
from buffer_rl.options.section import env_of
from buffer_rl_rollout_service.server import Service
from buffer_rl_rollout_service.store import Rules, Store

TOKEN_VARIABLE = env_of("rollout_service_token")
TOKEN_FILE = "token"
PORT = 8889
MIB = 1 << 20


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the service."""
    parser = argparse.ArgumentParser(
        prog="python -m buffer_rl_rollout_service",
        description="Takes trajectories from agents over HTTP, and gives complete groups of them to a run.",
        epilog=f"The token that callers send is {TOKEN_VARIABLE}, or else the one in DIR/{TOKEN_FILE}, a new one if "
        "there is none.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--dir", type=Path, required=True, help="folder of the store; what is there already is served on")
    add(
        "--group-size",
        type=_count,
        required=True,
        help="members of a complete group: --n-samples-per-prompt of the run",
    )
    add("--min-group-size", type=_count, default=1, help="members that a group needs to be given when its time is out")
    add("--group-timeout-s", type=_seconds, default=600.0, help="time of a group since the last write to it")
    add("--lease-s", type=_seconds, default=600.0, help="time of a reader from a read to its acknowledgement")
    add("--capacity", type=_count, default=10_000, help="groups that wait or are leased; beyond them none is begun")
    add("--max-body-mib", type=_count, default=16, help="largest request")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=PORT, help="port to listen on; 0 takes a free one")
    return parser


def token_of(folder: Path) -> str:
    """The token of the service in ``folder``; a new one is written with mode 0600. Raises ConfigError for an empty
    one."""
    path = folder / TOKEN_FILE
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token and not path.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = folder / f".{TOKEN_FILE}.{os.getpid()}"
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(32))
        temporary.replace(path)
    token = token or path.read_text(encoding="utf-8").strip()
    if not token.isascii() or len(token) < 16:
        raise ConfigError("the token is too short or no ASCII", where=str(path), expected="16 characters or more")
    return token


def serve(service: Service, folder: Path, host: str, port: int) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError if the address cannot be listened on."""
    with raised_as(ConfigError, "it cannot be listened on", OSError, where=f"--host {host} --port {port}"):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=4096)
    url = base_url(host, listener.getsockname()[1])
    say(f"rollout service on {url}, its token is in {TOKEN_VARIABLE} or {folder / TOKEN_FILE}")
    sys.stdout.flush()
    server = http_server(service.app())
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)  # the server ends at them, and raises them once more when it has
    server.run(sockets=[listener])


def main(argv: Sequence[str] | None = None) -> int:
    """Serve; returns the exit status."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.min_group_size > args.group_size:
        parser.error(f"--min-group-size {args.min_group_size}: expected at most --group-size, {args.group_size}")
    logging.basicConfig(level="WARNING", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    rules = Rules(
        group_size=args.group_size,
        min_group_size=args.min_group_size,
        timeout_s=args.group_timeout_s,
        capacity=args.capacity,
        lease_s=args.lease_s,
    )
    try:
        token = token_of(args.dir)
        service = Service(Store(args.dir, rules), token, max_body_bytes=args.max_body_mib * MIB)
        serve(service, args.dir, args.host, args.port)
    except (BufferRLError, OSError) as error:
        say(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected seconds, more than 0, got {text!r}")
    return value


if __name__ == "__main__":
    sys.exit(main())
