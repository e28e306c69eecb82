"""A storage process: owner of payloads that others produced.

An object of Ray's store dies with the process that owns it, and the owner of a call's answer is the caller. So a
storage process calls the producer for its payload: the producer writes it into the store of its own node, once, and it
outlives the producer. The storage process keeps nothing: an object is freed when the Buffer drops its reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import ray

from buffer_rl.errors import DeadlineError

PULLS = 8
"""Producers that one storage process serves at a time; others wait for it."""


def pull_payloads(producer: Any, keys: Sequence[int], timeout_s: float) -> list[Any]:
    """References, owned by this process, to what the actor ``producer`` offers under ``keys``, once it is in the store.

    Raises DeadlineError if it is not there within ``timeout_s``."""
    refs = [producer.give_payload.remote(key) for key in keys]
    _, late = cast(Any, ray).wait(refs, num_returns=len(refs), timeout=timeout_s, fetch_local=False)
    if late:
        raise DeadlineError(
            f"a producer did not hand over {len(late)} of {len(refs)} payloads within {timeout_s:g} s",
            where="storage",
            hint="does user code keep the event loop of a rollout worker busy?",
        )
    return refs


class StorageActor:
    """A process that owns payloads. The Buffer's process answers ``pull`` too."""

    def ready(self) -> None:
        """Answers once the process runs."""

    def pull(self, producer: Any, keys: Sequence[int], timeout_s: float) -> list[Any]:
        """See ``pull_payloads``."""
        return pull_payloads(producer, keys, timeout_s)


def start_storage(num_units: int) -> list[Any]:
    """Start ``--num-data-storage-units`` processes, spread over the nodes of the cluster.

    One that dies is started again, if need be on another node. What it owned is lost: whoever reads it is told so
    (PayloadLostError), and the rollout is produced again."""
    remote = cast(Any, ray.remote)(num_cpus=0, max_restarts=-1, max_concurrency=PULLS, scheduling_strategy="SPREAD")
    return [remote(StorageActor).remote() for _ in range(num_units)]
