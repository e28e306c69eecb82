"""The time of one publication to one engine, by transport and size of the model.

    python benchmarks/publication.py                                     # 10 MB to 2 GB: minutes, and 12 GB of memory
    python benchmarks/publication.py --sizes 10,100                      # MB of float32 weights
    python benchmarks/publication.py --sglang-python .venv-sglang/bin/python       # also to a SGLang server
    python benchmarks/publication.py --delta --sizes 100,1000            # MB of bfloat16 weights, whole and as deltas

Weights of a random model, and an engine in a process of its own, one thread each. ``write`` is what engines
generate through, which an embedded one prepares the weights in; ``pause`` is the time without generation. ``checksum``
is what ``--check-weight-update-equal`` adds to the pause. ``copy`` is a copy of as many bytes in memory, right after
each publication, and ``by copy`` the pause over it. Medians over alternating publications, so that all transports see
the same machine; folders of versions are in the temporary folder. Beside them a TCP connection over the loopback
interface.

With ``--delta``, float32 weights are trained for an engine in bfloat16: in each step every element moves by the
learning rate, which is as far as Adam goes. ``bytes`` are those of the delta by those of all weights.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from servers import options_for, served

from buffer_rl.engines.control import EngineControlClient
from buffer_rl.testing.tiny import make_tiny_model
from buffer_rl.trainer.model import weight_buckets
from buffer_rl.weights.disk import DiskTransport
from buffer_rl.weights.distributed import DistributedTransport
from buffer_rl.weights.publish import Publisher
from buffer_rl.weights.tensor import TensorTransport

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # for tests/harness

from harness.fake_roles import local_senders

TRANSPORTS: dict[str, Any] = {"disk": DiskTransport, "tensor": TensorTransport, "distributed": DistributedTransport}
VOCAB = 4096
TIMEOUT_S = 300.0


def make_model(folder: Path, megabytes: int) -> str:
    """A model of about so many MB in float32: wider and deeper the larger it is."""
    width = next((width for limit, width in ((20, 256), (200, 512), (1000, 1024)) if megabytes <= limit), 2048)
    layers = max(1, round((megabytes * 1e6 / 4 - VOCAB * width) / (12 * width**2)))  # q, o: 2; k, v: 1; three of 3 each
    return make_tiny_model(
        folder / "model",
        vocab=VOCAB,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        head_dim=64,
        init_scale=0.02,
    )


def measure(folder: Path, path: str, engine: str, python: str, repeats: int) -> dict[str, dict[str, float]]:
    """The median seconds of each part by transport, to an engine of the kind ``engine``."""
    args = options_for(
        path,
        run_dir=str(folder / "run"),
        rollout_engine=engine,
        sglang_python=python,
        update_weights_timeout_s=TIMEOUT_S,
    )
    weights = weights_of(path)
    copy = Copy(sum(tensor.nbytes for tensor in weights.values()))
    times: dict[str, list[dict[str, float]]] = {name: [] for name in TRANSPORTS}
    with served(args, folder) as server, EngineControlClient([server.url], timeout_s=TIMEOUT_S) as control:
        publishers = {}
        for name, transport in TRANSPORTS.items():
            trainer = local_senders(transport, args, lambda: weight_buckets(weights.items(), copy=False))
            publishers[name] = Publisher(transport(args), trainer, control)
        for version in range(1, repeats + 2):
            for name, publisher in publishers.items():
                parts = copy.beside(publisher.publish(version))
                started = time.monotonic()
                control.checksums()
                parts["checksum"] = time.monotonic() - started
                if version > 1:  # the first of each warms up
                    times[name].append(parts)
        for publisher in publishers.values():
            publisher.close()
    return {name: {part: median(rows, part) for part in rows[0]} for name, rows in times.items()}


def measure_delta(folder: Path, path: str, repeats: int, lr: float) -> dict[str, dict[str, float]]:
    """The median seconds of each part by transport, of whole versions in bfloat16 and of deltas, to an embedded engine,
    and the share of the bytes."""
    weights, random = weights_of(path), torch.Generator().manual_seed(0)
    found: dict[str, dict[str, float]] = {}
    copy = Copy(sum(tensor.nbytes for tensor in weights.values()) // 2)

    def step() -> None:
        for tensor in weights.values():
            tensor += lr * (torch.randint(0, 2, tensor.shape, generator=random, dtype=torch.int8) * 2 - 1)

    def export() -> Any:
        yield from weight_buckets(((name, tensor.to(torch.bfloat16)) for name, tensor in weights.items()), copy=False)

    common = {"run_dir": str(folder / "run"), "engine_dtype": "bfloat16", "update_weights_timeout_s": TIMEOUT_S}
    args = options_for(path, **common)
    with served(args, folder) as server, EngineControlClient([server.url], timeout_s=TIMEOUT_S) as control:
        version = 0
        for delta in (False, True):
            for name, transport in TRANSPORTS.items():
                if delta and name == "tensor":
                    continue
                own = options_for(path, **common, publish_delta=delta)
                side, rows = transport(own), list[dict[str, float]]()
                publisher = Publisher(side, local_senders(transport, own, export), control)
                for _ in range(repeats + 1):
                    version += 1
                    step()
                    rows.append(copy.beside(publisher.publish(version)))
                publisher.close()
                row = {part: median(rows[1:], part) for part in rows[0]}
                encoded = side._encoded if delta else None
                row["bytes"] = 1.0 if encoded is None else encoded.delta_bytes / encoded.full_bytes
                found[f"{name}, delta" if delta else name] = row
    return found


def write_s(folder: Path, num_bytes: int) -> float:
    """Seconds of a file of so many bytes in ``folder``, the best of three."""
    block = bytes(1 << 20)

    def write() -> None:
        with (folder / "file").open("wb") as file:
            for left in range(num_bytes, 0, -len(block)):
                file.write(block[:left])

    return min(timed(write) for _ in range(3))


def report_delta(folder: Path, megabytes: int, repeats: int, lr: float) -> None:
    """Print the rows of one size, in bfloat16."""
    path = make_model(folder, 2 * megabytes)
    num_bytes = sum(tensor.nbytes for tensor in weights_of(path).values()) // 2
    print(f"{num_bytes / 1e6:.0f} MB in bfloat16, a learning rate of {lr:g}", flush=True)
    rows = measure_delta(folder, path, repeats, lr)
    for name, row in rows.items():
        print(f"  {name:20}{shown(row)}  bytes {row['bytes']:.4f}", flush=True)
    print(f"  write of a file {write_s(folder, num_bytes) * 1e3:.1f} ms", flush=True)


def weights_of(path: str) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face folder by name."""
    return {name: tensor for file in Path(path).glob("*.safetensors") for name, tensor in load_file(file).items()}


def median(rows: list[dict[str, float]], part: str) -> float:
    """Of one part."""
    return statistics.median(row[part] for row in rows)


class Copy:
    """A copy of so many bytes, in memory that is there already: of one part again and again if they are more."""

    PART = 1 << 30

    def __init__(self, num_bytes: int) -> None:
        self._source, self._target = (torch.ones(min(num_bytes, self.PART), dtype=torch.uint8) for _ in range(2))
        self._repeats = num_bytes / len(self._source)

    def beside(self, parts: dict[str, float]) -> dict[str, float]:
        """The seconds of a publication, and those of a copy now, the best of two."""
        seconds = self._repeats * min(timed(lambda: self._target.copy_(self._source)) for _ in range(2))
        return parts | {"copy": seconds, "by copy": parts["perf/publish_pause"] / seconds}


SHOWN = {"perf/publish_write": "write", "perf/publish_pause": "pause", "copy": "copy", "checksum": "checksum"}


def shown(parts: dict[str, float]) -> str:
    """The parts of a row."""
    times = "".join(f"{name:>10} {parts[part] * 1e3:8.1f} ms" for part, name in SHOWN.items() if part in parts)
    return f"{times}  by copy {parts['by copy']:5.2f}"


def loopback_s(num_bytes: int) -> float:
    """Seconds of so many bytes through a TCP connection over the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sender:
        receiver, _ = listener.accept()
        block = bytes(1 << 20)

        def send() -> None:
            for left in range(num_bytes, 0, -len(block)):
                sender.sendall(block[:left])

        def run() -> None:
            thread, left, buffer = threading.Thread(target=send), num_bytes, bytearray(1 << 20)
            thread.start()
            while left:
                left -= receiver.recv_into(buffer)
            thread.join()

        with receiver:
            return timed(run)


def timed(run: Any) -> float:
    """Seconds of a call."""
    started = time.monotonic()
    run()
    return time.monotonic() - started


def report(engine: str, times: dict[str, dict[str, float]]) -> None:
    """Print the rows of one engine."""
    for name, parts in times.items():
        print(f"  {engine:10}{name:12}{shown(parts)}", flush=True)


def main() -> int:
    """Print a table; 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="10,100,500,2000", help="MB of weights, separated by commas")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--delta", action="store_true", help="whole versions and deltas in bfloat16")
    parser.add_argument("--lr", type=float, default=1e-6, help="with --delta: what every element moves by in a step")
    parser.add_argument("--sglang-python", default="", help="the Python of an environment with SGLang")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for megabytes in map(int, args.sizes.split(",")):
        with tempfile.TemporaryDirectory(prefix="publication_") as name:
            if args.delta:
                report_delta(Path(name), megabytes, args.repeats, args.lr)
                continue
            path = make_model(Path(name), megabytes)
            num_bytes = sum(tensor.nbytes for tensor in weights_of(path).values())
            print(f"{num_bytes / 1e6:.0f} MB")
            for engine in ("embedded", "sglang") if args.sglang_python else ("embedded",):
                report(engine, measure(Path(name), path, engine, args.sglang_python, args.repeats))
            print(f"  {'loopback':22}{loopback_s(num_bytes) * 1e3:19.1f} ms", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
