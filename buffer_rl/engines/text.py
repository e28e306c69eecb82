"""Text of token ids, and the stop strings that end it, found as SGLang finds them but for one case: of several that
one token completes, the one that begins first counts, and not the first of the list.

A stop string is searched in the text *with* special tokens, or ``<|im_end|>`` would never be found. The text of an
answer may leave special tokens out (``skip_special_tokens``), and it leaves out what stopped it; under
``no_stop_trim`` it ends behind the stop string, with which the last token need not end. The token ids always keep all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from buffer_rl.embedded.scheduler import Request

Decode = Callable[[Sequence[int], bool], str]
"""``(token ids, skip_special_tokens) -> text``."""


def stop_window(stops: Sequence[str]) -> int:
    """How many of the last tokens hold a stop string that the newest one completed.

    Every token adds at least a byte to the text, so b bytes lie within b tokens; a few more are decoded because the
    first of them may be the rest of a character.
    """
    return max(len(stop.encode()) for stop in stops) + 4


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the first stop string of ``text`` begins, and which it is; None if there is none. Of several that begin
    there it is the first of ``stops``."""
    return min(((text.find(stop), stop) for stop in stops if stop in text), key=itemgetter(0), default=None)


def text_to_stop(decode: Decode, ids: Sequence[int], stops: Sequence[str], skip_special_tokens: bool) -> str:
    """Text of ``ids``, whose last token completed a stop string, without what that token has behind it."""
    shown = decode(ids, skip_special_tokens)
    found = first_stop(decode(ids, False), stops) if stops and ids else None
    if found is None or not decode(ids[-1:], skip_special_tokens):
        return shown
    behind = len(decode(ids, False)) - found[0] - len(found[1])
    return shown[: len(shown) - behind]


def text_before_stop(decode: Decode, ids: Sequence[int], stops: Sequence[str], skip_special_tokens: bool) -> str:
    """Text of ``ids`` up to the first stop string; all of it where there is none.

    Where special tokens are left out, the stop string or a part of it may not be in the text that is shown, and what
    stands on both sides of a hidden token may look like one. So it is located in the whole text, then in the tokens.
    """
    shown = decode(ids, skip_special_tokens)
    whole = decode(ids, False) if skip_special_tokens else shown
    found = first_stop(whole, stops)
    if found is None:
        return shown
    before = whole[: found[0]]
    if shown == whole:
        return before
    # The tokens that end before the stop string does begin; a character that is not complete yet decodes otherwise.
    count, head = next(
        (n, text) for n in range(len(ids), -1, -1) if before.startswith(text := decode(ids[:n], False) if n else "")
    )
    kept = decode(ids[:count], True) if count else ""
    is_shown = before != head and decode(ids[count : count + 1], True) != ""
    return kept + before[len(head) :] if is_shown else kept


class TextCodec:
    """Encodes and decodes with a tokenizer; without one, texts are empty and stop strings are refused earlier."""

    def __init__(self, tokenizer: Any | None) -> None:
        self.tokenizer = tokenizer
        self._decode_batch = _batch_decoder(tokenizer)

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
        params, matched = request.params, (request.finish_reason or {}).get("matched")
        decode = partial(self.decode, spaces_between_special_tokens=params.spaces_between_special_tokens)
        if isinstance(matched, str):
            text = text_to_stop if params.no_stop_trim else text_before_stop
            return text(decode, request.output_ids, [matched], params.skip_special_tokens)
        return decode(_shown(request), params.skip_special_tokens)

    def output_texts(self, requests: Sequence[Request]) -> list[str]:
        """The texts of several answers, by one call of the tokenizer where it gives the same."""
        skip = requests[0].params.skip_special_tokens
        if self._decode_batch is None or any(r.params.stop or r.params.skip_special_tokens != skip for r in requests):
            return [self.output_text(request) for request in requests]
        return self._decode_batch([_shown(request) for request in requests], skip_special_tokens=skip)


def _shown(request: Request) -> list[int]:
    """The tokens of the answer's text, where no stop string is cut from it."""
    ids = request.output_ids
    is_trimmed = ids and not request.params.no_stop_trim and ids[-1] == (request.finish_reason or {}).get("matched")
    return ids[:-1] if is_trimmed else ids


def _batch_decoder(tokenizer: Any | None) -> Callable[..., list[str]] | None:
    """``decode`` for many sequences in the Rust library, where ``transformers`` adds nothing to it."""
    if tokenizer is None or getattr(tokenizer, "clean_up_tokenization_spaces", True):
        return None
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    is_plain = (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and kind.decode is PreTrainedTokenizerBase.decode
        and kind._decode is PreTrainedTokenizerFast._decode
    )
    return tokenizer.backend_tokenizer.decode_batch if is_plain else None
