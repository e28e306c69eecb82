"""Options of the Buffer."""

from __future__ import annotations

from typing import ClassVar

from buffer_rl.options.section import Section, option


class BufferOptions(Section):
    """The Buffer actor."""

    heading: ClassVar[str] = "Buffer"

    num_data_storage_units: int = option(
        0,
        "processes, spread over the nodes, that own large payloads in Ray's object store; with 0 the Buffer's own "
        "process does",
        ge=0,
    )
    data_storage_min_bytes: int = option(
        1 << 20,
        "a column of a group goes into the object store from this size on; smaller ones travel inside calls, which is "
        "cheaper for them",
        ge=0,
    )
    buffer_timeout_s: float = option(60.0, "deadline of one call to the Buffer, in seconds", gt=0)
    buffer_max_restarts: int = option(
        3,
        "how often, over the run, a Buffer that died or hung is replaced; and, counted by itself, how often a rollout "
        "or evaluation that was lost with a process is produced again",
        ge=0,
    )
    buffer_hang_timeout_s: float = option(
        20.0,
        "a Buffer that answers no call for this long, in seconds, is ended and replaced; at most half of "
        "--buffer-timeout-s counts",
        gt=0,
    )
    ledger_dir: str | None = option(
        None,
        "folder for the ledger of the groups, on a local disk of the node that the run is started on; --run-dir where "
        "absent",
        metavar="PATH",
    )
