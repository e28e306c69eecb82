"""What the driver does again after a loss, and what it does not."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.buffer.state import BufferState
from buffer_rl.data.source import EvalSource, PromptDataSource
from buffer_rl.driver.driver import Driver
from buffer_rl.errors import BufferRLError, PayloadLostError, RolloutError, TrainError, WorkerDiedError
from buffer_rl.options.section import compose
from buffer_rl.plan.schedule import Mode, RolePlan, RunPlan, Schedule
from buffer_rl.records.groups import GroupUid, Sample, SampleGroup, Ticket
from harness.fake_roles import FakePublisher, FakeRole, FakeRollouts, FakeTrain
from harness.ledger_contents import count_states
from harness.tickets import schedule_of
from harness.virtual_time import Span, VirtualRuntime

PLAN = RunPlan(
    num_rollouts=3,
    schedule=Schedule(mode=Mode.LOCKSTEP),
    max_rollout_retries=2,
    rollout_timeout_s=100,
    train_timeout_s=100,
    publish_timeout_s=50,
    save_timeout_s=50,
    buffer_timeout_s=5,
)


class MortalBuffer:
    """A Buffer that can be replaced by one that has its ledger alone."""

    def __init__(self, folder: Path, max_staleness: int = 0) -> None:
        self._ledger_path, self._max_staleness = folder / "ledger.sqlite", max_staleness
        folder.mkdir(exist_ok=True)
        path = folder / "rows.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(6)))
        self._args: Any = compose(CORE_SECTIONS)(
            prompt_data=str(path), rollout_batch_size=2, n_samples_per_prompt=2, eval_prompt_data=[f"held={path}"]
        )
        self._state = self._open(restarted=False)

    def die(self) -> None:
        self._state.ledger.close()
        self._state = self._open(restarted=True)

    def _open(self, restarted: bool) -> BufferState:
        return BufferState(
            PromptDataSource(self._args),
            ledger=Ledger(self._ledger_path, run="run", keep_selected=True),
            groups_per_step=2,
            eval_groups=EvalSource(self._args).all_groups,
            schedule=schedule_of(self._max_staleness),
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


class MortalRollouts(FakeRollouts):
    """Its worker dies in the calls on rollouts, or evaluations, of ``deaths``, each time after one finished group.

    made: how often each group was made."""

    def __init__(self, buffer: MortalBuffer, deaths: list[str]) -> None:
        super().__init__(buffer)  # type: ignore[arg-type]
        self.buffer, self._deaths = buffer, deaths
        self.restarts = 0
        self.made: Counter[tuple[str, GroupUid]] = Counter()

    def run(self, ticket: Ticket) -> Any:
        dies = ticket.task in self._deaths
        if dies:
            self._deaths.remove(ticket.task)
            leased = self.buffer.get_samples(ticket, ticket.num_groups)
            self.report(ticket, leased[0])
            raise WorkerDiedError("the process died", where="rollout.run")
        for group in self.buffer.get_samples(ticket, ticket.num_groups):
            self.report(ticket, group)
        return {"rollout/raw_reward": 1.0}, []

    def report(self, ticket: Ticket, group: SampleGroup) -> None:
        self.made[ticket.task, group.uid] += 1
        columns = {"tokens": [np.asarray([1, 2], dtype=np.int32) for _ in group]}
        self.buffer.finish(ticket, group.uid, group.attempt, [sample.row_id for sample in group], columns)

    def restart(self) -> None:
        self.restarts += 1


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


SURVIVES = replace(PLAN, roles=RolePlan(max_restarts=3))


@pytest.mark.parametrize("deaths", [["train_0"], ["train_1", "train_1"], ["train_0", "train_1", "train_2"]])
def test_another_rollout_worker_goes_on_with_the_ticket_and_makes_no_finished_group_again(
    tmp_path: Path, deaths: list[str]
) -> None:
    buffer = MortalBuffer(tmp_path)
    rollouts = MortalRollouts(buffer, list(deaths))
    driver, train, recorder = make_driver(buffer, rollouts, plan=SURVIVES)  # type: ignore[arg-type]
    assert driver.run().steps == 3
    assert (rollouts.restarts, train.fetched, buffer.trained()) == (len(deaths), [0, 1, 2], 6)
    undisturbed = MortalRollouts(MortalBuffer(tmp_path / "undisturbed"), [])
    make_driver(undisturbed.buffer, undisturbed, plan=SURVIVES)[0].run()  # type: ignore[arg-type]
    assert rollouts.made == undisturbed.made
    assert set(rollouts.made.values()) == {1}
    assert next(line for line in recorder.notices if "goes on" in line) == (
        f"{deaths[0]} goes on: 1 groups are missing, and its metrics are of these"
    )


def test_a_worker_that_dies_whenever_it_is_replaced_ends_the_run_with_its_death(tmp_path: Path) -> None:
    buffer = MortalBuffer(tmp_path)
    rollouts = MortalRollouts(buffer, ["train_0", "train_1", "train_1", "train_2"])
    driver, _, _ = make_driver(buffer, rollouts, plan=SURVIVES)  # type: ignore[arg-type]
    with pytest.raises(WorkerDiedError, match=r"(?s)the process died.*--role-max-restarts: 3 of 3 were used"):
        driver.run()
    assert rollouts.restarts == 3


def test_a_rollout_of_foreign_groups_is_made_again_where_its_worker_died(tmp_path: Path) -> None:
    class Own(MortalRollouts):
        def run(self, ticket: Ticket) -> Any:
            for row in range(ticket.num_groups):
                uid = GroupUid("foreign", row, ticket.rollout_id)
                self.report(ticket, SampleGroup(uid=uid, samples=[Sample(uid=uid, sample_index=0)]))
                if ticket.task in self._deaths:
                    self._deaths.remove(ticket.task)
                    raise WorkerDiedError("the process died", where="rollout.run")
            return {}, []

    rollouts = Own(MortalBuffer(tmp_path), ["train_1"])
    driver, train, recorder = make_driver(rollouts.buffer, rollouts, plan=SURVIVES)  # type: ignore[arg-type]
    assert driver.run().steps == 3
    assert (rollouts.restarts, train.fetched, sum(rollouts.made.values())) == (1, [0, 1, 2], 7)
    assert recorder.notices[-1].startswith("train_1 is produced again (1 of 2): train_1: the worker died")


@pytest.mark.parametrize("task", ["eval_0", "train_1"])
def test_where_the_whole_rollout_is_needed_a_worker_that_died_has_it_made_again(tmp_path: Path, task: str) -> None:
    """An evaluation's metrics are of all its groups; a sample filter sees a whole rollout."""
    buffer = MortalBuffer(tmp_path)
    rollouts = MortalRollouts(buffer, [task])
    plan = replace(SURVIVES, evaluate=True, passes_on_tickets=False, max_rollout_retries=1)
    driver, _, _ = make_driver(buffer, rollouts, plan=plan)  # type: ignore[arg-type]
    assert driver.run().steps == 3
    assert (rollouts.restarts, buffer.trained()) == (1, 6)
    assert sorted(count for (name, _), count in rollouts.made.items() if name == task) == (
        [1, 1, 1, 1, 1, 2] if task == "eval_0" else [1, 2]
    )


@pytest.mark.parametrize("schedule", ["lockstep", "pipelined"])
def test_a_rollout_whose_payloads_are_lost_is_produced_again_and_trained_once(tmp_path: Path, schedule: str) -> None:
    buffer = MortalBuffer(tmp_path)
    plan = replace(PLAN, schedule=Schedule(mode=Mode(schedule), streams=schedule == "pipelined"))
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
    with pytest.raises(PayloadLostError, match="--buffer-max-restarts: what was lost was produced again 2 times"):
        driver.run()


def test_the_last_error_of_a_lost_rollout_does_not_say_that_it_is_produced_again(tmp_path: Path) -> None:
    rollouts = MortalRollouts(MortalBuffer(tmp_path), ["eval_0"])
    plan = replace(SURVIVES, evaluate=True, max_rollout_retries=0)
    driver, _, recorder = make_driver(rollouts.buffer, rollouts, plan=plan)  # type: ignore[arg-type]
    with pytest.raises(WorkerDiedError, match=r"(?s)the process died.*--buffer-max-restarts"):
        driver.run()
    assert (rollouts.restarts, recorder.notices) == (0, [])


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


ONE_AHEAD = replace(
    PLAN,
    schedule=Schedule(mode=Mode.ONE_STEP_OFF, target=1, max_staleness=1, drains=True),
    roles=RolePlan(passes=(("train", "actor"),)),
)
# Rollouts run one after another: the first from 0 to 10, the second to 20.
SECONDS = {"run": 10.0, "publish": 1.0}


class AheadWorld:
    """A driver whose rollouts run one ahead. seconds: how long calls take, beside ``SECONDS``."""

    def __init__(
        self,
        folder: Path,
        failures: list[Exception],
        *,
        die: bool = False,
        rollouts: type[Rollouts] = Rollouts,
        trainer: Train | None = None,
        roles: dict[str, Any] | None = None,
        plan: RunPlan = ONE_AHEAD,
        **seconds: float,
    ) -> None:
        self.buffer = MortalBuffer(folder, max_staleness=1)
        self.rollouts, self.train = rollouts(self.buffer, failures, die), trainer or Train()
        self.recorder, publisher = Recorder(), FakePublisher()
        parts = {"buffer": self.buffer, "rollout": self.rollouts, "train": self.train, "publish": publisher}
        self.runtime = VirtualRuntime(
            parts | (roles or {}), lambda role, method, args: (SECONDS | seconds).get(method, 0.0)
        )
        self.driver = Driver(plan, self.runtime, self.recorder)  # type: ignore[arg-type]

    def spans(self, *methods: str) -> list[Span]:
        return [span for span in self.runtime.spans if span.method in methods]

    def runs(self) -> list[tuple[int, float]]:
        """Each rollout's id, and when it started."""
        return [(span.args[0].rollout_id, span.start) for span in self.spans("run")]


def test_one_ahead_a_rollout_runs_while_the_one_before_it_is_trained_on(tmp_path: Path) -> None:
    world = AheadWorld(tmp_path, [], train=5.0)
    assert world.driver.run().steps == 3
    assert world.runs() == [(0, 0.0), (1, 10.0), (2, 21.0)]
    assert [(span.start, span.end) for span in world.spans("train", "publish")] == [
        *[(10.0, 15.0), (20.0, 21.0)],  # version 1 is published when no rollout runs
        *[(21.0, 26.0), (31.0, 32.0)],
        *[(32.0, 37.0), (37.0, 38.0)],
    ]
    assert world.buffer.trained() == 6


def test_one_ahead_a_rollout_waits_for_the_publication_not_for_the_step(tmp_path: Path) -> None:
    world = AheadWorld(tmp_path, [], train=50.0)
    world.driver.run()
    calls = [(span.method, getattr(span.args[0], "rollout_id", span.args[0])) for span in world.spans("run", "publish")]
    assert calls == [("run", 0), ("run", 1), ("publish", 1), ("run", 2), ("publish", 2), ("publish", 3)]


def test_what_is_lost_before_an_optimizer_step_has_all_production_start_again(tmp_path: Path) -> None:
    lost = Train("fetch", [PayloadLostError("gone", where="storage-0")])
    world = AheadWorld(tmp_path, [], trainer=lost)
    assert world.driver.run().steps == 3
    assert [rollout_id for rollout_id, _ in world.runs()] == [0, 1, 0, 1, 2]
    assert lost.fetched == [0, 0, 1, 2]
    assert (lost.discarded, world.buffer.trained()) == (1, 6)
    assert world.recorder.notices == ["train_0 to train_1 is produced again (1 of 2): storage-0: gone"]


def test_a_role_works_again_on_the_lost_rollout(tmp_path: Path) -> None:
    """The role's first call on rollout 1 ends with a death, after rollout 0 was found to be lost."""
    lost, role = Train("fetch", [PayloadLostError("gone", where="storage-0")]), FakeRole(fails=1, fails_from=1)
    plan = replace(ONE_AHEAD, roles=RolePlan(dedicated_roles=("ref",), max_restarts=1))
    world = AheadWorld(tmp_path, [], trainer=lost, roles={"ref": role}, plan=plan, stream=30.0)
    assert world.driver.run().steps == 3
    assert (role.streamed, role.restarts) == ([0, 0, 1, 1, 2], 1)


def test_what_is_lost_during_an_optimizer_step_is_produced_again_after_its_commit(tmp_path: Path) -> None:
    world = AheadWorld(tmp_path, [PayloadLostError("gone", where="storage-0")], train=50.0)
    assert world.driver.run().steps == 3
    assert [rollout_id for rollout_id, _ in world.runs()] == [0, 1, 1, 2]
    assert world.runs()[2][1] == 61.0  # the step takes from 10 to 60, and its publication 1
    assert world.train.fetched == [0, 1, 2]
    assert world.buffer.trained() == 6


def test_a_buffer_that_died_while_a_rollout_is_trained_on_loses_the_others_alone(tmp_path: Path) -> None:
    class Deadly(Train):
        def train(self) -> Any:
            if self.fetched == [0]:
                world.buffer.die()
            return super().train()

    world = AheadWorld(tmp_path, [], trainer=Deadly(), train=50.0)
    assert world.driver.run().steps == 3
    assert [rollout_id for rollout_id, _ in world.runs()] == [0, 1, 1, 2]
    assert [span.args for span in world.spans("commit")] == [(0, 1), (1, 2), (2, 3)]
    assert world.buffer.trained() == 6


def test_an_error_of_a_rollout_that_was_not_lost_ends_the_run_after_the_step_that_is_taken(tmp_path: Path) -> None:
    world = AheadWorld(tmp_path, [RolloutError("a bug")], train=50.0)
    with pytest.raises(RolloutError, match="a bug"):
        world.driver.run()
    assert (world.runtime.now(), world.recorder.notices) == (60.0, [])  # it failed at 20
    assert [span.args for span in world.spans("commit")] == [(0, 1)]


def test_a_buffer_that_died_during_an_evaluation_counts_once_for_all_that_it_held(tmp_path: Path) -> None:
    class Slow(Rollouts):
        """The Buffer dies in the middle of the first evaluation, beside which rollout 0 is under way."""

        died = False

        async def run(self, ticket: Ticket) -> Any:
            groups = self._buffer.get_samples(ticket, ticket.num_groups)
            await world.runtime.loop.sleep_until(world.runtime.now() + 5.0)
            if ticket.evaluation and not self.died:
                self.died = True
                self._buffer.die()
                raise RolloutError("in words of its own")
            await world.runtime.loop.sleep_until(world.runtime.now() + 5.0)
            for group in groups:
                columns = {"tokens": [np.asarray([1, 2], dtype=np.int32) for _ in group]}
                self._buffer.finish(ticket, group.uid, group.attempt, [s.row_id for s in group], columns)
            return {}, []

    plan = replace(ONE_AHEAD, evaluate=True, eval_interval=3, max_rollout_retries=1)
    world = AheadWorld(tmp_path, [], rollouts=Slow, plan=plan)
    assert world.driver.run().steps == 3
    assert [span.args[0].task for span in world.spans("run")] == [
        *["eval_0", "train_0", "eval_0", "train_0", "train_1", "train_2", "eval_3"]
    ]
    assert sorted(text.split(":")[0] for text in world.recorder.notices) == [
        "eval_0 is produced again (1 of 1)",
        "train_0 is produced again (1 of 1)",
    ]
    assert world.buffer.trained() == 6
