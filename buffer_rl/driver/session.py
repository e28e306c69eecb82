"""What a run keeps when its processes are started again: what it is made of, its observer, the connection to Ray."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from buffer_rl.cluster.session import ray_session
from buffer_rl.driver.provenance import Provenance, changed_plugins, collect_user_code, ships_code
from buffer_rl.driver.resume import resume_notices
from buffer_rl.files.checkpoint import Checkpoint
from buffer_rl.observe.observer import RunObserver
from buffer_rl.plugin.registry import PluginRegistry

if TYPE_CHECKING:
    from buffer_rl.args import Args


class RunSession:
    """Opened on ``stack``, which closes it. loaded: the checkpoint of ``--load``."""

    def __init__(
        self, args: Args, registry: PluginRegistry, loaded: Checkpoint | None, provenance: Provenance, stack: ExitStack
    ) -> None:
        self.provenance = provenance
        self.observer = stack.enter_context(
            RunObserver(args, registry, loaded.step if loaded else None, provenance.facts())
        )
        if loaded is not None:
            resumed = resume_notices(loaded.facts, loaded.step, args)
            for line in (*changed_plugins(loaded.facts, provenance), *resumed):
                self.observer.notice(line)
        self._first_step = loaded.step if loaded else 0
        self._code = collect_user_code(args, registry) if ships_code(args) else None
        self.args = args
        self._stack = stack
        self._is_connected = False

    def owes_evaluation(self, start: Checkpoint | None) -> bool:
        """Whether a death came between the save of ``start``, which this run wrote, and the evaluation that follows."""
        return start is not None and start.step > max(self._first_step, self.observer.evaluated)

    def connect(self) -> None:
        """Connect to Ray, unless it was done before. Raises as ``ray_session``."""
        if not self._is_connected:
            store_bytes = round(self.args.object_store_gb * 1e9)
            self._stack.enter_context(ray_session(self.args.ray_address, self._code, store_bytes))
            self._is_connected = True
