"""The Buffer's process: one thread that owns the state, and a second one that answers health and progress.

Who waits for whom: callers wait for the state thread, with a deadline of their own; the state thread waits
for nobody. User code never runs here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import orjson
import ray

from buffer_rl.buffer.calls import CallLog
from buffer_rl.buffer.feed import DeliveredFeed
from buffer_rl.buffer.ledger import MemoryLedger
from buffer_rl.buffer.partial import RequeueRule
from buffer_rl.buffer.pool import LocalDataPlane
from buffer_rl.buffer.state import BufferState
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
        "clear",
        "commit",
        "release",
        "update_metadata",
        "load",
    }
)
READS = frozenset(
    {
        # It fixes the assignment of rows to ranks, but repeats give the same rows by themselves; its answers are the
        # payloads of a whole step, too large to keep.
        "get_data",
        "get_eval_data",
        "get_headers",
        "get_metadata",
        "get_buffer_length",
        "get_num_rollout_per_epoch",
        "get_source_state",
        "save",
    }
)

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

    def change(self, caller: str, sequence: int, method: str, *args: Any) -> Any:
        """Execute a method that changes state, once per ``(caller, sequence)``."""
        if method not in CHANGES:
            raise BufferStateError(f"the Buffer has no method {method!r} that changes state")
        target = self._load if method == "load" else getattr(self._state, method)
        return self._calls.once(caller, sequence, lambda: target(*args))

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
    remote = cast(Any, ray.remote)(num_cpus=0, max_restarts=0, concurrency_groups={"health": 1})
    return remote(BufferActor).remote(args_text)
