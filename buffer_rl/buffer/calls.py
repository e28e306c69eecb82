"""Repeats of a call, recognised by ``(caller, sequence)``.

Ray may execute a call twice when a connection breaks between the call and its answer; a retry must
then find the stored answer, and change nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from buffer_rl.errors import BufferStateError

KEPT_ANSWERS = 1024
"""Answers kept for each caller; more than one caller can have in flight."""


class CallLog:
    """Executes each ``(caller, sequence)`` once. A call that raised changed nothing, so its repeat is executed."""

    def __init__(self, kept_answers: int = KEPT_ANSWERS) -> None:
        self._kept = kept_answers
        self._answers: dict[str, OrderedDict[int, Any]] = {}
        self._forgotten: dict[str, int] = {}

    def once(self, caller: str, sequence: int, execute: Callable[[], Any]) -> Any:
        """``execute()``, or the answer that it gave before.

        Raises BufferStateError for a repeat so old that its answer is no longer kept.
        """
        answers = self._answers.setdefault(caller, OrderedDict())
        if sequence in answers:
            return answers[sequence]
        if sequence <= self._forgotten.get(caller, -1):
            raise BufferStateError(f"call {sequence} of {caller} is a repeat whose answer is no longer kept")
        answer = execute()
        answers[sequence] = answer
        if len(answers) > self._kept:
            oldest = min(answers)
            del answers[oldest]
            self._forgotten[caller] = max(oldest, self._forgotten.get(caller, -1))
        return answer
