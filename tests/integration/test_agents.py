"""Whole runs in which an agent plays the guessing game of the example."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.buffer.ledger_audit import LedgerAudit
from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.cluster.fork_server import SOCKET_VARIABLE
from buffer_rl.observe.metrics import read_metrics
from buffer_rl.options.section import compose
from harness.agent_programs import CLIENT
from harness.checkpoints import final_weights
from harness.processes import descendants, holds_within, is_running

EXAMPLE = Path(__file__).parents[2] / "examples" / "agent"
FUNCTIONS = Path(__file__).parent / "agent_functions.py"
PROGRAM = (sys.executable, "-I", "-S", str(Path(__file__).parent / "agent_program.py"))
PHASES = runpy.run_path(PROGRAM[-1])["PHASES"]
EOS, ANSWER = 1, "a"

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]
Run = Callable[..., tuple[list[dict[str, Any]], list[dict[str, Any]], Path]]


@pytest.fixture(scope="session")
def game(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rounds and the model of the example."""
    folder = tmp_path_factory.mktemp("game")
    runpy.run_path(str(EXAMPLE / "prepare.py"))["prepare"](folder)
    return folder


@pytest.fixture
def options_of(game: Path, tmp_path: Path) -> Callable[..., Any]:
    """``options_of(name, **changes)``: the options of a run of two steps."""

    def options_of(name: str, **changes: Any) -> Any:
        options: dict[str, Any] = {
            "run_dir": str(tmp_path / name),
            "hf_checkpoint": str(game / "model"),
            "prompt_data": str(game / "train.jsonl"),
            "agent_path": f"{FUNCTIONS}:asks_and_plays",
            "rollout_sample_filter_path": f"{FUNCTIONS}:note_rows",
            "reward_key": "score",
            "num_rollout": 2,
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 4,
            "rollout_max_response_len": 4,
            "rollout_max_context_len": 64,
            "engine_context_length": 64,
            "lr": 1e-3,
            "logger": [],
            "progress": "none",
            **changes,
        }
        return compose(CORE_SECTIONS)(**options)

    return options_of


def outcome(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Path]:
    """Metrics, rows and folder of a run."""
    noted = folder / "rows.jsonl"
    rows = [json.loads(line) for line in noted.read_text().splitlines()] if noted.exists() else []
    return read_metrics(folder / "metrics.jsonl"), rows, folder


@pytest.fixture
def run(options_of: Callable[..., Any], train: Callable[[Any], Any]) -> Run:
    """``run(name, **changes)``: the ``outcome`` of a run with these options."""

    def play(name: str, **changes: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Path]:
        args = options_of(name, **changes)
        train(args)
        return outcome(Path(args.run_dir))

    return play


def values(metrics: list[dict[str, Any]], name: str) -> list[float]:
    return [line[name] for line in metrics if name in line]


def test_two_deterministic_runs_end_with_equal_bits_though_agents_ask_at_once(run: Run, game: Path) -> None:
    """The same agent plays in evaluation, and engine and trainer agree about its rows."""
    held_out: dict[str, Any] = {"eval_prompt_data": [f"heldout={game / 'heldout.jsonl'}@[0:6]"], "eval_interval": 2}
    held_out["rollout_max_response_len"] = 1
    first, rows, folder = run("first", deterministic=True, **held_out)
    second, others, other_folder = run("second", deterministic=True, **held_out)
    assert sorted(rows, key=lambda row: row["row"]) == sorted(others, key=lambda row: row["row"])
    assert final_weights(folder) == final_weights(other_folder)
    assert max(values(first, "train/grad_norm")) > 0
    for name in ("rollout/agent/turns", "rollout/agent/rows", "rollout/raw_reward", "eval/heldout/score"):
        assert values(first, name) == values(second, name) != []
    assert values(first, "eval/heldout/won") != []
    assert min(values(first, "rollout/agent/rows")) >= 2
    assert max(values(first, "train/train_rollout_logprob_abs_diff")) < 1e-5


def log_probs_of(model: Any, tokens: list[int]) -> torch.Tensor:
    """Of each token but the first, ``[num_tokens - 1]``."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1]
    found: torch.Tensor = logits.log_softmax(-1).gather(-1, torch.tensor(tokens[1:])[:, None]).squeeze(-1)
    return found


def test_in_an_asynchronous_run_each_turn_has_the_versions_that_sampled_it(run: Run, game: Path) -> None:
    """What a version's weights give, which each step's checkpoint has, is what its tokens were sampled with."""
    saves = game.parent / "async_saves"
    more = {"save": str(saves), "save_interval": 1, "lr": 1e-2}
    metrics, rows, _ = run("async", schedule="async", max_staleness=2, num_rollout=5, **more)
    folders = [game / "model", *(saves / f"step_{step:06d}" / "hf" for step in range(1, 6))]
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in folders]
    with_others = []
    for row in rows:
        response = len(row["mask"])
        expected = [log_probs_of(model, row["tokens"])[-response:] for model in models]
        recorded = torch.tensor(row["log_probs"])
        for version, start, end in row["spans"]:
            assert (expected[version][start:end] - recorded[start:end]).abs().max() < 1e-4
            others = [each for number, each in enumerate(expected) if abs(number - version) == 1]
            with_others.append(min(float((each[start:end] - recorded[start:end]).abs().max()) for each in others))
    assert sum(difference > 1e-3 for difference in with_others) > len(with_others) / 4  # another one would be seen
    assert len(values(metrics, "train/loss")) == 5
    for row in rows:
        mask = row["mask"]
        covered = [0] * len(mask)
        for _, start, end in row["spans"]:
            covered[start:end] = [1] * (end - start)
        assert covered == mask
        versions = [version for version, _, _ in row["spans"]]
        assert versions == sorted(versions)
    assert len({version for row in rows for version, _, _ in row["spans"]}) > 1


def test_an_over_sampled_run_of_agents_loses_no_group(run: Run) -> None:
    metrics, _, _ = run("over", over_sampling_batch_size=6)
    assert values(metrics, "rollout/num_groups") == [4.0, 4.0]
    aborted, surplus = (values(metrics, f"rollout/{name}_groups") for name in ("aborted", "surplus"))
    assert [sum(pair) for pair in zip(aborted, surplus, strict=True)] == [2.0, 2.0]
    assert not any(name.startswith("rollout/drop_") for line in metrics for name in line)


@contextmanager
def agents_elsewhere(file: Path, number: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """So many processes that lease samples; one that was killed is started again."""
    running: list[subprocess.Popen[bytes]] = []
    ended = threading.Event()

    def start() -> None:
        while not ended.wait(0.1):
            running[:] = [each for each in running if each.poll() is None]
            while len(running) < number and not ended.is_set():
                running.append(subprocess.Popen([*PROGRAM, str(CLIENT), str(file)]))

    thread = threading.Thread(target=start)
    thread.start()
    try:
        yield running
    finally:
        ended.set()
        thread.join()
        for each in running:
            each.kill()
            each.wait()


def commands() -> list[int]:
    """The processes of the program, also those that watch them."""
    return [each.pid for each in descendants(os.getpid()) if PROGRAM[-1] in each.command]


def test_the_same_program_as_function_command_and_elsewhere_ends_with_equal_bits_though_it_is_killed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second sample kills its agent once, in each phase of a play."""
    same: dict[str, Any] = {"deterministic": True, "rollout_max_response_len": 1}
    metrics, rows, folder = run("function", **same, agent_path=f"{FUNCTIONS}:plays_plainly")
    found: dict[str, tuple[Any, ...]] = {}
    own = {**same, "agent_path": None, "agent_command": " ".join(PROGRAM)}
    found["command"] = run("command", **own)
    own["agent_command"] = f"env KILLS={tmp_path / 'killed'} {own['agent_command']}"
    for door in ("killed", "elsewhere", "started"):
        (tmp_path / door).mkdir()
    found["killed"] = run("killed", **own)
    monkeypatch.setenv("KILLS", str(tmp_path / "elsewhere"))
    with agents_elsewhere(tmp_path / "elsewhere" / "agents" / "worker_0.json", 4):
        found["elsewhere"] = run("elsewhere", **same, agent_path="remote", agent_heartbeat_s=2.0)
    found["started"] = run("started", **same, agent_path=f"{FUNCTIONS}:programs")
    expected = final_weights(folder)
    assert min(values(metrics, "train/grad_norm")) > 0
    for door, (metrics, others, other_folder) in found.items():
        assert sorted(rows, key=lambda row: row["row"]) == sorted(others, key=lambda row: row["row"]), door
        assert final_weights(other_folder) == expected, door
        assert values(metrics, "rollout/agent/failed") == [], door
        marks = {path.name.rpartition("_")[0] for path in (tmp_path / door).glob("*_[0-9]*")}
        if door != "command":
            assert len(marks) == 5, marks  # each phase
            assert len(list((tmp_path / door).glob("*_[0-9]*"))) == 16
            assert min(values(metrics, "rollout/agent/killed")) > 0
            assert min(values(metrics, "rollout/agent/replayed")) > 0
    assert commands() == []


DEADLY: dict[str, Any] = {
    "agent_path": f"{FUNCTIONS}:plays_and_kills",
    "rollout_engine": f"{FUNCTIONS}:noted",
    "num_rollout": 6,
    "rollout_batch_size": 2,
    "rollout_max_response_len": 1,
    "deterministic": True,
    "rollout_shuffle": False,
    "role_max_restarts": 5,
    "buffer_max_restarts": 5,
}
ROLES = ("ray::RolloutWorker", "ray::BufferActor", "ray::TrainRank", "embedded.server", "router")


def test_a_run_whose_rollout_worker_buffer_or_driver_is_killed_in_each_phase_of_a_play_ends_with_the_same_bits(
    options_of: Callable[..., Any], run: Run, tmp_path: Path
) -> None:
    """What was answered before a death is replayed, and each death is only that of its play: five in a run, in a step
    each."""
    metrics, rows, whole = run("undisturbed", **DEADLY)
    expected = final_weights(whole)
    assert sum(norm > 0 for norm in values(metrics, "train/grad_norm")) > 2  # else all bits stay those of the start
    for victim in ("worker", "buffer", "driver"):
        if victim == "driver":
            saves = {"save": str(tmp_path / "saves"), "save_interval": 1}
            lineage(options_of(victim, **DEADLY, **saves), tmp_path / victim)
        else:
            run(victim, **DEADLY)
        metrics, others, folder = outcome(tmp_path / victim)
        assert {path.name for path in folder.glob("killed *")} == {f"killed {phase}" for phase in PHASES}
        # A Buffer that died has the rollout made again, whose rows are noted a second time.
        assert {json.dumps(row) for row in others} == {json.dumps(row) for row in rows}, victim
        assert final_weights(folder) == expected, victim
        assert len(values(metrics, "rollout/agent/replayed")) == len(PHASES)
        assert min(values(metrics, "rollout/agent/replayed")) > 0
        assert len(values(metrics, "rollout/agent/killed")) == (len(PHASES) if victim == "worker" else 0)
        assert values(metrics, "rollout/agent/failed") == []
        with closing(LedgerAudit(folder / "ledger.sqlite")) as audit:
            assert audit.faults() == []
            assert audit.commits() == [(step, step + 1, 2) for step in range(6)]
            assert [state for _, state in audit.states()] == [GroupState.TRAINED] * 12
    assert holds_within(
        60, lambda: not any(role in each.command for each in descendants(os.getpid()) for role in ROLES)
    )


def lineage(args: Any, folder: Path) -> None:
    """One command again and again: its driver is killed in each phase, and it goes on from its newest checkpoint."""
    pid, config, log = folder / "driver.pid", folder / "options.yaml", folder / "output"
    folder.mkdir()
    config.write_text(args.model_dump_json(exclude_defaults=True, exclude_none=True))
    command = [sys.executable, "-m", "buffer_rl.cli", "train", "--config", str(config), "--load", "auto", "--no-trial"]
    own = {name: value for name, value in os.environ.items() if name != SOCKET_VARIABLE}  # or its workers outlive it
    for expected in (*(-signal.SIGKILL for _ in PHASES), 0):
        pid.unlink(missing_ok=True)
        with log.open("wb") as output:
            driver = subprocess.Popen(command, start_new_session=True, stdout=output, stderr=output, env=own)
        pid.write_text(str(driver.pid))
        try:
            assert driver.wait(120) == expected, log.read_text()[-3000:]
        finally:
            driver.kill()
            driver.wait()
    for mark in folder.glob("killed *"):
        processes = mark.read_text().splitlines()
        assert all(any(role in line for line in processes) for role in ROLES), processes
        numbers = [int(line.partition(" ")[0]) for line in processes]
        assert holds_within(60, lambda numbers=numbers: not any(map(is_running, numbers)))
