"""What an engine may do to a run, at every point of it: the same groups and tokens are trained on as without it.

The rollout function, the Buffer's state with its durable ledger, the publisher and the client are the real ones; the
engine is a server that fails as told, and is replaced after a moment where it is gone. The client does not retry by
itself here, so every fault reaches the rollout.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.data.source import PromptDataSource
from buffer_rl.engines.client import EngineClient
from buffer_rl.engines.control import EngineControlClient
from buffer_rl.errors import RolloutError
from buffer_rl.records.groups import GroupUid
from buffer_rl.rollout.conversion import GroupConverter
from buffer_rl.rollout.default import DefaultRollout
from buffer_rl.testing.fake_engine import FakeEngine, Fault
from buffer_rl.testing.faulty_server import FaultPoint
from buffer_rl.weights.disk import DiskTransport
from buffer_rl.weights.publish import Publisher
from harness.fake_roles import local_senders
from harness.ledger_contents import count_states
from harness.local_buffer import local_client, local_state
from harness.tickets import close_rollout

ROWS, STEPS, GROUPS = 9, 3, 2


def seeded(input_ids: list[int], seed: int) -> list[int]:
    return [3 + seed % 50, 3 + seed // 50 % 50, 1]


def row_of(body: dict[str, Any]) -> int:
    return int(body["rid"].split("/")[0].split(":")[2])


class Run:
    """A lockstep run of ``STEPS`` steps of ``GROUPS`` groups, of which row, sample and tokens are kept. fault: what its
    engine does; where it hangs, deadlines pass, and else none does."""

    def __init__(self, kit: Any, folder: Path, fault: Fault | None = None, **options: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.timeout_s = 1.0 if fault is Fault.HANG else 60.0
        data = folder / "rows.jsonl"
        data.write_text("".join(json.dumps({"prompt": f"p{i}", "label": "1"}) + "\n" for i in range(ROWS)))
        self.kit = kit
        self.options = {
            "rollout_batch_size": GROUPS,
            "n_samples_per_prompt": 2,
            "rollout_shuffle": False,
            "prompt_data": str(data),
            "custom_rm_path": kit.user("slow_async"),
            "run_dir": str(folder),
            **options,
        }
        self.args = kit.make_args(**self.options)
        source = PromptDataSource(self.args)
        self.source = source.get_samples(1)[0].uid.source
        self.ledger = Ledger(folder / "ledger.sqlite", run="test")
        self.state = local_state(self.args, self.ledger)
        self.trained: list[dict[str, list[int]]] = []
        self.metrics: Counter[str] = Counter()

    async def go(self, engine: FakeEngine) -> None:
        with EngineControlClient([engine.url], timeout_s=self.timeout_s) as control:
            place = SimpleNamespace(hf_checkpoint=self.args.run_dir)
            trainer = local_senders(DiskTransport, place, lambda: iter(()))
            publisher = Publisher(DiskTransport(self.args), trainer, control)
            for rollout_id in range(STEPS):
                await self.step(rollout_id, engine)
                self.state.commit(rollout_id, rollout_id + 1)
                publisher.publish(rollout_id + 1)
                self.state.release(rollout_id + 1)

    async def step(self, rollout_id: int, engine: FakeEngine) -> None:
        ticket = self.state.generate(rollout_id)
        buffer = local_client(self.state, ticket, GroupConverter(self.args))
        deadlines = {"timeout_s": self.timeout_s, "control_timeout_s": self.timeout_s}
        client = EngineClient(engine.url, [engine.url], max_retries=0, **deadlines)
        try:
            options = {**self.options, "router_url": engine.url}
            async with self.kit.opened(client, **options) as context:
                output = await DefaultRollout(context.args)(context.args, rollout_id, buffer)
        finally:
            await client.aclose()
        self.metrics.update(output.metrics)
        assert close_rollout(self.state, ticket).num_groups == GROUPS
        batch = self.state.get_data(rollout_id)
        assert {version for rows in batch.columns["weight_version"] for version in [int(rows)]} == {rollout_id}
        tokens = zip(batch.row_ids, batch.columns["tokens"], strict=True)
        self.trained.append({str(row): row_tokens.tolist() for row, row_tokens in tokens})

    def check_accounts(self) -> None:
        counts = count_states(self.state.ledger, self.source, 0, ROWS)
        assert sum(counts.values()) == ROWS
        expected = {GroupState.TRAINED: STEPS * GROUPS, GroupState.PENDING: ROWS - STEPS * GROUPS}
        assert {state: count for state, count in counts.items() if count} == expected
        entries = [self.ledger.entry(GroupUid(self.source, row, 0)) for row in range(STEPS * GROUPS)]
        assert [entry.step for entry in entries] == [1 + row // GROUPS for row in range(STEPS * GROUPS)]


@pytest.fixture(scope="module")
def undisturbed(kit: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[int]]]:
    import asyncio

    run = Run(kit, tmp_path_factory.mktemp("undisturbed"))
    with FakeEngine(seeded) as engine:
        asyncio.run(run.go(engine))
    run.check_accounts()
    assert len(run.trained) == STEPS
    return run.trained


FAULTS = [Fault.KILL, Fault.HANG, Fault.RESET, Fault.SERVER_ERROR, Fault.GARBAGE]
FEW_OR_SLOW = [*FAULTS[:2], *(pytest.param(fault, marks=pytest.mark.slow) for fault in FAULTS[2:])]


@pytest.mark.parametrize("point", FaultPoint)
@pytest.mark.parametrize("fault", FEW_OR_SLOW)
async def test_a_request_that_is_lost_costs_an_attempt_and_changes_nothing(
    kit: Any, tmp_path: Path, undisturbed: Any, fault: Fault, point: FaultPoint
) -> None:
    met: list[int] = []

    def once(body: dict[str, Any], number: int) -> Fault | None:
        if row_of(body) != 3 or met:
            return None
        met.append(number)
        return fault

    run = Run(kit, tmp_path, fault)
    with FakeEngine(seeded, fault=once, point=point) as engine:
        await run.go(engine)
    assert met
    assert run.trained == undisturbed
    assert run.metrics["infra_failures"] >= 1
    run.check_accounts()


@pytest.mark.parametrize("fault", FAULTS)
async def test_an_engine_that_fails_while_a_reward_is_computed_loses_what_it_had_in_hand(
    kit: Any, tmp_path: Path, undisturbed: Any, fault: Fault
) -> None:
    run = Run(kit, tmp_path, fault, custom_rm_path=kit.user("strikes_the_engine"))

    def late(body: dict[str, Any]) -> float:
        """Until the engine fails, half of the requests are in its hand."""
        return 0.0 if engine.strike_fault is None or row_of(body) % GROUPS == 0 else 60.0

    with FakeEngine(seeded, strike_fault=fault, latency=late) as engine:
        await run.go(engine)
        assert engine.strike_fault is None
    assert run.trained == undisturbed
    assert run.metrics["infra_failures"] >= 1
    run.check_accounts()


@pytest.mark.parametrize("path", ["/pause_generation", "/update_weights_from_disk"])
@pytest.mark.parametrize("fault", FEW_OR_SLOW)
async def test_an_engine_that_fails_in_a_publication_samples_no_token_that_is_trained_on_as_another_version(
    kit: Any, tmp_path: Path, undisturbed: Any, fault: Fault, path: str
) -> None:
    met: list[str] = []

    def once(asked: str) -> Fault | None:
        if asked != path or len(met) > 0 or engine.version != 1:
            return None
        met.append(asked)
        return fault

    run = Run(kit, tmp_path, fault)
    with FakeEngine(seeded, control_fault=once) as engine:
        await run.go(engine)
    assert met
    assert run.trained == undisturbed
    run.check_accounts()


@pytest.mark.parametrize("back_after", [1, pytest.param(4, marks=pytest.mark.slow)])
async def test_a_replacement_with_the_initial_weights_is_found_out_by_its_first_tokens(
    kit: Any, tmp_path: Path, undisturbed: Any, back_after: int
) -> None:
    """It is given the weights after so many answers; until then, nothing of it is trained on."""
    asked: list[int] = []

    def kills_then_catches_up(body: dict[str, Any], number: int) -> Fault | None:
        if row_of(body) < GROUPS:
            return None
        asked.append(number)
        if len(asked) == 1:
            return Fault.KILL
        if len(asked) == 1 + back_after:
            engine.version, engine.back_version = 1, None
        return None

    run = Run(kit, tmp_path)
    with FakeEngine(seeded, fault=kills_then_catches_up, back_version=0) as engine:
        await run.go(engine)
    assert run.trained == undisturbed
    assert run.metrics["infra_failures"] >= 2
    run.check_accounts()


async def test_weights_that_never_come_spend_the_budget_and_train_nothing(kit: Any, tmp_path: Path) -> None:
    run = Run(kit, tmp_path, max_infra_failures=3)
    expected = r"4 attempts .* --max-infra-failures is 3(.|\n)*weight version 7"
    with FakeEngine(seeded, version=7) as engine, pytest.raises(RolloutError, match=expected):
        await run.go(engine)
    counts = count_states(run.state.ledger, run.source, 0, ROWS)
    assert counts[GroupState.TRAINED] == counts[GroupState.FINISHED] == 0
    assert sum(counts.values()) == ROWS
