"""A user's data source (``--data-source-path``) in the process that hosts it: batches by number, state as bytes.

Whatever the user's code raises becomes a PluginError that names the reference; what it returns is checked.
"""

from __future__ import annotations

import asyncio
import inspect
import tempfile
from pathlib import Path
from typing import Any

from buffer_rl.data.custom_groups import GroupReader
from buffer_rl.data.delivery import Delivery, DeliveryRequest
from buffer_rl.errors import BufferRLError, DataError
from buffer_rl.plugins import PluginRegistry
from buffer_rl.resolution.calls import call, construct, place

MAX_STATE_BYTES = 64 * 2**20
"""The state travels and is kept with each batch; 64 MiB take some tenths of a second."""


class CustomSource:
    """Hosts one data source; not thread-safe.

    args: the flat options; ``data_source_path`` and ``n_samples_per_prompt`` are read, and the user's class gets
    them all. Raises PluginError where the class is not found or its constructor raises.
    """

    def __init__(self, args: Any, registry: PluginRegistry, *, max_state_bytes: int = MAX_STATE_BYTES) -> None:
        self.reference: str = args.data_source_path
        self._where = place("data_source", self.reference)
        self._max_state_bytes = max_state_bytes
        self._reader = GroupReader(self.reference, args.n_samples_per_prompt)
        factory = registry.resolve("data_source", self.reference)
        self._source: Any = construct("data_source", self.reference, factory, args).built
        self._next = 0
        self._last: Delivery | None = None
        self._failure: BufferRLError | None = None

    def num_rows(self) -> int:
        """``len(source)``. Raises DataError for a source of no rows."""
        rows: int = self._call("__len__")
        if rows < 1:
            raise DataError(f"its length is {rows}", where=self._where, hint="or set --num-rollout, not --num-epoch")
        return rows

    def take(self, request: DeliveryRequest) -> Delivery | None:
        """The batch that ``request`` names, with the state after it: made if it is the next one, the same again if it
        is the last one, and None if it is an older one, which the Buffer has.

        Raises PluginError and DataError; the source is then of no use any more, and the error is raised again.
        """
        if self._failure is not None:
            raise self._failure
        if request.number < self._next:
            return self._last if self._last is not None and self._last.number == request.number else None
        if request.number > self._next:
            raise DataError(f"batch {request.number} is asked for", where=self._where, expected=f"batch {self._next}")
        try:
            value = self._call("get_samples", request.num_groups)
            groups = self._reader.read(value, request)
            self._last = Delivery(number=request.number, groups=groups, state=self._save())
        except BufferRLError as error:  # the source has gone on; a second try would lose its groups
            self._failure = error
            raise
        self._next += 1
        return self._last

    def restore(self, number: int, state: bytes) -> None:
        """Go on after batch ``number - 1``, at which the state was ``state``. Raises PluginError."""
        with tempfile.TemporaryDirectory(prefix="buffer-rl-source-") as folder:
            path = Path(folder) / "state"
            path.write_bytes(state)
            self._call("load", str(path))
        self._next, self._last, self._failure = number, None, None

    def _save(self) -> bytes:
        with tempfile.TemporaryDirectory(prefix="buffer-rl-source-") as folder:
            path = Path(folder) / "state"
            self._call("save", str(path))
            if not path.is_file():
                written = ", ".join(sorted(child.name for child in Path(folder).iterdir()))
                raise DataError(
                    "its method save wrote no state" + (f", but {written}" if written else ""),
                    where=self._where,
                    expected="one file, whose path save receives",
                    hint="a source with nothing to keep writes an empty file",
                )
            if (size := path.stat().st_size) > self._max_state_bytes:
                raise DataError(
                    f"its method save wrote {size} bytes",
                    where=self._where,
                    expected=f"at most {self._max_state_bytes}",
                    hint="save where the source stands, such as a row number, not its rows",
                )
            return path.read_bytes()

    def _call(self, method: str, *arguments: Any) -> Any:
        """What a method of the user's object answers; it may be async."""

        def answer() -> Any:
            value = getattr(self._source, method)(*arguments)
            return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value

        return call("data_source", self.reference, answer, at=method)


async def _awaited(answer: Any) -> Any:
    return await answer
