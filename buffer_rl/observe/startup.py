"""When each part of a run was ready, in seconds since the command began, on one line that grows with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from buffer_rl.observe.terminal import printable


class StartUp:
    """The start of a run: ``checks 0.8 s · Ray 1.9 s · engine 3.1 s · trainer 3.4 s · first request 3.8 s``.

    title: what the line begins with. began: when the command began, by ``clock``; now if None. out: where the line
    grows; nowhere if None. command: what the run was started with, program included; empty if no command did.
    """

    def __init__(
        self,
        title: str = "",
        began: float | None = None,
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        command: Sequence[str] = (),
    ) -> None:
        self.command = tuple(command)
        self.times: dict[str, float] = {}
        self._title = title
        self._began = clock() if began is None else began
        self._out = out
        self._clock = clock
        self._is_open = False

    def ready(self, part: str) -> None:
        """The part is ready; only the first time counts."""
        if part in self.times:
            return
        self.times[part] = self._clock() - self._began
        self._write((" · " if self._is_open else f"{self._title}  ") + text_of({part: self.times[part]}), is_open=True)

    def end_line(self) -> None:
        """End the line, as something else is shown next; what follows begins another one."""
        if self._is_open:
            self._write("\n", is_open=False)

    def silence(self) -> None:
        """End the line for good, as something else shows what follows."""
        self.end_line()
        self._out = None

    def _write(self, text: str, *, is_open: bool) -> None:
        if self._out is not None:
            self._is_open = is_open
            self._out.write(printable(text))
            self._out.flush()


def text_of(times: Mapping[str, float]) -> str:
    """Parts and times as text."""
    return " · ".join(f"{part} {seconds:.1f} s" for part, seconds in times.items())
