"""Shared memory between processes of one machine and one user, as Linux's anonymous memory files (``memfd``).

Such memory has no name in a file system, so nothing is left behind however its owner ends, and a container's small
``/dev/shm`` does not limit it. A reader opens it through the owner's entry in ``/proc``, which the kernel allows to
the same user only. The owner seals it after writing: from then on it can neither change nor shrink, so a reader can
map it and keep the mapping after the owner has closed its end; the last one that closes frees it.

Memory of a CUDA device is shared through CUDA's inter-process handles as torch makes them. torch counts a handle's
receivers, so each of them needs a handle of its own, and the memory stays allocated until the receiver has released
it. Processes may number the same device differently; a handle names it by its UUID.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Mapping
from typing import Any

import torch

from buffer_rl.cluster.locality import has_memory_files, machine_id
from buffer_rl.errors import ConfigError, EngineError, TrainError, raised_as

NAME = "buffer_rl_weights"
"""What the memory is called in ``/proc``; a reader refuses other files."""
_MADV_POPULATE_READ = 22
"""Linux's ``madvise``: map all pages at once, for reading, rather than by one page fault each (linux/mman.h)."""
_CUDA_FIELDS: Mapping[str, type] = {
    "handle": bytes,
    "num_bytes": int,
    "offset": int,
    "ref_counter_handle": bytes,
    "ref_counter_offset": int,
    "event_handle": bytes,
    "event_sync_required": bool,
}
"""What torch gives of CUDA memory beside its device, and takes in another process, in this order."""


class SharedMemory:
    """``num_bytes`` of memory that this process owns. Raises ConfigError where the system has no such memory,
    TrainError if there is not enough of it."""

    def __init__(self, num_bytes: int) -> None:
        if not has_memory_files():
            what = "this system has no memory files"
            raise ConfigError(what, where="--weight-sync-mode tensor", hint="use --weight-sync-mode disk")
        self.num_bytes = num_bytes
        self._descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._descriptor, num_bytes)
        except OSError as error:
            self.close()
            raise _not_enough(num_bytes, error) from error

    def write(self, tensor: torch.Tensor, offset: int) -> None:
        """Copy the bytes of a tensor to ``offset``. Raises TrainError if there is not enough memory."""
        left = bytes_view(tensor)
        # Written rather than mapped: that skips a page fault and the zeroing of each page, and reports a lack of memory
        # as an error, where a mapping dies of a signal.
        while left:
            try:
                count = os.pwrite(self._descriptor, left, offset)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                    raise
                raise _not_enough(self.num_bytes, error) from error
            left, offset = left[count:], offset + count

    def seal(self) -> dict[str, Any]:
        """End writing for good. Returns the handle that ``open_memory`` takes, as JSON values."""
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _seals() | fcntl.F_SEAL_SEAL)
        return {"machine": machine_id(), "pid": os.getpid(), "descriptor": self._descriptor}

    def close(self) -> None:
        """Give the memory up; readers that have it keep it. May be called twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def open_memory(handle: Any, num_bytes: int) -> torch.Tensor:
    """The memory behind a handle as ``[num_bytes]`` uint8; it stays mapped as long as a view of it lives.

    Writes to it are private to this process. Raises EngineError if the handle is not one, or is of another machine,
    or its owner is gone, or what it names is not sealed memory of that length.
    """
    try:
        machine, pid, number = handle["machine"], handle["pid"], handle["descriptor"]
    except (KeyError, TypeError) as error:
        raise EngineError("not a handle of shared memory", expected="machine, pid, descriptor") from error
    if type(pid) is not int or type(number) is not int or min(pid, number) < 0:
        raise EngineError("not a handle of shared memory", expected="whole numbers as pid and descriptor")
    if not has_memory_files() or machine != machine_id():
        hint = "--weight-sync-mode tensor needs trainer and engines on one machine; use --weight-sync-mode disk"
        raise EngineError("the weights are in the memory of another machine or container", hint=hint)
    path = f"/proc/{pid}/fd/{number}"
    with raised_as(EngineError, "the shared memory cannot be opened", OSError, where=path):
        if not os.readlink(path).startswith(f"/memfd:{NAME}"):
            raise EngineError("not shared memory of weights", where=path)
        with open(path, "rb", buffering=0) as file:
            _require_sealed(file.fileno(), num_bytes, path)
            if not num_bytes:
                return torch.empty(0, dtype=torch.uint8)
            # Private rather than shared: kernels before 6.7 refuse a shared mapping of memory sealed against writing.
            mapped = mmap.mmap(file.fileno(), num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with contextlib.suppress(OSError):  # kernels before 5.14 do not know it
        mapped.madvise(_MADV_POPULATE_READ)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of ``tensor`` in row-major order, ``[num_bytes]`` uint8; shares memory where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def bytes_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of ``tensor`` in row-major order, on the CPU."""
    array: Any = as_bytes(tensor.cpu()).numpy()
    return memoryview(array)


def _not_enough(num_bytes: int, error: OSError) -> TrainError:
    what = f"{num_bytes / 1e6:.0f} MB of memory to share the weights could not be had: {error}"
    return TrainError(what, hint="use --weight-sync-mode disk")


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def _require_sealed(descriptor: int, num_bytes: int, path: str) -> None:
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _seals() != _seals():
        raise EngineError("the shared memory is still being written", where=path)
    found = os.fstat(descriptor).st_size
    if found != num_bytes:
        raise EngineError(f"the shared memory has {found} bytes", where=path, expected=f"{num_bytes}")


def share_cuda_memory(flat: torch.Tensor) -> dict[str, Any]:
    """A handle of ``flat`` (uint8, on a CUDA device) for one receiver, as JSON values."""
    storage: Any = flat.untyped_storage()
    _, *values = storage._share_cuda_()
    # What was queued for this memory has to be in it before another process reads.
    torch.cuda.synchronize(flat.device)
    texts = [base64.b64encode(value).decode() if isinstance(value, bytes) else value for value in values]
    uuid = str(torch.cuda.get_device_properties(flat.device).uuid)
    return {"device_uuid": uuid, **dict(zip(_CUDA_FIELDS, texts, strict=True))}


def copy_cuda_memory(handle: Any, num_bytes: int) -> torch.Tensor:
    """A copy of the memory behind a handle, ``[num_bytes]`` uint8 on its own device; the handle is used up by it.

    Raises EngineError if the handle is not one or its device is not visible in this process.
    """
    try:
        values = [
            base64.b64decode(handle[name], validate=True) if kind is bytes else kind(handle[name])
            for name, kind in _CUDA_FIELDS.items()
        ]
        device = _device_of(str(handle["device_uuid"]))
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"not a handle of CUDA memory: {type(error).__name__}: {error}") from error
    numbers = [value for value in values if type(value) is int]
    if numbers[0] < num_bytes or min(numbers) < 0:
        raise EngineError("the CUDA memory is smaller than its tensors", expected=f"{num_bytes} bytes")
    open_storage: Any = torch.UntypedStorage._new_shared_cuda
    with raised_as(EngineError, "the CUDA memory cannot be opened", RuntimeError):
        storage = open_storage(device, *values)
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
    hint = "make the trainer's device visible to the engine, or use --weight-sync-mode disk"
    raise EngineError("the weights are on a CUDA device that this engine does not see", where=uuid, hint=hint)
