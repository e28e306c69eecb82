"""The Ray session of a run, joined where an address is given, else started on this machine and ended with the run."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from buffer_rl.cluster.isolation import ON_LOOPBACK, isolated_ray
from buffer_rl.errors import ConfigError, WorkerError
from buffer_rl.resolution.shipping import CodeBundle, use_shipped_code

WORKING_DIRECTORY = "BUFFER_RL_WORKING_DIRECTORY"
SETUP_HOOK = "buffer_rl.cluster.session.enter_working_directory"


def enter_working_directory() -> None:
    """Executed by each worker of a cluster that was joined: go to the driver's folder, where this node has it, and find
    the user's code that came with the run."""
    came = os.getcwd()  # Ray starts a worker in the folder that was sent to its node
    with contextlib.suppress(OSError):
        os.chdir(os.environ[WORKING_DIRECTORY])
    use_shipped_code(came)


@contextmanager
def ray_session(
    address: str | None, code: CodeBundle | None = None, object_store_bytes: int = 500_000_000
) -> Iterator[None]:
    """Connect to Ray for the length of the block, unless this process is connected already.

    What is started here listens on the loopback interface alone and asks for a token (see ``isolated_ray``); a cluster
    that is joined has its own rules.

    code: the user's files to send to the nodes of a cluster that is joined.
    object_store_bytes: of the object store that is started. A laptop's rollout is a few megabytes; Ray's default is
    30% of the memory. What does not fit is spilled to disk.
    Raises ConfigError where the machine has less memory, and WorkerError where the cluster at ``address`` does not
    answer.
    """
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # CUDA_VISIBLE_DEVICES stays what it is
    with isolated_ray() if address is None else contextlib.nullcontext():
        try:
            with _own_sigterm_handler(), tempfile.TemporaryDirectory(prefix="buffer_rl_code_") as folder:
                if code is not None and code.files:
                    code.write(Path(folder))
                _connect(address, folder if code is not None and code.files else None, object_store_bytes)
            yield
        finally:
            ray.shutdown()


def _connect(address: str | None, code_folder: str | None, object_store_bytes: int) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if address is None:
            ray.init(
                address="local",
                include_dashboard=False,
                object_store_memory=object_store_bytes,
                **ON_LOOPBACK,
                **quiet,
            )
        else:
            # Its workers start where the cluster was started; relative paths of options mean the caller's folder.
            there: dict[str, Any] = {
                "env_vars": {WORKING_DIRECTORY: os.getcwd()},
                "worker_process_setup_hook": SETUP_HOOK,
            }
            if code_folder is not None:
                there["working_dir"] = code_folder
            ray.init(address=address, runtime_env=there, **quiet)
    except ValueError as error:
        if "object_store_memory" not in str(error):
            raise
        raise ConfigError(
            f"Ray does not start with an object store of {object_store_bytes / 1e9:g} GB: {error}",
            where="--object-store-gb",
            expected="a part of this machine's memory",
        ) from error
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
