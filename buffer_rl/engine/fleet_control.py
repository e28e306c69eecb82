"""The control calls of a publication, to a fleet whose engines may die or be replaced meanwhile.

Who waits for whom: a publication, from ``pause`` to ``resume``, waits for a replacement that is just taking the
newest weights by itself, and holds back one that would (``Roster.publication``, with a deadline).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from buffer_rl.engine.client import EngineClient, EngineControlClient
from buffer_rl.engine.roster import Member, MemberState, Published, Roster, none_left
from buffer_rl.errors import DeadlineError, EngineError

T = TypeVar("T")


class FleetControl(EngineControlClient):
    """Reaches the engines that were there at ``pause`` and still live. An engine that dies does not fail a call that
    another one answers, nor does one that is given up (``let_go_of_failing``). Replacements that wait for weights take
    part, and join the router at ``resume``.

    admit: has the router send requests to a member. timeout_s: deadline of one call. api_key: of the engines.
    """

    def __init__(
        self, roster: Roster, admit: Callable[[Member], None], *, timeout_s: float, api_key: str | None = None
    ) -> None:
        super().__init__((), timeout_s=timeout_s, is_gone=self._is_gone_or_given_up, api_key=api_key)
        self._roster = roster
        self._admit = admit
        self._in_publication: list[Member] | None = None
        self._folder: str | None = None
        self._versions: dict[str, str] = {}
        self._lets_go = False

    def targets(self) -> Sequence[str]:
        """The engines that calls go to now."""
        return [member.url for member in self._members() if member in self._roster and member.failure is None]

    def _members(self) -> list[Member]:
        if self._in_publication is not None:
            return self._in_publication
        return self._roster.in_state(MemberState.SERVING)

    def let_go_of_failing(self) -> None:
        """Until ``resume``, an engine that fails a call that another one answers has failed for good: nothing of this
        publication is asked of it any more, and the fleet replaces it as one that died."""
        self._lets_go = True

    def pause(self, mode: str = "retract") -> None:
        """Begin a publication: stop decoding on every engine that answers."""
        if not self._roster.publication.acquire(timeout=self.timeout_s):
            raise DeadlineError(f"an engine that joins took longer than {self.timeout_s:g} s", where="publish")
        self._in_publication = self._roster.in_state(MemberState.SERVING, MemberState.WAITING)
        self._folder, self._versions = None, {}
        super().pause(mode)

    def update_weights_from_disk(self, path: str, version: int) -> None:
        """Have every engine take the weights in the folder ``path`` and call them ``version``."""
        super().update_weights_from_disk(path, version)
        self._folder = path

    def versions(self) -> dict[str, str]:
        """The weight version of each engine, by URL."""
        self._versions = super().versions()
        return self._versions

    def resume(self) -> None:
        """End the publication: every engine goes on, and replacements that have the weights of the others join."""
        try:
            super().resume()
            if self._in_publication is None:
                return
            if len(set(self._versions.values())) == 1:  # versions() was asked for, and all have the same
                self._roster.published = Published(version=next(iter(self._versions.values())), folder=self._folder)
                for member in self._in_publication:
                    waits = member.state is MemberState.WAITING and member.failure is None
                    if waits and member.url in self._versions:
                        self._admit(member)
        finally:
            self._lets_go = False
            if self._in_publication is not None:
                self._in_publication = None
                self._roster.publication.release()

    def _run(self, call: Callable[[EngineClient], Coroutine[Any, Any, T]]) -> T:
        members = self._members()
        try:
            if not self.targets():
                raise EngineError("there is no engine to ask", where="the fleet")
            return super()._run(call)
        except EngineError as error:
            if not all(self._roster.is_gone(member.url) for member in members):
                raise
            deaths = [death for member in members if (death := member.death()) is not None]
            raise none_left(deaths[-1] if deaths else error) from error

    def _is_gone_or_given_up(self, url: str) -> bool:
        if self._roster.is_gone(url):
            return True
        failing = next((member for member in self._members() if member.url == url), None)
        if not self._lets_go or failing is None:
            return False
        failing.failure = EngineError(
            f"engine {failing.index} failed the last attempt of a publication",
            where=url,
            hint="the notices of the attempts before, and its log, say why",
        )
        return True
