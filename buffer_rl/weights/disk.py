"""Weights by disk: a folder of safetensors for each version, which the engines read.

The folder gets its name by one rename, so that no engine ever reads half a version.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buffer_rl.errors import ConfigError
from buffer_rl.options.section import required

if TYPE_CHECKING:
    from buffer_rl.args import Args
    from buffer_rl.engines.control import EngineControlClient
    from buffer_rl.records.groups import Topology
    from buffer_rl.weights.sender import Senders

VERSION_GLOB = "v" + "[0-9]" * 6
COPIED = (".json", ".jinja", ".model", ".py", ".txt")
"""Endings of the files beside the weights: configuration, tokenizer, code of the model."""
INDEX = "model.safetensors.index.json"


class DiskSender:
    """Writes one rank's weights, a file for each bucket."""

    def __init__(self, args: Args, topology: Topology) -> None:
        self._model = Path(required(args.hf_checkpoint, "hf_checkpoint"))
        self._is_source = topology.is_source

    def write(self, buckets: Iterator[Mapping[str, Any]], folder: str) -> None:
        """Write a Hugging Face folder, with the configuration of ``--hf-checkpoint``; on other ranks nothing."""
        if not self._is_source:
            for _ in buckets:
                pass
            return
        from safetensors.torch import save_file

        target = Path(folder)
        target.mkdir(parents=True)
        files, num_bytes = {}, 0
        for number, bucket in enumerate(buckets, start=1):
            name = f"model-{number:05d}.safetensors"
            tensors = {key: _alone(tensor) for key, tensor in bucket.items()}
            save_file(tensors, target / name, metadata={"format": "pt"})
            files.update(dict.fromkeys(tensors, name))
            num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        (target / INDEX).write_text(json.dumps({"metadata": {"total_size": num_bytes}, "weight_map": files}))
        for path in self._model.iterdir():
            if path.suffix in COPIED and not path.name.endswith(".index.json"):
                shutil.copyfile(path, target / path.name)


def _alone(tensor: Any) -> Any:
    """The tensor on the CPU, contiguous, and in memory of its own, as its file needs it."""
    found = tensor.detach().cpu().contiguous()
    return found if found.untyped_storage().nbytes() == found.nbytes else found.clone()


def disk_folder(args: Args) -> Path:
    """Where ``DiskTransport`` writes."""
    return Path(args.update_weight_disk_dir or Path(args.run_dir, "weights")).absolute()


class DiskTransport:
    """``--weight-sync-mode disk``."""

    sender = DiskSender
    staged = False

    def __init__(self, args: Args) -> None:
        self._folder = disk_folder(args)

    def connect(self, trainer: Senders, engines: EngineControlClient) -> None:
        """Only note both sides: the folder is there for every engine."""
        self._trainer, self._engines = trainer, engines

    def prepare(self, version: int) -> None:
        """Write the version while engines go on generating. Raises ConfigError where the driver does not see it."""
        target = self._target(version)
        temporary = target.with_name(f".{target.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        self._write_version(str(temporary))
        shutil.rmtree(target, ignore_errors=True)
        try:
            temporary.rename(target)
        except FileNotFoundError as error:
            raise ConfigError(
                "what the trainer wrote is not on the driver's node",
                where=f"--update-weight-disk-dir {self._folder}",
                expected="a folder on a file system that all nodes share",
            ) from error

    def publish(self, version: int) -> None:
        """Have the paused engines read the version."""
        self._engines.update_weights_from_disk(str(self._target(version)), version)

    def release(self, version: int) -> None:
        """All engines have the version: forget the older ones, and what a run that was killed has left half written."""
        for folder in (*self._folder.glob(VERSION_GLOB), *self._folder.glob(f".{VERSION_GLOB}.tmp")):
            if folder != self._target(version):
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Nothing to free: the newest version stays for engines that join."""

    def _write_version(self, folder: str) -> None:
        self._trainer.send(DiskSender.write, folder)

    def _target(self, version: int) -> Path:
        return self._folder / f"v{version:06d}"
