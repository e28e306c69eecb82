"""What the rollout functions of a worker share: tokenizer, engine, scorer, places for samples in flight."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buffer_rl.args import Args
from buffer_rl.data.eval_sets import eval_datasets
from buffer_rl.options.user_args import user_args
from buffer_rl.rollout.baseline import needs_baseline
from buffer_rl.rollout.lease import Lease, current_lease
from buffer_rl.rollout.options import generate_path
from buffer_rl.rollout.prompts import PromptEncoder, load_tokenizer
from buffer_rl.rollout.reward_model_client import RewardModelClient
from buffer_rl.rollout.scoring import Scorer
from buffer_rl.rollout.user_functions import UserFunction, resolve_function

if TYPE_CHECKING:
    from buffer_rl.engines.client import EngineClient
    from buffer_rl.kinds.rollout import RolloutBuffer
    from buffer_rl.plugin.registry import PluginRegistry


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """A start of a run's processes: the run's own, or a global restart.

    name: differs from that of every other start. version: of the weights that it begins with. origin: which weights
    these are: ``NAME:VERSION`` of the start that wrote the checkpoint; without one, a text of the run's own.
    machine, driver: where the driver is (``machine_id``), and its process (``process_note``). What its processes do
    after its death is no part of the run. Empty if unknown.
    """

    name: str
    version: int
    origin: str
    machine: str = ""
    driver: str = ""


@dataclass(slots=True, kw_only=True)
class RolloutContext:
    """Everything that rollout functions share in one worker process and event loop.

    engine is None where a run needs none (supervised fine-tuning). ``generate`` and the filters are the
    user's functions, resolved once; None stands for the built-in generate function and for no filter.
    places: one for each sample in flight; those of evaluations come first. at_end: held while a function sees a whole
    rollout: it may keep something from one rollout to the next.
    baseline: whether each group needs the reward of a greedy response (``buffer_rl.rollout.baseline``).
    renders: whether ``sample.prompt`` is the text that the chat template makes, because the user's functions were
    written for a program that has it so (``PluginRegistry.is_written_for_others``).
    run_dir: where reports go; None writes none. start: of the processes of the run; None outside of one.
    loop: the event loop that runs the rollouts. shared: what plugins keep from call to call, by a key of theirs; what
    has an ``aclose`` is closed with the context.
    worker: number of the rollout worker.
    agent, tools, environment: those of ``--agent-path``, ``--tools-path`` and ``--environment``. counts: what generate
    functions counted, by the name of the pool.
    """

    args: Args
    tokenizer: Any
    prompts: PromptEncoder
    scorer: Scorer
    engine: EngineClient | None
    places: Places
    at_end: asyncio.Lock
    seed: int
    generate: Callable[..., Any] | None = None
    dynamic_filter: UserFunction | None = None
    sample_filter: UserFunction | None = None
    all_samples_process: UserFunction | None = None
    baseline: bool = False
    renders: bool = False
    run_dir: Path | None = None
    worker: int = 0
    start: RunStart | None = None
    loop: asyncio.AbstractEventLoop | None = None
    shared: dict[object, Any] = field(default_factory=dict)
    agent: Callable[..., Any] | None = None
    tools: Sequence[Callable[..., Any]] = ()
    environment: Callable[..., Any] | None = None
    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    _closed: bool = field(default=False, init=False)

    @classmethod
    def build(
        cls,
        args: Args,
        *,
        registry: PluginRegistry,
        engine: EngineClient | None,
        tokenizer: Any = None,
        run_dir: Path | None = None,
        worker: int = 0,
        start: RunStart | None = None,
        reward_model: Sequence[Any] = (),
    ) -> RolloutContext:
        """Load the tokenizer and resolve the plugins that ``args`` names. reward_model: the actors of ``--rm-model``.

        Call it inside the event loop that will run the rollouts. Raises RolloutError or PluginError.
        """
        rollouts = {"rollout": (args.rollout_function_path, args.eval_function_path)}
        if _any_for_others(registry, rollouts):
            user_args(args).eval_datasets = eval_datasets(args)
        readers = {
            **rollouts,
            "generate": (generate_path(args),),
            "reward": (args.custom_rm_path,),
            "group_reward": (args.custom_group_rm_path,),
        }
        if tokenizer is None:
            tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=args.trust_remote_code)
        named = partial(UserFunction.named, registry)
        return cls(
            args=args,
            tokenizer=tokenizer,
            prompts=PromptEncoder.from_args(args, tokenizer),
            scorer=Scorer(args, registry, RewardModelClient(args, tokenizer, reward_model) if reward_model else None),
            engine=engine,
            places=Places(args.rollout_concurrency),
            at_end=asyncio.Lock(),
            seed=args.rollout_seed,
            generate=resolve_function(registry, "generate", generate_path(args)),
            agent=resolve_function(registry, "agent", args.agent_path),
            tools=[registry.load(path) for path in args.tools_path],
            environment=resolve_function(registry, "environment", args.environment),
            dynamic_filter=named("filter", args.dynamic_sampling_filter_path),
            sample_filter=named("sample_filter", args.rollout_sample_filter_path),
            all_samples_process=named("all_samples_process", args.rollout_all_samples_process_path),
            baseline=needs_baseline(args, registry),
            renders=args.apply_chat_template and _any_for_others(registry, readers),
            run_dir=run_dir,
            worker=worker,
            start=start,
            loop=asyncio.get_running_loop(),
        )

    @contextmanager
    def active(self, buffer: RolloutBuffer | None = None) -> Iterator[RolloutContext]:
        """Make this the context that ``current_context()`` returns, here and in tasks started from here. buffer: that
        of the rollout, for ``current_lease()``."""
        with Lease(context=self, ticket=None if buffer is None else buffer.ticket, buffer=buffer).active():
            yield self

    def take_counts(self, task: str) -> dict[str, float]:
        """The counts of a rollout, each per sample, that is divided by ``.../samples`` of its namespace. They are gone
        then."""
        counts = self.counts.pop(task, Counter())
        shares = {name: name.rpartition("/")[0] + "/samples" for name in counts}
        return {name: counts[name] / (counts[shares[name]] or 1) for name in sorted(counts) if name != shares[name]}

    async def aclose(self) -> None:
        """Stop the reward processes. The caller of ``build`` closes the engine client."""
        if not self._closed:
            self._closed = True
            for shared in self.shared.values():
                if hasattr(shared, "aclose"):
                    await shared.aclose()
            await self.scorer.aclose()


def _any_for_others(registry: PluginRegistry, references: Mapping[str, Sequence[str | None]]) -> bool:
    """Whether one of the functions, by kind, was written for another program."""
    functions = (resolve_function(registry, kind, path) for kind, paths in references.items() for path in paths)
    return any(function is not None and registry.is_written_for_others(function) for function in functions)


def current_context() -> RolloutContext:
    """The running rollout's context. Raises RolloutError outside a rollout."""
    return current_lease().context


class Places:
    """Places that requests hold while the engines work on their samples. Those of an evaluation come before those of
    training; of each kind, the request that asked first.

    A request gets all its places in one moment: no two wait for each other with a part of theirs. Until the first one
    in the queue has enough of them, those that are free stay free.

    free: places that nobody holds.
    """

    def __init__(self, total: int) -> None:
        self.free = total
        self._total = total
        self._order = itertools.count()
        self._waiting: list[tuple[bool, int, asyncio.Future[None], int]] = []  # a heap: evaluations, then by order

    async def acquire(self, count: int, *, evaluation: bool = False) -> None:
        """Wait for ``count`` places, and hold them. Raises ValueError if there are not as many in all."""
        if count > self._total:
            raise ValueError(f"{count} of {self._total} places were asked for")
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (not evaluation, next(self._order), granted, count))
        self._serve()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():  # in the moment of the cancellation
                self.release(count)
            else:
                self._serve()
            raise

    def release(self, count: int = 1) -> None:
        """Give places back."""
        self.free += count
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            *_, granted, count = self._waiting[0]
            if not granted.cancelled():
                if count > self.free:
                    return
                self.free -= count
                granted.set_result(None)
            heapq.heappop(self._waiting)
