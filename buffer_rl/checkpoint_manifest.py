"""A checkpoint's manifest: size and hash of every file, what the writer noted, and a hash of all that."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from buffer_rl.errors import CheckpointError
from buffer_rl.remote_checkpoint import FOLDER_KEY

FORMAT = 2
UNSEALED_FORMAT = 1
"""Of earlier versions: without a hash of the manifest itself."""
MANIFEST = "manifest.json"
_SEAL = "manifest_sha256"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a manifest says. files: size in bytes and SHA-256 by name. folder: where they are, beside the manifest."""

    step: int
    facts: Mapping[str, Any]
    files: Mapping[str, tuple[int, str]]
    folder: str = ""


def manifest_content(step: int, facts: Mapping[str, Any], files: Mapping[str, tuple[int, str]]) -> bytes:
    """The bytes of a manifest. The inverse of ``parse_manifest``."""
    listed = {name: {"size": size, "sha256": sha256} for name, (size, sha256) in files.items()}
    # As they will be read: what a mapping's keys are in JSON is part of the hash.
    values = orjson.loads(orjson.dumps({"format": FORMAT, "step": step, "facts": dict(facts), "files": listed}))
    return orjson.dumps({**values, _SEAL: _hash(values)}, option=orjson.OPT_INDENT_2)


def parse_manifest(content: bytes, where: str) -> Manifest:
    """What a manifest's bytes say. Raises CheckpointError naming ``where`` if they are damaged or of another format."""
    try:
        manifest = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise CheckpointError(f"the manifest cannot be read: {error}", where=where) from error
    if not isinstance(manifest, dict) or manifest.get("format") not in (FORMAT, UNSEALED_FORMAT):
        raise CheckpointError("the manifest is of another format", where=where, expected=f"format {FORMAT}")
    try:
        files = {name: (int(file["size"]), str(file["sha256"])) for name, file in dict(manifest["files"]).items()}
        folder = str(manifest.get(FOLDER_KEY, ""))
        if any(path.startswith("/") or ".." in path.split("/") for path in (folder, *files)):
            raise ValueError("a path leads out of the checkpoint")
        parsed = Manifest(step=int(manifest["step"]), facts=dict(manifest["facts"]), files=files, folder=folder)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the manifest is damaged: {error!r}", where=where) from error
    if (manifest["format"] == FORMAT or _SEAL in manifest) and manifest.get(_SEAL) != _hash(manifest):
        raise CheckpointError("the manifest is damaged: it differs from its own hash", where=where)
    return parsed


def _hash(manifest: Mapping[str, Any]) -> str:
    """Of everything but the hash itself and the folder, which an upload adds."""
    sealed = {name: value for name, value in manifest.items() if name not in (_SEAL, FOLDER_KEY)}
    return hashlib.sha256(orjson.dumps(sealed, option=orjson.OPT_SORT_KEYS)).hexdigest()
