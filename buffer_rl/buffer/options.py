"""Options of the Buffer."""

from __future__ import annotations

from typing import ClassVar

from buffer_rl.config import Section, option


class BufferOptions(Section):
    """The Buffer actor."""

    heading: ClassVar[str] = "Buffer"

    buffer_timeout_s: float = option(60.0, "deadline of one call to the Buffer, in seconds", gt=0)
