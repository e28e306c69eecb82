"""The peak memory of a process between two moments, as metrics of a step."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

PEAK_PREFIX = "perf/peak_memory/"
_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


def take_peaks(device: Any = None, folder: Path = Path("/proc/self")) -> dict[str, float]:
    """The peak memory of this process since the last call, or since the process began: in GB (10^9 bytes) by kind,
    ``host`` and ``device``. Both are counted from now on.

    The host's is the high-water mark of the resident set, which Linux sets back on request; ``getrusage`` has the same
    number and cannot. A system without procfs has no ``host``. Where the kernel refuses to set the mark back, it is
    that of the whole process.

    device: ``torch.cuda``, or what has its ``max_memory_allocated`` and ``reset_peak_memory_stats``; None without a
    GPU. folder: of this process in procfs."""
    peaks: dict[str, float] = {}
    with suppress(OSError):
        if found := _PEAK.search((folder / "status").read_text()):
            peaks["host"] = int(found[1]) * 1024 / 1e9
        (folder / "clear_refs").write_text("5")  # the mark alone; no page is touched
    if device is not None:
        peaks["device"] = device.max_memory_allocated() / 1e9
        device.reset_peak_memory_stats()
    return peaks


def peak_metrics(role: str, peaks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The peaks of all processes of a role, as metrics: the largest of any, on the host and on a device."""
    names = {"host": f"perf/peak_memory/{role}_gb", "device": f"perf/peak_memory/{role}_device_gb"}
    found = {name: [peak[kind] for peak in peaks if kind in peak] for kind, name in names.items()}
    return {name: max(values) for name, values in found.items() if values}
