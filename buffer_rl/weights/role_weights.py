"""The actor's weights for the roles that compute with them, after the engines have a version.

- ``actor_fwd`` takes every version: with ``--weight-sync-mode distributed`` from the trainer's broadcast, else from a
  folder that the trainer writes. Processes that replace dead ones take the version once more before they work. On disk
  there is none of a broadcast, but the trainer has it until its next optimizer step, for which it waits for the role.
- The reference takes the versions of ``--ref-update-interval``, always from a folder: they are older than what the
  trainer has, and a replacement or a checkpoint may need them at any time.

Who waits for whom: the publisher waits for the trainer and the role, each call with a deadline. No process group has
engines and a role, so the death of either costs the other nothing. Nothing is sent to a role that is at work: it would
receive after its rows alone. The trainer sends to a replacement between its own calls; where it works on a rollout
that is not closed, its work ends after the role's, so a global restart follows in place of that.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

from buffer_rl.args import Args
from buffer_rl.cluster.actor_group import ActorGroup
from buffer_rl.cluster.member import Member
from buffer_rl.engines.http import NOTHING, Body
from buffer_rl.engines.protocol import ServerInfo
from buffer_rl.errors import EngineError, WorkerDiedError
from buffer_rl.kinds.engine import WeightTransport
from buffer_rl.observe.pulse import Waits, waiting
from buffer_rl.weights.disk import remove_versions
from buffer_rl.weights.distributed import JOIN, LEAVE, UPDATE
from buffer_rl.weights.publish import ATTEMPTS, Publisher
from buffer_rl.weights.sender import Senders


@dataclass(eq=False)
class RolePublisher:
    """Publishes a version to the engines, where there are any, and to a role that computes with the actor's weights.

    role: its name. update: brings it to a version, and its replacements from then on; returns False where it is down.
    notice: called with a line then.
    """

    _engines: Publisher | None
    _role: str
    _update: Callable[[int], bool]
    _notice: Callable[[str], None]
    _version: int | None = None

    def publish(self, version: int) -> dict[str, float]:
        """Have the engines and the role take ``version``. Returns the seconds of each part."""
        times = {} if self._engines is None else self._engines.publish(version)
        started = time.monotonic()
        if version != self._version:  # else it is at work, and engines alone lost their weights
            if not self._update(version):
                what = f"its replacement takes version {version} before it works"
                self._notice(f"{self._role} is down and passed over: {what}")
            self._version = version
        return times | {"perf/publish_role": time.monotonic() - started}

    def close(self) -> None:
        """Free what the transport to the engines has."""
        if self._engines is not None:
            self._engines.close()


@dataclass(eq=False)
class RoleBroadcasts:
    """Brings a role to versions through a process group of the trainer's source rank and all of the role's processes,
    which it stands for as the receiver of broadcasts.

    transport: one that ``reaches_roles``, of this role alone. timeout_s: for each bucket. trainer_is_busy: the trainer
    works while a rollout runs, and cannot send weights to a replacement then.
    """

    _role: ActorGroup
    _transport: WeightTransport
    _trainer: Senders
    _: KW_ONLY
    timeout_s: float
    trainer_is_busy: bool = False

    def __post_init__(self) -> None:
        self._is_connected = False
        self._version: int | None = None

    def update(self, version: int) -> bool:
        """Have the role compute with ``version``, which the trainer has. Returns False if one of its processes died.

        Raises EngineError if it did not take the version in ``ATTEMPTS``."""
        return self._role.do_and_keep(partial(self._send, version))

    def _send(self, version: int) -> None:
        again, self._version = version == self._version, version
        if again and self.trainer_is_busy:
            what = f"its replacement lacks version {version}, and the trainer cannot send it during a rollout"
            raise WorkerDiedError(what, where=self._role.role, hint="--weight-sync-mode disk has it for replacements")
        for attempt in range(1, ATTEMPTS + 1):
            connected, self._is_connected = self._is_connected and not again, False
            try:
                if not connected:
                    self._transport.connect(self._trainer, self)
                self._transport.publish(version)
            except EngineError:  # of the group; whether a process died is what the next connection finds out
                if attempt == ATTEMPTS:
                    raise
                continue
            self._is_connected = True
            return

    # What ``EngineControlClient`` has for engines; both raise WorkerDiedError, naming the role, if a process has died.

    def server_info(self) -> dict[str, ServerInfo]:
        """The processes are the ranks of one receiver. Called first, it finds a death before one is waited for."""
        self._role.call(Member.ready, timeout_s=self.timeout_s)
        return {self._role.role: ServerInfo(tp_size=len(self._role.actors))}

    def post(self, path: str, body: Body = NOTHING, *, each: Mapping[str, Body] | None = None, **_: Any) -> None:
        """Have the processes do what an engine does, with the body for all or that of ``each`` for the role."""
        own = body if each is None else each[self._role.role]
        self._role.call(BroadcastMember.CALLS[path], own, timeout_s=self.timeout_s)


class BroadcastMember(Member):
    """A process of a role that receives broadcasts into its model, a ``buffer_rl.trainer.role_model.RoleModel``. Each
    call has the body of an engine's."""

    _model: Any

    def join_broadcast(self, body: Body) -> None:
        """Join the process group of the trainer."""
        with waiting(Waits.DEADLINE):
            self._model.join(body["master_address"], body["master_port"], body["group_name"], body["world_size"])

    def receive_weights(self, body: Body) -> None:
        """Receive a bucket, of which the last one has the version."""
        with waiting(Waits.DEADLINE):
            self._model.receive(body, body["weight_version"])

    def leave_broadcast(self, body: Body) -> None:
        """Leave the group."""
        self._model.leave()

    CALLS: ClassVar = {JOIN: join_broadcast, UPDATE: receive_weights, LEAVE: leave_broadcast}


@dataclass(eq=False)
class FolderUpdates:
    """Brings a role, or the trainer's reference model, to versions through a folder, and keeps what it has for
    checkpoints.

    save_hf: writes the newest weights as a Hugging Face folder. load: has every process with the model take a folder's
    weights, of a version, and returns whether all are there. folder: where versions are written; the newest stays.
    """

    _save_hf: Callable[[str], object]
    _load: Callable[[str, int], bool]
    _folder: Path
    _newest: Path | None = None

    @classmethod
    def of(cls, role: str, args: Args, save_hf: Callable[[str], object], load: Callable[[str, int], bool]) -> Self:
        """For ``role``. Other nodes see the folder under ``--update-weight-disk-dir``."""
        shared = args.update_weight_disk_dir
        folder = Path(shared, role) if shared else Path(args.run_dir, f"weights_{role}")
        return cls(save_hf, load, folder.absolute())

    def update(self, version: int) -> bool:
        """The model is the actor of ``version``, the newest, from now on. Returns what ``load`` does."""
        return self._pass_on(self._save_hf, version)

    def save(self, folder: Path) -> None:
        """Copy the weights to ``folder``; nothing while they are the initial ones."""
        if self._newest is not None:
            shutil.copytree(self._newest, folder)

    def restore(self, folder: Path, version: int) -> None:
        """The inverse of ``save``. The weights are copied: the checkpoint may be removed while the run needs them."""
        if folder.is_dir():
            self._pass_on(partial(shutil.copytree, folder), version)

    def _pass_on(self, write: Callable[[str], object], version: int) -> bool:
        """Write a version into a folder of its own, load it, and remove older ones."""
        target = self._folder / f"v{version:06d}"
        shutil.rmtree(target, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        write(str(target))
        loaded = self._load(str(target), version)
        self._newest = target
        remove_versions(self._folder, [target])
        return loaded
