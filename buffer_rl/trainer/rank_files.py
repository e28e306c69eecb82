"""Files that a trainer rank writes into a checkpoint folder and reads back.

``weights.safetensors`` and ``optimizer.safetensors`` are equal on all data-parallel ranks and written by rank 0;
``trainer.json`` has the step; ``random_{rank}.json`` is each rank's own. Nothing is pickled. Making the folder durable
and visible at once (temporary folder, fsync, rename) is the caller's part.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from buffer_rl.errors import CheckpointError, raised_as
from buffer_rl.trainer.lora import base_digest
from buffer_rl.trainer.optimizer import Optimizer
from buffer_rl.trainer.sharding import PART, load_parts, local, require_shapes, save_parts

FORMAT = 1
"""Version of this layout; a reader refuses others."""


def save_state(
    path: str,
    model: torch.nn.Module,
    optimizer: Optimizer,
    weights: Mapping[str, torch.Tensor],
    rank: int,
    *,
    background: bool = False,
) -> Callable[[], bool]:
    """Write this rank's part. ``weights``: the tensors of ``model``, each storage once. The result says whether all is
    written, and raises CheckpointError if it cannot be.

    background: tensors are written from a copy on a thread."""
    folder, moments = _begin_save(path, model, optimizer, rank)
    if rank != 0:
        return lambda: True
    files = {"weights": _on_cpu(weights, background), "optimizer": _on_cpu(moments, background)}

    def write() -> None:
        for name, tensors in files.items():
            save_file(tensors, folder / f"{name}.safetensors")

    return _written(write, str(folder), background=background)


def _written(write: Callable[[], None], where: str, *, background: bool) -> Callable[[], bool]:
    """``write``, or start it on a thread. Whether it has ended; raises CheckpointError if it failed there."""
    if not background:
        write()
        return lambda: True
    executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    written = executor.submit(write)
    executor.shutdown(wait=False)

    def ended() -> bool:
        if not written.done():
            return False
        if (error := written.exception()) is not None:
            raise CheckpointError(f"the checkpoint cannot be written: {error}", where=where) from error
        return True

    return ended


def save_random(folder: Path, rank: int) -> None:
    """Write the random state of this process, which is ``rank``."""
    (folder / f"random_{rank}.json").write_text(json.dumps(_random_state()))


def read_random(folder: Path, rank: int) -> Callable[[], None]:
    """Read what ``save_random`` wrote; the result sets it. A rank that the saved run did not have keeps its own.
    Raises CheckpointError, as the result does."""
    file = folder / f"random_{rank}.json"
    state = _read_json(file) if rank == 0 or file.exists() else None
    return lambda: _set_random_state(state, file) if state is not None else None


def load_state(
    path: str, model: torch.nn.Module, optimizer: Optimizer, weights: Mapping[str, torch.Tensor], rank: int
) -> None:
    """The inverse of ``save_state``; copies into ``weights`` in place.

    A rank that the saved run did not have (it had fewer ranks) keeps its own random state.
    Raises CheckpointError if a file is missing or damaged, or belongs to another model.
    """
    folder = Path(path)
    if any(folder.glob(f"{PART}*")):
        return load_split_state(path, model, optimizer, weights, rank)
    meta = _meta(folder, model)
    saved = _read_tensors(folder / "weights.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    require_shapes(weights, shapes, folder / "weights.safetensors")
    moments = _read_tensors(folder / "optimizer.safetensors")
    set_random = read_random(folder, rank)
    _set_moments(optimizer, moments, meta)
    with torch.no_grad():
        for name, tensor in weights.items():
            local(tensor).copy_(saved[name])  # of this rank alone: it has the whole model
    set_random()


def save_split_state(
    path: str,
    model: torch.nn.Module,
    optimizer: Optimizer,
    weights: Mapping[str, torch.Tensor],
    rank: int,
    *,
    background: Any,
) -> Callable[[], bool]:
    """As ``save_state``, of weights that are split over ranks: each writes its parts, and any number of ranks reads
    them. All ranks call it.

    background: a process group of all ranks for this alone, in which their threads meet."""
    folder, moments = _begin_save(path, model, optimizer, rank)
    tensors, on_thread = {**weights, **moments}, background is not None
    if on_thread:
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
    return _written(lambda: save_parts(tensors, folder, background), str(folder), background=on_thread)


def load_split_state(
    path: str, model: torch.nn.Module, optimizer: Optimizer, weights: Mapping[str, torch.Tensor], rank: int
) -> None:
    """As ``load_state``, from what either of the two wrote, on any number of ranks. All of them call it."""
    folder = Path(path)
    meta = _meta(folder, model)
    set_random = read_random(folder, rank)
    moments = optimizer.empty_state_tensors() if meta["step"] and meta.get("moments", True) else {}
    with torch.no_grad():
        load_parts({**weights, **moments}, folder)
    _set_moments(optimizer, moments, meta)
    set_random()


def _begin_save(
    path: str, model: torch.nn.Module, optimizer: Optimizer, rank: int
) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write what is no tensor. Returns the folder, and the optimizer's tensors, which are to be written."""
    folder, moments = Path(path), optimizer.state_tensors()
    folder.mkdir(parents=True, exist_ok=True)
    save_random(folder, rank)
    meta = {"format": FORMAT, "step": optimizer.step_count, "model": _architecture(model), "moments": bool(moments)}
    meta["base"] = base_digest(model)
    if rank == 0:
        (folder / "trainer.json").write_text(json.dumps(meta))
    return folder, moments


def _set_moments(optimizer: Optimizer, moments: Mapping[str, torch.Tensor], meta: Mapping[str, Any]) -> None:
    """``meta`` of folders that were written before there was ``--no-save-optim`` says nothing of moments."""
    if meta.get("moments", True):
        optimizer.load_state_tensors(moments, int(meta["step"]))
    else:
        optimizer.restart(int(meta["step"]))


def _meta(folder: Path, model: torch.nn.Module) -> dict[str, Any]:
    meta = _read_json(folder / "trainer.json")
    if meta.get("format") != FORMAT or meta.get("model") != _architecture(model):
        what = f"a checkpoint of format {meta.get('format')} for {meta.get('model')}"
        raise CheckpointError(what, where=str(folder), expected=f"format {FORMAT} for {_architecture(model)}")
    if meta.get("base") != (base := base_digest(model)):
        kinds = {True: "all weights", False: "adapters"}
        found, expected = (kinds[each is None] for each in (meta.get("base"), base))
        raise CheckpointError(
            f"a checkpoint of {found}" + (" of another base" if found == expected else ""),
            where=str(folder),
            expected=f"{expected} of this --hf-checkpoint",
            hint="--lora-rank and --hf-checkpoint are those of the run that is resumed",
        )
    return meta


def _architecture(model: torch.nn.Module) -> str:
    return type(model).__name__.removeprefix("FSDP")


def _on_cpu(tensors: Mapping[str, torch.Tensor], copy: bool) -> dict[str, torch.Tensor]:
    return {name: local(tensor).detach().to("cpu", copy=copy).contiguous() for name, tensor in tensors.items()}


def _random_state() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": torch.cuda.get_rng_state().numpy().tobytes().hex() if torch.cuda.is_available() else None,
    }


def _set_random_state(state: Mapping[str, Any], file: Path) -> None:
    with raised_as(
        CheckpointError, "the random state is damaged", (KeyError, TypeError, ValueError, RuntimeError), where=str(file)
    ):
        version, words, gauss = state["python"]
        kind, keys, position, has_gauss, cached = state["numpy"]
        random.setstate((version, tuple(words), gauss))
        np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(_byte_tensor(state["torch"]))
        if state["cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state(_byte_tensor(state["cuda"]))


def _byte_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _read_tensors(file: Path) -> dict[str, torch.Tensor]:
    _require(file)
    with raised_as(
        CheckpointError, "not a readable safetensors file", (SafetensorError, OSError, ValueError), where=str(file)
    ):
        return load_file(file)


def _read_json(file: Path) -> dict[str, Any]:
    _require(file)
    with raised_as(CheckpointError, "not readable", (OSError, ValueError), where=str(file)):
        value = json.loads(file.read_text())
    if not isinstance(value, dict):
        raise CheckpointError("not a JSON object", where=str(file))
    return value


def _require(file: Path) -> None:
    if not file.is_file():
        raise CheckpointError(f"{file.name} is missing", where=str(file.parent), hint="the checkpoint is incomplete")
