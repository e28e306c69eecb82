"""A run whose rollout worker is killed in each of ten rollouts ends with the parameters of an undisturbed one, bit by
bit; what was finished is not made again. ``benchmarks/faults.py rollout`` does the same at random moments."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.buffer.ledger_audit import LedgerAudit
from harness.checkpoints import final_weights

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

STEPS, GROUPS = 10, 3

KILLER = """
import asyncio, os, signal, sqlite3, time
from pathlib import Path

from buffer_rl.rollout import generate as default


def num_finished(args):
    with sqlite3.connect(f"file:{Path(args.run_dir) / 'ledger.sqlite'}?mode=ro", uri=True) as ledger:
        return ledger.execute("SELECT count(*) FROM groups WHERE state = 'finished'").fetchone()[0]


async def generate(args, sample, sampling_params):
    '''Kills its process once a rollout, when the two other groups of the three are finished.'''
    rollout, place = divmod(sample.group_index, 3)
    if place == 2 and sample.sample_index == 0 and not args.run_dir.endswith("undisturbed"):
        marker = Path(args.run_dir) / f"killed_{rollout}"
        if not marker.exists():
            deadline = time.monotonic() + 60
            while num_finished(args) < 2 and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return await default.generate(args, sample, sampling_params)
"""


@pytest.fixture(scope="module")
def run(
    train: Callable[[Any], Any], options_in: Callable[..., Any], task: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Trains and returns the run's folder: ``run(name, **options)``."""
    folder = tmp_path_factory.mktemp("worker_deaths")
    (folder / "killer.py").write_text(KILLER)

    def run(name: str, **options: Any) -> Path:
        args = options_in(
            folder / name,
            custom_generate_function_path=f"{folder / 'killer.py'}:generate",
            eval_prompt_data=[],
            ref_load=str(task / "model"),
            use_kl_loss=True,
            kl_loss_coef=0.1,
            num_rollout=STEPS,
            deterministic=True,
            role_max_restarts=STEPS,
            progress="plain",
            **options,
        )
        assert train(args).steps == STEPS
        return Path(args.run_dir)

    return run


@pytest.fixture(scope="module")
def undisturbed(run: Callable[..., Path]) -> Path:
    """A run in lockstep in which nothing dies."""
    return run("undisturbed")


def history(run_dir: Path) -> dict[tuple[str, str], int]:
    """How often each transition happened in the run."""
    with sqlite3.connect(run_dir / "ledger.sqlite") as ledger:
        query = "SELECT from_state, to_state, count(*) FROM history WHERE reason != 'selected' GROUP BY 1, 2"
        return {(before, after): number for before, after, number in ledger.execute(query)}


@pytest.mark.parametrize(
    "options",
    [{"schedule": "lockstep"}, {"schedule": "pipelined", "stream_gradients": True, "num_ref_workers": 1}],
    ids=["lockstep", "streamed"],
)
def test_ten_deaths_of_the_rollout_worker_change_no_bit_and_no_finished_group_is_made_again(
    run: Callable[..., Path],
    undisturbed: Path,
    options: dict[str, Any],
    request: pytest.FixtureRequest,
    capfd: pytest.CaptureFixture[str],
) -> None:
    disturbed = run(request.node.callspec.id, **options)
    said = "".join(capfd.readouterr())
    assert said.count("1 groups are missing, and its metrics are of these") == STEPS, said
    audit = LedgerAudit(disturbed / "ledger.sqlite")
    assert audit.faults() == []
    assert audit.commits() == [(step, step + 1, GROUPS) for step in range(STEPS)]
    total = STEPS * GROUPS
    assert history(disturbed) == {
        ("pending", "leased"): total + STEPS,  # one group of each rollout was leased twice
        ("leased", "pending"): STEPS,
        ("leased", "finished"): total,
        ("finished", "trained"): total,
    }
    assert final_weights(disturbed) == final_weights(undisturbed)
