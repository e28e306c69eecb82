"""The Buffer's process: one thread that owns the state, and a second one that answers health and progress.

Who waits for whom: callers wait for the state thread, with a deadline of their own; the state thread waits
for nobody. User code never runs here.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import orjson
import ray

from buffer_rl.buffer.calls import CallLog
from buffer_rl.buffer.feed import DeliveredFeed
from buffer_rl.buffer.ledger import MemoryLedger
from buffer_rl.buffer.partial import RequeueRule
from buffer_rl.buffer.plane import LocalDataPlane
from buffer_rl.buffer.state import BufferState
from buffer_rl.buffer.storage.actor import PULLS, pull_payloads
from buffer_rl.config import load_args
from buffer_rl.data.source import EvalSource, PromptDataSource
from buffer_rl.errors import BufferStateError, CheckpointError

CHANGES = frozenset(
    {
        "generate",
        "get_samples",
        "deliver",
        "set_source_length",
        "add_samples",
        "finish",
        "reject",
        "adopt",
        "close_rollout",
        "put_fields",
        "get_meta",
        "offer_again",
        "clear",
        "commit",
        "release",
        "update_metadata",
        "load",
    }
)
READS = frozenset(
    {
        # It fixes the assignment of rows to ranks, but repeats give the same rows by themselves; its answers hold the
        # payloads of a whole step, too large to keep.
        "plan_data",
        "plan_eval_data",
        "plan_fields",
        "get_totals",
        "get_headers",
        "get_metadata",
        "get_buffer_length",
        "get_num_rollout_per_epoch",
        "get_source_state",
        "save",
    }
)

MAX_WAITERS = 64
"""Readers that can wait for rows at one time; more would wait for each other."""

STATE_FILE = "buffer.json"


class BufferActor:
    """Hosts one ``BufferState``. Called through ``buffer_rl.buffer.client.BufferClient``."""

    def __init__(self, args_text: str) -> None:
        args: Any = load_args(args_text)
        source: PromptDataSource | DeliveredFeed | None = None
        if args.data_source_path:  # it may read --prompt-data in its own way, and is not to be second-guessed
            source = DeliveredFeed(args.data_source_path)
        elif args.prompt_data:
            source = PromptDataSource(args)
        self._state = BufferState(
            source,
            ledger=MemoryLedger(),
            plane=LocalDataPlane(),
            eval_plane=LocalDataPlane(),
            groups_per_step=args.rollout_batch_size,
            eval_groups=EvalSource(args).all_groups,
            rule=RequeueRule.from_args(args),
            max_staleness=None if args.debug_rollout_only else 0,  # that mode publishes no weights
        )
        self._calls = CallLog()
        self._changed = threading.Condition()

    def change(self, caller: str, sequence: int, method: str, *args: Any) -> Any:
        """Execute a method that changes state, once per ``(caller, sequence)``."""
        if method not in CHANGES:
            raise BufferStateError(f"the Buffer has no method {method!r} that changes state")
        target = self._load if method == "load" else getattr(self._state, method)
        revision = self._state.revision
        try:
            return self._calls.once(caller, sequence, lambda: target(*args))
        finally:
            if self._state.revision != revision:
                with self._changed:
                    self._changed.notify_all()

    def read(self, method: str, *args: Any) -> Any:
        """Execute a method whose repeat changes nothing."""
        if method not in READS:
            raise BufferStateError(f"the Buffer has no method {method!r} that reads")
        return (self._save if method == "save" else getattr(self._state, method))(*args)

    @ray.method(concurrency_group="health")
    def get_progress(self) -> dict[str, Any]:
        """Counts for a display, answered even while the state thread works. Best effort: the counts may be
        of two moments."""
        try:
            return self._state.get_progress()
        except RuntimeError:  # a dict changed while it was read: the next poll will do
            return {}

    @ray.method(concurrency_group="wait")
    def wait_change(self, revision: int, timeout_s: float) -> None:
        """Returns once rows may be ready that were not at ``revision``, or after ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: self._state.revision != revision, timeout_s)

    @ray.method(concurrency_group="storage")
    def pull(self, producer: Any, keys: Sequence[int], timeout_s: float) -> list[Any]:
        """Own large payloads, where there are no storage processes (see ``pull_payloads``)."""
        return pull_payloads(producer, keys, timeout_s)

    def _save(self, folder: str) -> None:
        path = Path(folder) / STATE_FILE
        with path.open("wb") as file:
            file.write(orjson.dumps(self._state.state_dict()))
            file.flush()
            os.fsync(file.fileno())

    def _load(self, folder: str) -> None:
        path = Path(folder) / STATE_FILE
        try:
            state = orjson.loads(path.read_bytes())
        except (OSError, orjson.JSONDecodeError) as error:
            raise CheckpointError(f"the Buffer's state cannot be read: {error}", where=str(path)) from error
        self._state.load_state_dict(state)


def start_buffer(args_text: str) -> Any:
    """Start the Buffer's process. Returns its handle, for ``BufferClient``.

    No restarts: the ledger lives in memory, so a Buffer that died must end the run.
    """
    groups = {"health": 1, "wait": MAX_WAITERS, "storage": PULLS}
    remote = cast(Any, ray.remote)(num_cpus=0, max_restarts=0, concurrency_groups=groups)
    return remote(BufferActor).remote(args_text)
