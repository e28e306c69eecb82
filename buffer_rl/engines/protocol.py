"""SGLang's protocol, as far as both sides of it have to agree: rows of a request, kinds of memory, ``/server_info``.

A request for several prompts has one ``rid`` R and one ``sampling_seed``. Servers name its rows R_0, R_1, …, and the
rows of an embedded engine draw under seeds that are mixed from the request's seed and the row's number, as below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from buffer_rl.errors import EngineError, raised_as

GENERATE, SERVER_INFO, MODEL_INFO = "/generate", "/server_info", "/model_info"
"""Paths that several callers ask; those of one call stand in its method of ``EngineControlClient``."""
WEIGHTS = ("weights",)
CACHE = ("kv_cache", "cuda_graph")
"""The tags of SGLang's memory, in the order in which an engine takes it back."""
ROWS = 16
"""Most rows of a request. Engines abort by prefix, so an abort of R_1 ends R_10 to R_15 as well: the rows of a request
are aborted together."""
SEED_BITS = 31
"""The widest seed that every engine and every random generator behind one accepts."""
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio, SplitMix64's step from one state to the next
EMBEDDED = "buffer_rl.embedded"
"""``engine`` in ``/server_info`` of this package's own."""


class RowSeeds(StrEnum):
    """How the rows of a request draw."""

    OWN = "own"  # each under a seed of its own, mixed as below: the embedded engine
    SHARED = "shared"  # all under the request's, so that rows of equal prompts are equal: SGLang's reproducible mode
    NONE = "none"  # under none, whatever the request says: SGLang otherwise


def seed_of(text: str) -> int:
    """A seed below 2**31 that depends on ``text`` alone, equal on every machine."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> (64 - SEED_BITS)


def row_rid(rid: str, row: int) -> str:
    """The id of row ``row`` of the request ``rid``."""
    return f"{rid}_{row}"


def row_seeds(seed: int, num_rows: int) -> list[int]:
    """The seeds of the rows 0 to ``num_rows - 1`` of a request with ``sampling_seed`` ``seed``; each below 2**31.

    Seed i is the upper 31 bits of number i of the SplitMix64 generator that starts at ``seed``, taken modulo 2**64."""
    states = [(seed + number * GOLDEN) & 0xFFFFFFFFFFFFFFFF for number in range(1, num_rows + 1)]
    seeds: list[int] = (mix64(np.array(states, dtype=np.uint64)) >> np.uint64(64 - SEED_BITS)).tolist()
    return seeds


def mix64(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators",
    with the constants of Stafford's variant 13). ``x``: uint64, any shape; overflow wraps."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
"""OpenAI's code of a request that has more tokens than the model's context."""


class BadRequestError(ValueError):
    """What a client sent is wrong: answered with status 400 and this text. code: OpenAI's, if it has one for it."""

    def __init__(self, what: str, *, code: str | None = None) -> None:
        super().__init__(what)
        self.code = code


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether what is asked for changes nothing: None, False, something empty, or one of the ``neutral`` values."""
    return value is None or value is False or value in ("", [], {}) or value in neutral


@dataclass(frozen=True, slots=True)
class Adapter:
    """A published adapter, which requests name: an engine applies none that a request does not name.

    A request has the one that it began with to its end, also if another one is published meanwhile. SGLang calls the
    tokens after that by the newer version, so the version is set here.

    Example:
        Adapter(name="v12-9f3a", version=12)
    """

    name: str
    version: int

    def named_in(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The body of ``/generate`` that asks for it."""
        return {**request, "lora_path": self.name}

    def set_version(self, answer: Any) -> None:
        """Say in an answer of ``/generate``, or in several, that all tokens are of its version."""
        for row in answer if isinstance(answer, list) else [answer]:
            if isinstance(row, dict) and isinstance(meta := row.get("meta_info"), dict):
                span = {"version": str(self.version), "start": 0, "end": len(row.get("output_ids") or ())}
                meta["weight_versions"] = [span]


Truth = Annotated[bool, BeforeValidator(bool)]


class ServerInfo(BaseModel):
    """What an engine says that it is, in ``/server_info``. engine: its kind. imitates: the server that it answers as.
    deterministic: an answer depends on the request and its seed alone. enable_deterministic_inference: the rows of a
    request have its seed, where it is not ours. device: ``"cuda"`` or ``"cpu"``; empty where it does not say.
    context_length: None where it is the model's own. digest: of the version that a delta may be of; None: it keeps
    none. prepares_weights: it can do so while it generates, and the end of an update only swaps them."""

    model_config = ConfigDict(frozen=True)

    engine: Any = None
    imitates: str | None = None
    tp_size: int = 1
    dp_size: int = 1
    deterministic: Truth = False
    enable_deterministic_inference: Truth = False
    device: str | None = None
    context_length: int | None = None
    digest: str | None = None
    prepares_weights: Truth = False

    @classmethod
    def parse(cls, answer: Any, url: str) -> ServerInfo:
        """Of an answer of ``/server_info``. Raises EngineError unless it is one."""
        with raised_as(EngineError, "not what a server says of itself", ValidationError, where=url + SERVER_INFO):
            return cls.model_validate(answer)

    @property
    def is_embedded(self) -> bool:
        """Whether it is one of this package's."""
        return bool(self.engine == EMBEDDED)

    @property
    def is_ours(self) -> bool:
        """Whether it behaves as the embedded engine, which takes weights only as a whole, and only those that fit."""
        return self.is_embedded and self.imitates is None

    @property
    def row_seeds(self) -> RowSeeds:
        """How the rows of a request draw."""
        if self.is_ours:
            return RowSeeds.OWN
        return RowSeeds.SHARED if self.deterministic or self.enable_deterministic_inference else RowSeeds.NONE
