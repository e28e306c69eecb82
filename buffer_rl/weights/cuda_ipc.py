"""Memory of one CUDA device in two processes, through CUDA's inter-process handles as torch makes them.

torch counts a handle's receivers, so each of them needs a handle of its own, and the memory stays allocated until the
receiver has released it. Processes may number the same device differently; a handle names it by its UUID.
"""

from __future__ import annotations

import base64
from typing import Any

import torch

from buffer_rl.errors import EngineError

_FIELDS = ("handle", "ref_counter_handle", "event_handle")
_NUMBERS = ("num_bytes", "offset", "ref_counter_offset")


def share(flat: torch.Tensor) -> dict[str, Any]:
    """A handle of ``flat`` (uint8, on a CUDA device) for one receiver, as JSON values."""
    storage: Any = flat.untyped_storage()
    _, handle, num_bytes, offset, counter, counter_offset, event, event_sync = storage._share_cuda_()
    # What was queued for this memory has to be in it before another process reads.
    torch.cuda.synchronize(flat.device)
    return {
        "device_uuid": str(torch.cuda.get_device_properties(flat.device).uuid),
        "handle": _text(handle),
        "num_bytes": num_bytes,
        "offset": offset,
        "ref_counter_handle": _text(counter),
        "ref_counter_offset": counter_offset,
        "event_handle": _text(event),
        "event_sync_required": bool(event_sync),
    }


def copy_from(handle: Any, num_bytes: int) -> torch.Tensor:
    """A copy of the memory behind a handle, ``[num_bytes]`` uint8 on its own device; the handle is used up by it.

    Raises EngineError if the handle is not one or its device is not visible in this process.
    """
    try:
        binary = {name: base64.b64decode(handle[name], validate=True) for name in _FIELDS}
        numbers = {name: int(handle[name]) for name in _NUMBERS}
        device = _device_of(str(handle["device_uuid"]))
        event_sync = bool(handle["event_sync_required"])
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"not a handle of CUDA memory: {type(error).__name__}: {error}") from error
    if numbers["num_bytes"] < num_bytes or min(numbers.values()) < 0:
        raise EngineError("the CUDA memory is smaller than its tensors", expected=f"{num_bytes} bytes")
    open_storage: Any = torch.UntypedStorage._new_shared_cuda
    try:
        storage = open_storage(
            device,
            binary["handle"],
            numbers["num_bytes"],
            numbers["offset"],
            binary["ref_counter_handle"],
            numbers["ref_counter_offset"],
            binary["event_handle"],
            event_sync,
        )
    except RuntimeError as error:
        raise EngineError(f"the CUDA memory cannot be opened: {error}") from error
    shared = torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}").set_(storage)
    copied = shared[:num_bytes].clone()
    torch.cuda.synchronize(device)
    return copied


def _device_of(uuid: str) -> int:
    """The number of a device in this process."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return index
    raise EngineError(
        "the weights are on a CUDA device that this engine does not see",
        where=uuid,
        hint="make the trainer's device visible to the engine, or use --weight-sync-mode disk",
    )


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
