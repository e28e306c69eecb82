"""Kill parts of live runs at random moments, and compare how they end with an undisturbed run.

    python benchmarks/faults.py                          # everything: about twenty minutes on two cores
    python benchmarks/faults.py buffer --kills 25        # the Buffer's process; the run goes on by itself
    python benchmarks/faults.py rollout --kills 25       # the rollout worker; the same
    python benchmarks/faults.py rank --cuts 10           # one of two trainer ranks; the run restarts its processes
    python benchmarks/faults.py driver --cuts 10         # the driver, then --load: ten times along one lineage
    python benchmarks/faults.py --schedule async         # every part in turn, in an asynchronous run; accounting alone

Each run must end with the parameters of the undisturbed one, bit by bit, and its ledger must hold each group of each
step as trained, once. After a rollout worker was killed, no finished group may have been made again. After the driver
was killed, the checkpoint that the next run continues from is compared with that of the undisturbed run too.
Exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # for tests/harness

from harness.faulty_runs import GROUPS, LiveRun, Outcome, make_options, make_task, newest_step

LIMIT_S = 300.0
STEPS_PER_CUT = 3
LONGEST_LIFE_S = 1.5  # of a process that is killed: on a quiet machine a few steps
ASYNC = {"schedule": "async", "max_staleness": 2, "use_tis": True, "deterministic": False}
VICTIMS = ("buffer", "rollout", "engine", "storage", "rank")
"""Of an asynchronous run."""
RESTARTS = {  # what a run replaces by itself, and the option that says how often
    "buffer": "buffer_max_restarts",
    "rollout": "role_max_restarts",
    "rank": "max_global_restarts",
}


def kill(folder: Path, victim: str, kills: int, schedule: str, draw: random.Random) -> tuple[int, list[str]]:
    """One run whose ``victim`` is killed ``kills`` times. Returns how many kills there were, and what is wrong."""
    steps = max(6, 3 * kills)
    options = {"schedule": schedule, RESTARTS[victim]: 2 * kills, "buffer_timeout_s": 120.0}
    options |= {"num_train_ranks": 2, "save_interval": 1} if victim == "rank" else {}
    saves = folder / f"{victim}_{schedule}_saves"
    quiet = make_options(folder, f"quiet_{victim}_{schedule}", steps, **options, save=f"{saves}_quiet")
    if LiveRun(quiet).wait(LIMIT_S):
        return 0, ["the undisturbed run failed"]
    run = LiveRun(make_options(folder, f"{victim}_{schedule}", steps, **options, save=str(saves)))
    done = 0
    try:
        metrics = run.folder / "metrics.jsonl"  # a process that dies before the first step has never worked
        run.wait_until(lambda: metrics.exists() and "perf/step_time" in metrics.read_text(), LIMIT_S)
        while done < kills and run.wait_until(lambda: run.kill(victim, draw.randrange(2)), LIMIT_S):
            done += 1
            saved = newest_step(saves)
            run.pause(draw.uniform(0.0, LONGEST_LIFE_S))
            if victim == "rank" and done % 2:  # every other time once it is at work again, else while it starts
                run.wait_until(lambda saved=saved: newest_step(saves) > saved, LIMIT_S)
                run.pause(draw.uniform(0.0, 0.5))
        status = run.wait(LIMIT_S)
    finally:
        run.stop()
    if status:
        return done, [f"the run ended with status {status}: {run.last_output()}"]
    expected = Outcome.of(Path(quiet.run_dir), steps * GROUPS)
    found = Outcome.of(run.folder, steps * GROUPS)
    few = [f"the run ended before kill {done + 1} of {kills}"] if done < kills else []
    if victim == "rollout" and found.num_made_again:
        few.append(f"{found.num_made_again} finished groups were made again")
    return done, [*few, *expected.faults, *found.differs(expected)]


def kill_asynchronous(folder: Path, kills: int, draw: random.Random) -> tuple[int, list[str]]:
    """One asynchronous run whose parts are killed in turn. Its accounting must hold, and its bound: which groups a step
    takes depends on timing."""
    steps = 6 * kills
    saves = folder / "async_saves"
    options = {"save": str(saves), "save_interval": 1, "num_data_storage_units": 1, "data_storage_min_bytes": 1}
    options |= dict.fromkeys([*RESTARTS.values(), "engine_max_restarts"], 2 * kills)
    run = LiveRun(make_options(folder, "async", steps, **ASYNC, **options, rollout_num_engines=2, num_train_ranks=2))
    done = 0
    metrics = run.folder / "metrics.jsonl"
    try:
        run.wait_until(lambda: metrics.exists() and "perf/step_time" in metrics.read_text(), LIMIT_S)
        for victim in itertools.islice(itertools.cycle(VICTIMS), kills):
            if not run.wait_until(lambda victim=victim: run.kill(victim, draw.randrange(2)), LIMIT_S):
                break
            done += 1
            saved = newest_step(saves)
            run.pause(draw.uniform(0.0, LONGEST_LIFE_S))
            run.wait_until(lambda saved=saved: newest_step(saves) > saved, LIMIT_S)
        status = run.wait(LIMIT_S)
    finally:
        run.stop()
    if status:
        return done, [f"the run ended with status {status}: {run.last_output()}"]
    found = Outcome.of(run.folder, steps * GROUPS)
    ages = [json.loads(line).get("staleness/max", 0.0) for line in metrics.read_text().splitlines()]
    few = [f"the run ended before kill {done + 1} of {kills}"] if done < kills else []
    late = [f"a token was {max(ages):g} versions old"] if max(ages) > ASYNC["max_staleness"] else []
    return done, [*few, *late, *found.faults]


def cut(folder: Path, cuts: int, schedule: str, draw: random.Random) -> tuple[int, list[str]]:
    """One lineage: a run whose driver is killed and continued from its newest checkpoint, ``cuts`` times. Returns how
    many cuts there were, and what is wrong."""
    steps = STEPS_PER_CUT * cuts + 2
    if schedule == "async":
        return cut_asynchronous(folder, cuts, steps, draw)
    saves = {name: folder / name / "saves" for name in ("whole", "driver")}
    whole = make_options(folder, "whole", steps, save=str(saves["whole"]), save_interval=1)
    if newest_step(saves["whole"]) < steps and LiveRun(whole).wait(LIMIT_S):
        return 0, ["the undisturbed run failed"]
    wrong: list[str] = []
    done = 0
    while True:
        start = newest_step(saves["driver"])
        load = {"load": str(saves["driver"])} if start else {}
        run = LiveRun(make_options(folder, "driver", steps, save=str(saves["driver"]), save_interval=1, **load))
        try:
            if done < cuts and run.wait_until(lambda start=start: newest_step(saves["driver"]) > start, LIMIT_S):
                run.pause(draw.uniform(0.0, 1.0))
                done += run.kill("driver")
            status = run.wait(LIMIT_S)
        finally:
            run.stop()
        step = newest_step(saves["driver"])
        expected = Outcome.of(saves["whole"] / f"step_{step:06d}", step * GROUPS)
        found = Outcome.of(saves["driver"] / f"step_{step:06d}", step * GROUPS)
        wrong += [f"step {step}: {what}" for what in (*expected.faults, *found.differs(expected))]
        if status == 0 or step == start:
            break
    if status:
        wrong.append(f"the last run ended with status {status}: {run.last_output()}")
        return done, wrong
    final = Outcome.of(Path(whole.run_dir), steps * GROUPS)
    return done, wrong + Outcome.of(run.folder, steps * GROUPS).differs(final)


def cut_asynchronous(folder: Path, cuts: int, steps: int, draw: random.Random) -> tuple[int, list[str]]:
    """The same of an asynchronous run, of whose checkpoints and end the accounting must hold."""
    saves, done, status, wrong = folder / "async_cut_saves", 0, 1, []
    while status:
        start = newest_step(saves)
        load = {"load": str(saves)} if start else {}
        options = {**ASYNC, "save": str(saves), "save_interval": 1, **load}
        run = LiveRun(make_options(folder, "async_cut", steps, **options))
        try:
            if done < cuts and run.wait_until(lambda start=start: newest_step(saves) > start, LIMIT_S):
                run.pause(draw.uniform(0.0, 1.0))
                done += run.kill("driver")
            status = run.wait(LIMIT_S)
        finally:
            run.stop()
        step = newest_step(saves)
        wrong += [f"step {step}: {what}" for what in Outcome.of(saves / f"step_{step:06d}", step * GROUPS).faults]
        if status and step == start:
            return done, [*wrong, f"a run ended with status {status}: {run.last_output()}"]
    return done, [*wrong, *Outcome.of(run.folder, steps * GROUPS).faults]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("victims", nargs="*", metavar="PART", help="buffer, rollout, rank, driver; all where absent")
    parser.add_argument("--kills", type=int, default=25, help="of the Buffer or the rollout worker, over a run")
    parser.add_argument("--schedule", default="lockstep", choices=["lockstep", "pipelined", "async"])
    parser.add_argument("--cuts", type=int, default=10, help="of a rank, over a run, or of the driver, along a lineage")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    violations = 0
    print(f"{'killed':<10}{'times':>6}{'violations':>12}{'seconds':>9}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_task(folder)
        every = ["parts", "driver"] if options.schedule == "async" else [*RESTARTS, "driver"]
        for victim in options.victims or every:
            started = time.monotonic()
            if victim == "parts":
                done, wrong = kill_asynchronous(folder, options.kills, draw)
            elif victim in RESTARTS:
                kills = options.cuts if victim == "rank" else options.kills
                done, wrong = kill(folder, victim, kills, options.schedule, draw)
            else:
                done, wrong = cut(folder, options.cuts, options.schedule, draw)
            violations += len(wrong)
            print(f"{victim:<10}{done:>6}{len(wrong):>12}{time.monotonic() - started:>9.0f}", flush=True)
            for what in wrong:
                print(f"  {what}", flush=True)
    return 1 if violations else 0


if __name__ == "__main__":
    raise SystemExit(main())
