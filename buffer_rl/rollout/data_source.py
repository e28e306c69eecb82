"""The process in which a user's data source (``--data-source-path``) runs, and delivers to the Buffer.

Who waits for whom: rollout workers wait for ``deliver``, the driver for the rest, with a deadline each. The source
waits for the Buffer, which waits for no process: so no circle of waits is possible, and a source that is slow or hangs
stops those that wait for its groups, and nothing else. The process works on one call at a time, so that batches are
made one after the other, however many workers wait.

Ray starts the process again when it dies. The state that the new one needs comes with the Buffer's request (see
``buffer_rl.data.custom``). A call of ``deliver`` that a death interrupts is made again, and does nothing if the batch
arrived.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import ray

from buffer_rl.args import Args
from buffer_rl.buffer.client import BufferClient
from buffer_rl.buffer.state import BufferState
from buffer_rl.cluster.actor_group import redirect_output
from buffer_rl.cluster.calling import Answers
from buffer_rl.cluster.placement import near
from buffer_rl.data.custom import CustomSource
from buffer_rl.options.section import dump_args, load_args
from buffer_rl.plugin.calls import place
from buffer_rl.plugin.registry import PluginRegistry


class DataSourceActor:
    """Hosts one ``CustomSource``. What the user's code prints goes to the end of the file ``log_path``."""

    def __init__(self, args_text: str, log_path: str) -> None:
        redirect_output(log_path)
        self._args = load_args(args_text)
        self._buffer: BufferClient | None = None

    @cached_property
    def _source(self) -> CustomSource:
        """Constructed in a call, not with the actor, for Ray keeps a constructor's error as text alone."""
        return CustomSource(self._args, PluginRegistry.from_flags(self._args.plugin))

    def ready(self) -> int:
        """The process's id, once the user's class is constructed."""
        _ = self._source
        return os.getpid()

    def num_rows(self) -> int:
        return self._source.num_rows()

    def deliver(self, buffer: Any, num_groups: int) -> None:
        """Deliver a batch to the Buffer, whose handle is ``buffer``, unless it has ``num_groups`` groups in stock."""
        if self._buffer is None:
            self._buffer = BufferClient(buffer, timeout_s=self._args.buffer_timeout_s, caller="data source")
        request = self._buffer.call(BufferState.get_delivery_request, num_groups)
        if request is not None:
            self._buffer.call(BufferState.deliver, self._source.take(request))


def start_data_source(args: Args, log_dir: str) -> Any:
    """Start the data source's process, on this node while it is there: that has the files of a run that is started
    here. Returns its handle; the user's class is constructed once ``ready`` has answered."""
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


def delivery_answers(args: Args) -> Answers:
    """As ``source_answers``, for ``deliver``."""
    # It calls the Buffer twice, with a deadline each: a slow Buffer is no slow source.
    return replace(source_answers(args), timeout_s=args.data_source_timeout_s + 2 * args.buffer_timeout_s)
