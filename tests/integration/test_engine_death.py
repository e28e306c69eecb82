"""Engines that are killed while a rollout waits for their answers."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from buffer_rl.buffer.ledger_audit import LedgerAudit
from buffer_rl.buffer.ledger_file import FILE_NAME
from buffer_rl.embedded.launcher import launch
from buffer_rl.errors import EngineError
from harness.processes import descendants, holds_within

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

Run = Callable[[Any], Any]
MakeOptions = Callable[..., Any]

KILLER = """
import asyncio, json, os, signal, time, urllib.request
from pathlib import Path

from buffer_rl.cluster.process import auth_headers
from buffer_rl.embedded import launcher
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.rollout.lease import current_lease
from buffer_rl.rollout.generate import generate


def noted(args, index, log_path):
    '''The embedded engine; its process and URL are written down.'''
    engine = launcher.launch(args, index, log_path)
    with open(f"{args.run_dir}/engines", "a") as file:
        print(engine.process.pid, engine.url, file=file)
    return engine


def sglang(args, log_path):
    return noted_router("sglang", args, log_path)


def smg(args, log_path):
    return noted_router("smg", args, log_path)


def noted_router(name, args, log_path):
    router = PluginRegistry().resolve("router", name)(args, log_path)
    Path(args.run_dir, "router").write_text(str(router.process.pid))
    return router


async def router_killed(args, sample, sampling_params):
    if current_lease().ticket.task == "train_1" and first(args, "chosen"):
        os.kill(int(Path(args.run_dir, "router").read_text()), signal.SIGKILL)
    return await generate(args, sample, sampling_params)


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
    task = current_lease().ticket.task
    if task == "train_1" and first(args, "chosen"):
        in_background(args, *engines(args)[1])
    if task == "train_3":
        await asyncio.to_thread(until, lambda: len(loads(args)) == 2)
    return await generate(args, sample, sampling_params)


def stop_with_a_request_in_flight(args, pid, url):
    os.kill(int(pid), signal.SIGSTOP)
    until(lambda: loads(args)[url] > 0)
    Path(args.run_dir, f"stopped_{pid}").touch()


async def only_one_killed(args, sample, sampling_params):
    if current_lease().ticket.task == "train_1" and first(args, "chosen"):
        in_background(args, *engines(args)[0])
    return await generate(args, sample, sampling_params)


async def only_one_stopped(args, sample, sampling_params):
    if current_lease().ticket.task == "train_1" and first(args, "chosen"):
        tasks.add(asyncio.create_task(asyncio.to_thread(stop_with_a_request_in_flight, args, *engines(args)[0])))
    return await generate(args, sample, sampling_params)


async def one_away(args, sample, sampling_params):
    '''Rollout 1 begins once the first engine was stopped and is off the router's list, rollout 3 once it is back.'''
    (pid, url), _ = engines(args)
    if current_lease().ticket.task == "train_1":
        if first(args, "stopped"):
            os.kill(int(pid), signal.SIGSTOP)
        await asyncio.to_thread(until, lambda: url not in loads(args))
    if current_lease().ticket.task == "train_3":
        if first(args, "continued"):
            os.kill(int(pid), signal.SIGCONT)
        await asyncio.to_thread(until, lambda: url in loads(args))
    return await generate(args, sample, sampling_params)


async def all_of_them(args, sample, sampling_params):
    if current_lease().ticket.task == "train_1" and first(args, "chosen"):
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
    assert any("embedded engine 1 was killed by signal 9" in line for line in fleet_log)
    assert any("engine 1 is back, with the weights of version" in line for line in fleet_log)
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
@pytest.mark.parametrize(
    ("end", "transport"),
    [("killed", "disk"), ("stopped", "disk"), ("killed", "tensor"), ("stopped", "tensor")],
)
def test_a_run_whose_only_engine_ends_in_a_rollout_ends_as_an_undisturbed_one(
    train: Run, make_options: MakeOptions, whole_run: Any, killer: str, end: str, transport: str
) -> None:
    args = make_options(
        deterministic=True,
        num_rollout=4,
        lr_decay_style="cosine",
        lr_decay_iters=4,
        rollout_engine=f"{killer}:noted",
        rollout_health_check_timeout=5.0,
        weight_sync_mode=transport,
        custom_generate_function_path=f"{killer}:only_one_{end}",
    )
    assert train(args).steps == 4
    started = [line.split() for line in (Path(args.run_dir) / "engines").read_text().splitlines()]
    assert len(started) == 2
    assert (Path(args.run_dir) / f"{end}_{started[0][0]}").exists()  # with a request in flight
    assert metrics_of(args.run_dir) == metrics_of(whole_run.run_dir)
    left, right = (load_file(Path(run) / "hf" / "model.safetensors") for run in (args.run_dir, whole_run.run_dir))
    assert all(torch.equal(left[name], right[name]) for name in right)
    ledgers = [LedgerAudit(Path(run) / FILE_NAME) for run in (args.run_dir, whole_run.run_dir)]
    entries = [{uid: ledger.entry(uid) for uid, _ in ledger.states()} for ledger in ledgers]
    for ledger in ledgers:
        ledger.close()
    assert {(entry.state, entry.attempt) for entry in entries[0].values()} == {("trained", 1)}
    assert {uid: entry.step for uid, entry in entries[0].items()} == {uid: e.step for uid, e in entries[1].items()}


@pytest.mark.slow
def test_a_run_with_engines_started_outside_goes_on_while_one_is_away_and_takes_it_back(
    train: Run, make_options: MakeOptions, whole_run: Any, killer: str
) -> None:
    same = {"deterministic": True, "num_rollout": 4, "lr_decay_style": "cosine", "lr_decay_iters": 4}
    args = make_options(**same)
    folder = Path(args.run_dir)
    folder.mkdir()
    with ExitStack() as stack:
        outside = [launch(args, index, str(folder / f"outside_{index}.log")) for index in range(2)]
        for engine in outside:
            stack.callback(engine.stop)
            engine.wait_ready(60)
        (folder / "engines").write_text("".join(f"{engine.process.pid} {engine.url}\n" for engine in outside))
        external = make_options(
            **same,
            rollout_external_engine_addrs=[engine.url for engine in outside],
            rollout_health_check_timeout=5.0,
            custom_generate_function_path=f"{killer}:one_away",
        )
        assert train(external).steps == 4
        for engine in outside:
            engine.check()
    said = (folder / "logs" / "fleet.log").read_text()
    assert "the run goes on with 1 engine until it answers again" in said
    assert re.search(r"engine 0 is back, with the weights of version [23]", said)
    assert metrics_of(args.run_dir) == metrics_of(whole_run.run_dir)
    left, right = (load_file(Path(run) / "hf" / "model.safetensors") for run in (args.run_dir, whole_run.run_dir))
    assert all(torch.equal(left[name], right[name]) for name in right)


@pytest.mark.slow
@pytest.mark.parametrize("router", ["sglang", "smg"])
def test_a_router_that_is_killed_is_a_global_restart(
    train: Run, make_options: MakeOptions, killer: str, router: str, capfd: pytest.CaptureFixture[str]
) -> None:
    if router == "smg":
        pytest.importorskip("smg")
    args = make_options(
        router=f"{killer}:{router}", custom_generate_function_path=f"{killer}:router_killed", progress="plain"
    )
    assert train(args).steps == 3
    shown = capfd.readouterr()
    assert "was killed by signal 9" in shown.out + shown.err
    assert "(global restart 1 of 3)" in shown.out + shown.err


@pytest.mark.slow
def test_where_the_trainer_works_during_rollouts_the_death_of_all_that_have_the_weights_is_a_global_restart(
    train: Run, make_options: MakeOptions, killer: str, capfd: pytest.CaptureFixture[str]
) -> None:
    args = make_options(
        schedule="pipelined",
        stream_gradients=True,
        rollout_engine=f"{killer}:noted",
        weight_sync_mode="tensor",
        custom_generate_function_path=f"{killer}:only_one_killed",
        progress="plain",
    )
    assert train(args).steps == 3
    shown = capfd.readouterr()
    assert "no engine has the weights of version 1" in shown.out + shown.err
    assert "started again, from the start (global restart 1 of 3)" in shown.out + shown.err


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
        engine_max_restarts=0,
        eval_prompt_data=[],
        eval_interval=None,
    )
    with pytest.raises(EngineError, match=r"no engine is left: embedded engine \d was killed by signal 9; "):
        train(args)
    assert holds_within(60, lambda: engines() <= before)
