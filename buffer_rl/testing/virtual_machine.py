"""Processes of a ``VirtualRuntime`` that share cores, and engines among them whose requests share a batch.

A process serves its parts at equal speed: n requests of an engine get a token each in the same time. If more processes
are busy than the machine has cores, each gets a core for its share of the time.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from buffer_rl.testing.virtual_time import VirtualRuntime

FASTEST = 1e-9
"""Seconds of a unit of work that costs nothing."""


@dataclass(slots=True, kw_only=True)
class Machine:
    """The cores that processes share. cores: None if each process has a device of its own. others: processes of other
    work on the machine, which never wait for anything; others_s: CPU-seconds that they had until the newest change.
    """

    runtime: VirtualRuntime
    cores: float | None = None
    others: float = 0.0
    others_s: float = 0.0
    processes: list[Process] = field(default_factory=list)
    _at: float = 0.0
    _share: float = 1.0

    def process(self, seconds: Callable[[int], float], weight: int = 1) -> Process:
        """A process, for which a unit of each of n parts takes ``seconds(n)``. weight: cores that it keeps busy."""
        made = Process(machine=self, seconds=seconds, weight=weight)
        self.processes.append(made)
        return made

    def share(self) -> float:
        """The part of a core that each busy process has."""
        if self.cores is None:
            return 1.0
        busy = self.others + sum(process.weight for process in self.processes if process.is_busy)
        return min(1.0, self.cores / busy) if busy else 1.0

    def settle(self) -> None:
        """Count what others had since the newest change."""
        now = self.runtime.now()
        self.others_s += (now - self._at) * self.others * self._share
        self._at = now

    def go_on(self) -> None:
        """Note the share that follows from a change."""
        self._share = self.share()


@dataclass(slots=True, kw_only=True, eq=False)
class Process:
    """Serves parts of work at the same time. busy_s: seconds in which it had any. paused: it serves none."""

    machine: Machine
    seconds: Callable[[int], float]
    weight: int = 1
    busy_s: float = 0.0
    _paused: bool = False
    _served: float = 0.0  # units, of each part
    _speed: float = 0.0
    _at: float = 0.0
    _parts: list[tuple[float, int, asyncio.Future[None]]] = field(default_factory=list)
    _count: int = 0
    _orders: Iterator[int] = field(default_factory=itertools.count)
    _cancel: Callable[[], None] | None = None

    @property
    def is_busy(self) -> bool:
        return self._count > 0 and not self._paused

    async def work(self, units: float) -> None:
        """Wait for the end of one more part of so many units."""
        with self._changes():
            part: asyncio.Future[None] = self.machine.runtime.loop.create_future()
            heapq.heappush(self._parts, (self._served + units, next(self._orders), part))
            self._count += 1
        try:
            await part
        finally:
            if not part.done() or part.cancelled():  # its owner was cancelled
                with self._changes():
                    self._count -= 1

    def pause(self, paused: bool) -> None:
        with self._changes():
            self._paused = paused

    @contextmanager
    def _changes(self) -> Iterator[None]:
        """Settle what was served until now; and go on with the speeds that follow from the change."""
        affected = [self] if self.machine.cores is None else self.machine.processes
        self.machine.settle()
        for process in affected:
            process._settle()
        yield
        self.machine.go_on()
        for process in affected:
            process._go_on()

    def _settle(self) -> None:
        now = self.machine.runtime.now()
        self._served += (now - self._at) * self._speed
        self.busy_s += (now - self._at) * self.is_busy
        self._at = now

    def _go_on(self) -> None:
        while self._parts and self._parts[0][2].done():
            heapq.heappop(self._parts)
        self._speed = self.machine._share / max(FASTEST, self.seconds(self._count)) if self.is_busy else 0.0
        if self._cancel is not None:
            self._cancel()
            self._cancel = None
        if self.is_busy:
            left = max(0.0, self._parts[0][0] - self._served)
            self._cancel = self.machine.runtime.loop.call_at_last(self._at + left / self._speed, self._end_first)

    def _end_first(self) -> None:
        """End the part that has the least to do, and those that end with it."""
        self._cancel = None
        with self._changes():
            self._served = max(self._served, self._parts[0][0])
            while self._parts and self._parts[0][0] <= self._served + FASTEST:
                part = heapq.heappop(self._parts)[2]
                if not part.done():
                    part.set_result(None)
                    self._count -= 1


@dataclass(slots=True, kw_only=True)
class BatchingEngines:
    """The role ``publish``, over engines that decode a token of each running request in one step.

    decode: seconds of a step with n requests. slots: of each engine. publish_s: seconds of a publication, the last
    ``pause_s`` of which stop generation, by ``host``. A group's requests go to the engine with the fewest.
    """

    machine: Machine
    decode: Callable[[int], float]
    count: int
    slots: int
    host: Process
    publish_s: float = 0.0
    pause_s: float = 0.0
    version: int = 0
    engines: list[Process] = field(default_factory=list)
    _places: list[asyncio.Semaphore] = field(default_factory=list)
    _loads: list[int] = field(default_factory=list)
    _resumed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.engines = [self.machine.process(self.decode) for _ in range(self.count)]
        self._places = [asyncio.Semaphore(self.slots) for _ in range(self.count)]
        self._loads = [0] * self.count
        self._resumed.set()

    async def publish(self, version: int) -> dict[str, float]:
        """Send the weights, and pause for their loading; requests go on with them."""
        await self.host.work(max(0.0, self.publish_s - self.pause_s))
        self._pause(True)
        await self.host.work(min(self.pause_s, self.publish_s))
        self.version = version
        self._pause(False)
        return {}

    async def respond_all(self, lengths: Sequence[float]) -> list[tuple[int, int]]:
        """The responses of a group, in tokens. Returns the oldest and the newest version of each one's tokens."""
        index = min(range(self.count), key=self._loads.__getitem__)
        self._loads[index] += len(lengths)
        try:
            return await asyncio.gather(*(self._respond(index, length) for length in lengths))
        finally:
            self._loads[index] -= len(lengths)

    async def _respond(self, index: int, length: float) -> tuple[int, int]:
        async with self._places[index]:
            await self._resumed.wait()
            oldest = self.version
            await self.engines[index].work(length)
            return oldest, self.version

    def _pause(self, paused: bool) -> None:
        for engine in self.engines:
            engine.pause(paused)
        self._resumed.clear() if paused else self._resumed.set()
