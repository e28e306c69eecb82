"""The process in which rollout functions, generate functions and filters run.

Who waits for whom: user code waits for the engines and for the Buffer, with a deadline for each request and each
call; the driver waits for ``run``, with a deadline for the whole rollout.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from buffer_rl.args import Args
from buffer_rl.buffer.client import BufferClient
from buffer_rl.buffer.rollout_client import RolloutClient
from buffer_rl.cluster.actor_group import ActorGroup, redirect_output
from buffer_rl.cluster.dispatch import To, dispatch
from buffer_rl.cluster.environment import direct_variables, set_variables
from buffer_rl.cluster.member import Member
from buffer_rl.cluster.placement import Placement
from buffer_rl.cluster.process import settle_garbage_collector
from buffer_rl.engines.client import EngineClient
from buffer_rl.engines.protocol import Adapter
from buffer_rl.errors import WorkerError
from buffer_rl.observe.memory import peak_metrics, take_peaks
from buffer_rl.observe.pulse import Waits, waiting
from buffer_rl.observe.run_folder import sample_record
from buffer_rl.options.section import load_args
from buffer_rl.options.user_args import user_args
from buffer_rl.plugin.calls import call, contained_task, error_text, place
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import Ticket
from buffer_rl.rollout.context import RolloutContext, RunStart
from buffer_rl.rollout.conversion import GroupConverter
from buffer_rl.rollout.data_source import DataSourceActor, delivery_answers
from buffer_rl.rollout.stats import known_reward
from buffer_rl.rollout.user_functions import LogFunctions, UserFunction, choose_queued
from buffer_rl.rollout.user_rollout import render, run_user_rollout

COLLECT_AFTER_S = 0.01
NAMESPACES = ("rollout", "eval", "perf")
T = TypeVar("T")


class LoopGuard:
    """Guards the running event loop from code that would end it, for example with ``sys.exit``; everything that
    waits for the loop would wait for ever.

    What a task raises reaches the task that awaits it, as an ordinary exception (``contained_task``). After what
    something else raised, such as a callback of ``call_soon``, the loop runs again, and the work ``guarded`` fails.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.current_thread()
        self._waiting: set[asyncio.Future[None]] = set()
        self._failure: BaseException | None = None
        self._loop.set_task_factory(
            lambda loop, work, **options: asyncio.Task(contained_task(work), loop=loop, **options)
        )
        self._next_hook, threading.excepthook = threading.excepthook, self._thread_ended

    async def guarded(self, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work`` as a task. Raises WorkerError, without waiting for it, if code ends the loop meanwhile."""
        task, ended = self._loop.create_task(work), self._loop.create_future()
        self._waiting.add(ended)
        try:
            self._check()
            await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
            self._check()
            return task.result()
        finally:
            self._waiting.discard(ended)
            task.cancel()

    def close(self) -> None:
        """Leave the loop as it was."""
        self._loop.set_task_factory(None)
        threading.excepthook = self._next_hook

    def _check(self) -> None:
        if self._failure is not None:
            text = f"code ended the event loop of the process: {error_text(self._failure)}"
            raise WorkerError(text, hint="no callback of an event loop may raise it") from self._failure

    def _thread_ended(self, ended: threading.ExceptHookArgs) -> None:
        """For ``threading.excepthook``, which is called in the thread that ends."""
        if ended.thread is not self._thread:
            self._next_hook(ended)
            return
        self._failure = ended.exc_value
        while True:
            for ended_now in [each for each in self._waiting if not each.done()]:
                ended_now.set_result(None)
            try:
                self._loop.run_forever()
                return
            except BaseException as error:  # fault boundary: another callback
                self._failure = error


class RolloutWorker(Member):
    """Runs rollouts and evaluations: several at a time, but of a rollout function without ``concurrent = True`` one
    rollout. ``source``: the actor of the user's data source, where there is one.

    storage: the processes that own large payloads, by name; without them the Buffer does. reward_model: those of
    ``--rm-model``. number: of this worker, from 0.
    start: that of the run's processes.
    """

    def __init__(
        self,
        args_text: str,
        buffer: Any,
        log_path: str,
        storage: Mapping[str, Any],
        source: Any = None,
        reward_model: Sequence[Any] = (),
        number: int = 0,
        start: RunStart | None = None,
    ) -> None:
        settle_garbage_collector()
        redirect_output(log_path)
        self._run_dir = Path(log_path).parent.parent  # absolute, unlike --run-dir
        self._args = load_args(args_text)
        set_variables(direct_variables(self._args))
        self._client = BufferClient(
            buffer,
            timeout_s=self._args.buffer_timeout_s,
            caller="rollout",
            storage=storage,
            min_bytes=self._args.data_storage_min_bytes,
        )
        self._deliver = None
        if source is not None:
            answers = delivery_answers(self._args)
            self._deliver = lambda number: answers.acall(source, DataSourceActor.deliver, buffer, number)
        self._reward_model = reward_model
        self._number = number
        self._start = start
        self._registry = PluginRegistry.from_flags(self._args.plugin)
        self._converter = GroupConverter.from_args(self._args, self._registry)
        train = _construct(self._registry, self._args.rollout_function_path, self._args)
        path = self._args.eval_function_path
        evaluate = _construct(self._registry, path, self._args) if path else train
        self._functions = {False: train, True: evaluate}
        self._buffer_filter = UserFunction.named(self._registry, "buffer_filter", self._args.buffer_filter_path)
        self._log_functions = LogFunctions(self._args, self._registry)
        self._opened: RolloutContext | None = None
        self._guard: LoopGuard | None = None
        self._one_rollout = asyncio.Lock()
        self._logging = asyncio.Lock()

    async def ready(self) -> None:
        """Answers once the worker's plugins are loaded."""
        self._context()
        settle_garbage_collector()

    async def close(self) -> None:
        """Stop the reward processes and close the connections to the engines."""
        if self._opened is not None and self._guard is not None:
            self._guard.close()
            await self._opened.aclose()
            if isinstance(self._opened.engine, EngineClient):
                await self._opened.engine.aclose()

    async def hold(self, timeout_s: float) -> None:
        """Send the engines no request from now on, of evaluations neither, until ``unhold``; returns when none runs.
        Raises DeadlineError after ``timeout_s``, and sends again."""
        if (engine := self._context().engine) is not None:
            with waiting(Waits.DEADLINE):
                await engine.gate.close(timeout_s)

    async def unhold(self) -> None:
        """Send what ``hold`` held back; nothing without one."""
        if (engine := self._context().engine) is not None:
            engine.gate.open()

    async def use_adapter(self, adapter: Adapter) -> None:
        """Requests name the adapter from now on; those that run go on with the one that they named."""
        if (engine := self._context().engine) is not None:
            engine.adapter = adapter

    @dispatch(To.ONE)
    async def run(self, ticket: Ticket) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Produce the ticket's groups. Returns flat metrics and some samples to show."""
        if ticket.num_groups == 0:  # the worker before this one died when all were finished
            return {}, []
        function = self._functions[ticket.evaluation]
        several = ticket.evaluation or getattr(function, "concurrent", False)
        with waiting(Waits.DEADLINE):  # requests, rewards, calls of user code and the rollout have their own
            async with contextlib.nullcontext() if several else self._one_rollout:
                return await self._produced(ticket, function)

    async def _produced(
        self, ticket: Ticket, function: Callable[..., Any]
    ) -> tuple[dict[str, float], list[dict[str, Any]]]:
        choose = None
        if self._buffer_filter is not None:
            choose = partial(choose_queued, self._buffer_filter, self._args, ticket.rollout_id)
        context, where = self._context(), place("rollout", self._reference(ticket), ticket.task)
        on_lease = partial(render, context.prompts) if context.renders else None
        buffer = RolloutClient(
            self._client,
            ticket,
            self._converter,
            choose,
            self._deliver,
            where=where,
            on_lease=on_lease,
            reward_of=partial(known_reward, self._args),
        )
        started = time.perf_counter()
        assert self._guard is not None
        with context.active(buffer):
            output = await self._guard.guarded(run_user_rollout(function, self._args, buffer, where=where))
        for group in output.groups:
            if group.uid not in buffer.finished:
                await buffer.afinish(group)
        seconds = time.perf_counter() - started
        async with self._logging:
            logged = self._log_functions.metrics(ticket, buffer.finished.values(), _named(output.metrics), seconds)
            metrics = await self._guard.guarded(logged)
        shown = self._shown(ticket, buffer)
        peak = {} if ticket.evaluation else peak_metrics("rollout", [take_peaks()])
        # Not before the answer, which others wait for.
        asyncio.get_running_loop().call_later(COLLECT_AFTER_S, gc.collect)
        return _named(metrics) | peak, shown

    def _context(self) -> RolloutContext:
        """The context, made on first use because it belongs to the event loop that runs the rollouts."""
        if self._opened is None:
            args = self._args
            self._guard = LoopGuard()
            engine = EngineClient.from_args(args) if args.router_url else None
            self._opened = RolloutContext.build(
                args,
                registry=self._registry,
                engine=engine,
                run_dir=self._run_dir,
                worker=self._number,
                start=self._start,
                reward_model=self._reward_model,
            )
        return self._opened

    def _reference(self, ticket: Ticket) -> str:
        path = self._args.eval_function_path if ticket.evaluation else None
        return str(path or self._args.rollout_function_path)

    def _shown(self, ticket: Ticket, buffer: RolloutClient) -> list[dict[str, Any]]:
        chosen = sorted(buffer.finished)[: -(-self._args.dump_samples // ticket.num_parts)]
        return [
            {"data_set": buffer.finished[uid].data_set, **sample_record(sample)}
            for uid in chosen
            for sample in buffer.finished[uid]
        ]


def start_rollout_workers(
    args: Args,
    args_text: str,
    buffer: Any,
    log_dir: str,
    placement: Placement,
    storage: Mapping[str, Any] = {},
    source: Any = None,
    reward_model: Sequence[Any] = (),
    start: RunStart | None = None,
) -> ActorGroup:
    """Start ``--num-rollout-workers`` processes.

    storage: the storage processes, by name; without them the Buffer owns large payloads.
    source: the actor of the user's data source, where there is one. reward_model: the actors of ``--rm-model``.
    start: that of the run's processes."""
    return ActorGroup.of(
        "rollout",
        RolloutWorker,
        lambda index: (
            *(args_text, buffer, f"{log_dir}/rollout_{index}.log", storage, source, reward_model, index, start),
        ),
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
