"""Stop strings and the text that they end, found as SGLang finds them.

A stop string is searched in the text *with* special tokens, or ``<|im_end|>`` would never be found. The text of an
answer may leave special tokens out (``skip_special_tokens``), and it may leave out what stopped it (unless
``no_stop_trim``); the token ids always keep both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int], bool], str]
"""``(token ids, skip_special_tokens) -> text``."""


def stop_window(stops: Sequence[str]) -> int:
    """How many of the last tokens hold a stop string that the newest one completed.

    Every token adds at least a byte to the text, so b bytes lie within b tokens; a few more are decoded because the
    first of them may be the rest of a character.
    """
    return max(len(stop.encode()) for stop in stops) + 4


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the first stop string of ``text`` begins, and which it is; None if there is none."""
    return min(((text.find(stop), stop) for stop in stops if stop in text), default=None)


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
