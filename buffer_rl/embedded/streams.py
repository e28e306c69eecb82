"""Requests that are answered while they run: the text and the tokens that came since the last look."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from buffer_rl.embedded.protocol import GenerateCall
from buffer_rl.embedded.scheduler import Request
from buffer_rl.engines.text import TextCodec


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """New output of row ``row``: the tokens ``[start, end)`` and ``text``, which may lag behind them; ``done`` with the
    last."""

    row: int
    start: int
    end: int
    text: str
    done: bool


class Stream:
    """The rows of one call. ``lengths`` is called in the engine thread between steps, everything else in the event
    loop, which never looks at a request in the middle of a step."""

    def __init__(self, call: GenerateCall, codec: TextCodec) -> None:
        self.changed = asyncio.Event()
        self._call = call
        self._rows = [_RowText(request, codec) for request in call.requests]

    def lengths(self) -> list[int]:
        """How many tokens each row has."""
        return [len(row.request.output_ids) for row in self._rows]

    def grow(self, lengths: list[int]) -> None:
        """Rows have so many tokens now."""
        for row, length in zip(self._rows, lengths, strict=True):
            row.length = length
        self.changed.set()

    async def pieces(self) -> AsyncIterator[Piece]:
        """What is new, until every row is done or the engine has failed."""
        while any(not row.done for row in self._rows):
            await self.changed.wait()
            self.changed.clear()
            for i, row in enumerate(self._rows):
                if (piece := row.advance(i)) is not None:
                    yield piece
            if self._call.engine_failure:
                return


class _RowText:
    """The text of one row, without the rest of a character and what may become a stop string.

    The tokens before ``shown`` are in the text; those from ``context`` on are decoded with new ones, whose text may
    depend on them."""

    def __init__(self, request: Request, codec: TextCodec) -> None:
        self.request, self.codec = request, codec
        self.length, self.done = 0, False
        self._start = self._context = self._shown = 0
        self._text, self._sent = "", 0

    def advance(self, row: int) -> Piece | None:
        request = self.request
        self.done, was_done = request.finish_reason is not None, self.done
        end = len(request.output_ids) if self.done else self.length
        if was_done or (end == self._start and not self.done):
            return None
        if self.done:
            whole = self.codec.output_text(request)
            text = whole[self._sent :] if whole.startswith(self._text[: self._sent]) else ""
        else:
            text = self._new_text(end)
        start, self._start = self._start, end
        return Piece(row=row, start=start, end=end, text=text, done=self.done)

    def _new_text(self, end: int) -> str:
        params, ids = self.request.params, self.request.output_ids
        spaces = params.spaces_between_special_tokens

        def decode(until: int) -> str:
            part = ids[self._context : until]
            return self.codec.decode(part, params.skip_special_tokens, spaces_between_special_tokens=spaces)

        before, now = decode(self._shown), decode(end)
        if not now.endswith("\ufffd"):
            self._text += now[len(before) :]
            self._context, self._shown = self._shown, end
        start, self._sent = self._sent, len(self._text) - _held_back(self._text, params.stop)
        return self._text[start : self._sent]


def _held_back(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of ``text`` may be the beginning of a stop string."""
    starts = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return max(starts, default=0)
