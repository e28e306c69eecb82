"""``buffer-rl export --load CHECKPOINT --output FOLDER``: the model of a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from buffer_rl.errors import CheckpointError
from buffer_rl.files.model_folder import new_folder, require_new
from buffer_rl.files.remote import is_remote
from buffer_rl.observe.terminal import say
from buffer_rl.options.redaction import mask_url

_LOAD = "a folder or URL step_NNNNNN, or --save's, then the newest in it"
_SAVE_DTYPE = "number format of the weights; input: as the checkpoint has them, whose run had a --save-dtype too"


def add_parser(subparsers: argparse._SubParsersAction[Any], argv: Sequence[str]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "export",
        description="Check a checkpoint against its manifest and copy its model and tokenizer into a folder of their\n"
        "own, which transformers and every engine can load.",
    )
    parser.add_argument("--load", required=True, metavar="CHECKPOINT", help=_LOAD)
    parser.add_argument("--output", required=True, metavar="FOLDER", help="the folder to make; it must not be there")
    formats = ["input", "float32", "bfloat16", "float16"]
    parser.add_argument("--save-dtype", choices=formats, default="input", help=_SAVE_DTYPE)
    parser.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    """Export and say what was written. Raises CheckpointError or ConfigError."""
    from buffer_rl.files.checkpoint import opened_checkpoint

    target = Path(namespace.output)
    require_new(target)
    with opened_checkpoint(namespace.load) as checkpoint:
        copy_model(checkpoint.folder / "hf", target, namespace.save_dtype)
        origin = mask_url(namespace.load) if is_remote(namespace.load) else checkpoint.folder
        say(f"{target}: the model after {checkpoint.step} steps, from {origin}")
    return 0


def copy_model(source: Path, target: Path, save_dtype: str = "input") -> None:
    """Copy the folder ``source``, its weights cast to ``save_dtype``; ``target`` gets its name only once it is whole.

    Raises CheckpointError if there is no model in ``source``, ConfigError if ``target`` cannot be written.
    """
    if not (source / "config.json").is_file():
        raise CheckpointError("the checkpoint holds no Hugging Face folder", where=str(source), expected="config.json")
    with new_folder(target) as temporary:
        shutil.copytree(source, temporary, dirs_exist_ok=True)
        if save_dtype != "input":
            from buffer_rl.trainer.save_dtype import cast_folder  # torch takes seconds

            cast_folder(temporary, lambda _: save_dtype)
        temporary.chmod(0o755)  # a run's checkpoint may be private
