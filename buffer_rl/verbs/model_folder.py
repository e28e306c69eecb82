"""Whether a Hugging Face folder can be loaded, as far as one sees without reading its weights."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from buffer_rl.errors import ConfigError

# Every file that a tokenizer of transformers keeps its vocabulary in, by the names that models use.
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.tiktoken", "*.model", "*.spm")
INDEX_NAMES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
WEIGHT_NAMES = ("model.safetensors", "pytorch_model.bin")
_HEADER_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
_DOWNLOAD = "a model of the Hub is downloaded first: hf download ORG/NAME --local-dir FOLDER"


def read_config(flag: str, folder: str) -> dict[str, Any]:
    """``config.json`` of a model folder. Raises ConfigError if it is not there or no JSON object."""
    path = Path(folder, "config.json")
    if not path.is_file():
        raise ConfigError(
            f"{folder!r} is no Hugging Face folder: there is no config.json in it", where=flag, hint=_DOWNLOAD
        )
    return _json_object(flag, path)


def check_weights(flag: str, folder: str) -> None:
    """Raises ConfigError for a model folder without weights, and naming the first file of weights that is missing or
    cut off."""
    base = Path(folder)
    index = next((base / name for name in INDEX_NAMES if (base / name).is_file()), None)
    if index is not None:
        shards = _json_object(flag, index).get("weight_map")
        if not isinstance(shards, dict):
            raise ConfigError("the index has no weight_map", where=f"{flag} {index}", hint=_DOWNLOAD)
        files = [base / name for name in sorted({str(name) for name in shards.values()})]
    else:
        files = [path for name in WEIGHT_NAMES if (path := base / name).is_file()][:1]
    if not files:
        raise ConfigError(
            f"there are no weights in {folder!r}", where=flag, expected=" or ".join(WEIGHT_NAMES), hint=_DOWNLOAD
        )
    for file in files:
        _check_file(flag, file)


def check_tokenizer(flag: str, folder: str) -> None:
    """Raises ConfigError if no file of the model folder looks like a tokenizer's; transformers would make one up."""
    if not any(path for pattern in TOKENIZER_FILES for path in Path(folder).glob(pattern)):
        raise ConfigError(
            f"there is no tokenizer in {folder!r}",
            where=flag,
            expected="tokenizer.json or another tokenizer file beside config.json",
            hint="AutoTokenizer.from_pretrained(ORIGIN).save_pretrained(FOLDER) writes it",
        )


def _check_file(flag: str, file: Path) -> None:
    where = f"{flag} {file}"
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            start = opened.read(_HEADER_LENGTH.size)
            header = opened.read(_header_length(start)) if file.suffix == ".safetensors" else b"{}"
    except OSError as error:
        raise ConfigError(f"the weights cannot be read: {error.strerror}", where=where, hint=_DOWNLOAD) from error
    if start.startswith(b"version "):
        raise ConfigError("the file is a pointer of Git LFS, not the weights", where=where, hint="git lfs pull")
    if not size:
        raise ConfigError("the file is empty", where=where, hint=_DOWNLOAD)
    if file.suffix != ".safetensors":
        return
    try:
        tensors: Mapping[str, Any] = json.loads(header)
        ends = [int(tensor["data_offsets"][1]) for name, tensor in tensors.items() if name != "__metadata__"]
    except (ValueError, AttributeError, KeyError, IndexError, TypeError) as error:
        raise ConfigError("the file is no safetensors file, or a damaged one", where=where, hint=_DOWNLOAD) from error
    expected = _HEADER_LENGTH.size + len(header) + max(ends, default=0)
    if size != expected:
        raise ConfigError(
            f"the file is damaged: {size} bytes", where=where, expected=f"{expected} bytes", hint=_DOWNLOAD
        )


def _header_length(start: bytes) -> int:
    if len(start) < _HEADER_LENGTH.size:
        return 0
    return min(int(_HEADER_LENGTH.unpack(start)[0]), _MAX_HEADER_BYTES)


def _json_object(flag: str, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"the file cannot be read: {error.strerror}", where=f"{flag} {path}") from error
    except ValueError as error:
        raise ConfigError(f"the file is no JSON: {error}", where=f"{flag} {path}", hint=_DOWNLOAD) from error
    if not isinstance(value, dict):
        raise ConfigError("the file holds no JSON object", where=f"{flag} {path}", hint=_DOWNLOAD)
    return value
