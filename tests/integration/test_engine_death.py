"""Engines that are killed while a rollout waits for their answers."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from buffer_rl.buffer.ledger_audit import LedgerAudit
from buffer_rl.buffer.ledger_file import FILE_NAME
from buffer_rl.errors import EngineError
from harness.processes import descendants, holds_within

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

Run = Callable[[Any], Any]
MakeOptions = Callable[..., Any]

KILLER = """
import asyncio, json, os, signal, time, urllib.request
from pathlib import Path

from buffer_rl.engine.process import auth_headers
from buffer_rl.engine.embedded import launcher
from buffer_rl.rollout.context import current_scope
from buffer_rl.rollout.generate import generate


def noted(args, index, log_path):
    '''The embedded engine; its process and URL are written down.'''
    engine = launcher.launch(args, index, log_path)
    with open(f"{args.run_dir}/engines", "a") as file:
        print(engine.process.pid, engine.url, file=file)
    return engine


def engines(args):
    return [line.split() for line in Path(args.run_dir, "engines").read_text().splitlines()]


def loads(args):
    request = urllib.request.Request(f"{args.router_url}/workers", headers=auth_headers(args.engine_api_key))
    with urllib.request.urlopen(request, timeout=10) as response:
        return {worker["url"]: worker["load"] for worker in json.load(response)["workers"]}


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def kill_with_a_request_in_flight(args, pid, url):
    # A stopped process answers nothing, so whatever it is sent stays in flight.
    os.kill(int(pid), signal.SIGSTOP)
    try:
        until(lambda: loads(args)[url] > 0)
        Path(args.run_dir, f"killed_{pid}").touch()
    finally:
        os.kill(int(pid), signal.SIGKILL)


def first(args, name):
    try:
        Path(args.run_dir, name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


tasks = set()


def in_background(args, *engine):
    task = asyncio.create_task(asyncio.to_thread(kill_with_a_request_in_flight, args, *engine))
    tasks.add(task)


async def one(args, sample, sampling_params):
    '''Kills the second engine in rollout 1, and lets rollout 3 begin once there are two again.'''
    task = current_scope().task
    if task == "train_1" and first(args, "chosen"):
        in_background(args, *engines(args)[1])
    if task == "train_3":
        await asyncio.to_thread(until, lambda: len(loads(args)) == 2)
    return await generate(args, sample, sampling_params)


async def all_of_them(args, sample, sampling_params):
    if current_scope().task == "train_1" and first(args, "chosen"):
        for engine in engines(args):
            in_background(args, *engine)
    return await generate(args, sample, sampling_params)
"""


@pytest.fixture
def killer(tmp_path: Path) -> str:
    path = tmp_path / "killer.py"
    path.write_text(KILLER)
    return str(path)


def metrics_of(run_dir: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] != "perf"]


def test_a_run_goes_on_without_an_engine_that_is_killed_and_every_group_is_trained_once(
    train: Run, make_options: MakeOptions, whole_run: Any, killer: str, tmp_path: Path
) -> None:
    args = make_options(
        deterministic=True,
        num_rollout=4,
        lr_decay_style="cosine",
        lr_decay_iters=4,
        rollout_num_engines=2,
        rollout_engine=f"{killer}:noted",
        custom_generate_function_path=f"{killer}:one",
        save=str(tmp_path / "checkpoints"),
    )
    assert train(args).steps == 4
    started = [line.split() for line in (Path(args.run_dir) / "engines").read_text().splitlines()]
    assert len(started) == 3  # the two of the start, and one in the place of the second
    assert (Path(args.run_dir) / f"killed_{started[1][0]}").exists()  # with a request in flight
    fleet_log = (Path(args.run_dir) / "logs" / "fleet.log").read_text().splitlines()
    assert "embedded engine 1 was killed by signal 9" in fleet_log[0]
    assert "engine 1 is back, with the weights of version" in fleet_log[1]
    # Four rollouts of three groups are the eight rows of an epoch and four of the next, each leased and trained once.
    audit = LedgerAudit(tmp_path / "checkpoints" / "step_000004" / FILE_NAME)
    entries = {uid: audit.entry(uid) for uid, _ in audit.states()}
    audit.close()
    assert {(entry.state, entry.attempt) for entry in entries.values()} == {("trained", 1)}
    assert sorted(uid.row for uid in entries if uid.epoch == 0) == list(range(8))
    assert len({uid.row for uid in entries if uid.epoch == 1}) == 4
    assert Counter(entry.step for entry in entries.values()) == {1: 3, 2: 3, 3: 3, 4: 3}
    # Nothing else tells the run from one that nobody disturbed.
    assert metrics_of(args.run_dir) == metrics_of(whole_run.run_dir)
    left, right = (load_file(Path(run) / "hf" / "model.safetensors") for run in (args.run_dir, whole_run.run_dir))
    assert all(torch.equal(left[name], right[name]) for name in right)


@pytest.mark.slow
def test_a_run_whose_engines_all_die_ends_with_the_end_of_the_last_ones_log(
    train: Run, make_options: MakeOptions, killer: str
) -> None:
    def engines() -> set[int]:
        mine = descendants(os.getpid())
        return {process.pid for process in mine if "embedded.server" in process.command or "router" in process.command}

    before = engines()
    args = make_options(
        rollout_num_engines=2,
        rollout_engine=f"{killer}:noted",
        custom_generate_function_path=f"{killer}:all_of_them",
        eval_prompt_data=[],
        eval_interval=None,
    )
    with pytest.raises(EngineError, match=r"no engine is left: embedded engine \d was killed by signal 9; "):
        train(args)
    assert holds_within(10, lambda: engines() <= before)
