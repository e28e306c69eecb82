"""The engine as its HTTP handlers see it: requests in flight, commands, health. Lives in the event loop."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from typing import Any

from buffer_rl.engine.embedded.engine_thread import EngineThread
from buffer_rl.engine.embedded.loader import LoadedModel, StagedUpdate, checksum_answer
from buffer_rl.engine.embedded.protocol import BadRequestError, GenerateCall, Limits, parse_generate
from buffer_rl.engine.embedded.scheduler import Request, Scheduler
from buffer_rl.engine.embedded.weight_groups import WeightGroups
from buffer_rl.engine.text import TextCodec
from buffer_rl.errors import EngineError

PAUSE_MODES = ("abort", "in_place", "retract")


class _InFlight:
    """One HTTP request that waits for its rows."""

    __slots__ = ("call", "left", "reply")

    def __init__(self, call: GenerateCall, reply: asyncio.Future[None]) -> None:
        self.call, self.reply = call, reply
        self.left = len(call.requests)


class EngineService:
    """Everything behind the HTTP routes of one embedded engine.

    on_failure: set it to be called once if the engine thread fails; every waiting request has been failed by then.
    """

    def __init__(
        self,
        model: LoadedModel,
        tokenizer: Any | None,
        *,
        max_running_requests: int,
        weight_version: str,
        return_kept: bool = False,
        weight_update_timeout_s: float = 600.0,
    ) -> None:
        self.model = model
        self.model_path = model.options.model_path
        self.codec = TextCodec(tokenizer)
        eos = set(model.eos_token_ids)
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            eos.add(int(tokenizer.eos_token_id))
        self.scheduler = Scheduler(
            model.decoder,
            max_running_requests=max_running_requests,
            eos_token_ids=eos,
            stop_string=self.codec.stop_string,
            version=weight_version,
            return_kept=return_kept,
        )
        self.limits = Limits(
            vocab_size=model.decoder.vocab_size,
            context_length=model.decoder.shape.context_length,
            deterministic=model.options.deterministic,
            has_tokenizer=tokenizer is not None,
        )
        self.on_failure: Callable[[], None] = lambda: None
        self.staged = StagedUpdate()
        self.groups = WeightGroups(model.checkpoint_shapes, self.staged, weight_update_timeout_s)
        self._in_flight: dict[str, Request] = {}
        self._thread = EngineThread(self.scheduler, on_finished=self._finished, on_failure=self._failed)

    def start(self) -> None:
        """Start the engine thread, in the running event loop."""
        self._thread.start()

    def stop(self) -> None:
        """End the engine thread; requests in flight are never answered."""
        self._thread.stop()

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine thread, or None."""
        return self._thread.failure

    # ------------------------------------------------------------------ generate

    def begin(self, body: Any) -> tuple[GenerateCall, asyncio.Future[None]]:
        """Check and queue a request; the future is done when all its samples are. Raises BadRequestError."""
        call = parse_generate(body, self.codec, self.limits)
        for request in call.requests:
            if request.rid in self._in_flight:
                raise BadRequestError(f"a request with rid {request.rid!r} is already running")
        if self.failure is not None:
            raise EngineError(f"the engine has failed: {self.failure}")
        reply: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = _InFlight(call, reply)
        for request in call.requests:
            request.tag = entry
            self._in_flight[request.rid] = request
        self._thread.submit(call.requests)
        return call, reply

    def _finished(self, requests: list[Request]) -> None:
        for request in requests:
            entry: _InFlight = request.tag
            entry.left -= 1
            if entry.left == 0:
                self._forget(entry)
                if not entry.reply.done():
                    entry.reply.set_result(None)

    def _failed(self, error: BaseException) -> None:
        for entry in {request.tag for request in self._in_flight.values()}:
            self._forget(entry)
            if not entry.reply.done():
                entry.reply.set_exception(EngineError(f"the engine has failed: {error}"))
        self.on_failure()

    def _forget(self, entry: _InFlight) -> None:
        for request in entry.call.requests:
            self._in_flight.pop(request.rid, None)

    # ------------------------------------------------------------------ commands

    async def abort(self, chosen: Callable[[Request], bool] = lambda _: True) -> None:
        """Finish the chosen rows with what they have. On return they are done, and an HTTP request is answered whose
        rows all are."""

        def run() -> None:
            self._thread.finished_between_steps(self.scheduler.abort(chosen))

        if any(map(chosen, self._in_flight.values())):
            await self._thread.call(run)

    async def pause(self, mode: str) -> None:
        """Stop decoding; new requests queue. Raises BadRequestError for an unknown mode."""
        if mode not in PAUSE_MODES:
            raise BadRequestError(f"unknown pause mode {mode!r}; known: {', '.join(PAUSE_MODES)}")

        def run() -> None:
            self._thread.finished_between_steps(self.scheduler.pause(mode))

        await self._thread.call(run)

    async def resume(self) -> None:
        """End a pause. An update that was begun and not ended is discarded: its sender has failed."""
        self.staged.discard()
        await self._thread.call(self.scheduler.resume)

    async def flush(self) -> bool:
        """Forget prefixes; False while requests are waiting or running."""
        return bool(await self._thread.call(self.scheduler.flush))

    async def update_weights(self, path: str, version: str | None, *, flush_cache: bool, abort_all: bool) -> int:
        """Take the weights in ``path`` and call them ``version``; returns how many requests were held meanwhile.

        An engine that is not paused finishes its running requests first. Raises EngineError, with nothing changed,
        if the weights do not fit, or if the memory of requests held in place was to be flushed.
        """

        def run() -> int:
            held = self.scheduler.num_running + self.scheduler.num_waiting
            self._replace(lambda: self.model.replace_weights(path), version, flush_cache)
            self.model_path = path
            return held if self.scheduler.paused else 0

        if abort_all:
            await self.abort()
        return int(await self._thread.call(run, when_drained=True))

    async def end_weight_update(self) -> None:
        """Take the weights that were staged, all at once.

        An engine that is not paused finishes its running requests first. Raises EngineError, with nothing changed,
        if no update is under way, or in the cases of ``update_weights``.
        """
        tensors, version, flush_cache = self.staged.finish()

        def run() -> None:
            try:
                self._replace(lambda: self.model.replace_tensors(tensors), version, flush_cache)
            finally:
                tensors.clear()

        await self._thread.call(run, when_drained=True)

    def _replace(self, replace: Callable[[], None], version: str | None, flush_cache: bool) -> None:
        """In the engine thread: new weights under a new name, or the old ones under the old."""
        if flush_cache and self.scheduler.paused and self.scheduler.num_running:
            raise EngineError(
                "cannot flush the cache: requests are paused in place",
                hint="pause with mode 'retract', or update with flush_cache false",
            )
        try:
            replace()
        except EngineError as error:
            _forget_frames(error)
            raise
        self.scheduler.weights_changed(self.scheduler.version if version is None else version)

    # ------------------------------------------------------------------ information

    async def checksums(self) -> dict[str, Any]:
        """Checksums of the weights that are served now (see ``buffer_rl.engine.embedded.loader``)."""
        answer: dict[str, Any] = await self._thread.call(lambda: checksum_answer(self.model.decoder.named_weights()))
        return answer

    def model_info(self) -> dict[str, Any]:
        """SGLang's ``/model_info``."""
        return {
            "model_path": self.model_path,
            "tokenizer_path": self.model.options.model_path if self.codec.tokenizer is not None else None,
            "is_generation": True,
            "weight_version": self.scheduler.version,
            "model_type": self.model.config.model_type,
            "architectures": getattr(self.model.config, "architectures", None),
            "max_context_length": self.limits.context_length,
            "vocab_size": self.limits.vocab_size,
        }

    def server_info(self) -> dict[str, Any]:
        """SGLang's ``/server_info``: the settings, and how much is going on."""
        options = self.model.options
        return {
            "engine": "buffer_rl.embedded",
            "model_path": self.model_path,
            "served_model_name": options.model_path,
            "device": options.device,
            "dtype": options.dtype,
            "decoder": type(self.model.decoder).__name__,
            "deterministic": options.deterministic,
            "context_length": self.limits.context_length,
            "max_running_requests": self.scheduler.max_running_requests,
            "weight_version": self.scheduler.version,
            "paused": self.scheduler.paused,
            "num_running_requests": self.scheduler.num_running,
            "num_waiting_requests": self.scheduler.num_waiting,
            "compute_cpu_s": self._thread.compute_cpu_s,
            "tp_size": 1,
            "dp_size": 1,
        }


def _forget_frames(error: BaseException | None) -> None:
    """The frames of a failed load hold a whole model, which would live until the garbage collector finds them."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
