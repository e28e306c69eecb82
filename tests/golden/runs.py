"""Golden runs: whole runs on a fixed tiny task, through the command line alone.

    python tests/golden/runs.py check     run all, compare runs that must end with equal weights with each other
    python tests/golden/runs.py record    the same, and write what each ended with to build/golden.json
    python tests/golden/runs.py compare   the same, and compare with what was recorded in this environment

Before parts of the package are moved, ``record``; afterwards ``compare`` says whether any run ends with other bits. The
table is not committed: another processor or another torch gives other bits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from task import make_task

ROOT = Path(__file__).parents[2]
FORK_SERVER = "BUFFER_RL_FORK_SERVER"
"""Names the one that runs share, in the environment."""
TABLE = ROOT / "build" / "golden.json"
TIMEOUT_S = 240.0
STEPS = 4
GROUPS = 3

BASE: Mapping[str, Any] = {
    "prompt_data": "train.jsonl",
    "hf_checkpoint": "model",
    "custom_rm_path": "./functions.py:count_a",
    "num_rollout": STEPS,
    "rollout_batch_size": GROUPS,
    "n_samples_per_prompt": 4,
    "rollout_max_response_len": 6,
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "lr": 0.01,
    "deterministic": True,
    "progress": "plain",
    "logger": [],
    "engine_max_running_requests": 16,
    "engine_context_length": 64,
}
FILTER = {"dynamic_sampling_filter_path": "./functions.py:some_a"}
ROLES = {"num_ref_workers": 1, "num_actor_fwd_workers": 1, "num_advantage_workers": 1}
PPO = {"advantage_estimator": "ppo", "lambd": 0.9, "num_critic_only_steps": 1}
STREAMED = {"schedule": "pipelined", "stream_gradients": True}
ASYNC_ZERO = {"schedule": "async", "max_staleness": 0}
TENSOR_PARALLEL = {
    "train_backend": f"{ROOT}/examples/trainer_backends/tensor_parallel.py:TensorParallelTrainer",
    "num_train_ranks": 2,
    "train_timeout_s": 60.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """One golden run. options: what differs from ``BASE``. equals: the run that it must end with the weights of.

    killed: ``driver`` after its second checkpoint, and resumed; or ``buffer`` during its second rollout.
    varies: its weights depend on timing, or on sums in float32, so only its accounting is looked at.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    equals: str | None = None
    killed: str | None = None
    varies: bool = False


RUNS: Mapping[str, Golden] = {
    "lockstep": Golden(),
    "pipelined": Golden(options={"schedule": "pipelined"}, equals="lockstep"),
    "streamed": Golden(options=STREAMED, equals="lockstep"),
    "async_zero": Golden(options=ASYNC_ZERO, equals="lockstep"),
    "async_zero_streamed": Golden(
        options={**ASYNC_ZERO, "stream_gradients": True, "num_ref_workers": 1, "num_train_ranks": 2}, equals="lockstep"
    ),
    "async_zero_filter": Golden(options={**ASYNC_ZERO, **FILTER}, equals="filter"),
    "roles": Golden(options={"schedule": "pipelined", **ROLES}, equals="lockstep"),
    "two_ranks": Golden(options={"num_train_ranks": 2}, equals="lockstep"),
    "two_engines": Golden(options={"rollout_num_engines": 2}, equals="lockstep"),
    "two_workers": Golden(options={"num_rollout_workers": 2}, equals="lockstep"),
    "two_workers_filter": Golden(options={**FILTER, **STREAMED, "num_rollout_workers": 2}, equals="filter"),
    "tensor": Golden(options={"weight_sync_mode": "tensor"}, equals="lockstep"),
    "distributed": Golden(
        options={"weight_sync_mode": "buffer_rl.weights.distributed:DistributedTransport", "rollout_num_engines": 2},
        equals="lockstep",
    ),
    "offloaded": Golden(options={"offload_train": True, "offload_rollout": True}, equals="lockstep"),
    "resumed": Golden(killed="driver", equals="lockstep"),
    "buffer_killed": Golden(killed="buffer", equals="lockstep"),
    "tensor_parallel_killed": Golden(options={**TENSOR_PARALLEL, **STREAMED}, killed="buffer", varies=True),
    "ppo": Golden(options=PPO),
    "ppo_pipelined": Golden(options={**PPO, "schedule": "pipelined", **ROLES}, equals="ppo"),
    "ppo_streamed": Golden(options={**PPO, **STREAMED, "num_train_ranks": 2}, equals="ppo"),
    "ppo_resumed": Golden(options=PPO, killed="driver", equals="ppo"),
    "filter": Golden(options=FILTER),
    "filter_streamed": Golden(options={**FILTER, **STREAMED}, equals="filter"),
    "two_steps": Golden(options={"num_steps_per_rollout": 3, "loss_agg_mode": "seq-mean-token-mean"}),
    "masked": Golden(options={"rollout_sample_filter_path": "./functions.py:mask_some"}),
    "custom_loss": Golden(options={"custom_loss_function_path": "./functions.py:half_loss", "use_kl_loss": False}),
    "data_source": Golden(options={"data_source_path": "./functions.py:Letters", "prompt_data": []}),
    "requeued": Golden(options={"rollout_function_path": "./functions.py:some_of_many", "rollout_shuffle": False}),
    "over_sampling": Golden(
        options={
            "over_sampling_batch_size": 5,
            "partial_rollout": True,
            "mask_offpolicy_in_partial_rollout": True,
        },
        varies=True,
    ),
}


def run(name: str, folder: Path) -> str:
    """Make one run in ``folder``, which holds the task. Returns the hash of its final weights, empty where it varies.

    Raises RuntimeError, with the end of its log, if it fails or its accounting does not hold."""
    golden = RUNS[name]
    options = {**BASE, **golden.options, "run_dir": name}
    if golden.killed == "driver":
        saves = {"save": f"{name}_saves", "save_interval": 1}
        _train(name, folder, {**options, **saves, "num_rollout": 1000, "lr_decay_iters": STEPS}, _kill_driver)
        _require(folder, name, _newest(folder / f"{name}_saves") < STEPS, "it was killed too late to be resumed")
        options |= {**saves, "load": f"{name}_saves", "lr_decay_iters": STEPS}
    if golden.killed == "buffer":
        options["custom_rm_path"] = "./functions.py:count_a_once_killed"
        _train(name, folder, options, _kill_buffer)
        _require(folder, name, "is produced again" in _log(folder, name).read_text(), "no rollout was lost")
    else:
        _train(name, folder, options, None)
    _check_ledger(name, folder)
    return "" if golden.varies else _hash_of(folder / name / "hf" / "model.safetensors")


def _train(
    name: str, folder: Path, options: Mapping[str, Any], kill: Callable[[subprocess.Popen[bytes], Path], None] | None
) -> None:
    """Run to the end, or until ``kill`` has ended it."""
    config = folder / f"{name}.yaml"
    config.write_text(json.dumps(options))  # JSON is YAML
    # A fork server of the caller's would be the parent of the process that is looked for here.
    kept = () if kill is _kill_buffer else (FORK_SERVER,)
    own = {key: value for key, value in os.environ.items() if key in kept or not key.startswith("BUFFER_RL_")}
    environ = {**own, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "buffer_rl.cli", "train", "--config", config.name]
    with _log(folder, name).open("ab") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environ, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
    try:
        if kill is not None:
            kill(process, folder / name)
        status = process.wait(TIMEOUT_S)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
    _require(folder, name, status == 0 or kill is _kill_driver, f"status {status}")


def _kill_driver(process: subprocess.Popen[bytes], run_dir: Path) -> None:
    """``kill -9`` after the second checkpoint."""
    _wait(process, lambda: _newest(run_dir.with_name(f"{run_dir.name}_saves")) >= 2)
    process.kill()


def _kill_buffer(process: subprocess.Popen[bytes], run_dir: Path) -> None:
    """``kill -9`` of the Buffer's process in the second rollout, whose rewards wait until they are told of it."""
    _wait(process, lambda: _has_leased_again(run_dir / "ledger.sqlite"))
    # Ray changes the title of a process with each call, so it is looked for until it is seen.
    _wait(process, lambda: bool(pids := _buffers(process.pid)) and not any(os.kill(pid, 9) for pid in pids))
    run_dir.with_name(f"{run_dir.name}.killed").touch()


def _has_leased_again(ledger: Path) -> bool:
    """Whether groups of the second rollout, or of a later one, are leased now."""
    try:
        with closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as tables:
            query = "SELECT count(*) FROM groups WHERE rollout_id > 0 AND state = 'leased'"
            return bool(tables.execute(query).fetchone()[0])
    except sqlite3.Error:  # it is not made yet
        return False


def _buffers(driver: int) -> list[int]:
    return [pid for pid, command in _descendants(driver) if command.startswith("ray::BufferActor")]


def _wait(process: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while process.poll() is None and not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"nothing happened within {TIMEOUT_S:g} s")
        time.sleep(0.01)


def _newest(saves: Path) -> int:
    return max((int(path.name[5:]) for path in saves.glob("step_*")), default=0)


def _descendants(pid: int) -> list[tuple[int, str]]:
    """Process ids and command lines of the children of ``pid``, their children and so on."""
    found: list[tuple[int, str]] = []
    table = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            command = (stat.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it ended meanwhile
            continue
        table.append((int(stat.parent.name), parent, command))
    parents = {pid}
    while parents:
        found += [(child, command) for child, parent, command in table if parent in parents]
        parents = {child for child, parent, _ in table if parent in parents}
    return found


def _check_ledger(name: str, folder: Path) -> None:
    """The accounting of a run that has ended: every group in one state, and as many trained as its steps took."""
    command = [sys.executable, "-m", "buffer_rl.cli", "ledger", name, "--verify", "--json"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    answer = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=60, check=False)
    _require(folder, name, answer.returncode == 0, f"its accounting: {answer.stdout}{answer.stderr}")
    trained = sum(epoch["counts"]["trained"] for epoch in json.loads(answer.stdout)["epochs"])
    _require(folder, name, trained == STEPS * GROUPS, f"{trained} groups are trained, not {STEPS * GROUPS}")


def _log(folder: Path, name: str) -> Path:
    return folder / f"{name}.log"


def _require(folder: Path, name: str, holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(f"{name}: {what}\n{_log(folder, name).read_text(errors='replace')[-3000:]}")


def _hash_of(path: Path) -> str:
    """Of names, shapes and bytes of all tensors, in the order of their names."""
    from safetensors.numpy import load_file

    digest = hashlib.sha256()
    for name, array in sorted(load_file(path).items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return digest.hexdigest()[:16]


def run_all(names: Sequence[str], folder: Path, jobs: int) -> tuple[dict[str, str], list[str]]:
    """The hashes of the runs that ended, by name, and what is wrong: runs that failed, or differ from one another."""
    make_task(folder)
    found: dict[str, str] = {}
    wrong: list[str] = []

    def one(name: str) -> None:
        started = time.monotonic()
        try:
            found[name] = run(name, folder)
        except (RuntimeError, OSError, subprocess.TimeoutExpired, StopIteration) as error:
            wrong.append(f"{name} failed: {error}")
        print(f"{name:16} {found.get(name, 'failed'):16} {time.monotonic() - started:6.1f} s", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, names))
    for name in names:
        other = RUNS[name].equals
        if other in found and name in found and found[name] != found[other]:
            wrong.append(f"{name} ended with other weights than {other}: {found[name]} and {found[other]}")
    return found, wrong


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if a run failed, or ended with other weights than it must."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["check", "record", "compare"])
    parser.add_argument("--only", nargs="+", choices=list(RUNS), help="these runs alone")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    args = parser.parse_args(argv)
    recorded = json.loads(TABLE.read_text()) if args.mode == "compare" else {}
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        found, wrong = run_all(args.only or list(RUNS), Path(folder), args.jobs)
    if args.mode == "record" and not wrong:
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text(json.dumps(found, indent=2) + "\n")
    for name in found:
        if args.mode == "compare" and found[name] != recorded.get(name):
            wrong.append(f"{name} ended with {found[name]}; recorded was {recorded.get(name)}")
    print("\n".join(wrong) or f"{len(found)} golden runs are as they must be")
    return 1 if wrong else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
