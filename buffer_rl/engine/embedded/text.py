"""Text of token ids, and stop strings in it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from buffer_rl.engine.embedded.request import Request
from buffer_rl.engine.stop_strings import first_stop, stop_window, text_before_stop


class TextCodec:
    """Encodes and decodes with a tokenizer; without one, texts are empty and stop strings are refused earlier."""

    def __init__(self, tokenizer: Any | None) -> None:
        self.tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the tokenizer's own special tokens."""
        assert self.tokenizer is not None
        return list(self.tokenizer.encode(text))

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool, *, spaces_between_special_tokens: bool = True
    ) -> str:
        """Text of ``ids``. spaces_between_special_tokens matters to tokenizers written in Python alone."""
        if self.tokenizer is None or not ids:
            return ""
        # Named only where it is not the default: some tokenizers take no keyword that they do not know.
        more = {} if spaces_between_special_tokens else {"spaces_between_special_tokens": False}
        return str(self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, **more))

    def stop_string(self, request: Request) -> str | None:
        """The stop string that the newest token completed, or None; of several the one that begins first."""
        stops = request.params.stop
        found = first_stop(self.decode(request.output_ids[-stop_window(stops) :], False), stops)
        return found[1] if found else None

    def output_text(self, request: Request) -> str:
        """The answer's text: without what stopped it (unless ``no_stop_trim``); the token ids keep it."""
        params, ids = request.params, request.output_ids
        decode = partial(self.decode, spaces_between_special_tokens=params.spaces_between_special_tokens)
        matched = (request.finish_reason or {}).get("matched") if not params.no_stop_trim else None
        if isinstance(matched, str):
            return text_before_stop(decode, ids, [matched], params.skip_special_tokens)
        stopped = matched is not None and ids and ids[-1] == matched
        return decode(ids[:-1] if stopped else ids, params.skip_special_tokens)
