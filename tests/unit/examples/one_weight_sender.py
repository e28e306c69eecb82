"""A trainer's rank as a weight transport sees it, in a process that can be killed: does what each line of its input
says, and answers on its output.

    python one_weight_sender.py TRANSPORT MODEL BUCKET_BYTES KILL_AT

MODEL: a folder with the weights. KILL_AT: before this bucket of a broadcast the process kills itself.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from collections.abc import Iterator
from typing import Any

import torch

from buffer_rl.config import compose
from buffer_rl.options import CORE_SECTIONS
from buffer_rl.train.model import hf_state, load_model, weight_buckets
from buffer_rl.types import Topology


def until(buckets: list[dict[str, torch.Tensor]], kill_at: int) -> Iterator[dict[str, torch.Tensor]]:
    """``buckets`` up to the one before which the process ends; one past the last is after all were sent."""
    for index, bucket in enumerate([*buckets, None]):
        if index == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if bucket is not None:
            yield bucket


def main(transport: str, model: str, bucket_bytes: str, kill_at: str) -> None:
    file, _, name = transport.rpartition(":")
    factory: Any = runpy.run_path(file)[name]
    sender = factory.sender(compose(CORE_SECTIONS)(), Topology(dp_rank=0, dp_size=1))
    weights = hf_state(load_model(model, torch.device("cpu"), "MODEL"))
    buckets = list(weight_buckets(weights.items(), int(bucket_bytes)))
    for line in sys.stdin:
        method, arguments = json.loads(line)
        answer = getattr(sender, method)(until(buckets, int(kill_at) if method == "broadcast" else -1), *arguments)
        print("answer", json.dumps(answer), flush=True)  # gloo writes lines of its own


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
