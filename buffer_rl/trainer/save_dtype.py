"""``--save-dtype``: the number format of the weights in a Hugging Face folder that is written for others.

What is trained is float32. The folder is cast after it is written, a file at a time, so that every trainer backend,
whatever writes its folders, has the option.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

INPUT = "input"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # of safetensors
_INDEX, _CONFIG = "model.safetensors.index.json", "config.json"
_DTYPE_KEYS = ("dtype", "torch_dtype")
WantedDtype = Callable[[str], str | None]
"""By the name of a weight, one of ``DTYPES``; None leaves it as it is."""


def cast_as_saved(folder: Path, save_dtype: str, origin: str | None) -> None:
    """Cast the floating-point weights in ``folder`` as ``--save-dtype`` says. origin: the folder that the model came
    from, of which ``input`` takes each weight's format."""
    if save_dtype != INPUT:
        cast_folder(folder, lambda _: save_dtype)
    elif origin is not None:
        cast_folder(folder, _formats_of(Path(origin)))


def cast_folder(folder: Path, wanted: WantedDtype) -> None:
    """Cast the floating-point weights of a Hugging Face folder in place, at most a file of them in memory.

    ``config.json`` gets the format that most numbers have then. Files that are as wanted are not written again.
    """
    sizes: Counter[str] = Counter()
    for file in sorted(folder.glob("*.safetensors")):
        _cast_file(file, wanted, sizes)
    if most := max(sizes.keys() & DTYPES, key=lambda name: sizes[name], default=None):
        _edit_json(folder / _CONFIG, lambda config: _name_dtype(config, most))
        total = sum(count * DTYPES[name].itemsize if name in DTYPES else count for name, count in sizes.items())
        _edit_json(folder / _INDEX, lambda index: index.get("metadata", {}).update(total_size=total))


def _cast_file(file: Path, wanted: WantedDtype, sizes: Counter[str]) -> None:
    """sizes: numbers by format, of other formats bytes; those of the file are added."""
    tensors: dict[str, torch.Tensor] = {}
    changed = False
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
        for name in opened.keys():  # noqa: SIM118  no mapping
            now = _NAMES.get(opened.get_slice(name).get_dtype())
            after = (wanted(name) or now) if now else None
            changed |= after != now
            tensor = tensors[name] = opened.get_tensor(name)
            if after is not None and after != now:
                tensors[name] = tensor.to(DTYPES[after])
            sizes[after or "other"] += tensor.numel() * (1 if after else tensor.element_size())
        if changed:
            partial = file.with_suffix(".partial")
            save_file(tensors, partial, metadata=metadata)
            os.replace(partial, file)


def _formats_of(origin: Path) -> WantedDtype:
    """The format of each weight in the folder; of one that its safetensors files do not have, the configuration's."""
    formats: dict[str, str | None] = {}
    for file in sorted(origin.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            formats |= {name: _NAMES.get(opened.get_slice(name).get_dtype()) for name in opened.keys()}  # noqa: SIM118
    config: Any = json.loads((origin / _CONFIG).read_text(encoding="utf-8"))
    named = next((config[key] for key in _DTYPE_KEYS if config.get(key) in DTYPES), None)
    return lambda name: formats.get(name, named)


def _name_dtype(config: dict[str, Any], dtype: str) -> None:
    for key, value in config.items():
        if key in _DTYPE_KEYS and value in DTYPES:
            config[key] = dtype
        elif isinstance(value, dict):
            _name_dtype(value, dtype)


def _edit_json(file: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    if file.is_file():
        text = file.read_text(encoding="utf-8")
        content: dict[str, Any] = json.loads(text)
        edit(content)
        if content != json.loads(text):
            file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
