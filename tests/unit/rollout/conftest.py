"""Builders shared by the tests of rollouts."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.engines.protocol import RowSeeds, row_rid, row_seeds
from buffer_rl.options.section import compose
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import GroupUid, Sample, SampleGroup, Ticket, VersionSpan
from buffer_rl.rollout.context import RolloutContext
from buffer_rl.rollout.lease import Lease
from buffer_rl.rollout.production import run_all
from buffer_rl.rollout.requests import Requests
from buffer_rl.testing.fake_buffer import FakeBuffer
from buffer_rl.testing.tiny import make_char_tokenizer, make_tiny_model
from buffer_rl.trainer.reward_model import RewardModel

FOLDER = Path(__file__).parent
CALLS_GENERATE = (FOLDER / "user_generate.py").read_text(encoding="utf-8")


def user(name: str) -> str:
    """The reference of a function in ``user_code.py``, or in ``user_generate.py``: reward processes, of which there are
    hundreds, need not import what calls the built-in generate function."""
    file = "user_generate.py" if f"def {name}(" in CALLS_GENERATE else "user_code.py"
    return f"{FOLDER / file}:{name}"


def make_args(**options: Any) -> Any:
    """Options with everything at its default but ``options``."""
    return compose(CORE_SECTIONS)(**options)


def make_group(row: int, *, labels: Sequence[Any] = ("1", "1"), data_set: str = "", epoch: int = 0) -> SampleGroup:
    uid = GroupUid("source", row, epoch)
    samples = [Sample(uid=uid, sample_index=i, prompt=f"prompt {row}", label=label) for i, label in enumerate(labels)]
    return SampleGroup(uid=uid, samples=samples, incarnation="inc", data_set=data_set)


def make_ticket(num_groups: int, *, rollout_id: int = 0, evaluation: bool = False) -> Ticket:
    return Ticket(
        rollout_id=rollout_id,
        evaluation=evaluation,
        num_groups=num_groups,
        version=rollout_id,
        incarnation="inc",
        max_staleness=None,  # the engines of these tests publish nothing: their tokens are of any version
    )


def make_lease(
    context: RolloutContext,
    group: SampleGroup,
    ticket: Ticket | None = None,
    requests: Requests | None = None,
) -> Lease:
    """The lease of a group in a rollout without others."""
    return Lease.of(context, FakeBuffer([group], ticket or make_ticket(1)), group, requests or Requests())


@dataclass
class Answer:
    output_ids: list[int]
    text: str
    log_probs: list[float]
    finish_reason: str
    spans: list[VersionSpan]


def answer(tokens: Sequence[int], finish_reason: str = "stop", version: int = 3) -> Answer:
    return Answer(
        output_ids=list(tokens),
        text="".join(chr(97 + token % 26) for token in tokens),
        log_probs=[-0.5] * len(tokens),
        finish_reason=finish_reason,
        spans=[VersionSpan(version, 0, len(tokens))] if tokens else [],
    )


@dataclass
class ScriptedEngine:
    """An engine in this process: answers at once, or in an order drawn from ``order``."""

    respond: Callable[[list[int], dict[str, Any]], Answer] = field(
        default=lambda input_ids, params: answer([params["sampling_seed"] % 7 + 3] * 3)
    )
    order: random.Random | None = None
    calls: list[tuple[str, list[int], dict[str, Any]]] = field(default_factory=list)
    cancelled: int = 0
    waiting: list[asyncio.Future[None]] = field(default_factory=list)
    most_waiting: int = 0

    async def agenerate(
        self, rid: str, input_ids: Sequence[int], sampling_params: dict[str, Any], **more: Any
    ) -> Answer:
        self.calls.append((rid, list(input_ids), sampling_params))
        if self.order is not None:
            turn = asyncio.get_running_loop().create_future()
            self.waiting.append(turn)
            self.most_waiting = max(self.most_waiting, len(self.waiting))
            try:
                await turn
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        return self.respond(list(input_ids), sampling_params)

    async def agenerate_rows(
        self, rid: str, input_ids: Sequence[int], num_rows: int, sampling_params: dict[str, Any], **more: Any
    ) -> list[Answer]:
        """Each row as a request of its own, with the id and the seed that it has at an embedded engine."""
        seeds = row_seeds(sampling_params["sampling_seed"], num_rows)
        rows = [(row_rid(rid, i), {**sampling_params, "sampling_seed": seed}) for i, seed in enumerate(seeds)]
        return await run_all(self.agenerate(own, input_ids, params) for own, params in rows)

    async def row_seeds(self) -> RowSeeds:
        """As those of the embedded engine."""
        return RowSeeds.OWN

    async def let_go(self) -> None:
        """Answer waiting requests one at a time, in random order, until cancelled."""
        assert self.order is not None
        while True:
            for _ in range(5):
                await asyncio.sleep(0)
            if self.waiting:
                self.waiting.pop(self.order.randrange(len(self.waiting))).set_result(None)


@asynccontextmanager
async def opened(
    engine: Any = None, reward_model: Sequence[Any] = (), tokenizer: Any = None, **options: Any
) -> AsyncIterator[RolloutContext]:
    """An active context that is closed at the end."""
    args = make_args(**options)
    context = RolloutContext.build(
        args,
        registry=PluginRegistry.from_flags(args.plugin),
        engine=engine,
        tokenizer=tokenizer or make_char_tokenizer(),
        reward_model=reward_model,
    )
    try:
        with context.active():
            yield context
    finally:
        await context.aclose()


def pids(context: RolloutContext) -> list[int]:
    """Process ids of the live reward processes."""
    return sorted(process.pid for process in context.scorer.pool.live)


class LocalRewardModel:
    """The handle of a reward model's process, whose model is in this one. open: answers wait for it."""

    def __init__(self, folder: str) -> None:
        self.model = RewardModel(folder, torch.device("cpu"))
        self.score = SimpleNamespace(remote=self._score)
        self.open = threading.Event()
        self.open.set()
        self.thread = ThreadPoolExecutor(max_workers=1)

    def _score(self, rows: Sequence[Any]) -> Any:
        future = self.thread.submit(self._scores, rows)
        return SimpleNamespace(future=lambda: future)

    def _scores(self, rows: Sequence[Any]) -> list[float]:
        assert self.open.wait(30)
        return self.model.scores(rows, 4096)


def make_reward_model(folder: Path, **options: Any) -> str:
    """A random sequence classifier with one label, in ``folder``."""
    kind = "AutoModelForSequenceClassification"
    return make_tiny_model(folder, auto_class=kind, num_labels=1, hidden_size=32, **options)


class Kit:
    """The builders of this file."""

    user = staticmethod(user)
    make_args = staticmethod(make_args)
    make_group = staticmethod(make_group)
    make_ticket = staticmethod(make_ticket)
    make_lease = staticmethod(make_lease)
    answer = staticmethod(answer)
    opened = staticmethod(opened)
    pids = staticmethod(pids)
    ScriptedEngine = ScriptedEngine
    LocalRewardModel = LocalRewardModel
    make_reward_model = staticmethod(make_reward_model)


@pytest.fixture(scope="module")
def kit(forked_processes: None) -> Kit:
    return Kit()
