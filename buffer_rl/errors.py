"""Every error that buffer_rl raises on purpose, in one style: what, where, expected, what to do.

A subclass that also derives from ``ValueError`` is something that the user can mend.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


class BufferRLError(Exception):
    """Base of all errors raised on purpose.

    ``what`` says what is wrong; ``where`` names the file, line, flag or actor; ``expected`` says what
    would have been right; ``hint`` says what to do next; ``see`` names the page, with its anchor, that says more. The
    object survives pickling, so that an error raised in a Ray worker reads the same in the driver. ``status`` is that
    of the HTTP answer behind it, if any.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        expected: str = "",
        hint: str = "",
        see: str = "",
        status: int | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.expected = expected
        self.hint = hint
        self.see = see
        self.status = status

    def __str__(self) -> str:
        first = f"{self.where}: {self.what}" if self.where else self.what
        more = {"expected": self.expected, "hint": self.hint, "see": self.see}
        return "\n".join([first, *(f"  {name}: {text}" for name, text in more.items() if text)])


class ConfigError(BufferRLError, ValueError):
    """An option, flag, environment variable or YAML key is wrong, or two options contradict each other."""


def all_of(errors: Sequence[ConfigError]) -> ConfigError:
    """One error that reports all of ``errors``, of which there is at least one, in their order."""
    return errors[0] if len(errors) == 1 else ConfigError("\n".join(map(str, errors)))


class PluginError(BufferRLError, ValueError):
    """A plugin reference does not resolve, or what it names does not meet its contract."""


class DataError(BufferRLError, ValueError):
    """A data file or a row of it is wrong; ``where`` is ``file:line``."""


class BufferStateError(BufferRLError):
    """A request that the Buffer must refuse: a late report, an unknown uid, a double commit."""


class BufferRestartedError(BufferStateError):
    """What the request names was lost with an earlier Buffer process: the rollout is produced again."""


class RolloutError(BufferRLError):
    """A rollout function failed or returned something that cannot be trained on."""


class RewardError(BufferRLError):
    """A reward could not be computed: it raised, ran out of time or returned something unusable."""


class EngineError(BufferRLError):
    """A rollout engine or the router failed, or answered something that breaks the protocol."""


class TrainError(BufferRLError):
    """A trainer failed, or its loss or gradient is not finite."""


class NonFiniteError(TrainError):
    """A loss or a gradient is not finite; the parameters and the optimizer's state are unchanged."""


class CheckpointError(BufferRLError, ValueError):
    """A checkpoint is missing, damaged or of another run."""


class DeadlineError(BufferRLError, TimeoutError):
    """A wait reached its deadline; ``where`` names what was waited for."""


class ClusterError(BufferRLError):
    """Ray does not start, or the cluster to join does not answer or refuses this run."""


class WorkerError(BufferRLError):
    """A worker process died or raised something unexpected; ``where`` names its role."""


class WorkerDiedError(WorkerError):
    """A worker process is gone; ``where`` begins with its role. It is replaced where its work can be done again alone;
    else all processes of the run are started again from a checkpoint."""


class WorkerHungError(WorkerDiedError):
    """A worker process hung and was ended, which is treated as a death."""


class PayloadLostError(WorkerError):
    """Payloads in the object store are gone with the process that owned them: the rollout is produced again."""


class EndedBySignal(SystemExit):
    """The process got a signal that ends it; raised in the main thread, and by nothing else. ``code`` is 128 and its
    number, the exit status of a process that a signal ended."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


class Stopped(EndedBySignal):
    """A run ended well because a signal asked for it. steps: those that are done. text: how to continue."""

    def __init__(self, number: int, steps: int, text: str = "") -> None:
        super().__init__(number)
        self.steps = steps
        self.text = text


_Caught = type[BaseException] | tuple[type[BaseException], ...]


@contextmanager
def raised_as(error_class: Callable[..., Exception], what: str, caught: _Caught, **more: str) -> Iterator[None]:
    """A block whose errors of the classes ``caught`` become ``error_class``: ``what``, and the error's own text. more:
    what else an error of this module says."""
    try:
        yield
    except caught as error:
        raise error_class(f"{what}: {error}", **more) from error


def short_repr(value: object) -> str:
    """A value for a message: its shortened ``repr``, in one line, and its type."""
    text = re.sub(r"\s*\n\s*", " ", repr(value))
    return f"{text[:80]}{'…' if len(text) > 80 else ''} ({type(value).__name__})"
