"""The loop, on virtual time and over the real Buffer state."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.buffer.state import BufferState
from buffer_rl.cluster.environment import StopRequest
from buffer_rl.data.source import EvalSource, PromptDataSource
from buffer_rl.driver.driver import Driver
from buffer_rl.errors import (
    BufferRLError,
    CheckpointError,
    DeadlineError,
    EndedBySignal,
    EngineError,
    PayloadLostError,
    RolloutError,
    TrainError,
    WorkerDiedError,
    WorkerError,
)
from buffer_rl.observe.timeline import WorkReport, WorkSpan, clock_origin
from buffer_rl.options.section import compose
from buffer_rl.plan.schedule import Mode, RolePlan, RunPlan, Schedule, parse_early_stop
from buffer_rl.records.groups import Ticket
from harness.fake_roles import FakePublisher, FakeRole, FakeRollouts, FakeTrain
from harness.ledger_contents import count_states, entries, entries_of
from harness.saved_state import load_saved, saved_state
from harness.virtual_time import VirtualRuntime

PLAN = RunPlan(
    num_rollouts=3,
    schedule=Schedule(mode=Mode.LOCKSTEP),
    roles=RolePlan(passes=(("train", "actor"),)),
    evaluate=True,
    eval_interval=2,
    saves=True,
    save_interval=2,
    rollout_timeout_s=1000,
    train_timeout_s=100,
    publish_timeout_s=50,
    save_timeout_s=50,
    buffer_timeout_s=5,
)


class Recorder:
    """An observer and a checkpointer that note what they are told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.metrics: list[dict[str, float]] = []
        self.notices: list[tuple[str, int]] = []
        self.spans: list[tuple[str, WorkSpan]] = []
        self.said: list[str] = []
        self.phases: list[str] = []
        self.told: dict[int, dict[str, float]] = {}

    def phase(self, name: str) -> None:
        self.phases.append(name)

    def worked(self, role: str, spans: Sequence[WorkSpan]) -> None:
        self.spans += [(role, span) for span in spans]

    def notice(self, text: str) -> None:
        self.said.append(text)

    def under_way(self, spans: Mapping[str, Sequence[WorkSpan]]) -> None:
        pass

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.events.append(("step", step))
        self.metrics.append(dict(metrics))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.events.append(("evaluation", step))

    def rollout_ended(self, rollout_id: int, evaluation: bool, metrics: Any, samples: Any) -> None:
        self.notices.append(("eval" if evaluation else "rollout", rollout_id))

    def trained(self, rollout_id: int, step: int, metrics: Mapping[str, float]) -> None:
        self.notices.append(("trained", step))

    def known(self, step: int, metrics: Mapping[str, float]) -> None:
        self.told[step] = dict(metrics)

    def published(self, version: int, metrics: Mapping[str, float]) -> None:
        self.notices.append(("published", version))


class Saves:
    """Notes when it is asked to save, and the Buffer's state then."""

    def __init__(self, state: BufferState) -> None:
        self._state = state
        self.saved: dict[int, dict[str, Any]] = {}
        self.sealed: list[int] = []

    def save(self, step: int, owes_evaluation: bool) -> None:
        assert step not in self.saved
        self.saved[step] = saved_state(self._state)

    def save_next(self) -> None:
        """Nothing: it notes the Buffer's state alone."""

    def seal(self) -> None:
        self.sealed.append(max(self.saved))


# The Buffer takes its time, as it does with processes: what died before it answered is then seen once more.
COSTS = {"requeue_for_readers": 0.5, "run": 10.0, "log_probs": 2.0, "train": 5.0, "publish": 1.0}


def cost(role: str, method: str, args: tuple[Any, ...]) -> float:
    return COSTS.get(method, 0.0)


class World:
    """A driver's surroundings, without processes."""

    def __init__(self, folder: Path, scores: tuple[float, ...] = (0.0,), schedule: Schedule = PLAN.schedule) -> None:
        path = folder / "rows.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(4)))
        args: Any = compose(CORE_SECTIONS)(
            prompt_data=str(path), rollout_batch_size=2, n_samples_per_prompt=2, eval_prompt_data=[f"held={path}"]
        )
        evals = EvalSource(args)
        self.state = BufferState(
            PromptDataSource(args),
            ledger=Ledger.in_memory(),
            groups_per_step=2,
            eval_groups=lambda: evals.groups("held"),
            schedule=schedule,
        )
        self.rollouts = FakeRollouts(self.state, scores)
        self.train = FakeTrain()
        self.publisher = FakePublisher()
        self.recorder = Recorder()
        self.saves = Saves(self.state)
        self.roles: dict[str, Any] = {
            "buffer": self.state,
            "rollout": self.rollouts,
            "train": self.train,
            "publish": self.publisher,
            "save": self.saves,
        }

    def driver(self, plan: RunPlan) -> Driver:
        self.runtime = VirtualRuntime(self.roles, cost)
        return Driver(plan, self.runtime, self.recorder)

    def calls(self) -> list[str]:
        shown = {"commit", "publish", "release", "train", "run", "update"}
        return [span.method for span in self.runtime.spans if span.method in shown]


def test_a_step_trains_commits_publishes_releases_and_evaluates_in_this_order(tmp_path: Path) -> None:
    world = World(tmp_path)
    result = world.driver(PLAN).run()
    one_step = ["run", "train", "commit", "publish", "release"]
    evaluation = ["run"]
    assert world.calls() == ["release", *evaluation, *one_step, *one_step, *evaluation, *one_step, *evaluation]
    assert world.publisher.versions == [1, 2, 3]
    assert world.recorder.events == [
        ("evaluation", 0),
        ("step", 0),
        ("step", 1),
        ("evaluation", 2),
        ("step", 2),
        ("evaluation", 3),
    ]
    step, saved = ["generate", "train", "publish"], ["generate", "train", "save", "publish", "evaluate"]
    assert world.recorder.phases == ["evaluate", *step, *saved, *saved]
    assert result.steps == 3


def test_a_checkpoint_holds_its_groups_as_trained_and_is_written_before_the_publication(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.driver(PLAN).run()
    assert sorted(world.saves.saved) == [2, 3]
    saved = entries_of(world.saves.saved[2]["ledger"])
    assert [entry.state for entry in saved.values()] == ["trained"] * 4
    assert world.saves.saved[2]["queue"] == []
    assert world.saves.saved[2]["version"] == 1  # version 2 is not published yet


@pytest.mark.parametrize("lag", [0, 1])
def test_all_metrics_of_a_step_but_its_times_are_told_before_its_checkpoint(tmp_path: Path, lag: int) -> None:
    """A run that is killed after the checkpoint goes on with the next step."""
    schedule = Schedule(mode=Mode.ONE_STEP_OFF if lag else Mode.LOCKSTEP, target=lag, max_staleness=lag)
    world = World(tmp_path, schedule=schedule)
    told: dict[int, Mapping[str, float]] = {}

    class NotedSaves(Saves):
        def save(self, step: int, owes_evaluation: bool) -> None:
            told[step] = world.recorder.told.get(step - 1, {})
            super().save(step, owes_evaluation)

    world.roles["save"] = world.saves = NotedSaves(world.state)
    world.driver(replace(PLAN, schedule=schedule)).run()
    assert list(told) == [2, 3]
    for step, metrics in told.items():
        every = world.recorder.metrics[step - 1]
        assert metrics["rollout/num_groups"] == 2
        assert {name: metrics.get(name) for name in every if not name.startswith("perf/")}.items() <= metrics.items()


class FakeReference:
    """Notes what was saved by the time that it is updated."""

    def __init__(self, saves: Saves) -> None:
        self._saves = saves
        self.updates: list[tuple[int, list[int]]] = []

    def update(self, version: int) -> None:
        self.updates.append((version, sorted(self._saves.saved)))


@pytest.mark.parametrize("mode", [Mode.LOCKSTEP, Mode.PIPELINED])
def test_the_reference_is_updated_after_the_step_and_before_the_checkpoint_and_the_next_rollout(
    tmp_path: Path, mode: Mode
) -> None:
    world = World(tmp_path)
    world.roles["reference"] = reference = FakeReference(world.saves)
    plan = replace(PLAN, num_rollouts=4, evaluate=False, save_interval=1, ref_update_interval=2)
    world.driver(replace(plan, schedule=Schedule(mode=mode, streams=mode is Mode.PIPELINED))).run()
    assert reference.updates == [(2, [1]), (4, [1, 2, 3])]
    step, last = (
        ["run", "train", "commit", "publish", "release"],
        ["run", "train", "commit", "update", "publish", "release"],
    )
    assert world.calls() == ["release", *step, *last, *step, *last]
    assert ["perf/ref_update_time" in metrics for metrics in world.recorder.metrics] == [False, True, False, True]


def test_a_step_has_the_metrics_of_its_publication_and_of_the_buffer(tmp_path: Path) -> None:
    class Timed(FakePublisher):
        def publish(self, version: int) -> dict[str, float]:
            return {"perf/publish_pause": version / 4, "publish/unchanged_share": 0.5}

    class Weighed(BufferState):
        def release(self, version: int) -> dict[str, Any]:
            return {**super().release(version), "work_s": version * 3.0, "peak": {"host": version + 0.5}}

    world = World(tmp_path)
    world.roles["publish"] = Timed()
    world.state.__class__ = Weighed
    world.driver(replace(PLAN, num_rollouts=2)).run()
    shown = ("perf/publish_pause", "publish/unchanged_share", "perf/buffer_time", "perf/peak_memory/buffer_gb")
    assert [[step[name] for name in shown] for step in world.recorder.metrics] == [
        [0.25, 0.5, 3.0, 1.5],
        [0.5, 0.5, 3.0, 2.5],
    ]


def test_in_lockstep_a_rollout_starts_when_the_version_before_it_is_published(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.driver(replace(PLAN, evaluate=False)).run()
    runs = [span for span in world.runtime.spans if span.method == "run"]
    publications = [span for span in world.runtime.spans if span.method == "publish"]
    assert [ticket.version for ticket in world.rollouts.tickets] == [0, 1, 2]
    for run, publication in zip(runs[1:], publications[:-1], strict=True):
        assert run.start >= publication.end
    assert [metrics["perf/step_time"] for metrics in world.recorder.metrics] == [10 + 2 + 5 + 1] * 3
    assert world.recorder.metrics[0]["perf/rollout_time"] == 10
    assert world.recorder.metrics[0]["perf/tokens_per_s"] == 4 / 10


def test_the_observer_hears_of_every_rollout_training_step_and_publication(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.driver(replace(PLAN, num_rollouts=2)).run()
    one_step = [[("rollout", r), ("trained", r + 1), ("published", r + 1)] for r in range(2)]
    assert world.recorder.notices == [("eval", 0), *one_step[0], *one_step[1], ("eval", 2)]


def test_every_group_is_trained_exactly_once(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.driver(replace(PLAN, num_rollouts=4)).run()
    source = world.rollouts.tickets and next(iter(entries(world.state.ledger))).source
    for epoch in (0, 1):
        counts = count_states(world.state.ledger, str(source), epoch, 4)
        assert counts[GroupState.TRAINED] == 4


def test_rollouts_that_never_ask_the_engine_publish_for_evaluations_only(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.driver(replace(PLAN, num_rollouts=5, publish_each_step=False, roles=RolePlan())).run()
    assert world.publisher.versions == [2, 4, 5]
    assert "log_probs" not in [span.method for span in world.runtime.spans]


class Kept:
    """Notes what a rollout's pool holds when it is to be kept."""

    def __init__(self, state: BufferState) -> None:
        self._state = state
        self.kept: dict[int, list[str]] = {}

    def save(self, rollout_id: int) -> None:
        self.kept[rollout_id] = sorted(self._state.get_data(rollout_id).columns)


def test_rollouts_alone_are_kept_released_and_evaluated_and_nothing_is_trained_or_published(tmp_path: Path) -> None:
    world = World(tmp_path)
    del world.roles["train"], world.roles["publish"]
    world.roles["record"] = kept = Kept(world.state)
    plan = replace(PLAN, roles=RolePlan(trained=()), publish_each_step=False, saves=False, records=True)
    result = world.driver(plan).run()
    assert (result.steps, list(kept.kept)) == (3, [0, 1, 2])
    assert [notice for notice in world.recorder.notices if notice[0] not in ("rollout", "eval")] == []
    assert [event for event in world.recorder.events if event[0] == "evaluation"] == [
        ("evaluation", 0),
        ("evaluation", 2),
        ("evaluation", 3),
    ]
    assert all("perf/train_time" not in metrics for metrics in world.recorder.metrics)
    assert world.state.get_progress()["version"] == 3


def test_a_rollout_is_kept_before_the_trainer_adds_to_it(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.roles["record"] = kept = Kept(world.state)
    world.driver(replace(PLAN, records=True)).run()
    assert kept.kept == {
        r: ["loss_mask", "response_length", "reward", "sample_parts", "sample_total_tokens", "tokens"] for r in range(3)
    }


def test_early_stop_ends_the_run_after_the_evaluation_that_reached_it_and_saves(tmp_path: Path) -> None:
    world = World(tmp_path, scores=(0.1, 0.1, 0.2, 0.2, 0.6))
    plan = replace(PLAN, num_rollouts=9, save_interval=None, early_stop=parse_early_stop("eval/held>=0.5"))
    result = world.driver(plan).run()
    assert (result.steps, result.stopped_early, result.evaluation) == (4, True, {"eval/held": 0.6})
    assert list(world.saves.saved) == [4]
    assert world.recorder.said == [
        "--early-stop: the run ends after 4 steps: eval/held is 0.6, and the condition is eval/held>=0.5"
    ]


def test_a_resumed_run_publishes_its_version_first_and_does_not_repeat_the_first_evaluation(tmp_path: Path) -> None:
    whole = World(tmp_path)
    whole.driver(replace(PLAN, num_rollouts=4)).run()
    world = World(tmp_path)
    load_saved(world.state, whole.saves.saved[2])
    world.driver(replace(PLAN, num_rollouts=4, first_rollout=2, publish_at_start=True, evaluated=2)).run()
    assert world.publisher.versions == [2, 3, 4]
    assert world.recorder.events == [("step", 2), ("step", 3), ("evaluation", 4)]
    found, expected = (entries_of(saves.saved[4]["ledger"]) for saves in (world.saves, whole.saves))
    assert list(found.items()) == list(expected.items())


class Failing:
    def __init__(self, error: BufferRLError) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        def fail(*args: Any) -> None:
            raise self._error

        return fail


def test_a_step_that_is_saved_is_reported_although_its_publication_fails(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.runtime = VirtualRuntime(
        {**world.roles, "publish": Failing(WorkerDiedError("it died", where="train.save_hf"))}
    )
    with pytest.raises(WorkerDiedError, match="it died"):
        Driver(replace(PLAN, save_interval=1), world.runtime, world.recorder).run()
    assert list(world.saves.saved) == [1]  # a restart begins after it
    assert [event for event in world.recorder.events if event[0] == "step"] == [("step", 0)]
    assert "perf/step_time" in world.recorder.metrics[0]


@pytest.mark.parametrize(("before", "evaluated"), [(2, [4]), (0, [2, 4]), (-1, [2, 4])])
def test_an_evaluation_that_a_death_came_before_is_made_up_for(before: int, evaluated: list[int]) -> None:
    plan = replace(PLAN, num_rollouts=4, first_rollout=2, publish_at_start=True, evaluated=before)
    assert [step for step in range(2, 5) if plan.evaluates_at(step)] == evaluated
    assert not replace(plan, first_rollout=3).evaluates_at(3)  # none was due
    ended = replace(plan, first_rollout=4)
    assert [replace(ended, evaluated=version).evaluates_at(4) for version in (-1, 2, 4)] == [True, True, False]


@pytest.mark.parametrize("role", ["rollout", "train", "publish", "buffer"])
def test_an_error_of_any_role_ends_the_run_as_it_is(tmp_path: Path, role: str) -> None:
    world = World(tmp_path)
    world.roles[role] = Failing(TrainError("broken", where=role))
    with pytest.raises(TrainError, match=f"{role}: broken"):
        world.driver(PLAN).run()


@pytest.mark.parametrize(
    ("limit", "name"),
    [("rollout_timeout_s", "rollout.run"), ("train_timeout_s", "train.log_probs"), ("publish_timeout_s", "publish")],
)
def test_a_role_that_does_not_answer_is_named_when_its_deadline_passes(tmp_path: Path, limit: str, name: str) -> None:
    world = World(tmp_path)
    with pytest.raises(DeadlineError, match=name):
        world.driver(replace(PLAN, **{limit: 0.5})).run()


def test_a_rollout_without_groups_is_an_error_that_shows_the_drops(tmp_path: Path) -> None:
    world = World(tmp_path)

    class Dropping(FakeRollouts):
        def run(self, ticket: Any) -> Any:
            for group in self._state.get_samples(ticket, 2):
                self._state.reject(ticket, group.uid, group.attempt, "zero_std")
            return {}, []

    world.roles["rollout"] = Dropping(world.state)
    with pytest.raises(RolloutError, match="zero_std"):
        world.driver(replace(PLAN, evaluate=False)).run()


@pytest.mark.parametrize("each_step", [True, False])
@pytest.mark.parametrize("pinned", [False, True])
def test_a_run_whose_last_ticket_has_no_group_ends_with_the_step_before_published_evaluated_and_saved(
    tmp_path: Path, pinned: bool, each_step: bool
) -> None:
    """pinned: the evaluation of version 2 is so slow that step 3 is trained before it ends. each_step: else weights
    are published for evaluations alone."""
    schedule = Schedule(mode=Mode.ONE_STEP_OFF, target=1, max_staleness=1, drains=True)
    world = World(tmp_path, schedule=schedule)

    class Dropping(FakeRollouts):
        def run(self, ticket: Ticket) -> Any:
            if pinned and ticket.evaluation and ticket.version == 2:
                return later(super().run(ticket))
            if ticket.evaluation or ticket.rollout_id < 3:
                return super().run(ticket)
            for group in self._state.get_samples(ticket, ticket.num_groups):
                self._state.reject(ticket, group.uid, group.attempt, "zero_std")
            return {}, []

    async def later(answer: Any) -> Any:
        await world.runtime.loop.sleep_until(world.runtime.now() + 100)
        return answer

    world.roles["rollout"] = rollouts = Dropping(world.state)
    plan = replace(PLAN, num_rollouts=4, schedule=schedule, publish_each_step=each_step)
    result = world.driver(plan).run()
    assert (result.steps, result.stopped_early) == (3, True)
    why = "the last tickets ended short by all groups of step 4; drops={'zero_std': 2}"
    assert result.why == why
    assert f"the run ends after 3 steps: {why}" in world.recorder.said
    assert world.publisher.versions == ([1, 2, 3] if each_step else [2, 3])
    assert [span.args for span in world.runtime.spans if span.method == "release"] == [(0,), (1,), (2,), (3,)]
    assert [step for name, step in world.recorder.events if name == "evaluation"] == [0, 2, 3]
    assert [ticket.version for ticket in rollouts.tickets if ticket.evaluation] == [0, 2, 3]
    assert sorted(world.saves.saved) == [2, 3]


def test_lockstep_with_staleness_is_a_contradiction() -> None:
    with pytest.raises(ValueError, match="max_staleness is 0"):
        Schedule(mode=Mode.LOCKSTEP, target=1, max_staleness=1)
    with pytest.raises(ValueError, match="does not go with a bound of 1"):
        Schedule(mode=Mode.ASYNC, target=2, max_staleness=1)


@pytest.mark.parametrize("num_rollouts", [3, 4])
def test_a_run_that_is_resumed_at_its_end_trains_no_more_and_evaluates_what_it_loaded(
    tmp_path: Path, num_rollouts: int
) -> None:
    """The run before may have been killed between its last checkpoint and its last evaluation."""
    whole = World(tmp_path)
    whole.driver(replace(PLAN, num_rollouts=4)).run()
    world = World(tmp_path, scores=(0.0, 0.0, 0.0, 0.0, 0.7))
    load_saved(world.state, whole.saves.saved[4])
    plan = replace(PLAN, num_rollouts=num_rollouts, first_rollout=4, publish_at_start=True, publish_each_step=False)
    result = world.driver(plan).run()
    assert (result.steps, result.evaluation) == (4, {"eval/held": 0.7})
    assert world.publisher.versions == [4]
    assert world.recorder.events == [("evaluation", 4)]
    assert world.saves.saved == {}


ONE_ROLE = RolePlan(dedicated_roles=("ref",), max_restarts=2)
PIPELINED = replace(PLAN, schedule=Schedule(mode=Mode.PIPELINED, streams=True), evaluate=False)


def submitted(world: World, *methods: str) -> list[tuple[str, str]]:
    return [(span.role, span.method) for span in world.runtime.spans if span.method in methods]


def test_in_a_pipelined_run_roles_start_with_the_rollout_and_in_lockstep_after_its_last_group(tmp_path: Path) -> None:
    for mode, order in ((Mode.PIPELINED, ["run", "stream"]), (Mode.LOCKSTEP, ["run", "stream"])):
        world = World(tmp_path)
        world.roles["ref"] = FakeRole()
        world.driver(
            replace(
                PIPELINED,
                schedule=Schedule(mode=mode, streams=mode is Mode.PIPELINED),
                roles=RolePlan(dedicated_roles=("ref",)),
            )
        ).run()
        assert submitted(world, "run", "stream") == [("rollout", order[0]), ("ref", order[1])] * 3
        runs = [span for span in world.runtime.spans if span.method == "run"]
        streams = [span for span in world.runtime.spans if span.method == "stream"]
        for run, stream in zip(runs, streams, strict=True):
            assert stream.start == (run.start if mode is Mode.PIPELINED else run.end)
        assert world.roles["ref"].streamed == [0, 1, 2]


def test_the_trainer_that_streams_log_probabilities_computes_none_afterwards(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.driver(PIPELINED).run()
    assert world.train.streamed == world.train.fetched == [0, 1, 2]
    assert submitted(world, "stream", "log_probs", "train") == [("train", "stream"), ("train", "train")] * 3


def test_the_work_of_a_role_on_another_machine_is_shown_on_the_drivers_clock(tmp_path: Path) -> None:
    class Remote(FakeRole):
        def stream(self, rollout_id: int) -> WorkReport:
            span = WorkSpan(name="ref", rollout_id=rollout_id, start=5010.0, end=5012.0)
            return WorkReport(spans=[span], origin=clock_origin() - 5000)

    world = World(tmp_path)
    world.roles["ref"] = Remote()
    world.driver(replace(PIPELINED, roles=RolePlan(dedicated_roles=("ref",)))).run()
    shown = [(span.start, span.end) for role, span in world.recorder.spans if role == "ref"]
    assert shown == [pytest.approx((10, 12), abs=1)] * 3


@pytest.mark.parametrize("gradients", [False, True])
def test_engine_and_trainer_are_compared_once_before_the_first_optimizer_step(tmp_path: Path, gradients: bool) -> None:
    world = World(tmp_path)
    plan = replace(PIPELINED, compare_log_probs=True, roles=RolePlan(stream_gradients=gradients))
    world.driver(plan).run()
    step = "finish_stream" if gradients else "train"
    calls = [method for _, method in submitted(world, "compare_log_probs", step)]
    assert calls == ["compare_log_probs", step, step, step]
    assert world.recorder.said == ["compared in rollout 0"]


def test_a_trainer_that_finds_other_weights_at_the_engines_takes_no_step(tmp_path: Path) -> None:
    class Apart(FakeTrain):
        def compare_log_probs(self, rollout_id: int) -> str:
            raise TrainError("other weights")

    world = World(tmp_path)
    world.roles["train"] = Apart()
    with pytest.raises(TrainError, match="other weights"):
        world.driver(replace(PLAN, compare_log_probs=True)).run()
    assert submitted(world, "train", "commit") == []


TWO_TRAINED = RolePlan(trained=("train", "critic"), passes=(("train", "actor"), ("critic", "actor")), estimates=True)


class Critic(FakeTrain):
    """A second trained model; ``fails`` is raised by its first fetch."""

    def __init__(self, fails: BufferRLError | None = None) -> None:
        super().__init__()
        self._fails = fails

    def fetch(self, rollout_id: int) -> None:
        super().fetch(rollout_id)
        if (error := self._fails) is not None:
            self._fails = None
            raise error

    def train(self) -> Mapping[str, float]:
        return {"critic/loss": 2.0}


def test_every_trained_role_is_fetched_passed_and_trained_and_the_actor_alone_estimates(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.roles["critic"] = Critic()
    world.driver(replace(PLAN, roles=TWO_TRAINED, compare_log_probs=True)).run()
    calls = submitted(world, "fetch", "log_probs", "estimate", "train", "compare_log_probs", "commit")
    fetched, updated = ([(role, method) for role in ("train", "critic")] for method in ("fetch", "train"))
    passes = [("train", "log_probs"), ("critic", "log_probs"), ("train", "estimate")]
    before = [*passes, *fetched]
    assert world.train.fetched == [0, 0, 1, 1, 2, 2]  # for its first pass, and with the advantages
    after = [*updated, ("buffer", "commit")]
    assert calls == [*before, ("train", "compare_log_probs"), *after, *((*before, *after) * 2)]
    assert world.recorder.metrics[0]["train/loss"] == 0.0
    assert world.recorder.metrics[0]["critic/loss"] == 2.0


def test_the_first_pass_of_a_step_fetches_its_rows_and_the_others_do_not(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.driver(replace(PLAN, roles=RolePlan(passes=(("train", "ref"), ("train", "actor"))))).run()
    assert submitted(world, "fetch", "log_probs", "train") == [*[("train", "log_probs")] * 2, ("train", "train")] * 3
    assert world.train.fetched == [0, 1, 2]


@pytest.mark.parametrize("gradients", [False, True])
def test_the_critic_alone_is_trained_at_first_and_every_version_is_published(tmp_path: Path, gradients: bool) -> None:
    world = World(tmp_path)
    world.roles["critic"] = Critic()
    roles = replace(TWO_TRAINED, passes=(), stream_gradients=gradients, critic_only_steps=2)
    world.driver(replace(PIPELINED if gradients else PLAN, roles=roles)).run()
    method = "finish_stream" if gradients else "train"
    only_critic = [("train", "discard"), ("critic", method), ("publish", "publish")]
    assert submitted(world, method, "discard", "publish") == [
        *only_critic,
        *only_critic,
        ("train", method),
        ("critic", method),
        ("publish", "publish"),
    ]


def test_every_trained_role_streams_and_forgets_what_it_did_for_a_rollout_that_was_lost(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.roles["critic"] = Critic()
    world.driver(replace(PIPELINED, roles=replace(TWO_TRAINED, passes=(), stream_gradients=True))).run()
    calls = submitted(world, "stream", "finish_stream", "fetch")
    both = [[(role, method) for role in ("train", "critic")] for method in ("stream", "finish_stream")]
    assert calls == [*both[0], *both[1]] * 3
    (tmp_path / "again").mkdir()
    world = World(tmp_path / "again")
    world.roles["critic"] = Critic(PayloadLostError("a payload is lost"))
    world.driver(replace(PLAN, roles=TWO_TRAINED, max_rollout_retries=1, num_rollouts=1)).run()
    assert submitted(world, "discard") == [("train", "discard"), ("critic", "discard")]


def test_streamed_gradients_are_finished_without_fetching_the_batch(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.driver(replace(PIPELINED, roles=RolePlan(stream_gradients=True))).run()
    calls = submitted(world, "stream", "fetch", "log_probs", "train", "finish_stream")
    assert calls == [("train", "stream"), ("train", "finish_stream")] * 3


def test_a_role_that_dies_is_replaced_and_does_its_work_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    role = world.roles["ref"] = FakeRole(fails=2)
    result = world.driver(replace(PIPELINED, roles=RolePlan(dedicated_roles=("ref",), max_restarts=2))).run()
    assert result.steps == 3
    assert role.restarts == 2
    assert role.streamed == [0, 0, 0, 1, 2]
    again = [span.args for span in world.runtime.spans if span.method == "requeue_for_readers"]
    assert again == [("train_0", "ref")] * 2
    assert [text.partition(":")[0] for text in world.recorder.said] == [
        "ref died and is replaced (1 of 2)",
        "ref died and is replaced (2 of 2)",
    ]


def test_a_role_that_dies_too_often_ends_the_run_with_its_error(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.roles["ref"] = FakeRole(fails=2)
    with pytest.raises(WorkerError, match=r"(?s)the process died.*--role-max-restarts: 1 of 1 were used"):
        world.driver(replace(PIPELINED, roles=RolePlan(dedicated_roles=("ref",), max_restarts=1))).run()


def test_a_role_that_asks_for_a_global_restart_is_not_replaced(tmp_path: Path) -> None:
    world = World(tmp_path)
    role = world.roles["judge"] = FakeRole(fails=1, where="judge.stream")
    roles = RolePlan(dedicated_roles=("judge",), max_restarts=2, restarted_globally=("judge",))
    with pytest.raises(WorkerDiedError):
        world.driver(replace(PIPELINED, roles=roles)).run()
    assert role.restarts == 0


def test_a_role_named_like_rollout_workers_is_replaced_and_they_are_not(tmp_path: Path) -> None:
    world = World(tmp_path)
    role = world.roles["rollout_judge"] = FakeRole(fails=1, where="rollout_judge.stream")
    roles = RolePlan(dedicated_roles=("rollout_judge",), max_restarts=2)
    plan = replace(PIPELINED, roles=roles, passes_on_tickets=True)
    assert world.driver(plan).run().steps == 3
    assert role.restarts == 1
    assert [text.partition(":")[0] for text in world.recorder.said] == ["rollout_judge died and is replaced (1 of 2)"]


def test_the_deaths_of_each_role_are_counted_by_themselves(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.roles |= {"ref": FakeRole(fails=2), "advantages": FakeRole(fails=2, where="advantages.stream")}
    roles = RolePlan(dedicated_roles=("ref", "advantages"), max_restarts=2)
    assert world.driver(replace(PIPELINED, roles=roles)).run().steps == 3
    assert [world.roles[role].restarts for role in ("ref", "advantages")] == [2, 2]


TICKET_MODES = [Mode.LOCKSTEP, Mode.PIPELINED]


@pytest.mark.parametrize("mode", TICKET_MODES)
def test_a_role_that_died_between_two_rollouts_is_replaced_by_the_next_call(tmp_path: Path, mode: Mode) -> None:
    world = World(tmp_path)
    role = world.roles["ref"] = FakeRole(fails=1, fails_from=1)
    plan = replace(PIPELINED, schedule=Schedule(mode=mode, streams=mode is Mode.PIPELINED), roles=ONE_ROLE)
    assert world.driver(plan).run().steps == 3
    assert (role.restarts, role.streamed) == (1, [0, 1, 1, 2])


def test_a_role_whose_replacement_dies_at_its_start_ends_the_run_with_that_error(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.roles["ref"] = FakeRole(fails=1, stillborn=True)
    with pytest.raises(WorkerDiedError, match="the new process died"):
        world.driver(replace(PIPELINED, roles=ONE_ROLE)).run()


def test_the_death_of_what_a_role_was_calling_is_none_of_the_role(tmp_path: Path) -> None:
    world = World(tmp_path)
    role = world.roles["ref"] = FakeRole(fails=1, where="buffer.take")
    with pytest.raises(WorkerDiedError, match="buffer"):
        world.driver(replace(PIPELINED, roles=ONE_ROLE)).run()
    assert role.restarts == 0


def test_what_a_role_raises_is_no_death_and_ends_the_run(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.roles["ref"] = Failing(WorkerError("ZeroDivisionError: by zero", where="ref.stream"))
    with pytest.raises(WorkerError, match="by zero"):
        world.driver(replace(PIPELINED, roles=ONE_ROLE)).run()
    assert world.recorder.said == []


@pytest.mark.parametrize("mode", TICKET_MODES)
def test_a_role_that_hangs_is_named_when_its_deadline_passes(tmp_path: Path, mode: Mode) -> None:
    world = World(tmp_path)
    world.roles["ref"] = FakeRole()
    plan = replace(PIPELINED, schedule=Schedule(mode=mode, streams=mode is Mode.PIPELINED), roles=ONE_ROLE)
    world.runtime = VirtualRuntime(world.roles, lambda role, method, args: 1e9 if role == "ref" else 1.0)
    with pytest.raises(DeadlineError) as caught:
        Driver(plan, world.runtime, world.recorder).run()
    assert "ref.stream" in caught.value.where


def test_a_checkpoint_that_takes_too_long_is_told_with_the_option_that_gives_it_more_time(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.runtime = VirtualRuntime(world.roles, lambda role, method, args: 1e9 if role == "save" else 1.0)
    with pytest.raises(DeadlineError, match=r"(?s)save\.save: no answer within .*--save-timeout-s"):
        Driver(replace(PLAN, save_interval=1), world.runtime, world.recorder).run()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_next_step_goes_on_while_an_asynchronous_checkpoint_is_written(tmp_path: Path, asynchronous: bool) -> None:
    world = World(tmp_path)
    seal_s = 20.0  # a step takes 18, and saves follow the steps 1 to 3
    world.runtime = VirtualRuntime(
        world.roles, lambda role, method, args: seal_s if method == "seal" else cost(role, method, args)
    )
    plan = replace(PLAN, evaluate=False, save_interval=1, async_save=asynchronous)
    Driver(plan, world.runtime, world.recorder).run()
    spans = world.runtime.spans
    saves, seals, trains = ([s for s in spans if s.method == method] for method in ("save", "seal", "train"))
    assert [span.args for span in saves] == [(1, False), (2, False), (3, False)]
    assert len(seals) == 3
    for seal, save in zip(seals, saves[1:], strict=False):
        assert seal.end <= save.start  # one checkpoint after another
    assert seals[-1].end <= world.runtime.now()  # the run waits for the last
    assert [seal.end <= train.start for seal, train in zip(seals, trains[1:], strict=False)] == [not asynchronous] * 2
    if asynchronous:  # 18 s of each seal pass in a step, and 2 before the next save
        assert [metrics["perf/save_time"] for metrics in world.recorder.metrics] == [0.0, 2.0, 2.0]


def test_a_checkpoint_that_cannot_be_written_ends_the_run_in_the_step_that_goes_on(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.saves.seal = Failing(CheckpointError("no space", where="train 1")).seal  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="no space"):
        world.driver(replace(PLAN, evaluate=False, save_interval=1, async_save=True)).run()
    assert list(world.saves.saved) == [1]


def test_an_error_of_a_later_step_waits_for_the_checkpoint_that_is_written(tmp_path: Path) -> None:
    world = World(tmp_path)
    times = {"seal": 25.0, "publish": 1.0}
    world.runtime = VirtualRuntime(
        {**world.roles, "publish": Failing(WorkerDiedError("it died", where="publish"))},
        lambda role, method, args: times.get(method, 0.0),
    )
    with pytest.raises(WorkerDiedError, match="it died"):
        Driver(replace(PLAN, save_interval=1, async_save=True), world.runtime, world.recorder).run()
    assert world.runtime.now() == 25.0  # since the save at 0


def test_a_checkpoint_is_waited_for_although_what_is_watched_stays_broken(tmp_path: Path) -> None:
    class Breaking(Saves):
        """The engines are gone once a checkpoint is sealed."""

        def seal(self) -> None:
            super().seal()
            runtime.look(EngineError("no engine is left"))

    world = World(tmp_path)
    world.roles["save"] = Breaking(world.state)
    runtime = VirtualRuntime(world.roles, lambda role, method, args: 25.0 if method == "seal" else 0.0)
    with pytest.raises(EngineError, match="no engine is left"):
        Driver(replace(PLAN, save_interval=1, async_save=True), runtime, world.recorder).run()
    assert runtime.now() == 25.0


@pytest.mark.parametrize("plan", [PLAN, PIPELINED], ids=["lockstep", "pipelined"])
def test_the_tickets_of_rollouts_that_were_trained_on_are_forgotten(tmp_path: Path, plan: RunPlan) -> None:
    world = World(tmp_path)
    driver = world.driver(replace(plan, evaluate=False, records=False))
    driver.run()
    maps = [part for part in vars(driver).values() if isinstance(part, dict)]
    assert [value for part in maps for value in part.values() if isinstance(value, Ticket)] == []


def test_every_phase_is_on_the_timeline(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.driver(replace(PLAN, num_rollouts=1, evaluate=False, save_interval=1)).run()
    spans = {(role, span.name): (span.rollout_id, span.start, span.end) for role, span in world.recorder.spans}
    assert spans == {
        ("rollout", "rollout"): (0, 0.0, 10.0),
        ("train", "old_log_probs"): (0, 10.0, 12.0),
        ("train", "update"): (0, 12.0, 17.0),
        ("save", "save"): (1, 17.0, 17.0),
        ("publish", "publish"): (1, 17.0, 18.0),
    }


class Signalled(FakeRollouts):
    """Gets a signal while it runs the ticket of rollout 1, and then goes on for ever; with ``ends``, it ends."""

    def __init__(self, state: BufferState, stop: StopRequest, number: int, *, ends: bool = False) -> None:
        super().__init__(state)
        self._stop, self._number, self._ends = stop, number, ends

    def run(self, ticket: Ticket) -> Any:
        if ticket.rollout_id != 1 or ticket.evaluation:
            return super().run(ticket)
        self._stop.take(self._number)
        if self._ends:
            return super().run(ticket)
        self._state.get_samples(ticket, 2)
        return asyncio.Event().wait()


def stopped(world: World, number: int, **changes: Any) -> tuple[Driver, StopRequest]:
    stop = StopRequest()
    world.roles["rollout"] = Signalled(world.state, stop, number, ends=number == signal.SIGINT)
    world.driver(PLAN)
    return Driver(replace(PLAN, evaluate=False, **changes), world.runtime, world.recorder, stop), stop


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_with_a_deadline_ends_a_rollout_at_once_and_saves_the_last_step(
    tmp_path: Path, number: signal.Signals
) -> None:
    world = World(tmp_path)
    driver, stop = stopped(world, number)
    result = driver.run()
    assert (result.steps, result.signal, list(world.saves.saved), world.saves.sealed) == (1, number, [1], [1])
    assert world.runtime.now() == 18.0  # of the first step
    assert world.recorder.said == [f"{number.name}: the run ends within 30 s; another signal ends it at once"]
    assert [entry.state for entry in entries(world.state.ledger).values()].count("pending") == 2
    assert not stop.can_wait


def test_a_signal_with_a_deadline_ends_a_run_whose_step_takes_longer(tmp_path: Path) -> None:
    world = World(tmp_path)
    stop = StopRequest()

    class Slow(FakeTrain):
        def train(self) -> Mapping[str, float]:
            stop.take(signal.SIGTERM)
            return {}

    world.roles["train"] = Slow()
    world.runtime = VirtualRuntime(world.roles, lambda role, method, args: 40.0 if method == "train" else 0.0)
    with pytest.raises(EndedBySignal) as ended:
        Driver(replace(PLAN, evaluate=False), world.runtime, world.recorder, stop).run()
    assert ended.value.code == 128 + signal.SIGTERM
    assert world.runtime.now() == pytest.approx(30.0, abs=1.0)  # since the signal, by a real clock
    assert world.saves.saved == {}


def test_ctrl_c_waits_for_the_step_however_long_and_another_signal_does_not(tmp_path: Path) -> None:
    world = World(tmp_path)
    driver, stop = stopped(world, signal.SIGINT)
    with pytest.raises(EndedBySignal):
        stop.take(signal.SIGINT)  # nothing runs yet
    result = driver.run()
    assert (result.steps, result.signal, list(world.saves.saved)) == (2, signal.SIGINT, [2])
    (tmp_path / "again").mkdir()
    world = World(tmp_path / "again")
    driver, stop = stopped(world, signal.SIGINT)
    publisher = world.publisher.publish
    world.publisher.publish = lambda version: stop.take(signal.SIGTERM) if version == 2 else publisher(version)  # type: ignore
    with pytest.raises(EndedBySignal) as ended:
        driver.run()
    assert ended.value.code == 128 + signal.SIGTERM


@pytest.mark.parametrize("streams", [False, True])
def test_engines_that_all_lack_weights_during_a_rollout_get_the_newest_ones_again(
    tmp_path: Path, streams: bool
) -> None:
    class Starving(FakeRollouts):
        """In rollout 1 every engine is a replacement, until its version is published again."""

        starved: int | None = None

        async def run(self, ticket: Ticket) -> Any:
            if ticket.rollout_id == 1:
                self.starved = 1
                world.runtime.look()
                while self.starved is not None:
                    await world.runtime.loop.sleep_until(world.runtime.now() + 1.0)
            return super().run(ticket)

    class Feeding(FakePublisher):
        def publish(self, version: int) -> dict[str, float]:
            rollouts.starved = None
            return super().publish(version)

    world = World(tmp_path)
    rollouts = world.roles["rollout"] = Starving(world.state)
    publisher = world.roles["publish"] = Feeding()
    world.driver(PLAN)
    plan = replace(PIPELINED if streams else PLAN, evaluate=False)
    driver = Driver(plan, world.runtime, world.recorder, starved=lambda: rollouts.starved)
    if streams:  # the trainer works on the rollout
        with pytest.raises(WorkerDiedError, match="no engine has the weights of version 1"):
            driver.run()
        return
    assert driver.run().steps == 3
    assert publisher.versions == [1, 1, 2, 3]
    assert world.recorder.said == ["version 1 is published again, as every engine that had 1 is gone"]


def test_production_starts_again_once_the_workers_of_a_lost_ticket_have_ended(tmp_path: Path) -> None:
    """Of two workers that share a ticket one fails at once, the other works on for 30 seconds."""
    started: list[float] = []
    ended: list[float] = []

    class Failing(FakeRollouts):
        async def run(self, ticket: Ticket) -> Any:
            started.append(world.runtime.now())
            if len(started) == 1:
                raise PayloadLostError("a payload is lost")
            if len(started) == 2:
                await world.runtime.loop.sleep_until(world.runtime.now() + 30.0)
                ended.append(world.runtime.now())
                return {}, []
            return super().run(ticket)

    world = World(tmp_path)
    world.roles["rollout"] = Failing(world.state)
    plan = replace(PLAN, num_rollouts=1, evaluate=False, workers_per_ticket=2, max_rollout_retries=1)
    assert world.driver(plan).run().steps == 1
    assert len(started) == 4
    assert min(started[2:]) >= ended[0]
