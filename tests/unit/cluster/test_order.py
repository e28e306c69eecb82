"""Members that wait for each other get the calls of several threads in one order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from buffer_rl.cluster.actor_group import ActorGroup
from buffer_rl.trainer.rank import TrainRank


class Member:
    """Notes its calls. pause: called after each."""

    def __init__(self, pause: Callable[[str], None]) -> None:
        self.calls: list[str] = []
        self._pause = pause

    def __getattr__(self, method: str) -> Any:
        def remote() -> Any:
            self.calls.append(method)
            self._pause(method)
            future: Future[None] = Future()
            future.set_result(None)
            return type("Ref", (), {"future": lambda _: future})()

        return type("Method", (), {"remote": staticmethod(remote)})()


def test_no_call_of_another_thread_comes_between_the_members_of_a_call() -> None:
    first_is_called, second_has_ended = threading.Event(), threading.Event()

    def pause(method: str) -> None:
        if method == "train" and not first_is_called.is_set():
            first_is_called.set()
            second_has_ended.wait(0.5)  # it does not end, as it waits for this call

    members = [Member(pause), Member(lambda method: None)]
    group = ActorGroup("train", lambda rank: members[rank], 2)

    def ask() -> None:
        first_is_called.wait(10.0)
        group.start(TrainRank.is_saved)
        second_has_ended.set()

    thread = threading.Thread(target=ask)
    thread.start()
    group.start(TrainRank.train)
    thread.join(10.0)
    assert [member.calls for member in members] == [["train", "is_saved"]] * 2
