"""What a turn of an agent costs by the way in which it asks, and how many turns a second rollout workers play.

    python benchmarks/agents.py            # five ways, 1, 2 and 4 workers, three rounds in turns: about 25 minutes
    python benchmarks/agents.py --quick    # does it work?

An agent asks four times for each sample: by ``session.chat``, by HTTP with aiohttp, with one client of the openai
package for all samples, or with a new one for each. An environment is played for four turns. "worker" is CPU time of
the rollout worker's event loop, which has sessions, gateway and the requests to the engine; "agent" is that of the
threads of agents and environments. They are measured in this process, with an engine of known answers in another
thread. ``generate_turn`` is the same number of requests without an agent. The rates are those of
whole runs without a trainer, with the embedded engine. Medians, and ranges over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from agents_played import TURNS, WAYS

HERE = Path(__file__).resolve().parent
BASE = "generate_turn"
ANSWER = [5, 6, 7, 1]
TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}{{ message.content }}"
    "{{ '<eos>' if message.role == 'assistant' }}{% endfor %}{{ 'a' if add_generation_prompt }}"
)
GROUPS, SAMPLES = 8, 16  # of a step of a run
LENGTHS = (4, 500, 4000)  # tokens of a turn
Cost = tuple[float, float]
"""CPU milliseconds a turn: of the worker's event loop, and of the agents' threads."""


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=[*WAYS], default=[*WAYS])
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=64, help="that are played to find the cost of a turn")
    parser.add_argument("--steps", type=int, default=4, help="of each run; the first one is left out")
    parser.add_argument("--no-journal", action="store_true", help="find the cost of a turn that is not journalled")
    parser.add_argument("--quick", action="store_true", help="the shortest form: does it work?")
    options = parser.parse_args()
    if options.quick:
        options.workers, options.rounds, options.samples, options.steps = [1], 1, 4, 2
    os.environ["OMP_NUM_THREADS"] = "1"
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # says that connections of agents are not closed
    costs: dict[str, list[Cost]] = {way: [] for way in (BASE, *options.ways)}
    rates: dict[tuple[str, int], list[float]] = {(way, n): [] for way in options.ways for n in options.workers}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_task(folder)
        for number in range(options.rounds):  # in turns, so that what else the machine does meets all of them
            for way, found in costs.items():
                found.append(asyncio.run(cost(folder, way, options.samples, journals=not options.no_journal)))
            for (way, workers), turns in rates.items():
                if not (options.quick and way not in options.ways[:1]):
                    turns.append(turns_per_s(folder, way, workers, number, options.steps))
        journal = {length: [journal_cost(folder / f"{length}_{n}", length) for n in range(3)] for length in LENGTHS}
    print_table(costs, rates, options.workers)
    print("\nof which the journal, ms a turn of a play of four:")
    for length, spent in journal.items():
        print(f"{length} tokens a turn: {ranged(spent, 3)}")
    if "new client" in options.ways:
        print(f"\na process that imports openai: {import_seconds():.2f} s of CPU")
    return 0


def option_of(way: str) -> str:
    """The option that names what plays."""
    return "environment" if way == "environment" else "agent_path"


def make_task(folder: Path) -> None:
    """A model, and rows of one message each."""
    import json

    from buffer_rl.testing.tiny import make_tiny_model

    make_tiny_model(folder / "model", chat_template=TEMPLATE)
    row = json.dumps({"prompt": [{"role": "user", "content": "hello"}]})
    (folder / "rows.jsonl").write_text(f"{row}\n" * 64)


async def cost(folder: Path, way: str, num_samples: int, *, journals: bool) -> Cost:
    """What ``num_samples`` samples at once cost, after a few that are not counted."""
    from buffer_rl.args import CORE_SECTIONS
    from buffer_rl.engines.client import EngineClient
    from buffer_rl.options.section import compose
    from buffer_rl.options.sources import resolve
    from buffer_rl.plugin.registry import PluginRegistry
    from buffer_rl.rollout.context import RolloutContext, RunStart
    from buffer_rl.testing.fake_engine import FakeEngine

    with FakeEngine(lambda ids, seed: ANSWER) as engine:
        path = f"{HERE / 'agents_played.py'}:{WAYS.get(way, way)}"
        flags: dict[str, Any] = {
            "hf_checkpoint": str(folder / "model"),
            "prompt_data": str(folder / "rows.jsonl"),
            "rollout_max_response_len": 64,
            "router_url": engine.url,
            "custom_generate_function_path" if way == BASE else option_of(way): path,
        }
        resolved = resolve(compose(CORE_SECTIONS), flags=flags, environ={}).args
        args = resolved.model_copy(update={"engine_urls": [engine.url]})
        async with EngineClient(engine.url, [engine.url], timeout_s=60.0) as client:
            name = uuid4().hex  # of a start whose predecessors had other weights: nothing is replayed
            start = RunStart(name=name, version=0, origin=name) if journals else None
            context = RolloutContext.build(args, registry=PluginRegistry(), engine=client, run_dir=folder, start=start)
            try:
                await play(context, 2)
                with measured() as spent:
                    await play(context, num_samples)
            finally:
                await context.aclose()
    worker, agent = (1000 * seconds / (TURNS * num_samples) for seconds in spent)
    return worker, agent


async def play(context: Any, num_samples: int) -> None:
    """Generate one group."""
    from buffer_rl.records.groups import GroupUid, Sample, SampleGroup, Ticket
    from buffer_rl.rollout.generate import sampling_params_for
    from buffer_rl.rollout.lease import Lease
    from buffer_rl.rollout.production import generate_group
    from buffer_rl.rollout.requests import Requests
    from buffer_rl.rollout.stats import RolloutStats
    from buffer_rl.testing.fake_buffer import FakeBuffer

    uid = GroupUid("rows", row=num_samples, epoch=0)
    prompt = [{"role": "user", "content": "hello"}]
    samples = [Sample(prompt=prompt, uid=uid, sample_index=index) for index in range(num_samples)]
    group = SampleGroup(uid=uid, samples=samples, incarnation="benchmark", version=0)
    ticket = Ticket(
        rollout_id=0, evaluation=False, num_groups=1, version=0, incarnation="benchmark", max_staleness=None
    )
    lease = Lease.of(context, FakeBuffer([group], ticket), group, Requests())
    await generate_group(lease, sampling_params_for(context.args, evaluation=False), RolloutStats())
    assert all(sample.status == "completed" and sample.response_length > TURNS for sample in group)


@contextmanager
def measured() -> Iterator[list[float]]:
    """CPU seconds of this thread, and of all others but the engine's, during the block, once it has ended."""
    threads = [thread.ident for thread in threading.enumerate() if thread.name == "fake-engine"]
    engines = [time.pthread_getcpuclockid(ident) for ident in threads if ident]
    clocks = [time.CLOCK_THREAD_CPUTIME_ID, time.CLOCK_PROCESS_CPUTIME_ID, *engines]
    before = [time.clock_gettime(clock) for clock in clocks]
    spent: list[float] = []
    yield spent
    own, process, *engine_s = (time.clock_gettime(clock) - start for clock, start in zip(clocks, before, strict=True))
    spent += [own, process - own - sum(engine_s)]


def journal_cost(folder: Path, length: int, num_plays: int = 200) -> float:
    """CPU milliseconds a turn of ``length`` tokens for the journal alone, of plays of four turns."""
    from buffer_rl.agents.journal import FILE_NAME, Journal
    from buffer_rl.agents.turns import Turn
    from buffer_rl.records.groups import VersionSpan
    from buffer_rl.rollout.context import RunStart

    folder.mkdir()
    journal = Journal(folder / FILE_NAME, RunStart(name="start", version=0, origin="benchmark:0"))
    turns = [
        Turn(
            prompt_ids=(1,),
            output_ids=tuple(range(length)),
            log_probs=tuple(-place / 3 for place in range(length)),
            spans=(VersionSpan(0, 0, length),),
            digest="ab" * 32,
            ordinal=ordinal,
        )
        for ordinal in range(TURNS)
    ]
    before = time.thread_time()
    for number in range(num_plays):
        play, kills, _ = journal.begin(f"sample {number}", 0)
        journal.turns(f"sample {number}", play, 0)
        for turn in turns:
            journal.record(f"sample {number}", play, turn, 0)
        journal.note(f"sample {number}", play, kills, 0, runs=False)
    spent = time.thread_time() - before
    journal.close()
    return 1000 * spent / (num_plays * len(turns))


def turns_per_s(folder: Path, way: str, workers: int, number: int, steps: int) -> float:
    """Turns a second of one run: the median over its steps but the first."""
    from buffer_rl.observe.metrics import read_metrics

    run_dir = folder / f"{WAYS[way]}_{workers}_{number}"
    flags = {
        "prompt-data": "rows.jsonl",
        "hf-checkpoint": "model",
        option_of(way).replace("_", "-"): f"{HERE / 'agents_played.py'}:{WAYS[way]}",
        "num-rollout": steps,
        "rollout-batch-size": GROUPS,
        "n-samples-per-prompt": SAMPLES,
        "num-rollout-workers": workers,
        "rollout-max-response-len": 4,
        "engine-context-length": 256,
        "engine-device": "cpu",
        "run-dir": run_dir,
        "progress": "plain",
    }
    words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    command = [sys.executable, "-m", "buffer_rl", "train", "--debug-rollout-only", "--no-trial", *words]
    answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    if answer.returncode:
        raise RuntimeError(answer.stdout[-2000:] + answer.stderr[-2000:])
    seconds = [line["perf/rollout_time"] for line in read_metrics(run_dir) if "perf/rollout_time" in line]
    return TURNS * GROUPS * SAMPLES / statistics.median(seconds[1:])


def import_seconds() -> float:
    """CPU seconds of a process that does nothing but import openai."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", "import openai"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def print_table(
    costs: Mapping[str, list[Cost]], rates: Mapping[tuple[str, int], list[float]], workers: list[int]
) -> None:
    """As Markdown: a row for each way."""
    counts = [f"turns/s (samples/s), {number} worker{'s' * (number > 1)}" for number in workers]
    print(f"{os.cpu_count()} cores; medians of {len(costs[BASE])} rounds\n")
    print("| " + " | ".join(["the agent asks by", "worker, ms a turn", "agent, ms a turn", *counts]) + " |")
    print("|---" * (3 + len(counts)) + "|")
    for way, found in costs.items():
        cells = [way, *(ranged([pair[side] for pair in found], 2) for side in (0, 1))]
        for number in workers:
            turns = rates.get((way, number), [])
            cells.append(f"{ranged(turns, 0)} ({statistics.median(turns) / TURNS:.0f})" if turns else "")
        print("| " + " | ".join(cells) + " |")


def ranged(values: list[float], digits: int) -> str:
    """The median, and the range if there are several values."""
    middle = f"{statistics.median(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle}, {min(values):.{digits}f} to {max(values):.{digits}f}"


if __name__ == "__main__":
    sys.exit(main())
