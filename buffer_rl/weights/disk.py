"""Weights by disk: a folder of safetensors for each version, which the engines read.

The folder gets its name by one rename, so that no engine ever reads half a version. Under ``--publish-delta`` a folder
has what changed since the one before it, down to a whole one, and an engine reads those that it lacks. Whole ones are
written where there is none before, where an engine refused a delta, after ``MAX_DELTAS``, and where the deltas would
together be as large as one: so engines that join read at most twice what a version has.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buffer_rl.args import Args
from buffer_rl.errors import ConfigError, EngineError
from buffer_rl.options.section import required
from buffer_rl.records.groups import Topology
from buffer_rl.weights.sender import HoldsVersion, Senders, drained

if TYPE_CHECKING:
    from buffer_rl.engines.control import EngineControlClient
    from buffer_rl.weights.delta import Encoded

VERSION_GLOB = "v" + "[0-9]" * 6
COPIED = (".json", ".jinja", ".model", ".py", ".txt")
"""Endings of the files beside the weights: configuration, tokenizer, code of the model."""
INDEX = "model.safetensors.index.json"
MAX_DELTAS = 50
CONTENTS = "contents.json"
"""In a folder of ``--publish-delta``: its ``Contents``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a folder has. digest: of the version. base: the folder beside it and the digest of the version that its
    delta is of; None: it is whole."""

    digest: str
    base: tuple[str, str] | None


def read_contents(folder: Path) -> Contents | None:
    """Of a folder; None without any. Raises EngineError if they are none."""
    path = folder / CONTENTS
    try:
        found = json.loads(path.read_bytes())
        base = found["base"]
        if base is not None and not re.fullmatch(r"v\d{6,}", base[0]):
            raise ValueError("a base is the folder of a version")
        return Contents(digest=str(found["digest"]), base=None if base is None else (base[0], str(base[1])))
    except FileNotFoundError:
        return None
    except (IndexError, KeyError, OSError, TypeError, ValueError) as error:
        raise EngineError(f"not the contents of a folder of weights: {error}", where=str(path)) from error


class DiskSender(HoldsVersion):
    """Writes one rank's weights, a file for each bucket."""

    def __init__(self, args: Args, topology: Topology) -> None:
        super().__init__(args, topology)
        self._model = Path(required(args.hf_checkpoint, "hf_checkpoint"))
        self._share = topology.share or (0 if topology.is_source else 1, 1)

    def write_held(self, _: Iterator[Mapping[str, Any]], folder: str, contents: Contents) -> None:
        """Write what is held, whole or as a delta; on other ranks nothing."""
        if self._held is None:
            return
        target, as_delta = Path(folder), contents.base is not None
        target.mkdir(parents=True)
        files = self._write_files(self._held.buckets(as_delta=as_delta), target)
        if not as_delta:
            self._write_rest(target, *files)
        (target / CONTENTS).write_text(json.dumps(asdict(contents)))

    def write(self, buckets: Iterator[Mapping[str, Any]], folder: str, shares: bool = True) -> None:
        """Write a Hugging Face folder, with the configuration of ``--hf-checkpoint``. Each rank that has the tensors
        writes some of its files. shares: without it the source writes all."""
        number, count = self._share if shares else (0 if self._is_source else 1, 1)
        if number >= count:
            drained(buckets)
            return
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        files, num_bytes = self._write_files(buckets, target, number, count)
        if self._is_source:
            self._write_rest(target, files, num_bytes)

    def _write_files(
        self, buckets: Iterator[Mapping[str, Any]], target: Path, part: int = 0, count: int = 1
    ) -> tuple[dict[str, str], int]:
        """The file of each tensor, and how many bytes they have; part: which of ``count`` parts of the files is
        written, those of the others are left to other ranks."""
        from safetensors.torch import save_file

        files: dict[str, str] = {}
        num_bytes = 0
        for number, bucket in enumerate(buckets, start=1):
            name = f"model-{number:05d}.safetensors"
            if number % count == part:
                tensors = {key: _alone(tensor) for key, tensor in bucket.items()}
                save_file(tensors, target / name, metadata={"format": "pt"})
            files.update(dict.fromkeys(bucket, name))
            num_bytes += sum(tensor.nbytes for tensor in bucket.values())
        return files, num_bytes

    def _write_rest(self, target: Path, files: dict[str, str], num_bytes: int) -> None:
        (target / INDEX).write_text(json.dumps({"metadata": {"total_size": num_bytes}, "weight_map": files}))
        for path in self._model.iterdir():
            if path.suffix in COPIED and not path.name.endswith(".index.json"):
                shutil.copyfile(path, target / path.name)


def _alone(tensor: Any) -> Any:
    """The tensor on the CPU, contiguous, and in memory of its own, as its file needs it."""
    found = tensor.detach().cpu().contiguous()
    return found if found.untyped_storage().nbytes() == found.nbytes else found.clone()


def _is_whole(folder: Path) -> bool:
    """Whether the files that the index of a folder names are there. Without an index, nothing is known."""
    index = folder / INDEX
    return not index.exists() or all(
        (folder / name).exists() for name in set(json.loads(index.read_bytes())["weight_map"].values())
    )


def write_folder(target: Path, write: Callable[[str], object], *, where: str) -> None:
    """Have the trainer ``write`` the folder ``target``, which gets its name once it is whole, in place of one of that
    name. Raises ConfigError, naming the option ``where``, if the trainer writes to another file system."""
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    write(str(temporary))
    if not temporary.is_dir():
        expected = "a folder on a file system that all nodes share"
        raise ConfigError("what the trainer wrote is not on the driver's node", where=where, expected=expected)
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)


def remove_versions(folder: Path, kept: Collection[Path], *more: str) -> None:
    """Remove the versions in ``folder`` but those ``kept``, and what a run that was killed has left half written. more:
    patterns of names that versions have as well."""
    for pattern in (VERSION_GLOB, f".{VERSION_GLOB}.tmp", *more):
        for path in folder.glob(pattern):
            if path not in kept:
                shutil.rmtree(path, ignore_errors=True)


def disk_folder(args: Args) -> Path:
    """Where ``DiskTransport`` writes."""
    return Path(args.update_weight_disk_dir or Path(args.run_dir, "weights")).absolute()


class DiskTransport:
    """``--weight-sync-mode disk``."""

    sender = DiskSender
    staged = False

    def __init__(self, args: Args) -> None:
        self._folder = disk_folder(args)
        self._publishes_delta, self._sends_delta = args.publish_delta, False
        self.sent_share: float | None = None
        self._chain: list[Path] = []
        self._num_bytes = 0  # of the deltas in the chain
        self._digest: str | None = None  # of its last folder
        self._is_refused = False
        self._shares = True  # until a file is missing

    def connect(self, trainer: Senders, engines: EngineControlClient) -> None:
        """Only note both sides: the folder is there for every engine. Deltas are for embedded engines."""
        self._trainer, self._engines = trainer, engines
        if self._publishes_delta:
            self._sends_delta = all(info.is_ours for info in engines.server_info().values())

    def prepare(self, version: int) -> None:
        """Write the version while engines go on generating. Raises ConfigError where the driver does not see it."""
        if self._is_refused or not self._sends_delta:
            self._chain, self._is_refused, self.sent_share = [], False, None
        if self._sends_delta:
            answers = self._trainer.send(DiskSender.encode)
            self._encoded: Encoded = next(answer for answer in answers if answer is not None)
            self._write_held(version)
        else:
            self._write_at(version, self._write_version)

    def publish(self, version: int) -> None:
        """Have the paused engines read the version. Where one refused a delta, it is whole the next time."""
        if self._is_refused or (self._chain and not self._sends_delta):  # engines came that read whole ones alone
            self._chain = []
            self._write_held(version)
        self._is_refused = len(self._chain) > 1
        self._engines.update_weights_from_disk(str(self._target(version)), version)
        self._is_refused = False

    def stage(self, version: int) -> None:
        """Have the engines read and prepare the version while they generate."""
        self._is_refused = len(self._chain) > 1
        self._engines.prepare_weight_update(str(self._target(version)), version=version)
        self._is_refused = False

    def swap(self, version: int) -> None:
        """Have the paused engines serve what they prepared."""
        self._engines.serve_prepared(str(self._target(version)))

    def release(self, version: int) -> None:
        """All engines have the version: forget the older ones that it does not build on, and what a run that was killed
        has left half written."""
        remove_versions(self._folder, [self._target(version), *self._chain])

    def close(self) -> None:
        """Nothing to free: the newest version stays for engines that join."""

    def _write_held(self, version: int) -> None:
        """Write what the trainer holds: what changed since the newest folder where that is its base, else all."""
        encoded, target = self._encoded, self._target(version)
        base: tuple[str, str] | None = None
        if self._chain and encoded.base is not None and encoded.base == self._digest:
            if target == self._chain[-1] and encoded.digest == self._digest:
                return  # published once more, for engines that came since
            is_less = self._num_bytes + encoded.delta_bytes < encoded.full_bytes
            if target not in self._chain and is_less and len(self._chain) <= MAX_DELTAS:
                base = (self._chain[-1].name, encoded.base)
        contents = Contents(digest=encoded.digest, base=base)
        self.sent_share = encoded.sent_share(as_delta=base is not None)
        self._write_at(version, lambda folder: self._trainer.send(DiskSender.write_held, folder, contents))
        self._chain = [target] if base is None else [*self._chain, target]
        self._num_bytes = 0 if base is None else self._num_bytes + encoded.delta_bytes
        self._digest = encoded.digest

    def _write_at(self, version: int, write: Callable[[str], object]) -> None:
        write_folder(self._target(version), write, where=f"--update-weight-disk-dir {self._folder}")

    def _write_version(self, folder: str) -> None:
        """By all ranks, if they write where the driver reads; else, as of ranks on other nodes, by the source alone."""
        if self._shares:
            self._trainer.send(DiskSender.write, folder)
            self._shares = _is_whole(Path(folder))
        if not self._shares:
            shutil.rmtree(folder, ignore_errors=True)
            self._trainer.send(DiskSender.write, folder, False)

    def _target(self, version: int) -> Path:
        return self._folder / f"v{version:06d}"
