"""Trained roles and engines that hold a device's memory in turn, on virtual time and over the real Buffer state."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.state import BufferState
from buffer_rl.data.source import EvalSource, PromptDataSource
from buffer_rl.driver import offload
from buffer_rl.driver.driver import Driver
from buffer_rl.driver.offload import GIVE, HELD, MemoryTurns, Phase, Row
from buffer_rl.driver.tasks import Calls
from buffer_rl.errors import PayloadLostError, TrainError, WorkerDiedError
from buffer_rl.kinds.trainer import Memory
from buffer_rl.options.section import compose
from buffer_rl.plan.schedule import Mode, RolePlan, RunPlan, RunResult, Schedule, parse_early_stop
from buffer_rl.records.groups import Ticket
from harness.fake_roles import FakePublisher, FakeRollouts, FakeTrain
from harness.memory_trial import MemoryTrial, References, drawn_trial, run_trial
from harness.schedule_trial import Setting
from harness.shared_device import ENGINES, PASSES, STEP, WEIGHTS, Needs, SharedDevice, on_device
from harness.virtual_time import VirtualRuntime

PLAN = RunPlan(
    num_rollouts=3,
    schedule=Schedule(mode=Mode.LOCKSTEP),
    roles=RolePlan(max_restarts=3),
    publish_at_start=True,
    compare_log_probs=True,
    ref_update_interval=1,
    evaluate=True,
    eval_interval=2,
    offload_train=True,
    offload_rollout=True,
    saves=True,
    save_interval=1,
    max_rollout_retries=2,
    passes_on_tickets=False,
    rollout_timeout_s=100,
    train_timeout_s=100,
    publish_timeout_s=50,
    save_timeout_s=50,
    buffer_timeout_s=5,
)
TWO = RolePlan(
    trained=("train", "critic"), passes=(("train", "ref"), ("critic", "critic")), estimates=True, max_restarts=3
)


class Train(FakeTrain):
    """lost: errors of ``fetch``."""

    def __init__(self, *lost: Exception) -> None:
        super().__init__()
        self._lost = list(lost)

    def fetch(self, rollout_id: int) -> None:
        if self._lost:
            raise self._lost.pop(0)


class Rollouts(FakeRollouts):
    """dies_in: tasks in which the worker dies, once each."""

    def __init__(self, state: BufferState, scores: tuple[float, ...], dies_in: list[str]) -> None:
        super().__init__(state, scores)
        self._dies_in = dies_in

    def run(self, ticket: Ticket) -> Any:
        if ticket.task in self._dies_in:
            self._dies_in.remove(ticket.task)
            raise WorkerDiedError("the process died", where="rollout.run")
        return super().run(ticket)

    def restart(self) -> None:
        """There is another one."""


class Saves:
    """Keeps nothing."""

    def save(self, step: int, owes_evaluation: bool) -> None: ...
    def save_next(self) -> None: ...
    def seal(self) -> None: ...


class Observer:
    """Hears everything, keeps the metrics of steps."""

    def __init__(self) -> None:
        self.metrics: list[Mapping[str, float]] = []

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.metrics.append(metrics)

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def run(
    folder: Path,
    plan: RunPlan = PLAN,
    *lost: Exception,
    dies_in: tuple[str, ...] = (),
    scores: tuple[float, ...] = (0.0,),
    device_class: type[SharedDevice] = SharedDevice,
) -> tuple[SharedDevice, RunResult, Observer]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(4)))
    args: Any = compose(CORE_SECTIONS)(
        prompt_data=str(path), rollout_batch_size=2, n_samples_per_prompt=2, eval_prompt_data=[f"held={path}"]
    )
    evals = EvalSource(args)
    state = BufferState(
        PromptDataSource(args), ledger=Ledger.in_memory(), groups_per_step=2, eval_groups=lambda: evals.groups("held")
    )
    device = device_class(plan.roles.trained, train=plan.offload_train, rollout=plan.offload_rollout)
    observer = Observer()
    roles: dict[str, Any] = {
        "buffer": state,
        "rollout": Rollouts(state, scores, list(dies_in)),
        "train": Train(*lost),
        "critic": Train(),
        "publish": FakePublisher(),
        "save": Saves(),
        "reference": References(),
    }
    device.runtime = VirtualRuntime(on_device(device, roles, asks=plan.publish_each_step))
    watched: Any = observer
    result = Driver(plan, device.runtime, watched).run()
    assert device.faults == []
    assert "weights" in device.held["train"], "the weights are exported when the driver has ended"
    return device, result, observer


BEGIN = ["train -frozen,optimizer", "engines +weights", "publish"]
"""A single trained role begins with all of its memory."""
GENERATE = ["train -weights", "engines +cuda_graph,kv_cache"]
LOG_PROBS = ["engines -cuda_graph,kv_cache,weights", "train +frozen,weights"]
UPDATE = ["train -frozen", "train +optimizer", "train"]
REFERENCE = ["train -optimizer", "train +frozen", "update"]
SAVE = ["train -frozen", "train +optimizer", "save"]
PUBLISH = ["train -optimizer", "engines +weights", "publish"]
STEP_OF = [*LOG_PROBS, *UPDATE, *REFERENCE, *SAVE, *PUBLISH, *GENERATE]


def test_the_memory_changes_hands_before_each_phase_and_stays_between(tmp_path: Path) -> None:
    device, result, observer = run(tmp_path)
    first = ["rollout", *LOG_PROBS, "compare", *STEP_OF[len(LOG_PROBS) :]]
    later = ["rollout", *STEP_OF]
    begin, end = [*BEGIN, *GENERATE, "evaluate"], ["evaluate", *LOG_PROBS]
    assert device.calls == [*begin, *first, *later, "evaluate", *later, *end]
    assert result.steps == 3
    # Engines release and the trainer wakes up, and three times one of its parts goes and another one comes; then the
    # optimizer's part goes, and the engines take back the memory of weights. What the first and the last step add to
    # this, sleep and the cache, is before an evaluation; the second rollout has it in its step.
    first_s = 5 + 4 + 3 * (3 + 4) + 3 + 6
    assert [metrics["perf/offload_time"] for metrics in observer.metrics] == [first_s, first_s + 3 + 6, first_s]


def test_each_side_alone_frees_its_own_memory_and_without_either_nothing_is_called(tmp_path: Path) -> None:
    plan = replace(PLAN, num_rollouts=1, evaluate=False, ref_update_interval=None)
    device, _, _ = run(tmp_path, replace(plan, offload_rollout=False))
    wakes, step = ["train +frozen,weights", "compare"], [*UPDATE, "save", "train -optimizer", "publish"]
    assert device.calls == ["train -frozen,optimizer", "publish", "train -weights", "rollout", *wakes, *step]
    device, _, _ = run(tmp_path, replace(plan, offload_train=False))
    step = ["engines -cuda_graph,kv_cache,weights", "compare", "train", "save", "engines +weights", "publish"]
    assert device.calls == ["engines +weights", "publish", "engines +cuda_graph,kv_cache", "rollout", *step]
    device, _, observer = run(tmp_path, replace(plan, offload_train=False, offload_rollout=False))
    assert device.calls == ["publish", "rollout", "compare", "train", "save", "publish"]
    assert "perf/offload_time" not in observer.metrics[0]


def test_while_the_critic_trains_or_is_saved_the_policy_holds_nothing_and_the_other_way_round(tmp_path: Path) -> None:
    plan = replace(PLAN, num_rollouts=1, evaluate=False, compare_log_probs=False, roles=TWO)
    device, _, observer = run(tmp_path, plan)
    begin = ["train +weights", "engines +weights", "publish", *GENERATE, "rollout"]  # each slept once it was built
    passes = [*LOG_PROBS, "critic +frozen,weights", "train ref", "critic critic"]
    policy = ["train -frozen", "critic -frozen,weights", "train +optimizer", "train"]
    critic = ["train -optimizer,weights", "critic +optimizer,weights", "critic"]
    reference = ["critic -optimizer,weights", "train +frozen,weights", "update"]
    saves = [*SAVE, *critic[:2], "save next"]
    publish = ["critic -optimizer,weights", "train +weights", "engines +weights", "publish"]
    assert device.calls == [*begin, *passes, *policy, *critic, *reference, *saves, *publish]
    apart, _, _ = run(tmp_path, replace(plan, offload_train=False, offload_rollout=False))
    assert [call for call in device.calls if "+" not in call and "-" not in call] == apart.calls
    assert observer.metrics[0]["perf/update_time"] == 2 * 2.0  # one after another


def test_a_rollout_that_was_lost_in_the_trainers_turn_is_produced_again_from_weights_that_are_published_again(
    tmp_path: Path,
) -> None:
    plan = replace(PLAN, num_rollouts=1, evaluate=False, ref_update_interval=None, compare_log_probs=False)
    lost = [PayloadLostError("gone", where="storage-0"), PayloadLostError("gone", where="storage-0")]
    device, result, _ = run(tmp_path, plan, *lost)
    produced = [*GENERATE, "rollout", *LOG_PROBS]
    again = ["train -frozen", "engines +weights", "publish", *produced]
    assert device.calls == [*BEGIN, *produced, *again, *again, *UPDATE, "save", *PUBLISH]
    assert result.steps == 1


@pytest.mark.parametrize("task", ["train_0", "eval_0"])
def test_a_generation_whose_worker_died_is_made_again_while_the_trainer_sleeps(tmp_path: Path, task: str) -> None:
    device, result, _ = run(tmp_path, replace(PLAN, num_rollouts=1), dies_in=(task,))
    generated = ["evaluate", "rollout", "rollout"] if task == "train_0" else ["evaluate", "evaluate", "rollout"]
    begin = [*BEGIN, *GENERATE, *generated, *LOG_PROBS]
    assert device.calls[: len(begin)] == begin
    assert result.steps == 1


def test_a_run_that_stops_early_saves_with_the_trainer_awake(tmp_path: Path) -> None:
    stop = parse_early_stop("eval/held>=0.5")
    plan = replace(PLAN, save_interval=None, early_stop=stop, ref_update_interval=None)
    device, result, _ = run(tmp_path, plan, scores=(0.0, 0.0, 0.9))
    assert (result.steps, result.stopped_early) == (2, True)
    assert device.calls[-4:] == ["evaluate", LOG_PROBS[0], "train +optimizer,weights", "save"]


def test_rollouts_that_never_ask_an_engine_leave_the_memory_to_the_trainer(tmp_path: Path) -> None:
    plan = replace(PLAN, num_rollouts=2, publish_each_step=False, eval_before_train=False, compare_log_probs=False)
    plan = replace(plan, ref_update_interval=None)
    device, _, _ = run(tmp_path, plan)
    first, later = ["train -optimizer", *UPDATE, "save"], ["train -optimizer", "train +frozen", *UPDATE, "save"]
    end = [*PUBLISH, *GENERATE, "evaluate", *LOG_PROBS]
    assert device.calls == ["rollout", *first, "rollout", *later, *end]


def test_an_error_in_a_turn_ends_the_run(tmp_path: Path) -> None:
    class Insomniac(SharedDevice):
        async def give(self, *args: Any) -> None:
            raise TrainError("there are gradients of an unfinished step")

    with pytest.raises(TrainError, match="unfinished step"):
        run(tmp_path, device_class=Insomniac)


# -- whole runs, and any order of phases ---------------------------------------------------------------


@pytest.mark.parametrize("first", range(0, 30, 10))
def test_whatever_happens_in_a_run_a_device_never_holds_more_than_one_row(tmp_path: Path, first: int) -> None:
    for seed in range(first, first + 10):
        devices = run_trial(drawn_trial(seed), tmp_path)
        assert [fault for device in devices for fault in device.faults] == [], seed


def test_a_signal_in_any_move_of_memory_waits_for_its_end_and_the_last_step_is_saved(tmp_path: Path) -> None:
    """With rollouts after an evaluation and without one, and of steps that are saved and that are not."""
    setting = Setting(schedule=PLAN.schedule, groups_per_step=2, num_steps=3, eval_interval=2)
    same = ("offload_train", "offload_rollout", "publish_at_start", "saves")
    changes = {**{name: getattr(PLAN, name) for name in same}, "roles": TWO, "save_on_exit_s": 1e6, "save_interval": 2}
    trial = MemoryTrial(setting=setting, changes=changes, lost=frozenset(), signal_in=None)
    (undisturbed,) = run_trial(trial, tmp_path)
    num_moves = len([call for call in undisturbed.calls if " -" in call or " +" in call])
    num_ended = 0
    for move in range(num_moves):
        devices = run_trial(replace(trial, signal_in=move), tmp_path)
        assert [fault for device in devices for fault in device.faults] == [], move
        num_ended += len(devices) > 1  # and was continued; before the first publication and at the end a run cannot
    assert num_ended > num_moves / 2


WORK: dict[Phase, Needs] = {
    Phase.LOG_PROBS: {"train": PASSES, "critic": PASSES},
    Phase.PUBLISH: {"train": WEIGHTS, "engines": WEIGHTS},
    Phase.GENERATE: {"engines": ENGINES},
}
"""What the work of a phase needs; that of TRAIN is one role's."""
Walk = Sequence[tuple[Phase, str]]
"""Phases, one after another; of TRAIN with the role that trains."""


def walk(
    phases: Walk, roles: RolePlan = TWO, turns_class: type[MemoryTurns] = MemoryTurns, **options: Any
) -> SharedDevice:
    """Go through the phases, each with its work."""
    plan = replace(PLAN, roles=roles, **options)
    device = SharedDevice(roles.trained, train=plan.offload_train, rollout=plan.offload_rollout)
    device.runtime = runtime = VirtualRuntime(on_device(device, dict.fromkeys(roles.trained)))

    async def send() -> None:
        device.version = 1
        async with device.using("publish", WORK[Phase.PUBLISH]):
            await device.wait(1.0)

    turns = turns_class(plan, lambda name: nullcontext(), Calls(plan, runtime).call, send)
    takes_part = {Phase.LOG_PROBS: roles.trained, Phase.PUBLISH: ("train",)}

    async def main() -> None:
        for phase, role in phases:
            if phase is Phase.GENERATE:
                await turns.generation(evaluation=True)
                device.require(device.version is not None, "the engines lack every version")
            else:
                await turns.enter(phase, takes_part.get(phase, (role,)))
            if phase is Phase.PUBLISH:
                await send()
            needs = {holder: tags for holder, tags in WORK.get(phase, {role: STEP}).items() if holder in device.held}
            async with device.using(phase, needs):
                await device.wait(1.0)

    runtime.run(main, lambda error: None)
    assert device.faults == []
    return device


TWO_TRAINED = st.tuples(st.sampled_from(Phase), st.sampled_from(["train", "critic"]))
ONE_TRAINED = st.tuples(st.sampled_from(Phase), st.just("train"))
SIDES = st.sampled_from([(True, True), (True, False), (False, True)])


@settings(deadline=None)
@given(st.lists(TWO_TRAINED, max_size=12), SIDES)
def test_in_any_order_of_phases_two_trained_roles_hold_no_more_than_one_row(walked: Walk, sides: Any) -> None:
    walk(walked, offload_train=sides[0], offload_rollout=sides[1])


@settings(deadline=None)
@given(st.lists(ONE_TRAINED, max_size=12), SIDES)
def test_in_any_order_of_phases_one_trained_role_holds_no_more_than_one_row(walked: Walk, sides: Any) -> None:
    walk(walked, PLAN.roles, offload_train=sides[0], offload_rollout=sides[1])


PLACES = [(phase, role) for phase in Phase for role in ("train", "critic") if phase is Phase.TRAIN or role == "train"]
EVERYWHERE = [place for start in PLACES for end in PLACES for place in (start, end)]
"""Each way from a row to another one, and back to it."""


class Swapped(MemoryTurns):
    """Takes, and gives up then."""

    given: Mapping[str, frozenset[str]]

    async def _change(self, methods: tuple[Any, Any], parts: Mapping[str, frozenset[str]]) -> None:
        if methods == GIVE:
            self.given = parts
        else:
            await super()._change(methods, parts)
            await super()._change(GIVE, self.given)


def forgetting(tag: str) -> type[MemoryTurns]:
    """One that gives up all but a tag."""

    class Forgetful(MemoryTurns):
        async def _change(self, methods: tuple[Any, Any], parts: Mapping[str, frozenset[str]]) -> None:
            kept = {holder: tags - {tag} if methods == GIVE else tags for holder, tags in parts.items()}
            await super()._change(methods, kept)

    return Forgetful


MUTANTS: dict[str, type[MemoryTurns]] = {
    "swapped": Swapped,
    **{tag: forgetting(tag) for tag in ("optimizer", "frozen", "weights", "kv_cache")},
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_one_that_swaps_the_order_or_forgets_a_tag_is_refused(mutant: str) -> None:
    walk(EVERYWHERE)
    with pytest.raises(AssertionError, match=r"no row has all|has (frozenset|Memory)"):
        walk(EVERYWHERE, turns_class=MUTANTS[mutant])


CELLS = [(phase, tag) for phase in Phase for tag in (*Memory, *(f"engines {tag}" for tag in sorted(ENGINES)))]


@pytest.mark.parametrize(("phase", "tag"), CELLS)
def test_a_table_with_another_cell_is_refused(phase: Phase, tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = HELD[phase]
    if isinstance(tag, Memory):
        changed = Row(row.trained ^ {tag}, row.engines)
    else:
        changed = Row(row.trained, row.engines ^ {tag.split()[1]})
    monkeypatch.setattr(offload, "HELD", {**HELD, phase: changed})
    with pytest.raises(AssertionError, match=r"no row has all|lack"):
        walk(EVERYWHERE)
