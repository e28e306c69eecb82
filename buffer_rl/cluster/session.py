"""The Ray session of a run: joined where an address is given, else started on this machine and ended with the run."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from buffer_rl.errors import WorkerError

OBJECT_STORE_BYTES = 512 * 1024 * 1024
"""Object store of a local session. A laptop's rollout is a few megabytes; Ray's default is 30% of the memory."""

WORKING_DIRECTORY = "BUFFER_RL_WORKING_DIRECTORY"
SETUP_HOOK = "buffer_rl.cluster.session.enter_working_directory"


def enter_working_directory() -> None:
    """Executed by each worker of a cluster that was joined: go to the driver's folder, where this node has it."""
    with contextlib.suppress(OSError):
        os.chdir(os.environ[WORKING_DIRECTORY])


@contextmanager
def ray_session(address: str | None) -> Iterator[None]:
    """Connect to Ray for the length of the block, unless this process is connected already.

    Raises WorkerError where the cluster at ``address`` does not answer.
    """
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # CUDA_VISIBLE_DEVICES stays what it is
    try:
        with _own_sigterm_handler():
            _connect(address)
        yield
    finally:
        ray.shutdown()


def _connect(address: str | None) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if address is None:
            ray.init(
                address="local",
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _node_ip_address="127.0.0.1",
                **quiet,
            )
        else:
            # Its workers start where the cluster was started; relative paths of options mean the caller's folder.
            there = {"env_vars": {WORKING_DIRECTORY: os.getcwd()}, "worker_process_setup_hook": SETUP_HOOK}
            ray.init(address=address, runtime_env=there, **quiet)
    except ConnectionError as error:
        raise WorkerError(f"no Ray cluster answers: {error}", where=f"--ray-address {address}") from error


@contextmanager
def _own_sigterm_handler() -> Iterator[None]:
    """Keep the caller's handler. Ray sets one that stops the cluster before anything else is taken down: the clean-up
    that follows finds no cluster, and the process aborts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
