"""What the driver does again after a loss, and what it does not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.ledger_entry import GroupState
from buffer_rl.buffer.state import BufferState
from buffer_rl.config import compose
from buffer_rl.data.source import PromptDataSource
from buffer_rl.driver.driver import Driver
from buffer_rl.driver.schedule import RunPlan, Schedule
from buffer_rl.errors import BufferRLError, PayloadLostError, RolloutError, TrainError
from buffer_rl.options import CORE_SECTIONS
from buffer_rl.testing.fake_roles import FakePublisher, FakeRollouts, FakeTrain
from buffer_rl.testing.virtual_runtime import VirtualRuntime
from buffer_rl.types import Ticket
from harness.ledger_contents import copied, count_states, go_back

PLAN = RunPlan(
    num_rollouts=3,
    schedule=Schedule.named("lockstep"),
    max_rollout_retries=2,
    rollout_timeout_s=100,
    train_timeout_s=100,
    publish_timeout_s=50,
    save_timeout_s=50,
    buffer_timeout_s=5,
)


class MortalBuffer:
    """A Buffer that can be replaced by one that has its ledger alone."""

    def __init__(self, folder: Path) -> None:
        path = folder / "rows.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(6)))
        self._args: Any = compose(CORE_SECTIONS)(prompt_data=str(path), rollout_batch_size=2, n_samples_per_prompt=2)
        self._state = self._open(Ledger.in_memory(), restarted=False)

    def die(self) -> None:
        ledger = self._state.ledger
        position = ledger.recall("position")
        go_back(ledger, copied(ledger))  # another fencing token; leases are pending
        assert position == ledger.recall("position")
        self._state = self._open(ledger, restarted=True)

    def _open(self, ledger: Any, restarted: bool) -> BufferState:
        return BufferState(
            PromptDataSource(self._args),
            ledger=ledger,
            groups_per_step=2,
            restarted=restarted,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def trained(self) -> int:
        source = PromptDataSource(self._args).source_hashes[0]
        return count_states(self._state.ledger, source, 0, 6)[GroupState.TRAINED]


class Rollouts(FakeRollouts):
    """Before ``failures`` are used up, a rollout leases its groups and ends with one of them."""

    def __init__(self, buffer: MortalBuffer, failures: list[Exception], die: bool = False) -> None:
        super().__init__(buffer)  # type: ignore[arg-type]
        self._buffer, self._failures, self._die = buffer, failures, die

    def run(self, ticket: Ticket) -> Any:
        if self._failures and ticket.rollout_id == 1:
            self._buffer.get_samples(ticket, 2)
            if self._die:
                self._buffer.die()
            raise self._failures.pop(0)
        return super().run(ticket)


class Train(FakeTrain):
    """Fails in ``method`` as often as there are errors."""

    def __init__(self, method: str = "", errors: list[Exception] | None = None) -> None:
        super().__init__()
        self._method, self._errors = method, errors or []
        self.discarded = 0

    def discard(self) -> None:
        self.discarded += 1

    def fetch(self, rollout_id: int) -> None:
        super().fetch(rollout_id)
        self._fail("fetch")

    def train(self) -> Any:
        self._fail("train")
        return super().train()

    def _fail(self, method: str) -> None:
        if method == self._method and self._errors:
            raise self._errors.pop(0)


class Recorder:
    """Hears everything, keeps the notices."""

    def __init__(self) -> None:
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def make_driver(
    buffer: MortalBuffer, rollouts: Rollouts | None = None, train: Train | None = None, plan: RunPlan = PLAN
) -> tuple[Driver, Train, Recorder]:
    train, recorder = train or Train(), Recorder()
    roles = {
        "buffer": buffer,
        "rollout": rollouts or Rollouts(buffer, []),
        "train": train,
        "publish": FakePublisher(),
    }
    return Driver(plan, VirtualRuntime(roles), recorder), train, recorder


@pytest.mark.parametrize("schedule", ["lockstep", "pipelined"])
def test_a_rollout_whose_payloads_are_lost_is_produced_again_and_trained_once(tmp_path: Path, schedule: str) -> None:
    buffer = MortalBuffer(tmp_path)
    plan = replace(PLAN, schedule=Schedule.named(schedule))
    lost = Train("fetch", [PayloadLostError("gone", where="storage-0"), PayloadLostError("gone", where="storage-0")])
    driver, train, recorder = make_driver(buffer, train=lost, plan=plan)
    assert driver.run().steps == 3
    assert train.fetched == [0, 0, 0, 1, 2]
    assert (train.discarded, buffer.trained()) == (2, 6)
    assert [text.split(":")[0] for text in recorder.notices] == [
        "train_0 is produced again (1 of 2)",
        "train_0 is produced again (2 of 2)",
    ]


def test_after_the_budget_the_loss_ends_the_run(tmp_path: Path) -> None:
    lost = Train("fetch", [PayloadLostError("gone", where="storage-0")] * 3)
    driver, _, _ = make_driver(MortalBuffer(tmp_path), train=lost)
    with pytest.raises(PayloadLostError):
        driver.run()


def test_whatever_a_rollout_says_when_its_buffer_was_replaced_it_is_produced_again(tmp_path: Path) -> None:
    buffer = MortalBuffer(tmp_path)
    rollouts = Rollouts(buffer, [RolloutError("in words of its own")], die=True)
    driver, train, recorder = make_driver(buffer, rollouts)
    assert driver.run().steps == 3
    assert train.fetched == [0, 1, 2]
    assert ([t.rollout_id for t in rollouts.tickets], buffer.trained()) == ([0, 1, 2], 6)
    assert len(recorder.notices) == 1


def test_the_same_error_under_the_same_buffer_ends_the_run(tmp_path: Path) -> None:
    buffer = MortalBuffer(tmp_path)
    driver, _, recorder = make_driver(buffer, Rollouts(buffer, [RolloutError("a bug")]))
    with pytest.raises(RolloutError, match="a bug"):
        driver.run()
    assert recorder.notices == []


@pytest.mark.parametrize("error", [TrainError("not finite"), PayloadLostError("gone", where="storage-0")])
def test_an_optimizer_step_is_never_taken_again(tmp_path: Path, error: BufferRLError) -> None:
    driver, _, recorder = make_driver(MortalBuffer(tmp_path), train=Train("train", [error]))
    with pytest.raises(type(error)):
        driver.run()
    assert recorder.notices == []
