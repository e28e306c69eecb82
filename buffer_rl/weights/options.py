"""Options of weight publication."""

from __future__ import annotations

from typing import ClassVar

from buffer_rl.config import Section, option


class WeightOptions(Section):
    """How new weights reach the engines."""

    heading: ClassVar[str] = "Weights"

    weight_sync_mode: str = option(
        "disk", "weight transport: disk, or tensor (through the memory of one machine)", kind="weight_transport"
    )
    update_weight_disk_dir: str | None = option(
        None,
        "folder of the versions of --weight-sync-mode disk and of those that roles read, for this run alone, on a file "
        "system that all nodes share; without it: in --run-dir",
    )
    update_weights_timeout_s: float = option(600.0, "deadline of one call to the engines in a publication, in seconds; three times that for all its attempts", gt=0)
    check_weight_update_equal: bool = option(
        False, "after each publication compare the checksums of the weights that the engines serve"
    )
