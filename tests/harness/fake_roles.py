"""Roles for a driver without processes: rollouts over a real ``BufferState``, a trainer and a publisher that count."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from buffer_rl.buffer.state import BufferState
from buffer_rl.cluster.calling import Call
from buffer_rl.cluster.dispatch import all_answers
from buffer_rl.engines.protocol import EMBEDDED, ServerInfo
from buffer_rl.errors import WorkerDiedError
from buffer_rl.observe.timeline import WorkReport
from buffer_rl.records.groups import SampleGroup, Ticket, Topology
from buffer_rl.weights.sender import Senders

if TYPE_CHECKING:
    from buffer_rl.args import Args


URL = "http://engine-0"
"""Of ``FakeEngines``."""
EMBEDDED_ENGINE = ServerInfo(engine=EMBEDDED)
PREPARING_ENGINE = ServerInfo(engine=EMBEDDED, prepares_weights=True)


class FakeRollouts:
    """Leases, fills and finishes a ticket's groups: every sample answers with one token and the reward 1.

    scores: what an evaluation of each version reports as ``eval/held``; versions beyond repeat the last one.
    """

    def __init__(self, state: BufferState, scores: tuple[float, ...] = (0.0,)) -> None:
        self._state = state
        self._scores = scores
        self.tickets: list[Ticket] = []

    def run(self, ticket: Ticket) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Produce the rollout's groups."""
        self.tickets.append(ticket)
        num_tokens = 0
        for group in self._state.get_samples(ticket, ticket.num_groups):
            rows = [sample.row_id for sample in group]
            self._state.finish(ticket, group.uid, group.attempt, rows, _columns(group))
            num_tokens += len(rows)
        if ticket.evaluation:
            return {"eval/held": self._scores[min(ticket.version, len(self._scores) - 1)], "perf/own": 1.0}, []
        return {"rollout/raw_reward": 1.0, "rollout/generated_tokens": float(num_tokens)}, []


def _columns(group: SampleGroup) -> dict[str, Any]:
    return {
        "tokens": [np.asarray([1, 2], dtype=np.int32) for _ in group],
        "response_length": np.ones(len(group), dtype=np.int32),
        "loss_mask": [np.ones(1, dtype=np.float32) for _ in group],
        "reward": np.ones(len(group), dtype=np.float32),
    }


class FakeTrain:
    """A trainer group that trains on nothing and notes the rollouts, and how often it was asked to stream them."""

    def __init__(self) -> None:
        self.fetched: list[int] = []
        self.streamed: list[int] = []

    def fetch(self, rollout_id: int) -> None:
        """Note the rollout."""
        self.fetched.append(rollout_id)

    def log_probs(self, model: str, rollout_id: int | None, writes: bool) -> None:
        """Fetch the rollout, if it is named; nothing to compute."""
        if rollout_id is not None:
            self.fetch(rollout_id)

    def stream(self, rollout_id: int, models: Sequence[str], given: Sequence[str], gradients: bool) -> WorkReport:
        """Note the rollout."""
        self.streamed.append(rollout_id)
        return WorkReport()

    def compare_log_probs(self, rollout_id: int) -> str:
        """Engine and trainer are equal."""
        return f"compared in rollout {rollout_id}"

    def discard(self) -> None:
        """Nothing to forget."""

    def estimate(self, rollout_id: int) -> None:
        """Nothing to compute."""

    def finish_stream(self) -> Mapping[str, float]:
        """A loss of 0."""
        return {"train/loss": 0.0}

    def train(self) -> Mapping[str, float]:
        """A loss of 0."""
        return {"train/loss": 0.0}


class FakeRole:
    """A role with processes of its own; ``restarts`` counts.

    fails: how many of its calls end with a death, from that on rollout ``fails_from`` on. stillborn: what replaces it
    dies at once. where: what the deaths name; another role's where that is what died.
    """

    def __init__(self, fails: int = 0, fails_from: int = 0, stillborn: bool = False, where: str = "ref.stream") -> None:
        self.where = where
        self.fails = fails
        self.fails_from = fails_from
        self.stillborn = stillborn
        self.restarts = 0
        self.streamed: list[int] = []

    def stream(self, rollout_id: int) -> WorkReport:
        """Note the rollout."""
        self.streamed.append(rollout_id)
        if self.fails and rollout_id >= self.fails_from:
            self.fails -= 1
            raise WorkerDiedError("the process died", where=self.where)
        return WorkReport()

    def ready(self) -> None:
        """Nothing to load."""

    def restart(self) -> None:
        """Count it."""
        self.restarts += 1
        if self.stillborn:
            raise WorkerDiedError("the new process died", where=self.where)


class FakePublisher:
    """Notes the versions that it is asked to publish."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    def publish(self, version: int) -> dict[str, float]:
        """Note the version."""
        self.versions.append(version)
        return {}


def local_senders(factory: Any, args: Args, export: Callable[[], Iterator[Mapping[str, Any]]]) -> Senders:
    """A trainer of one rank in this process, as the weight transport ``factory`` sees it: its sender in a thread.

    export: as of ``Trainer``.
    """
    sender = factory.sender(args, Topology(dp_rank=0, dp_size=1))
    thread = ThreadPoolExecutor(1, thread_name_prefix="sender")

    def start(method: str, *arguments: Any) -> Call:
        return of_one_rank(thread.submit(getattr(sender, method), export(), *arguments))

    return Senders(start)


def of_one_rank(answer: Future[Any]) -> Call:
    """A call of a trainer of one rank."""
    return Call(role="train", method="", members=["train 0"], futures=[answer], collect=all_answers)


class FakeEngines:
    """The control of engines that obey: notes every call, holds a version.

    fail_on: the call that raises ``error``, each time or the first ``failures`` times. keeps_version: the engines
    ignore an update. checksums: what the engines say of their weights, by URL. info: what the engine is.
    """

    def __init__(
        self,
        fail_on: str = "",
        error: Exception | None = None,
        failures: int | None = None,
        keeps_version: bool = False,
        checksums: Mapping[str, str] | None = None,
        info: ServerInfo = EMBEDDED_ENGINE,
    ) -> None:
        self._info = info
        self._checksums = dict(checksums or {})
        self._fail_on = fail_on
        self._error = error
        self._failures = failures
        self._keeps_version = keeps_version
        self.version = 0
        self.prepared: int | None = None
        self.paused = False
        self.calls: list[str] = []

    def pause(self, mode: str) -> None:
        """Stop generating."""
        self._note("pause")
        self.paused = True

    def flush(self) -> None:
        """Forget cached prefixes."""
        self._note("flush")

    def update_weights_from_disk(self, path: str, version: int) -> None:
        """Take the version."""
        self._note("update")
        if not self._keeps_version:
            self.version = version

    def begin_weight_update(self, base: str | None = None) -> None:
        """Stage what comes."""
        self._note("begin")

    def update_weights_from_tensor(
        self, serialized: Mapping[str, Sequence[str]], load_format: str | None, version: int | None
    ) -> None:
        """Take a bucket; the last one has the version."""
        self._note("update")
        if version is not None and not self._keeps_version:
            self.version = version

    def end_weight_update(self, digest: str | None = None, version: int | None = None) -> None:
        """Serve what came."""
        self._note("end")

    def prepare_weight_update(
        self, folder: str | None = None, digest: str | None = None, version: int | None = None
    ) -> None:
        """Prepare what came, or the folder."""
        self._note("prepare")
        self.prepared = version

    def serve_prepared(self, folder: str | None = None) -> None:
        """Serve what was prepared."""
        self._note("swap")
        assert self.prepared is not None
        if not self._keeps_version:
            self.version = self.prepared

    def checksums(self) -> dict[str, str]:
        """What the engines say of their weights."""
        self._note("checksums")
        return dict(self._checksums)

    def server_info(self) -> dict[str, ServerInfo]:
        """What the engine is."""
        return {URL: self._info}

    def versions(self) -> dict[str, str]:
        """What the engines say."""
        self._note("versions")
        return {URL: str(self.version)}

    def resume(self, urls: Collection[str] | None = None) -> None:
        """Go on."""
        self._note("resume")
        self.paused = False

    def targets(self) -> Sequence[str]:
        """The one engine."""
        return [URL]

    def wait_for_engine(self) -> None:
        """They are there."""

    def drop_failed_engines(self) -> None:
        """Nothing: they are one."""
        self._note("drop failed")

    def drop(self, urls: Collection[str]) -> bool:
        """Nothing: they are one."""
        return False

    def end_publication(self) -> None:
        """The engine stays as it is."""

    def _note(self, call: str) -> None:
        self.calls.append(call)
        over = self._failures is not None and self.calls.count(call) > self._failures
        if call == self._fail_on and self._error is not None and not over:
            raise self._error
