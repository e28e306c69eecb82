"""Generated tokens per CPU-second: the embedded engine against ``generate`` of transformers, on one thread.

    python benchmarks/engine_decode.py            # about a minute
    python benchmarks/engine_decode.py --http     # also through a server process and the router

Workload: groups of 8 samples a prompt, prompts of 16 to 128 tokens, response lengths lognormal (sigma 1, mean 64,
at most 512) and the same for all variants; only these tokens count. ``generate`` runs static batches of B in which
all rows wait for the longest; it computes no log-probabilities, the engine does. The model is a Qwen3 of 0.7
million random parameters. Over HTTP the CPU time of the server, the router and this client is counted together.
Exit status 1 if the engine is less than ``--require`` times as fast.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from buffer_rl.engine.client import EngineClient
from buffer_rl.engine.embedded.launcher import launch
from buffer_rl.engine.embedded.model import FastDecoder
from buffer_rl.engine.embedded.sampling import SamplingParams
from buffer_rl.engine.embedded.scheduler import Request, Scheduler
from buffer_rl.engine.fleet import EngineFleet
from buffer_rl.testing.tiny import make_tiny_model

SAMPLES_PER_PROMPT = 8
VOCAB = 512
MODEL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
}


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
    decoder = FastDecoder(module, MODEL["max_position_embeddings"], deterministic=deterministic)
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
    args = SimpleNamespace(
        hf_checkpoint=folder,
        router_url=None,
        engine_urls=[],
        engine_api_key=None,
        trust_remote_code=False,
        rollout_num_engines=1,
        engine_device="cpu",
        engine_dtype="float32",
        engine_num_threads=1,
        engine_max_running_requests=batch,
        engine_context_length=None,
        engine_start_timeout_s=300.0,
        generate_timeout_s=600.0,
        deterministic=False,
        replay_kept_tokens=False,
    )

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


def _cpu_time() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def main() -> int:
    """Run all variants and print the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 64], help="sequences in flight")
    parser.add_argument("--groups", type=int, default=16, help="prompts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--http", action="store_true", help="also measure through a server process and the router")
    parser.add_argument("--require", type=float, default=4.0, help="least acceptable ratio of the engine to generate")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    items = make_workload(args.groups, args.seed)
    tokens = sum(item.length for item in items)
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(folder, "qwen3", vocab=VOCAB, **MODEL)
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
        run_engine(module, items[:SAMPLES_PER_PROMPT], 8, deterministic=False)  # warm-up
        worst = _table(variants, args.batch, tokens)
    if worst < args.require:
        print(f"the engine is {worst:.1f} times as fast as generate; at least {args.require:g} is required")
        return 1
    return 0


def _table(variants: dict[str, Callable[[int], float]], batches: list[int], tokens: int) -> float:
    """Measure and print; returns the smallest ratio of the embedded engine to ``generate``."""
    print(f"{'variant':32}{'B':>5}{'CPU s':>9}{'tokens/CPU-s':>14}{'ratio':>8}")
    ratios = []
    for batch in batches:
        base = 0.0
        for name, measure in variants.items():
            seconds = measure(batch)
            base = base or seconds
            ratios += [base / seconds] if name == "embedded engine" else []
            print(f"{name:32}{batch:>5}{seconds:>9.2f}{tokens / seconds:>14.0f}{base / seconds:>8.1f}", flush=True)
    return min(ratios)


if __name__ == "__main__":
    sys.exit(main())
