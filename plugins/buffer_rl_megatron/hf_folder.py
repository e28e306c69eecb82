"""Writes a Hugging Face folder from weights that arrive one at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from buffer_rl.train.model import weight_buckets

SHARD_BYTES = 5 * 1024**3
"""Largest file, as ``save_pretrained`` of transformers makes them; a larger tensor has a file of its own."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


def write_folder(
    weights: Iterable[tuple[str, torch.Tensor]],
    origin: str,
    target: str,
    *,
    writes: bool = True,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the weights into the folder ``target``, with configuration and tokenizer of the folder ``origin``.

    At most ``shard_bytes`` of the weights are in host memory at a time, and one tensor on the device. writes: whether
    this rank does; the others iterate over the weights, as those that gather them need all ranks.
    """
    if not writes:
        for _ in weights:
            pass
        return
    folder = Path(target)
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(Path(origin).iterdir()):
        if file.is_file() and not file.name.endswith(_WEIGHTS):
            shutil.copyfile(file, folder / file.name)
    files: list[tuple[Path, list[str]]] = []
    total = 0
    on_host = ((name, tensor.to("cpu", copy=True)) for name, tensor in weights)
    for tensors in weight_buckets(on_host, shard_bytes, copy=False):
        part = folder / f"part-{len(files)}"  # how many there will be is not known yet
        save_file(tensors, part, metadata={"format": "pt"})
        files.append((part, list(tensors)))
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    places: dict[str, str] = {}
    for number, (part, names) in enumerate(files, 1):
        several = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        name = several if len(files) > 1 else "model.safetensors"
        part.rename(folder / name)
        places |= dict.fromkeys(names, name)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
