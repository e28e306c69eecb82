"""The process in which a user's data source (``--data-source-path``) runs, and how rollout workers call it.

Who waits for whom: rollout workers wait for ``take``, the driver for the rest, with a deadline each; the source waits
for no process of the run.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import ray

from buffer_rl.buffer.calling import Answers
from buffer_rl.cluster.worker_group import WorkerGroup, redirect_output
from buffer_rl.config import load_args
from buffer_rl.data.custom import CustomSource, Delivery, DeliveryRequest
from buffer_rl.errors import WorkerError
from buffer_rl.plugins import PluginRegistry


class DataSourceActor:
    """Hosts one ``CustomSource``. What the user's code prints goes to the file ``log_path``."""

    def __init__(self, args_text: str, log_path: str) -> None:
        redirect_output(log_path)
        self._args: Any = load_args(args_text)
        self._hosted: CustomSource | None = None

    def setup(self) -> None:
        """Construct the user's class. A method of its own, for Ray keeps a constructor's error as text alone."""
        self._hosted = CustomSource(self._args, PluginRegistry.from_flags(self._args.plugin))

    def num_rows(self) -> int:
        return self._source.num_rows()

    def take(self, request: DeliveryRequest) -> Delivery | None:
        return self._source.take(request)

    def restore(self, number: int, state: bytes) -> None:
        self._source.restore(number, state)

    @property
    def _source(self) -> CustomSource:
        if self._hosted is None:
            raise WorkerError("the data source is not set up", where="data_source", hint="call setup() first")
        return self._hosted


def start_data_source(args_text: str, log_dir: str) -> WorkerGroup:
    """Start the data source's process; the user's class is constructed once ``setup`` has answered."""
    remote = cast(Any, ray.remote)(num_cpus=0, max_restarts=0)(DataSourceActor)
    return WorkerGroup("data_source", [remote.remote(args_text, f"{log_dir}/data_source.log")])


class SourceClient:
    """Asks the actor of a user's data source for batches; a ``BatchSource`` of ``buffer_rl.buffer.rollout_client``.

    Raises DeadlineError after ``timeout_s``, WorkerError if its process died, and what the source raised.
    """

    def __init__(self, actor: Any, *, timeout_s: float) -> None:
        self._actor = actor
        self._answers = Answers(
            who="the data source", role="data_source", timeout_s=timeout_s, flag="--data-source-timeout-s"
        )

    async def atake(self, request: DeliveryRequest) -> Delivery | None:
        """The batch that ``request`` names; None if the Buffer has it already."""
        delivery: Delivery | None = await self._answers.until("take", partial(self._actor.take.remote, request))
        return delivery
