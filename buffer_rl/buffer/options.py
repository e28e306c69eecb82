"""Options of the Buffer."""

from __future__ import annotations

from typing import ClassVar

from buffer_rl.options.section import Section, option


class BufferOptions(Section):
    """The process that owns prompts, sample groups and the ledger."""

    heading: ClassVar[str] = "Buffer"

    num_data_storage_units: int = option(
        0, "number of processes that hold large payloads in Ray's object store; 0: the Buffer holds them", ge=0
    )
    data_storage_min_bytes: int = option(
        1 << 20,
        "minimum size of a column of a group for the object store, in bytes; smaller ones travel in calls",
        ge=0,
    )
    buffer_timeout_s: float = option(60.0, "deadline for one call to the Buffer, in seconds", gt=0)
    buffer_max_restarts: int = option(
        3,
        "maximum number of replacements of a Buffer that died or hung; counted separately, of repetitions of a "
        "rollout or evaluation lost with a process",
        ge=0,
    )
    buffer_hang_timeout_s: float = option(
        20.0, "replace a Buffer that answers no call for N seconds; at most half of --buffer-timeout-s counts", gt=0
    )
    ledger_dir: str | None = option(
        None,
        "folder for the ledger, on a local disk of the node that starts the run; default: --run-dir",
        metavar="PATH",
    )
