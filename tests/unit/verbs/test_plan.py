"""``buffer-rl plan``: costs from a timeline, runs in virtual time with them, and what the verb says."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from buffer_rl.cli import main
from buffer_rl.errors import ConfigError, DataError
from buffer_rl.observe.costs import Costs, Recorded, Shape, fitted, least_squares
from buffer_rl.observe.timeline import TraceFile, WorkSpan, read_trace
from buffer_rl.plan.schedule import Mode, Schedule
from buffer_rl.verbs.plan.forecast import Forecast, Setup, calibrated, forecast, write_prompts
from buffer_rl.verbs.plan.verb import make_plan, options_of, parse_schedule, setup_of, splits_of
from harness.schedule_trial import Setting
from harness.schedule_trial import run as run_trial

LOCKSTEP = Schedule(mode=Mode.LOCKSTEP)
ONE_STEP_OFF = Schedule(mode=Mode.ONE_STEP_OFF, target=1, max_staleness=1, drains=True)
ASYNC = Schedule(mode=Mode.ASYNC, target=1, max_staleness=2)
KNOWN = Costs(
    decode_step=0.02,
    decode_token=0.004,
    score=0.05,
    ticket=0.1,
    prepare=0.03,
    update_fixed=0.5,
    update_token=0.01,
    publish=0.2,
    pause=0.1,
    rest=0.04,
)
SHAPE = Shape(groups=4, samples=2, engines=2, ranks=2)


def setup(schedule: Schedule = LOCKSTEP, **changes: Any) -> Setup:
    given = {"engines": 1, "ranks": 1, "groups": 4, "samples": 2, "slots": 64, **changes}
    return Setup(schedule=schedule, **given)


def recorded(costs: Costs = KNOWN, lengths: Sequence[Sequence[int]] = ((10, 10),), **changes: Any) -> Recorded:
    given = {"drops": 0.0, "passes": (), "num_steps": 10, "step_s": 1.0, "ticket_s": 1.0, "update_s": 1.0, **changes}
    return Recorded(costs=costs, lengths=lengths, **given)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path)


def of(prompts: Path, schedule: Schedule = LOCKSTEP, costs: Costs = KNOWN, **changes: Any) -> Forecast:
    """10 steps. lengths, drops, passes: of the recorded run."""
    kept = {name: changes.pop(name) for name in ("lengths", "drops", "passes") if name in changes}
    return forecast(recorded(costs, **kept), costs, setup(schedule, **changes), 10, prompts)


# -- a recorded run -----------------------------------------------------------------------------------


def write_run(folder: Path, num_steps: int = 12, options: Mapping[str, Any] | None = None, varies: bool = True) -> Path:
    """The folder of a run whose steps take what ``KNOWN`` says, of other numbers of tokens each."""
    folder.mkdir(exist_ok=True)
    rng, now, lines = Random(3), 100.0, []
    with TraceFile(folder) as trace:
        for step in range(num_steps):
            mean, longest = (rng.uniform(5, 20), rng.choice([24, 32, 40])) if varies else (10.0, 24.0)
            tokens = mean * SHAPE.groups * SHAPE.samples
            generated = KNOWN.decode_step * longest + KNOWN.decode_token * tokens / SHAPE.engines
            updated = KNOWN.update_fixed + KNOWN.update_token * tokens / SHAPE.ranks
            times = {
                "rollout": KNOWN.ticket + generated,
                "generate": generated,
                "reward": KNOWN.score * SHAPE.groups,
                "train": KNOWN.prepare + updated,
                "update": updated,
                "publish": KNOWN.publish,
            }
            trace.write("rollout", [span("rollout", step, now, now + times["rollout"])])
            now += times["rollout"] + KNOWN.prepare
            trace.write("train", [span("update", step, now, now + updated)])
            now += updated
            spans = [span("publish", step + 1, now, now + KNOWN.publish)]
            spans.append(span("pause", step + 1, now + KNOWN.publish - KNOWN.pause, now + KNOWN.publish))
            trace.write("publish", spans)
            now += KNOWN.publish + KNOWN.rest
            lines += [
                {"step": step, "kind": "rollout", "rollout/response_len/mean": mean, "rollout/num_groups": 4.0}
                | {"rollout/response_len/max": longest, "rollout/generated_tokens": tokens},
                {"step": step, "kind": "perf", "perf/step_time": 1.0}
                | {f"perf/{name}_time": seconds for name, seconds in times.items()},
            ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    changed = {
        "--rollout-batch-size": 4,
        "--n-samples-per-prompt": 2,
        "--rollout-num-engines": 2,
        "--num-train-ranks": 2,
    }
    facts = {"started": "", "version": "1", "changed": {**changed, **(options or {})}}
    (folder / "run.json").write_text(json.dumps(facts))
    return folder


def span(name: str, number: int, start: float, end: float) -> WorkSpan:
    return WorkSpan(name=name, rollout_id=number, start=start, end=end)


def test_the_fit_recovers_the_costs_of_a_timeline_that_was_made_with_them(tmp_path: Path) -> None:
    found = fitted(write_run(tmp_path / "run"), SHAPE)
    for name in KNOWN.__slots__:
        if name != "forward_token":
            assert getattr(found.costs, name) == pytest.approx(getattr(KNOWN, name), rel=1e-3, abs=1e-4), name
    assert found.num_steps == 11
    assert found.drops == 0.0
    assert max(found.residuals.values()) < 1e-3


def test_equal_steps_tell_no_fixed_part_and_the_fit_says_so(tmp_path: Path) -> None:
    found = fitted(write_run(tmp_path / "run", varies=False), SHAPE)
    tokens = 10.0 * 8 / 2
    generated = KNOWN.decode_step * 24.0 + KNOWN.decode_token * tokens
    assert found.costs.update_fixed == pytest.approx(0.0, abs=1e-3)
    assert found.costs.decode_step == pytest.approx(generated / 2 / 24.0, rel=1e-3)
    assert found.costs.decode_token == pytest.approx(generated / 2 / tokens, rel=1e-3)
    assert found.costs.update_token == pytest.approx(KNOWN.update_token + KNOWN.update_fixed / tokens, rel=1e-3)
    assert any("fixed part of an update" in text for text in found.unknown)
    assert any("a decoding step takes whatever its batch" in text for text in found.unknown)
    assert any("lengths of single responses" in text for text in found.unknown)


def test_samples_that_the_run_shows_give_the_lengths_of_responses(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    rows = [("a", 3), ("a", 5), ("b", 7)]
    records = [{"rollout_id": 0, "uid": uid, "versions": [[0, 0, length]], "kind": "train"} for uid, length in rows]
    records.append({"rollout_id": 0, "uid": "held", "versions": [[0, 0, 99]], "kind": "eval"})
    (folder / "samples.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert fitted(folder, SHAPE).lengths == [[3, 5], [7]]


def test_one_step_far_from_the_others_does_not_change_a_fit() -> None:
    rows = [(1.0, float(x)) for x in range(1, 12)]
    values = [2.0 + 3.0 * x for _, x in rows]
    values[4] += 100.0
    found = least_squares(rows, values, 0.5)
    assert (found.a, found.b) == pytest.approx((2.0, 3.0), rel=1e-4)
    assert found.residual == pytest.approx(0.0, abs=1e-4)
    assert found.is_determined


def test_noise_leaves_a_share_that_rows_hardly_tell_near_what_is_expected() -> None:
    """The values differ by a fifth at random, and the rows by a hundredth."""
    rng = Random(5)
    for _ in range(20):
        rows = [(1.0, 1.0 + rng.uniform(-0.01, 0.01)) for _ in range(12)]
        values = [rng.uniform(0.8, 1.2) for _ in rows]
        found = least_squares(rows, values, 0.5)
        assert 0.3 < found.a < 0.7
        assert found.a + found.b == pytest.approx(1.0, abs=0.1)
        assert not found.is_determined


def test_roles_with_processes_of_their_own_are_named_as_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    with TraceFile(folder, resume_step=12) as trace:
        trace.write("ref", [span("ref_log_probs", 3, 1.0, 2.0)])
    assert any(text.endswith("left out: ref") for text in fitted(folder, SHAPE).unknown)


def test_a_step_beside_a_checkpoint_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    whole = fitted(folder, SHAPE)
    end = read_trace(folder)["publish"][-1].end
    text = (folder / "trace.json").read_text().rstrip().removesuffix("]")
    event = {"ph": "X", "name": "save", "cat": "save", "ts": end * 1e6 - 1000, "dur": 10, "pid": 9, "tid": 1}
    (folder / "trace.json").write_text(f"{text},\n{json.dumps(event | {'args': {'rollout_id': 12}})}\n]\n")
    assert fitted(folder, SHAPE).num_steps == whole.num_steps - 1


def test_no_cost_is_negative() -> None:
    found = least_squares([(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)], [3.0, 2.0, 1.0], 0.5)
    assert (found.a, found.b) == pytest.approx((2.0, 0.0), rel=1e-3)


# -- virtual runs -------------------------------------------------------------------------------------


def test_a_lockstep_run_takes_the_sum_of_its_parts(prompts: Path) -> None:
    """8 responses of 10 tokens by one engine; their groups end together and are scored one after another."""
    generated = 10 * (KNOWN.decode_step + 8 * KNOWN.decode_token)
    ticket = KNOWN.ticket + generated + 4 * KNOWN.score
    updated = KNOWN.update_fixed + 80 * KNOWN.update_token
    found = of(prompts)
    assert found.update_s == pytest.approx(updated)
    assert found.ticket_s == pytest.approx(ticket)
    assert found.step_s == pytest.approx(ticket + KNOWN.prepare + updated + KNOWN.publish + KNOWN.rest)
    assert found.tokens_per_s == pytest.approx(80 / found.step_s)
    assert set(found.staleness) == {0}


def test_engines_and_ranks_divide_the_work(prompts: Path) -> None:
    found = of(prompts, engines=2, ranks=4)
    generated = 10 * (KNOWN.decode_step + 4 * KNOWN.decode_token)
    assert found.ticket_s == pytest.approx(KNOWN.ticket + generated + 4 * KNOWN.score)
    assert found.update_s == pytest.approx(KNOWN.update_fixed + 20 * KNOWN.update_token)


def test_an_engine_that_is_full_lets_requests_wait(prompts: Path) -> None:
    """Four slots: two groups, then two more."""
    found = of(prompts, slots=4, costs=replace(KNOWN, score=0.0))
    assert found.ticket_s == pytest.approx(KNOWN.ticket + 20 * (KNOWN.decode_step + 4 * KNOWN.decode_token))


def test_processes_that_share_cores_slow_each_other_down(prompts: Path) -> None:
    costs = replace(KNOWN, score=0.0)
    alone, shared = of(prompts, costs=costs, engines=4, cores=4), of(prompts, costs=costs, engines=4, cores=2)
    generated = 10 * (KNOWN.decode_step + 2 * KNOWN.decode_token)
    assert alone.ticket_s == pytest.approx(KNOWN.ticket + generated)
    assert shared.ticket_s == pytest.approx(KNOWN.ticket + 2 * generated)
    assert shared.update_s == pytest.approx(alone.update_s)  # one rank


def test_passes_add_their_time_and_pipelined_hides_it(prompts: Path) -> None:
    costs = replace(KNOWN, forward_token=0.004)
    lengths = ((2, 2), (30, 30))
    lockstep = of(prompts, costs=costs, passes=("ref_log_probs",), lengths=lengths)
    without = of(prompts, costs=costs, lengths=lengths)
    pipelined = of(
        prompts, Schedule(mode=Mode.PIPELINED, streams=True), costs, passes=("ref_log_probs",), lengths=lengths
    )
    assert lockstep.step_s == pytest.approx(without.step_s + 0.004 * lockstep.tokens)
    assert without.step_s < pipelined.step_s < lockstep.step_s


def test_streamed_gradients_train_on_the_same_tokens_in_less_time(prompts: Path) -> None:
    lengths = ((2, 2), (30, 30))
    streamed = Schedule(mode=Mode.PIPELINED, streams=True)
    lockstep, found = of(prompts, lengths=lengths), of(prompts, streamed, lengths=lengths, streams_gradients=True)
    assert found.tokens == lockstep.tokens
    assert found.step_s < lockstep.step_s
    assert found.step_s > max(lockstep.ticket_s, KNOWN.update_token * lockstep.tokens)


def test_asynchronous_runs_overlap_within_their_bound(prompts: Path) -> None:
    lockstep, found = of(prompts), of(prompts, ASYNC)
    assert found.step_s < lockstep.step_s
    assert 0 < max(found.staleness) <= 2
    assert found.step_s >= KNOWN.update_fixed + KNOWN.update_token * 80 + KNOWN.publish


@pytest.mark.parametrize(
    "schedule", [LOCKSTEP, ONE_STEP_OFF, ASYNC, Schedule(mode=Mode.ASYNC, target=2, max_staleness=4)]
)
def test_a_run_takes_as_long_as_with_the_virtual_engines_of_known_lengths(
    tmp_path: Path, prompts: Path, schedule: Schedule
) -> None:
    """Responses of 5 s by 4 places, updates of 5 s, publications of 0.5 s."""
    trial = Setting(schedule=schedule, groups_per_step=3, num_samples=2, num_steps=10, sigma=0.0)
    seconds = [metrics["perf/step_time"] for metrics in run_trial(trial, tmp_path).metrics]
    costs = Costs(decode_step=1.0, update_fixed=trial.train_s, publish=trial.load_s, pause=trial.load_s)
    found = of(prompts, schedule, costs, groups=3, slots=trial.slots, lengths=((5, 5),))
    assert found.step_s == pytest.approx(sum(seconds[3:]) / len(seconds[3:]))


@pytest.mark.parametrize("schedule", [LOCKSTEP, ASYNC])
def test_more_work_takes_longer_and_more_devices_do_not(prompts: Path, schedule: Schedule) -> None:
    base = of(prompts, schedule).step_s
    for name in ("decode_step", "decode_token", "score", "update_fixed", "update_token", "publish"):
        assert of(prompts, schedule, replace(KNOWN, **{name: 3 * getattr(KNOWN, name)})).step_s > base * 0.999, name
    assert of(prompts, schedule, lengths=((20, 20),)).step_s > base
    assert of(prompts, schedule, drops=0.5).step_s > base
    assert of(prompts, schedule, engines=2).step_s < base * 1.001
    assert of(prompts, schedule, ranks=2).step_s < base * 1.001
    assert of(prompts, schedule, cores=1).step_s > base * 0.999


def test_equal_forecasts_are_equal(prompts: Path) -> None:
    lengths = ((2, 9), (30, 1))
    assert of(prompts, ASYNC, lengths=lengths, drops=0.3) == of(prompts, ASYNC, lengths=lengths, drops=0.3)


def test_calibration_takes_contention_out_of_what_was_measured(prompts: Path) -> None:
    """What four engines and four ranks took on two cores is twice what they take alone."""
    shape = {"engines": 4, "ranks": 4, "cores": 2}
    costs = replace(KNOWN, score=0.0, ticket=0.0)
    seen = of(prompts, costs=costs, **shape)
    measured = replace(
        costs,
        decode_step=2 * costs.decode_step,
        decode_token=2 * costs.decode_token,
        update_fixed=2 * costs.update_fixed,
        update_token=2 * costs.update_token,
    )
    run = recorded(measured, ticket_s=seen.ticket_s, update_s=seen.update_s)
    found = calibrated(run, setup(**shape), 10, prompts)
    for name in ("decode_step", "decode_token", "update_fixed", "update_token"):
        assert getattr(found, name) == pytest.approx(getattr(costs, name), rel=0.02), name


# -- the verb -----------------------------------------------------------------------------------------


def test_the_verb_shows_the_recorded_configuration_and_marks_the_best_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run")
    flags = ["--schedules", "lockstep,async:1:2", "--gpus", "4", "--steps", "6"]
    assert main(["plan", "--trace", str(folder), *flags]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("recorded: lockstep, 2 engines, 2 ranks, 11 steps of ")
    assert "not told by the trace: " in shown
    assert sum(line.startswith("best") for line in shown.splitlines()) == 1


def test_json_has_every_split_and_schedule_and_the_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run")
    flags = ["--schedules", "lockstep,one-step-off,stream-gradients", "--gpus", "3", "--steps", "6", "--json"]
    assert main(["plan", "--trace", str(folder), *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = [(row["schedule"], row["engines"], row["ranks"]) for row in found["forecasts"]]
    assert rows == [(name, e, 3 - e) for name in ("lockstep", "one-step-off", "stream-gradients") for e in (1, 2)]
    best = max(found["forecasts"], key=lambda row: row["tokens_per_s"])
    assert [row["best"] for row in found["forecasts"]] == [row is best for row in found["forecasts"]]
    assert found["recorded"]["step_s"] == pytest.approx(found["recorded"]["measured_step_s"], rel=0.1)
    assert set(found["residuals"]) == {"generation", "rewards", "update"}


@pytest.mark.parametrize(
    ("torch", "device", "said"),
    [
        ("2.13.0+cpu", "auto", "share 3 cores"),
        ("2.13.0", "cpu", "share 3 cores"),
        ("2.13.0", "auto", "a device of its own"),
        ("2.13.0+cpu", "cuda", "a device of its own"),
    ],
)
def test_processes_share_the_cores_of_a_machine_whose_torch_has_no_other_device(
    tmp_path: Path, torch: str, device: str, said: str
) -> None:
    folder = write_run(tmp_path / "run", options={"--engine-device": device, "--train-device": device})
    facts = json.loads((folder / "run.json").read_text()) | {"packages": {"torch": torch}, "cores": 3}
    (folder / "run.json").write_text(json.dumps(facts))
    _, notes = setup_of(options_of(folder), folder, None)
    assert said in notes[-1]


def test_a_folder_without_a_timeline_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "trace.json").unlink()
    with pytest.raises(DataError, match=r"no timeline of training steps") as caught:
        make_plan(folder, [(LOCKSTEP, False)], None, None, 6)
    assert caught.value.where.endswith("trace.json")


def test_too_few_steps_are_an_error_that_says_how_many(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="2 steps"):
        make_plan(write_run(tmp_path / "run", num_steps=3), [(LOCKSTEP, False)], None, None, 6)


def test_a_folder_that_is_not_there_or_of_no_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder"):
        make_plan(tmp_path / "none", [(LOCKSTEP, False)], None, None, 6)
    with pytest.raises(DataError, match="no list of the run's options"):
        make_plan(tmp_path, [(LOCKSTEP, False)], None, None, 6)


def test_a_colocated_run_is_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", options={"--offload-rollout": True})
    with pytest.raises(ConfigError, match="take turns"):
        make_plan(folder, [(LOCKSTEP, False)], None, None, 6)


@pytest.mark.parametrize("text", ["fast", "async:2", "async:3:1", "async:0:2", ""])
def test_what_is_no_schedule_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="is no schedule"):
        parse_schedule(text)


def test_splits_use_all_devices() -> None:
    assert splits_of(4) == [(1, 3), (2, 2), (3, 1)]
    assert splits_of(8, per_engine=2) == [(1, 6), (2, 4), (3, 2)]
    assert all(engines + ranks == 1024 and ranks >= 1 for engines, ranks in splits_of(1024))
    assert len(splits_of(1024)) == 7
    with pytest.raises(ConfigError, match="too few"):
        splits_of(1)
