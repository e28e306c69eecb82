"""What a sandbox for programs that a model wrote receives and returns."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class Ended(StrEnum):
    """How a program ended. All but ``EXITED`` are limits that it ran into."""

    EXITED = "exited"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A Python program of one file, with what it reads.

    timeout_s: of processor time of all its processes together, and of time in which it waits for anything but a core.
    memory_mb: of all its processes and its temporary files together. output_bytes: of what it writes.
    """

    code: str
    stdin: bytes = b""
    timeout_s: float = 10.0
    memory_mb: int = 2048
    output_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRun:
    """What a program left. stdout: up to the limit, also if the program was stopped.

    Example: ``ProgramRun(ended=Ended.EXITED, exit_code=0, stdout=b"42\\n")``.
    """

    ended: Ended
    stdout: bytes
    exit_code: int = 0
    stderr: str = ""


class Sandbox(Protocol):
    """Runs programs that may try anything, so that they reach nothing. Made with the options of the run:
    ``Class(args)``. ``run`` is called from several threads."""

    def check(self) -> None:
        """Raises ConfigError with the reason, and with what to install, if programs cannot be run here, or if a probe
        reaches what it must not. Called before anything starts; takes at most two seconds."""

    def run(self, program: Program) -> ProgramRun:
        """Run it to its end or to a limit; nothing of it is left. Raises RewardError if the sandbox itself fails."""
