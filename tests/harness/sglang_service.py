"""The embedded engine behaving as a SGLang 0.5.23 server where the two differ, for tests of what runs with one.

A request stays under way for a scheduler step after its abort; one that came in a pause cannot be aborted before its
end; ``/ready`` is 503 in a pause; seeds reproduce nothing unless the engine is deterministic, and then the rows of a
request share one; a bad token id or an empty text ends the process; sequences end two tokens before the context does.
SIGUSR1 stops the engine thread, and the next one lets it go on: ``/health`` does not notice.

Each part of a weight update is served as soon as it arrives. A session stays open until ``/end_weight_update``: a
second begin is refused, also after a refused part and after ``/continue_generation``. The version changes with the
first part that names one. Unknown names are ignored and wrong shapes answered with success; SGLang then serves garbage,
this engine the old values. ``--rollout-engine harness.sglang_service:launch_imitating_sglang``.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from buffer_rl.embedded import server
from buffer_rl.embedded.launcher import EmbeddedLauncher
from buffer_rl.embedded.loader import LoadedModel, read_tensors
from buffer_rl.embedded.protocol import GenerateCall
from buffer_rl.embedded.scheduler import Request
from buffer_rl.embedded.service import EngineService
from buffer_rl.embedded.staged_update import StagedUpdate
from buffer_rl.errors import EngineError

ABORT_S = 0.02
"""From an abort to the end of its requests: a scheduler step."""
DISCONNECT_S = 1.0
"""From a client's going away to the abort of its requests."""
PROMPT_MARGIN, SEQUENCE_MARGIN = 7, 2
"""Tokens of the context that no prompt, and no sequence, may fill."""
VOCAB_MULTIPLE = 64
"""The embedding has rows up to a multiple of it."""


class SessionUpdate(StagedUpdate):
    """A session, in which ``taken`` gives what has arrived since the last call."""

    def begin(self, selector: Any = "all", base: str | None = None) -> None:
        """Open the session. Raises EngineError if it is open."""
        if self._tensors is not None:
            raise EngineError("a weight-update session is already open; call end_weight_update() first")
        super().begin(selector, base)

    def discard(self) -> None:
        """Forget what has arrived and is not served yet; the session stays open."""
        if self._tensors is not None:
            self.taken()

    def finish(self) -> tuple[dict[str, torch.Tensor], str | None, bool]:
        """Close the session; all that has arrived is served already. Raises EngineError if it is not open."""
        taken = super().finish()
        self._tensors = None
        return taken

    def taken(self) -> tuple[dict[str, torch.Tensor], str | None, bool]:
        """The tensors that arrived, the version's name if one was given, and whether to flush."""
        taken = (self._tensors or {}, self._version, self._flush)
        self._tensors, self._version, self._flush = {}, None, False
        return taken


class PartialWeights:
    """The weights that ``model`` serves, any of which can be replaced alone."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._served = read_tensors(Path(model.options.model_path))

    def replace_weights(self, path: str) -> None:
        """Take what fits of the weights in the folder ``path``. Raises EngineError if it has none."""
        if not (tensors := read_tensors(Path(path))):
            raise EngineError("no weights can be read", where=path)
        self.replace_tensors(tensors)

    def replace_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the tensors whose name and shape are those of a weight; the others stay as they are."""
        fits = {name: tensor for name, tensor in tensors.items() if self._shape(name) == tensor.shape}
        self._served = self._served | {name: tensor.clone() for name, tensor in fits.items()}
        self._model.replace(self._served)

    def _shape(self, name: str) -> torch.Size | None:
        return self._served[name].shape if name in self._served else None


class SGLangService(EngineService):
    """An ``EngineService`` that behaves as a SGLang server."""

    imitate = "sglang"
    update_class = SessionUpdate
    staged: SessionUpdate

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._partial = PartialWeights(self.model)
        self._replace_weights = self._partial.replace_weights
        own = self.limits
        self.limits = replace(
            own,
            longest_prompt=own.context_length - PROMPT_MARGIN,
            longest_sequence=own.context_length - SEQUENCE_MARGIN,
            padded_vocab=-(-own.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
            refuses=False,
            keeps_seeds=own.deterministic,
            mixes_seeds=False,
        )
        self._pausing = False
        self._came_in_pause: list[list[Request]] = []
        self._go_on: threading.Event | None = None

    def start(self) -> None:
        super().start()
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):  # signals come to the main thread only
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self.stop_or_go_on)

    def stop_or_go_on(self) -> None:
        """Stop the engine thread, or let it go on."""
        if self._go_on is None:
            self._go_on = threading.Event()
            self._thread.call(self._go_on.wait)
        else:
            self._go_on.set()
            self._go_on = None

    @property
    def ready(self) -> bool:
        return super().ready and not self._pausing

    def _submit(self, requests: list[Request]) -> None:
        if self._pausing:
            self._came_in_pause.append(requests)  # the scheduler does not know of them, and neither do aborts
        else:
            super()._submit(requests)

    async def abort(self, chosen: Callable[[Request], bool] = lambda _: True) -> None:
        held = {id(request) for requests in self._came_in_pause for request in requests}
        own = [request for request in self._in_flight.values() if chosen(request) and id(request) not in held]
        asyncio.get_running_loop().call_later(ABORT_S, self._abort_soon, own.__contains__)

    def drop(self, call: GenerateCall) -> None:
        call.on_done = None
        if not call.done:
            asyncio.get_running_loop().call_later(DISCONNECT_S, self._abort_soon, call.requests.__contains__)

    async def pause(self, mode: str) -> dict[str, int]:
        await super().pause(mode)
        self._pausing = True
        return {}

    async def resume(self) -> None:
        self._pausing = False
        await super().resume()
        came, self._came_in_pause = self._came_in_pause, []
        for requests in came:
            super()._submit(requests)

    async def part_arrived(self) -> None:
        tensors, version, flush_cache = self.staged.taken()

        def run() -> None:
            self._replace(lambda: self._partial.replace_tensors(tensors), version, flush_cache)

        await self._thread.call(run, when_drained=True)

    async def end_weight_update(self, digest: str | None = None, name: str | None = None) -> None:
        self.staged.finish()

    def answers(self, call: GenerateCall) -> list[dict[str, Any]]:
        rows = super().answers(call)
        for request, row in zip(call.requests, rows, strict=True):
            meta = row["meta_info"]
            if not request.output_ids:
                meta["weight_versions"] = [{"version": meta["weight_version"], "start": 0, "end": 0}]
            if not request.version_marks:  # aborted in the queue
                meta["finish_reason"] = {key: meta["finish_reason"][key] for key in ("type", "message")}
                for name in ("cached_tokens", "prompt_tokens", "num_retractions"):
                    del meta[name]
        return rows


launch_imitating_sglang = EmbeddedLauncher(__file__, deterministic=False)


if __name__ == "__main__":
    sys.exit(server.main(["--weight-version", "default", *sys.argv[1:]], SGLangService))
