"""The files of a model folder: whether its weights are whole, and whether it has a tokenizer. New ones."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open

from buffer_rl.errors import ConfigError
from buffer_rl.files.hf_config import DOWNLOAD, json_object
from buffer_rl.options.checks import refuse

# Every file that a tokenizer of transformers keeps its vocabulary in, by the names that models use.
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.tiktoken", "*.model", "*.spm")
INDEX_NAMES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
WEIGHT_NAMES = ("model.safetensors", "pytorch_model.bin")
_LFS_START = b"version "


def check_weights(flag: str, folder: str) -> None:
    """Raises ConfigError for a model folder without weights, and naming the first file of weights that is missing or
    cut off."""
    for file in weight_files(flag, folder):
        _check_file(flag, file)


def weight_files(flag: str, folder: str) -> list[Path]:
    """The files of a model folder's weights. Raises ConfigError if there are none, or if their index is damaged."""
    base = Path(folder)
    index = next((base / name for name in INDEX_NAMES if (base / name).is_file()), None)
    if index is not None:
        shards = json_object(flag, index).get("weight_map")
        if not isinstance(shards, dict):
            raise ConfigError("the index has no weight_map", where=f"{flag} {index}", hint=DOWNLOAD)
        return [base / name for name in sorted({str(name) for name in shards.values()})]
    files = [path for name in WEIGHT_NAMES if (path := base / name).is_file()][:1]
    refuse(not files, f"{flag}: there are no weights in {folder!r}", DOWNLOAD, " or ".join(WEIGHT_NAMES))
    return files


def check_tokenizer(flag: str, folder: str) -> None:
    """Raises ConfigError if no file of the model folder looks like a tokenizer's; transformers would make one up."""
    expected = "tokenizer.json or another tokenizer file beside config.json"
    hint = "AutoTokenizer.from_pretrained(ORIGIN).save_pretrained(FOLDER) writes it"
    refuse(not has_tokenizer(folder), f"{flag}: there is no tokenizer in {folder!r}", hint, expected)


def has_tokenizer(folder: str) -> bool:
    """Whether a file of the model folder looks like a tokenizer's."""
    return any(path for pattern in TOKENIZER_FILES for path in Path(folder).glob(pattern))


def require_new(target: Path) -> None:
    """Raises ConfigError if the folder of ``--output`` is there already."""
    if target.exists():
        raise ConfigError(f"{str(target)!r} is there already", where="--output", expected="a new folder")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder beside ``target``, the one of ``--output``, which gets its name once the block is through. Raises
    ConfigError if it cannot be written."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
            made = Path(folder, target.name)
            made.mkdir()
            yield made
            made.rename(target)
    except OSError as error:
        raise ConfigError(f"the folder cannot be written: {error}", where="--output") from error


def _check_file(flag: str, file: Path) -> None:
    where = f"{flag} {file}"
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            start = opened.read(len(_LFS_START))
        if start == _LFS_START:
            raise ConfigError("the file is a pointer of Git LFS, not the weights", where=where, hint="git lfs pull")
        if not size:
            raise ConfigError("the file is empty", where=where, hint=DOWNLOAD)
        if file.suffix == ".safetensors":
            with safe_open(file, framework="np"):  # compares the header with the size and reads no weights
                pass
    except OSError as error:
        raise ConfigError(f"the weights cannot be read: {error.strerror}", where=where, hint=DOWNLOAD) from error
    except SafetensorError as error:
        what = f"the file is no safetensors file, or it is damaged: {size} bytes; {error}"
        raise ConfigError(what, where=where, hint="copy or download the file again") from error
