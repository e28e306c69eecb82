"""The engine as its HTTP handlers see it: requests in flight, commands, health. Lives in the event loop."""

from __future__ import annotations

import asyncio
import gc
import threading
import traceback
from collections.abc import Awaitable, Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch

from buffer_rl.embedded.engine_thread import EngineThread
from buffer_rl.embedded.fast_decoder import FastDecoder
from buffer_rl.embedded.loader import LoadedModel, Replacement, Serving, checksum_answer
from buffer_rl.embedded.metrics import PREFIX, Counts, Metric, render
from buffer_rl.embedded.protocol import GenerateCall, Limits, answers, has_long_text, meta_info, parse_generate
from buffer_rl.embedded.scheduler import Request, Scheduler
from buffer_rl.embedded.staged_update import StagedUpdate
from buffer_rl.embedded.streams import Piece, Stream
from buffer_rl.embedded.weight_groups import WeightGroups, in_thread
from buffer_rl.engines.protocol import WEIGHTS, BadRequestError
from buffer_rl.engines.text import TextCodec
from buffer_rl.errors import EngineError

T = TypeVar("T")
PAUSE_MODES = ("abort", "in_place", "retract")
NEW_WEIGHTS = "new weights"
"""What an engine lacks between the resumption of their memory and an update."""


class EngineService:
    """Everything behind the HTTP routes of one embedded engine.

    on_failure: set it to be called once if the engine thread fails; every waiting request has been failed by then.
    label: what the newest weights are called where adapters have versions of their own; None: as those of the model.
    imitate: the server that it answers as, if another one.
    """

    imitate: str | None = None
    update_class: type[StagedUpdate] = StagedUpdate

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
        vocab_size, context_length = model.decoder.vocab_size, model.decoder.shape.context_length
        self.limits = Limits(
            vocab_size=vocab_size,
            context_length=context_length,
            deterministic=model.options.deterministic,
            has_tokenizer=tokenizer is not None,
            longest_prompt=context_length - 1,
            longest_sequence=context_length,
            padded_vocab=vocab_size,
            returns_experts=model.options.returns_experts,
        )
        self.label: str | None = None
        self._adapters: set[str] = set()
        self.counts = Counts()
        self.on_failure: Callable[[], None] = lambda: None
        self._replace_weights: Callable[[str], None] = model.replace
        self._spare: FastDecoder | None = None
        self._prepared_path: str | None = None
        self.staged = self.update_class()
        shapes = None if self.imitate else model.checkpoint_shapes
        self.groups = WeightGroups(shapes, self.staged, weight_update_timeout_s)
        self._in_flight: dict[str, Request] = {}
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="texts")
        self._thread = EngineThread(self.scheduler, on_finished=self._finished, on_failure=self._failed)

    def start(self) -> None:
        """Start the engine thread, in the running event loop."""
        self._thread.start()

    def stop(self) -> None:
        """End the engine thread; requests in flight are never answered."""
        self._thread.stop()
        self._aside.shutdown(wait=False)

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine thread, or None."""
        return self._thread.failure

    # ------------------------------------------------------------------ generate

    async def begin(self, body: Any, on_done: Callable[[], object]) -> GenerateCall:
        """Check and queue a request; ``on_done`` is called when all its rows are done. Raises BadRequestError."""
        parse = partial(parse_generate, body, self.codec, self.limits)
        call = await self.aside(parse) if has_long_text(body) else parse()
        for request in call.requests:
            if request.adapter and request.adapter not in self._adapters:
                raise BadRequestError(f"Got LoRA adapter that has never been loaded: {request.adapter}")
            if request.rid in self._in_flight:
                raise BadRequestError(f"Duplicate request ID detected: {request.rid}")
        if self.failure is not None:
            raise EngineError(f"the engine has failed: {self.failure}")
        call.on_done = on_done
        for request in call.requests:
            request.tag = call
            self._in_flight[request.rid] = request
        self._submit(call.requests)
        return call

    async def aside(self, function: Callable[[], T]) -> T:
        """``function``'s answer, from the one thread for texts and templates, which take time that the loop has not."""
        return await asyncio.get_running_loop().run_in_executor(self._aside, function)

    def _submit(self, requests: list[Request]) -> None:
        self._thread.submit(requests)

    def answers(self, call: GenerateCall) -> list[dict[str, Any]]:
        """The JSON objects of SGLang's ``/generate`` for the rows of a call that is done."""
        return answers(call, self.codec, self.scheduler.version, self.scheduler.return_kept)

    def row_so_far(self, call: GenerateCall, piece: Piece, text: str) -> dict[str, Any]:
        """What ``answers`` will say of a row of a stream, as far as it is known. text: all of the row's so far."""
        request = call.requests[piece.row]
        version, return_kept = self.scheduler.version, self.scheduler.return_kept
        if piece.done:
            meta = meta_info(request, version, call.return_logprob[piece.row], return_kept)
        else:
            lengths = {"prompt_tokens": len(request.prompt_ids), "completion_tokens": piece.end}
            meta = {"id": request.rid, "finish_reason": None, **lengths, "weight_version": version}
        return {"text": text, "output_ids": request.output_ids[: piece.end], "meta_info": meta}

    @contextmanager
    def streamed(self, call: GenerateCall) -> Iterator[Stream]:
        """The rows of a call as they grow, to whom reads them in the block; what is left of it then is aborted."""
        stream = Stream(call, self.codec)
        call.on_done = stream.changed.set
        if call.done:
            stream.changed.set()
        self._thread.streams = (*self._thread.streams, stream)
        try:
            yield stream
        finally:
            self._thread.streams = tuple(other for other in self._thread.streams if other is not stream)
            self.drop(call)

    def drop(self, call: GenerateCall) -> None:
        """The client of ``call`` is gone: abort what is left of it, without waiting."""
        call.on_done = None
        if not call.done:
            self._abort_soon(call.requests.__contains__)

    def _finished(self, requests: list[Request]) -> None:
        for request in requests:
            call: GenerateCall = request.tag
            call.left -= 1
            if call.done:
                self._end(call)

    def _failed(self, error: BaseException) -> None:
        for call in {request.tag for request in self._in_flight.values()}:
            call.engine_failure, call.left = f"the engine has failed: {error}", 0
            self._end(call)
        self.on_failure()

    def _end(self, call: GenerateCall) -> None:
        for request in call.requests:
            del self._in_flight[request.rid]
            self.counts.add(request)
            request.tag = None  # no cycle keeps a call's tokens
        if call.on_done is not None:
            call.on_done()

    # ------------------------------------------------------------------ commands

    async def abort(self, chosen: Callable[[Request], bool] = lambda _: True) -> None:
        """Finish the chosen rows with what they have. On return they are done, and an HTTP request is answered whose
        rows all are."""

        if any(map(chosen, self._in_flight.values())):
            await self._abort_soon(chosen)

    def _abort_soon(self, chosen: Callable[[Request], bool]) -> Awaitable[Any]:
        return self._thread.call(lambda: self._thread.post_finished(self.scheduler.abort(chosen)))

    async def pause(self, mode: str) -> dict[str, int]:
        """Stop decoding; new requests queue. Returns ``retracted_tokens``. Raises BadRequestError for an unknown
        mode."""
        if mode not in PAUSE_MODES:
            raise BadRequestError(f"unknown pause mode {mode!r}; known: {', '.join(PAUSE_MODES)}")

        def run() -> dict[str, int]:
            retracted = self.scheduler.running_tokens if mode == "retract" else 0
            self._thread.post_finished(self.scheduler.pause(mode))
            return {"retracted_tokens": retracted}

        return await self._thread.call(run)

    async def resume(self) -> None:
        """End a pause. An update that was begun and not ended is discarded: its sender has failed."""
        self.staged.discard()
        await self._thread.call(self.scheduler.resume)
        self._free_spare()

    async def flush(self) -> bool:
        """Forget prefixes; False while requests are waiting or running."""
        return await self._thread.call(self.scheduler.flush)

    async def release_memory(self, tags: Collection[str]) -> None:
        """Free the memory of the kinds ``tags``; requests wait from now on. Weights are lost, and come back with the
        next update. Raises EngineError, with nothing changed, while requests hold cache."""

        def run() -> None:
            if WEIGHTS[0] in tags:
                self._require_no_adapter()
            if not self.scheduler.flush(releases=True):
                raise EngineError("requests hold the memory", hint="pause with mode 'retract' or 'abort' first")
            self.scheduler.lacks |= set(tags)
            if WEIGHTS[0] in tags:
                self.model.decoder.drop_weights()
            gc.collect()
            if self.model.decoder.shape.device.type == "cuda":
                torch.cuda.empty_cache()

        await self._thread.call(run)

    async def resume_memory(self, tags: Collection[str]) -> None:
        """The inverse of ``release_memory``. Raises EngineError for what was not released."""

        def run() -> None:
            if there := set(tags) - self.scheduler.lacks:
                raise EngineError(f"not released: {', '.join(sorted(there))}", hint="/release_memory_occupation first")
            self.scheduler.lacks -= set(tags)
            if WEIGHTS[0] in tags:
                self.scheduler.lacks.add(NEW_WEIGHTS)

        await self._thread.call(run)

    async def update_weights(self, path: str, version: str | None, *, flush_cache: bool, abort_all: bool) -> int:
        """Take the weights in ``path`` and call them ``version``; returns how many requests were held meanwhile.

        An engine that is not paused finishes its running requests first. Raises EngineError, with nothing changed,
        if the weights do not fit, or if the memory of requests held in place was to be flushed.
        """

        def run() -> int:
            held = self.scheduler.num_running + self.scheduler.num_waiting
            self._replace(lambda: self._replace_weights(path), version, flush_cache)
            self.model_path = path
            return held if self.scheduler.paused else 0

        self.staged.discard()
        if abort_all:
            await self.abort()
        return await self._thread.call(run, when_drained=True)

    async def load_adapter(self, name: str, folder: str, version: str | None) -> None:
        """Requests may name the adapter in ``folder``, in peft's format, from now on; others go on. version: of its
        tokens; None: that of the weights. Raises EngineError if there is one of that name, or it does not fit."""

        def run() -> None:
            decoder = self.model.decoder.with_adapter(folder)
            self.scheduler.add_adapter(name, decoder, self.scheduler.version if version is None else version)

        await self._thread.call(run)
        self._adapters.add(name)

    async def unload_adapter(self, name: str) -> None:
        """The inverse of ``load_adapter``. Raises EngineError if requests run with it, or there is none."""
        own = {name} & self._adapters
        self._adapters -= own
        try:
            await self._thread.call(lambda: self.scheduler.remove_adapter(name))
        except EngineError:
            self._adapters |= own
            raise

    def _require_no_adapter(self) -> None:
        if names := self.scheduler.adapters:
            raise EngineError(f"adapters of these weights are loaded: {', '.join(names)}", hint="unload them first")

    async def part_arrived(self) -> None:
        """Called after each part of an update: it is staged until the end."""

    async def prepare_weight_update(self, path: str | None, digest: str | None, name: str | None) -> None:
        """Prepare what was staged, or the weights in the folder ``path``, beside those that serve, while requests
        go on: the end of the update only swaps them. digest, name: as in ``end_weight_update``.

        Raises EngineError, and the update is over, if the weights do not fit, or if another update was begun since.
        """
        if path is not None:
            self.staged.begin()
        base, update = self.staged.base, self.staged.seal(name)
        try:
            if base is not None and digest is None:
                raise EngineError("a delta was staged", expected="a digest of the version that it makes")
            self._free_spare()
            serving = await self._thread.call(self._serving)
            source = update if path is None else path
            prepared = await in_thread(lambda: self.model.replacement(source, digest, base, serving), yields=True)
            if not self.staged.is_sealed(update):
                raise EngineError("the update was begun again while it was prepared")
        except BaseException as error:
            _forget_frames(error)
            update.clear()
            if self.staged.is_sealed(update):
                self.staged.discard()
            raise
        if prepared.spare is not None:
            update.clear()
        self.staged.prepared, self._prepared_path = prepared, path

    def _serving(self) -> Serving:
        if WEIGHTS[0] in self.scheduler.lacks:
            raise EngineError("the memory of the weights was released", hint="/resume_memory_occupation first")
        return self.model.serving()

    def _free_spare(self) -> None:
        """Free what served before a swap: after the pause, as that takes a moment."""
        if (spare := self._spare) is not None:
            self._spare = None
            threading.Thread(target=spare.drop_weights, name="spare", daemon=True).start()

    async def end_weight_update(self, digest: str | None = None, name: str | None = None) -> None:
        """Take the weights that were staged, all at once. digest: of the version that they make. name: what it is
        called, if no part says it.

        An engine that is not paused finishes its running requests first. Raises EngineError, with nothing changed,
        if no update is under way, or in the cases of ``update_weights``.
        """
        base, prepared = self.staged.base, self.staged.prepared
        tensors, version, flush_cache = self.staged.finish()
        if prepared is not None:
            try:
                replace = partial(self._replace_prepared, prepared, version, flush_cache)
                await self._thread.call(replace, when_drained=True)
            finally:
                tensors.clear()
            return
        if base is not None and digest is None:
            raise EngineError("a delta was staged", expected="a digest of the version that it makes")
        version = name if version is None else version

        def run() -> None:
            try:
                self._replace(lambda: self.model.replace(tensors, digest, base), version, flush_cache)
            finally:
                tensors.clear()

        await self._thread.call(run, when_drained=True)

    def _replace_prepared(self, prepared: Replacement, version: str | None, flush_cache: bool) -> None:
        path, self._spare = self._prepared_path, prepared.spare
        self._replace(prepared.serve, version, flush_cache, collects=prepared.spare is None)
        self.model_path = self.model_path if path is None else path
        if not self.scheduler.paused:
            self._free_spare()

    def _replace(
        self, replace: Callable[[], None], version: str | None, flush_cache: bool, *, collects: bool = True
    ) -> None:
        """In the engine thread: new weights under a new name, or the old ones under the old. collects: a model that was
        loaded may be in cycles."""
        if flush_cache and self.scheduler.paused and self.scheduler.num_running:
            hint = "pause with mode 'retract', or update with flush_cache false"
            raise EngineError("cannot flush the cache: requests are paused in place", hint=hint)
        self._require_no_adapter()
        if WEIGHTS[0] in self.scheduler.lacks:
            raise EngineError("the memory of the weights was released", hint="/resume_memory_occupation first")
        try:
            replace()
        except EngineError as error:
            _forget_frames(error)
            raise
        self.scheduler.lacks.discard(NEW_WEIGHTS)
        self.scheduler.weights_changed(self.scheduler.version if version is None else version)
        self.label = None
        if collects:
            gc.collect()

    # ------------------------------------------------------------------ information

    async def checksums(self) -> dict[str, Any]:
        """Checksums of the weights that are served now (see ``buffer_rl.embedded.loader``)."""
        return await self._thread.call(lambda: checksum_answer(self.model.decoder.named_weights()))

    @property
    def ready(self) -> bool:
        """Whether ``/ready`` says so."""
        return self.failure is None

    def model_info(self) -> dict[str, Any]:
        """SGLang's ``/model_info``."""
        return {
            "model_path": self.model_path,
            "tokenizer_path": self.model.options.model_path if self.codec.tokenizer is not None else None,
            "is_generation": True,
            "weight_version": self.label or self.scheduler.version,
            "model_type": self.model.config.model_type,
            "architectures": getattr(self.model.config, "architectures", None),
            "max_context_length": self.limits.context_length,
            "vocab_size": self.limits.vocab_size,
        }

    def metrics(self) -> str:
        """Prometheus' text of what was answered and what is going on."""
        running, queue = self.scheduler.num_running, self.scheduler.num_waiting
        gauges: list[Metric] = [
            (f"{PREFIX}num_running_reqs", "gauge", "Requests with a slot.", running),
            (f"{PREFIX}num_queue_reqs", "gauge", "Requests without a slot.", queue),
            (f"{PREFIX}gen_throughput", "gauge", "Tokens a second since the last look.", self.counts.throughput()),
        ]
        return render(gauges + self.counts.counters(), self.model.options.model_path)

    async def server_info(self) -> dict[str, Any]:
        """SGLang's ``/server_info``: the settings, and how much is going on. The engine thread answers it between two
        steps, as SGLang's scheduler does, or computes: no answer says that nothing is decoded either."""
        return await self._thread.answer_or_progress(self._server_info)

    def _server_info(self) -> dict[str, Any]:
        options = self.model.options
        return {
            "engine": "buffer_rl.embedded",
            "imitates": self.imitate,
            "model_path": self.model_path,
            "served_model_name": options.model_path,
            "device": options.device,
            "dtype": options.dtype,
            "decoder": type(self.model.decoder).__name__,
            "deterministic": options.deterministic,
            "context_length": self.limits.context_length,
            "max_running_requests": self.scheduler.max_running_requests,
            "weight_version": self.label or self.scheduler.version,
            "digest": self.model.kept.digest,
            "prepares_weights": self.imitate is None,
            "adapters": self.scheduler.adapters,
            "paused": self.scheduler.paused,
            "lacks": sorted(self.scheduler.lacks),
            "cache_bytes": self.scheduler.cache_bytes,
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
