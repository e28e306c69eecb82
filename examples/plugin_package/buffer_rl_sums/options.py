"""Options of this package; every name has the package's prefix, so that no two packages clash."""

from __future__ import annotations

from typing import ClassVar

from buffer_rl.options.section import Section, option


class SumsOptions(Section):
    """Sums of two numbers."""

    heading: ClassVar[str] = "Sums (example plugin)"

    sums_largest: int = option(99, "largest summand of a generated problem", ge=1)
    sums_tolerance: int = option(10, "a distance from the sum that is worth nothing", ge=1)
