"""The Ray session of a run: joined where an address is given, else started on this machine and ended with the run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from buffer_rl.errors import WorkerError

OBJECT_STORE_BYTES = 512 * 1024 * 1024
"""Object store of a local session. A laptop's rollout is a few megabytes; Ray's default is 30% of the memory."""


@contextmanager
def ray_session(address: str | None) -> Iterator[None]:
    """Connect to Ray for the length of the block, unless this process is connected already.

    Raises WorkerError where the cluster at ``address`` does not answer.
    """
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # CUDA_VISIBLE_DEVICES stays what it is
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
            ray.init(address=address, **quiet)
    except ConnectionError as error:
        raise WorkerError(f"no Ray cluster answers: {error}", where=f"--ray-address {address}") from error
    try:
        yield
    finally:
        ray.shutdown()
