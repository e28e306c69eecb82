"""A checkpoint of a ``BufferState`` in memory, with that of its ledger, as JSON keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from buffer_rl.buffer.state import BufferState


def saved_state(state: BufferState) -> dict[str, Any]:
    """What a checkpoint holds of the state, and its ledger under ``ledger``."""
    saved: dict[str, Any] = orjson.loads(orjson.dumps({**state.state_dict(), "ledger": state.ledger.state_dict()}))
    return saved


def load_saved(state: BufferState, saved: Mapping[str, Any]) -> None:
    """Have the state go on from what ``saved_state`` returned."""
    state.load_state_dict(saved, lambda: state.ledger.load_state_dict(saved["ledger"]))
