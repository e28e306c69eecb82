"""``buffer-rl convert``: convert Hugging Face folders to torch_dist checkpoints of Megatron's, and back.

One process on the CPU holds the whole model; no layout is asked for, as such a checkpoint is loaded in any.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from buffer_rl.files.model_folder import new_folder, require_new
from buffer_rl.observe.terminal import say

DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_parser(subparsers: argparse._SubParsersAction[Any], argv: Sequence[str]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "convert",
        description="Convert the model in --hf-checkpoint into a torch_dist checkpoint of Megatron's, or the one in\n"
        "--load into a Hugging Face folder.",
    )
    parser.add_argument(
        "--hf-checkpoint",
        required=True,
        metavar="FOLDER",
        help="a Hugging Face folder: the weights, or with --load only configuration and tokenizer",
    )
    parser.add_argument(
        "--load",
        metavar="CHECKPOINT",
        help="a torch_dist checkpoint: the folder with latest_checkpointed_iteration.txt, or an iteration's",
    )
    parser.add_argument("--output", required=True, metavar="FOLDER", help="the folder to make; it must not be there")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the weights; auto: the configuration's")
    parser.add_argument(
        "--make-vocab-size-divisible-by",
        type=int,
        default=1,
        metavar="N",
        help="pad the vocabulary of the torch_dist checkpoint to a multiple of this",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that the folder brings")
    parser.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    """Convert, and say what was written. Raises ConfigError or CheckpointError."""
    target = Path(namespace.output)
    require_new(target)
    from buffer_rl_megatron.compat import cpu_devices, install

    install()
    import torch

    from buffer_rl_megatron.bridge import load_bridge, write_folder
    from buffer_rl_megatron.checkpoint import load, newest, save
    from buffer_rl_megatron.models import read_config

    config = read_config(namespace.hf_checkpoint, trust_remote_code=namespace.trust_remote_code)
    dtype = getattr(config, "dtype", None) if namespace.dtype == "auto" else getattr(torch, namespace.dtype)
    source = newest(namespace.load) if namespace.load else None
    with _one_rank(), cpu_devices(), new_folder(target) as folder:
        bridge = load_bridge(
            namespace.hf_checkpoint,
            sequence_parallel=False,
            transformer_impl="local",
            dtype=dtype or torch.float32,
            overrides={"use_cpu_initialization": True},
            make_vocab_size_divisible_by=namespace.make_vocab_size_divisible_by,
            trust_remote_code=namespace.trust_remote_code,
        )
        chunks = bridge.build(device=torch.device("cpu"))
        if source is None:
            bridge.load(chunks, namespace.hf_checkpoint)
            save(chunks, None, str(folder), step=0)
        else:
            load(chunks, None, str(source))
            write_folder(bridge.export(chunks), namespace.hf_checkpoint, str(folder))
    say(f"{target}: the model of {source or namespace.hf_checkpoint}")
    return 0


@contextmanager
def _one_rank() -> Iterator[None]:
    """A group of this process alone, and Megatron's groups in it."""
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    with tempfile.TemporaryDirectory(prefix="convert-") as folder:
        dist.init_process_group("gloo", init_method=f"file://{Path(folder, 'store')}", rank=0, world_size=1)
        try:
            parallel_state.initialize_model_parallel()
            tensor_parallel.model_parallel_cuda_manual_seed(0, inference_rng_tracker=True)
            yield
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
