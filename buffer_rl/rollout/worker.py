"""The process in which rollout functions, generate functions and filters run.

Who waits for whom: user code waits for the engines and for the Buffer, with a deadline for each request and each
call; the driver waits for ``run``, with a deadline for the whole rollout.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from buffer_rl.buffer.client import BufferClient
from buffer_rl.buffer.rollout_client import RolloutClient
from buffer_rl.buffer.storage import StorageUnit
from buffer_rl.cluster.actor_group import ActorGroup, redirect_output
from buffer_rl.cluster.dispatch import To, dispatch
from buffer_rl.cluster.placement import Placement
from buffer_rl.config import load_args
from buffer_rl.engine.client import EngineClient
from buffer_rl.engine.process import settle_garbage_collector
from buffer_rl.environment import direct_variables
from buffer_rl.observe.run_folder import sample_record
from buffer_rl.plugins import PluginRegistry
from buffer_rl.resolution.calls import call, place
from buffer_rl.rollout.context import RolloutContext
from buffer_rl.rollout.conversion import GroupConverter
from buffer_rl.rollout.data_source import SourceClient
from buffer_rl.rollout.user_functions import LogFunctions, choose_queued, resolve_function
from buffer_rl.rollout.user_rollout import run_user_rollout
from buffer_rl.types import Ticket
from buffer_rl.user_args import user_args

if TYPE_CHECKING:
    from buffer_rl.options import Args

NAMESPACES = ("rollout", "eval", "perf")


class RolloutWorker:
    """Runs one rollout at a time. ``source``: the actor of the user's data source, where there is one.

    storage: the processes that own large payloads; without them the Buffer does. reward_model: those of ``--rm-model``.
    """

    def __init__(
        self,
        args_text: str,
        buffer: Any,
        log_path: str,
        storage: Sequence[StorageUnit],
        source: Any = None,
        reward_model: Sequence[Any] = (),
    ) -> None:
        settle_garbage_collector()
        redirect_output(log_path)
        self._run_dir = Path(log_path).parent.parent  # absolute, unlike --run-dir
        self._args = cast("Args", load_args(args_text))
        os.environ.update(direct_variables(self._args))
        self._client = BufferClient(
            buffer,
            timeout_s=self._args.buffer_timeout_s,
            caller="rollout",
            storage=storage,
            min_bytes=self._args.data_storage_min_bytes,
        )
        self._source = None if source is None else SourceClient(source, self._args, self._client)
        self._reward_model = reward_model
        self._registry = PluginRegistry.from_flags(self._args.plugin)
        self._converter = GroupConverter.from_args(self._args, self._registry)
        train = _construct(self._registry, self._args.rollout_function_path, self._args)
        path = self._args.eval_function_path
        evaluate = _construct(self._registry, path, self._args) if path else train
        self._functions = {False: train, True: evaluate}
        self._buffer_filter = resolve_function(self._registry, "buffer_filter", self._args.buffer_filter_path)
        self._log_functions = LogFunctions(self._args, self._registry)
        self._opened: RolloutContext | None = None

    async def ready(self) -> None:
        """Answers once the worker's plugins are loaded."""
        self._context()
        settle_garbage_collector()

    async def close(self) -> None:
        """Stop the reward processes and close the connections to the engines."""
        if self._opened is not None:
            await self._opened.aclose()
            if isinstance(self._opened.engine, EngineClient):
                await self._opened.engine.aclose()

    @dispatch(To.ONE)
    async def run(self, ticket: Ticket) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Produce the ticket's groups. Returns flat metrics and some samples to show."""
        if ticket.num_groups == 0:  # the worker before this one died when all were finished
            return {}, []
        choose = None
        if self._buffer_filter is not None:
            path = self._args.buffer_filter_path
            choose = partial(choose_queued, self._buffer_filter, path, self._args, ticket.rollout_id)
        buffer = RolloutClient(self._client, ticket, self._converter, choose, self._source)
        where = place("rollout", self._reference(ticket), ticket.task)
        function = self._functions[ticket.evaluation]
        started = time.perf_counter()
        with self._context().active():
            output = await run_user_rollout(function, self._args, buffer, where=where)
        for group in output.groups:
            if group.uid not in buffer.finished:
                await buffer.afinish(group)
        seconds = time.perf_counter() - started
        metrics = await self._log_functions.metrics(ticket, buffer.finished.values(), _named(output.metrics), seconds)
        shown = self._shown(ticket, buffer)
        gc.collect()
        return _named(metrics), shown

    def _context(self) -> RolloutContext:
        """The context, made on first use because it belongs to the event loop that runs the rollouts."""
        if self._opened is None:
            args = self._args
            engine = EngineClient.from_args(args) if args.router_url else None
            self._opened = RolloutContext.build(
                args,
                registry=self._registry,
                engine=engine,
                run_dir=self._run_dir,
                reward_model=self._reward_model,
            )
        return self._opened

    def _reference(self, ticket: Ticket) -> str:
        path = self._args.eval_function_path if ticket.evaluation else None
        return str(path or self._args.rollout_function_path)

    def _shown(self, ticket: Ticket, buffer: RolloutClient) -> list[dict[str, Any]]:
        chosen = sorted(buffer.finished)[: self._args.dump_samples]
        return [
            {"data_set": buffer.finished[uid].data_set, **sample_record(sample)}
            for uid in chosen
            for sample in buffer.finished[uid]
        ]


def start_rollout_workers(
    args: Any,
    args_text: str,
    buffer: Any,
    log_dir: str,
    placement: Placement,
    storage: Sequence[StorageUnit] = (),
    source: Any = None,
    reward_model: Sequence[Any] = (),
) -> ActorGroup:
    """Start ``--num-rollout-workers`` processes.

    storage: the storage processes; without them the Buffer owns large payloads.
    source: the actor of the user's data source, where there is one. reward_model: the actors of ``--rm-model``."""
    return ActorGroup.of(
        "rollout",
        RolloutWorker,
        lambda index: (args_text, buffer, f"{log_dir}/rollout_{index}.log", storage, source, reward_model),
        args.num_rollout_workers,
        options=partial(placement.options, "rollout"),
        independent=True,
    )


def _construct(registry: PluginRegistry, reference: str, args: Args) -> Any:
    resolved = registry.resolve("rollout", reference)
    if not isinstance(resolved, type):
        return resolved
    return call("rollout", reference, resolved, user_args(args), at="while it was constructed")


def _named(metrics: Mapping[str, float]) -> dict[str, float]:
    return {
        name if name.partition("/")[0] in NAMESPACES else f"rollout/{name}": float(value)
        for name, value in metrics.items()
    }
