"""A checkpoint of a ``BufferState`` in memory: its state as JSON keeps it, and a copy of its ledger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from buffer_rl.buffer.state import BufferState
from harness.ledger_contents import copied, go_back


def saved_state(state: BufferState) -> dict[str, Any]:
    """What a checkpoint holds of the state, and its ledger's file under ``ledger``."""
    return {**orjson.loads(orjson.dumps(state.state_dict())), "ledger": copied(state.ledger)}


def load_saved(state: BufferState, saved: Mapping[str, Any]) -> None:
    """Have the state go on from what ``saved_state`` returned."""
    state.load_state_dict(saved, lambda: go_back(state.ledger, saved["ledger"]))
