"""The process in which a user's data source (``--data-source-path``) runs, and how rollout workers call it.

Who waits for whom: rollout workers wait for ``take`` and ``restore``, the driver for the rest, with a deadline each.
The source waits for no process of the run.

Ray starts the process again when it dies. The state that the new one needs is in the Buffer: the rollout worker whose
request meets StateNeeded restores it (see ``buffer_rl.data.custom``).
"""

from __future__ import annotations

import os
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import ray

from buffer_rl.buffer.client import BufferClient
from buffer_rl.buffer.state import BufferState
from buffer_rl.cluster.actor_group import redirect_output
from buffer_rl.cluster.calling import Answers
from buffer_rl.cluster.placement import near
from buffer_rl.data.custom import CustomSource, Delivery, DeliveryRequest, StateNeeded
from buffer_rl.options.section import dump_args, load_args
from buffer_rl.plugin.calls import place
from buffer_rl.plugin.registry import PluginRegistry

if TYPE_CHECKING:
    from buffer_rl.args import Args


class DataSourceActor:
    """Hosts one ``CustomSource``. What the user's code prints goes to the end of the file ``log_path``."""

    def __init__(self, args_text: str, log_path: str) -> None:
        redirect_output(log_path)
        self._args = load_args(args_text)

    @cached_property
    def _source(self) -> CustomSource:
        """Constructed in a call, not with the actor, for Ray keeps a constructor's error as text alone."""
        return CustomSource(self._args, PluginRegistry.from_flags(self._args.plugin))

    def setup(self) -> None:
        """Construct the user's class. A process that replaces one that died does so in its first call."""
        _ = self._source

    def num_rows(self) -> int:
        return self._source.num_rows()

    def take(self, request: DeliveryRequest) -> Delivery | None:
        return self._source.take(request)

    def restore(self, number: int, state: bytes) -> None:
        self._source.restore(number, state)

    def pid(self) -> int:
        return os.getpid()


def start_data_source(args: Args, log_dir: str) -> Any:
    """Start the data source's process, on this node while it is there: that has the files of a run that is started
    here. Returns its handle; the user's class is constructed once ``setup`` has answered."""
    here = near(ray.get_runtime_context().get_node_id())
    remote = cast("Any", ray.remote)(num_cpus=0, max_restarts=args.role_max_restarts, **here)
    return remote(DataSourceActor).remote(dump_args(args), f"{log_dir}/data_source.log")


def source_answers(args: Args) -> Answers:
    """Answers of the data source's process; errors name the user's class."""
    return Answers(
        who="the data source",
        role=place("data_source", args.data_source_path),
        timeout_s=args.data_source_timeout_s,
        flag="--data-source-timeout-s",
        death_hint="logs/data_source.log has what it printed; --role-max-restarts says how often it is replaced",
    )


class SourceClient:
    """Asks the actor of a user's data source for batches; a ``BatchSource`` of ``buffer_rl.buffer.rollout_client``.

    Raises DeadlineError after ``--data-source-timeout-s``, WorkerError if its process died for good, and what the
    source raised.
    """

    def __init__(self, actor: Any, args: Args, buffer: BufferClient) -> None:
        self._actor = actor
        self._answers = source_answers(args)
        self._buffer = buffer

    async def atake(self, request: DeliveryRequest) -> Delivery | None:
        """The batch that ``request`` names. None if the caller must ask the Buffer again: because it has the batch
        already, or because the source was restored to the Buffer's state first."""
        try:
            return await self._answers.acall(self._actor, DataSourceActor.take, request)
        except StateNeeded:
            saved = await self._buffer.acall(BufferState.get_source_state)
            await self._answers.acall(self._actor, DataSourceActor.restore, *saved)
            return None
