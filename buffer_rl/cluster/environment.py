"""What reaches a process from outside: variables of the environment, those that name proxies, and signals that end it.

A run reaches its own servers directly. Its HTTP clients read no proxies, its router drops them. Code of the user, and
what an engine downloads, keep the user's proxies for every other address: ``no_proxy`` names the run's own.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from types import FrameType
from urllib.parse import urlsplit

from buffer_rl.args import Args
from buffer_rl.errors import EndedBySignal

NO_PROXY = ("no_proxy", "NO_PROXY")
NO_GRPC_PROXY = "no_grpc_proxy"
"""Where set, gRPC reads it in place of ``no_proxy``."""
LOOPBACK = ("localhost", "127.0.0.1")


@contextmanager
def variables(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Variables of this process's environment for the length of the block; None removes one."""
    before = {name: os.environ.get(name) for name in changes}
    _set(changes)
    try:
        yield
    finally:
        _set(before)


def _set(changes: Mapping[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def set_variables(values: Mapping[str, str]) -> None:
    """Set variables of this process while threads of Ray may read them.

    For a new name, ``setenv`` of glibc before 2.41 frees the table that ``getenv`` walks in another thread. Here new
    names enter with a table of their own, which takes the old one's place in one store; neither is freed.
    """
    new = [os.fsencode(f"{name}=") for name in values if name not in os.environ]
    if new and sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.strdup.restype = ctypes.c_void_p
        place = ctypes.POINTER(ctypes.c_void_p).in_dll(libc, "environ")
        count = next(index for index in range(sys.maxsize) if not place[index])
        entries = [*place[:count], *map(libc.strdup, new), None]
        table = (ctypes.c_void_p * len(entries))(*entries)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(table))
        ctypes.c_void_p.in_dll(libc, "environ").value = ctypes.addressof(table)
    os.environ.update(values)


def direct_variables(args: Args, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables with which a process and its children reach this machine, and the engines and the router that
    ``args`` name, without a proxy. The user's own exceptions stay: the union of both spellings of ``no_proxy``."""
    urls = [url for url in (args.router_url, *args.engine_urls, *args.rollout_external_engine_addrs) if url]
    named = [urlsplit(url if "://" in url else f"//{url}").hostname for url in urls]
    hosts = list(dict.fromkeys([*LOOPBACK, args.engine_host, *filter(None, named)]))
    of_both = _joined(hosts, *(environ.get(name, "") for name in NO_PROXY))
    found = dict.fromkeys(NO_PROXY, of_both)
    if own := environ.get(NO_GRPC_PROXY):
        found[NO_GRPC_PROXY] = _joined(hosts, own)
    return found


def _joined(hosts: list[str], *lists: str) -> str:
    own = [entry.strip() for text in lists for entry in text.split(",")]
    if "*" in own:  # all addresses; clients know it only if it is alone
        return "*"
    return ",".join(dict.fromkeys(entry for entry in [*own, *hosts] if entry))


def drop_proxies(environ: MutableMapping[str, str] = os.environ) -> None:
    """Remove every variable that names a proxy, in either case, for a process that calls only servers of the run."""
    for name in [name for name in environ if name.lower().endswith("_proxy")]:
        del environ[name]


ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Ctrl-C, kill and schedulers, a closed terminal
ENDING_BY_DEFAULT = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)  # of schedulers; others may handle them


class StopRequest:
    """A signal that asks a run to end well. The first one is noted while ``can_wait``; another one, and any while not,
    raises EndedBySignal. number: of the signal; None before. at: when it came, by ``time.monotonic``. notify: called
    with the first one, in the handler of the signal."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.at = 0.0
        self.can_wait = False
        self.notify: Callable[[], object] = lambda: None

    @property
    def after_step(self) -> bool:
        """Whether the step under way is to be finished first: Ctrl-C. Other signals come with a deadline."""
        return self.number in (None, signal.SIGINT)

    def take(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal."""
        if self.number is not None or not self.can_wait:
            raise EndedBySignal(number)
        self.number, self.at = number, time.monotonic()
        self.notify()


@contextmanager
def signals_as_exceptions(handle: Callable[[int, FrameType | None], None] | None = None) -> Iterator[None]:
    """Raise EndedBySignal in the main thread for a signal that ends the process, or call ``handle``, for the length of
    the block.

    A signal that the caller ignores stays ignored, as SIGHUP under ``nohup`` and SIGINT in a script's background jobs.
    Outside the main thread, where Python allows no handlers, all signals keep their meaning.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (*ENDING, *ENDING_BY_DEFAULT)}
    ours = {
        number: handler
        for number, handler in before.items()
        if handler is not signal.SIG_IGN and (number in ENDING or handler is signal.SIG_DFL)
    }
    for number in ours:
        signal.signal(number, handle or StopRequest().take)
    try:
        yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)
