"""Text of token ids, and stop strings in it."""

from __future__ import annotations

from typing import Any

from buffer_rl.engine.embedded.request import Request


class TextCodec:
    """Encodes and decodes with a tokenizer; without one, texts are empty and stop strings are refused earlier."""

    def __init__(self, tokenizer: Any | None) -> None:
        self.tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the tokenizer's own special tokens."""
        assert self.tokenizer is not None
        return list(self.tokenizer.encode(text))

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Text of ``ids``."""
        if self.tokenizer is None or not ids:
            return ""
        return str(self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def stop_string(self, request: Request) -> str | None:
        """The stop string that the newest token completed, or None.

        A stop string of b bytes lies within the last b tokens, since every token but a special one adds at least
        a byte; a few more are decoded because the first of them may be the rest of a character.
        """
        params = request.params
        window = max(len(stop.encode()) for stop in params.stop) + 4
        tail = self.decode(request.output_ids[-window:], params.skip_special_tokens)
        found = [(tail.find(stop), stop) for stop in params.stop if stop in tail]
        return min(found)[1] if found else None

    def output_text(self, request: Request) -> str:
        """The answer's text: without what stopped it (unless ``no_stop_trim``); the token ids keep it."""
        params, ids = request.params, request.output_ids
        reason = request.finish_reason or {}
        matched = reason.get("matched") if not params.no_stop_trim else None
        if isinstance(matched, int) and ids and ids[-1] == matched:
            ids = ids[:-1]
        text = self.decode(ids, params.skip_special_tokens)
        if isinstance(matched, str) and matched in text:
            text = text[: text.index(matched)]
        return text
