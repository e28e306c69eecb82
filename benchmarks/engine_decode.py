"""Generated tokens per CPU-second: the embedded engine against ``generate`` of transformers, on one thread.

    python benchmarks/engine_decode.py                    # about a minute
    python benchmarks/engine_decode.py --http             # also through a server process and the router
    python benchmarks/engine_decode.py --size 30M         # or 3M
    python benchmarks/engine_decode.py --sglang-python .venv-sglang/bin/python          # also a SGLang server

Workload: groups of 8 samples a prompt, prompts of 16 to 128 tokens, response lengths lognormal (sigma 1, mean 64,
at most 512) and the same for all variants; only these tokens count. ``generate`` runs static batches of B in which
all rows wait for the longest; it computes no log-probabilities, the engine does. The model is a Qwen3 with random
parameters. Over HTTP the CPU time of the server, the router and this client is counted together; of a SGLang server
that of its own processes. Variants take turns ``--turns`` times, and the least time of each counts. Exit status 1 if
the engine is less than ``--require`` times as fast.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import torch
from servers import options_for, served
from transformers import AutoModelForCausalLM

from buffer_rl.embedded.fast_decoder import FastDecoder
from buffer_rl.embedded.launcher import launch
from buffer_rl.embedded.sampling import SamplingParams
from buffer_rl.embedded.scheduler import Request, Scheduler
from buffer_rl.engines.client import EngineClient
from buffer_rl.engines.fleet import EngineFleet
from buffer_rl.testing.tiny import make_tiny_model

SAMPLES_PER_PROMPT = 8
VOCAB = 512
CONTEXT = 1024


def sizes(hidden: int, inner: int, layers: int, heads: int, head_dim: int) -> dict[str, Any]:
    """The configuration of a model with half as many key-value heads as heads."""
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": head_dim,
        "max_position_embeddings": CONTEXT,
    }


MODELS = {"0.6M": sizes(128, 384, 3, 4, 32), "3M": sizes(256, 768, 4, 8, 32), "30M": sizes(640, 1920, 6, 10, 64)}
WANTED = {"0.6M": 8.0, "3M": 6.0, "30M": 4.5}
"""Times as fast as ``generate``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One response to generate: ``length`` tokens after ``prompt``."""

    prompt: tuple[int, ...]
    length: int


def make_workload(num_groups: int, seed: int) -> list[Item]:
    """The long-tailed workload; a lognormal of sigma 1 has the mean exp(mu + 1/2)."""
    rng = random.Random(seed)
    items = []
    for _ in range(num_groups):
        prompt = tuple(rng.randrange(3, VOCAB) for _ in range(rng.randint(16, 128)))
        for _ in range(SAMPLES_PER_PROMPT):
            length = round(math.exp(rng.gauss(math.log(64) - 0.5, 1.0)))
            items.append(Item(prompt=prompt, length=min(max(length, 1), 512)))
    return items


def run_generate(module: Any, items: list[Item], batch: int) -> float:
    """CPU seconds of ``generate`` in static batches, padded on the left."""
    start = time.process_time()
    for at in range(0, len(items), batch):
        part = items[at : at + batch]
        longest = max(len(item.prompt) for item in part)
        ids = torch.tensor([[0] * (longest - len(item.prompt)) + list(item.prompt) for item in part])
        new = max(item.length for item in part)
        module.generate(
            ids,
            attention_mask=(ids != 0).long(),
            do_sample=True,
            top_k=0,
            max_new_tokens=new,
            min_new_tokens=new,
            pad_token_id=0,
        )
    return time.process_time() - start


def run_engine(module: Any, items: list[Item], batch: int, *, deterministic: bool) -> float:
    """CPU seconds of the embedded engine's scheduler with ``batch`` sequences in flight."""
    start = time.process_time()
    decoder = FastDecoder(module, CONTEXT, deterministic=deterministic)
    scheduler = Scheduler(decoder, max_running_requests=batch)
    for i, item in enumerate(items):
        params = SamplingParams(max_new_tokens=item.length, ignore_eos=True)
        scheduler.add(Request(rid=str(i), prompt_ids=item.prompt, params=params, seed=i))
    tokens = 0
    while scheduler.has_work:
        tokens += sum(len(request.output_ids) for request in scheduler.step())
    assert tokens == sum(item.length for item in items)
    return time.process_time() - start


def run_http(folder: str, items: list[Item], batch: int) -> float:
    """CPU seconds of server, router and client together, after the server's start."""
    args = options_for(folder, engine_num_threads=1, engine_max_running_requests=batch, engine_auth=False)

    async def generate(fleet: EngineFleet) -> None:
        async with EngineClient(fleet.router_url, fleet.engine_urls) as client:
            params = [
                {"max_new_tokens": item.length, "ignore_eos": True, "sampling_seed": i} for i, item in enumerate(items)
            ]
            await asyncio.gather(
                *(
                    client.agenerate(str(i), item.prompt, own)
                    for i, (item, own) in enumerate(zip(items, params, strict=True))
                )
            )

    totals = []
    # Children's CPU time is known once they have ended, so a run without requests is taken off a run with them.
    for part in ([], items):
        before = _cpu_time()
        with tempfile.TemporaryDirectory() as run_dir, EngineFleet(args, run_dir, launch) as fleet:
            fleet.wait_ready()
            if part:
                asyncio.run(generate(fleet))
        totals.append(_cpu_time() - before)
    return totals[1] - totals[0]


def run_sglang(python: str, folder: str, items: list[Item], batch: int) -> float:
    """CPU seconds of a SGLang server, for the requests alone."""
    args = options_for(
        folder,
        rollout_engine="sglang",
        sglang_python=python,
        engine_num_threads=1,
        engine_max_running_requests=batch,
        engine_context_length=CONTEXT,
        engine_auth=False,
    )
    with served(args, Path(tempfile.gettempdir())) as server:
        asyncio.run(_post_all(server.url, items[:SAMPLES_PER_PROMPT], batch))  # warm-up
        before = _group_cpu_time(server.process.pid)
        asyncio.run(_post_all(server.url, items, batch))
        return _group_cpu_time(server.process.pid) - before


async def _post_all(url: str, items: list[Item], batch: int) -> None:
    slots = asyncio.Semaphore(batch)

    async def post(session: aiohttp.ClientSession, item: Item) -> None:
        params = {"max_new_tokens": item.length, "ignore_eos": True}
        body = {"input_ids": list(item.prompt), "sampling_params": params, "return_logprob": True}
        async with slots, session.post(f"{url}/generate", json=body) as response:
            assert len((await response.json())["output_ids"]) == item.length

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1200)) as session:
        await asyncio.gather(*(post(session, item) for item in items))


def _group_cpu_time(group: int) -> float:
    """CPU seconds of the processes of a process group, as Linux reports them."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12]) if int(fields[2]) == group else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def _cpu_time() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def main() -> int:
    """Run all variants and print the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(MODELS), default="0.6M", help="of the model")
    parser.add_argument("--batch", type=int, nargs="+", default=[32], help="sequences in flight")
    parser.add_argument("--groups", type=int, default=16, help="prompts")
    parser.add_argument("--turns", type=int, default=1, help="measurements of each variant")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--http", action="store_true", help="also measure through a server process and the router")
    parser.add_argument("--sglang-python", help="the Python of an environment with SGLang: also measure its server")
    parser.add_argument("--require", type=float, default=4.0, help="least acceptable ratio of the engine to generate")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    items = make_workload(args.groups, args.seed)
    tokens = sum(item.length for item in items)
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(folder, "qwen3", vocab=VOCAB, **MODELS[args.size])
        loader: Any = AutoModelForCausalLM
        module: Any = loader.from_pretrained(folder, dtype=torch.float32).eval()
        size = sum(weight.numel() for weight in module.parameters())
        print(
            f"{size / 1e6:.2f}M parameters, {len(items)} responses, {tokens} tokens, {torch.get_num_threads()} thread"
        )
        variants: dict[str, Callable[[int], float]] = {
            "transformers generate": lambda batch: run_generate(module, items, batch),
            "embedded engine": lambda batch: run_engine(module, items, batch, deterministic=False),
            "embedded engine, deterministic": lambda batch: run_engine(module, items, batch, deterministic=True),
        }
        if args.http:
            variants["embedded engine over HTTP"] = lambda batch: run_http(folder, items, batch)
        if args.sglang_python:
            variants["SGLang server"] = lambda batch: run_sglang(args.sglang_python, folder, items, batch)
        run_engine(module, items[:SAMPLES_PER_PROMPT], 8, deterministic=False)  # warm-up
        worst = _table(variants, args.batch, tokens, args.turns)
    print(f"the engine is {worst:.1f} times as fast as generate; wanted at this size: {WANTED[args.size]:g}")
    return 1 if worst < args.require else 0


def _table(variants: dict[str, Callable[[int], float]], batches: list[int], tokens: int, turns: int) -> float:
    """Measure and print; returns the smallest ratio of the embedded engine to ``generate``."""
    print(f"{'variant':32}{'B':>5}{'CPU s':>9}{'tokens/CPU-s':>14}{'ratio':>8}")
    ratios = []
    for batch in batches:
        taken: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(turns):
            for name, measure in variants.items():
                taken[name].append(measure(batch))
        least = {name: min(seconds) for name, seconds in taken.items()}
        base = least["transformers generate"]
        ratios.append(base / least["embedded engine"])
        for name, seconds in least.items():
            print(f"{name:32}{batch:>5}{seconds:>9.2f}{tokens / seconds:>14.0f}{base / seconds:>8.1f}", flush=True)
    return min(ratios)


if __name__ == "__main__":
    sys.exit(main())
