"""Which members hang: a table of cases, random runs in virtual time, and rules that are wrong on purpose."""

from __future__ import annotations

import contextvars
import random
import threading
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import buffer_rl.observe.pulse as pulse_module
from buffer_rl.observe.pulse import (
    CallPulse,
    Look,
    Pulse,
    PulseRecorder,
    Waits,
    hung_members,
    progress,
    slow_first_calls,
    waiting,
)

TIMEOUT_S = 60.0
NOT, PEERS, DEADLINE = Waits.NOT, Waits.PEERS, Waits.DEADLINE


def look(idle_s: float | None = None, gap_s: float | None = 1.0, *, waits: Waits = NOT, silent_s: float = 0.0) -> Look:
    """A member in ``train``, or between calls; gap_s: None if no call has returned."""
    call = CallPulse(method="train", idle_s=idle_s or 0.0, waits=waits)
    gaps = {} if gap_s is None else {"train": gap_s}
    return Look(pulse=Pulse(calls=() if idle_s is None else (call,), gaps=gaps), silent_s=silent_s)


NEW = Look(silent_s=1e6)
CASES: dict[str, tuple[list[Look], list[int]]] = {
    "no_member_at_work": ([look(), look()], []),
    "one_that_has_never_answered": ([NEW, look()], []),
    "silence_up_to_the_limit": ([look(silent_s=60.0)], []),
    "silence": ([look(silent_s=61.0)], [0]),
    "silence_in_a_call_that_waits": ([look(5.0, waits=DEADLINE, silent_s=61.0)], [0]),
    "no_progress_up_to_the_limit": ([look(60.0)], []),
    "no_progress": ([look(61.0)], [0]),
    "no_progress_in_a_first_call": ([look(1e6, None)], []),
    "no_progress_in_a_first_call_beside_one_that_has_returned": ([look(1e6, None), look(1.0)], []),
    "no_progress_up_to_20_gaps": ([look(200.0, 10.0)], []),
    "no_progress_for_20_gaps": ([look(201.0, 10.0)], [0]),
    "no_progress_up_to_20_gaps_of_a_sibling": ([look(200.0), look(1.0, 10.0)], []),
    "no_progress_for_20_gaps_of_a_sibling": ([look(201.0), look(1.0, 10.0)], [0]),
    "a_wait_with_a_deadline": ([look(1e6, waits=DEADLINE)], []),
    "peers_of_a_silent_member": ([look(100.0, waits=PEERS), look(100.0, silent_s=61.0)], [1]),
    "peers_of_a_member_that_is_silent_for_a_while": ([look(100.0, waits=PEERS), look(100.0, silent_s=21.0)], []),
    "a_peer_at_work_of_a_member_that_is_silent_for_a_while": ([look(100.0), look(100.0, silent_s=21.0)], []),
    "peers_of_a_blocked_member": ([look(100.0, waits=PEERS), look(100.0), look(100.0, waits=PEERS)], [1]),
    "peers_of_a_member_at_work": ([look(100.0, waits=PEERS), look(50.0)], []),
    "peers_of_a_member_between_calls": ([look(100.0, waits=PEERS), look()], []),
    "peers_of_a_member_that_waits_for_an_answer": ([look(100.0, waits=PEERS), look(90.0, waits=DEADLINE)], []),
    "all_wait_for_each_other": ([look(100.0, waits=PEERS), look(99.0, waits=PEERS)], [0, 1]),
    "two_blocked_members": ([look(100.0), look(99.0)], [0, 1]),
}


def test_a_first_call_without_progress_is_told_unless_it_waits() -> None:
    looks = [look(60.0, None), look(61.0, None), look(61.0), look(61.0, None, waits=PEERS), NEW]
    looks += [look(61.0, None, waits=DEADLINE), look(None, None), look(61.0, None)]
    assert slow_first_calls(looks, TIMEOUT_S) == {
        place: CallPulse(method="train", idle_s=61.0, waits=NOT) for place in (1, 7)
    }


@pytest.mark.parametrize("name", CASES)
def test_who_hangs(name: str) -> None:
    looks, expected = CASES[name]
    assert sorted(hung_members(looks, TIMEOUT_S)) == expected


def test_the_reason_says_how_long_and_in_which_call() -> None:
    assert hung_members([look(silent_s=61.4)], TIMEOUT_S) == {0: "no answer for 61 s between calls"}
    assert hung_members([look(5.0, silent_s=61.4)], TIMEOUT_S) == {0: "no answer for 61 s in train"}
    asked = Look(pulse=Pulse(), silent_s=61.4, called=("stream", "ready"))
    assert hung_members([asked], TIMEOUT_S) == {0: "no answer for 61 s in stream"}
    assert hung_members([look(70.0)], TIMEOUT_S) == {0: "no progress for 70 s in train"}
    both = [look(70.0, waits=PEERS)] * 2
    assert hung_members(both, TIMEOUT_S)[1] == "no progress for 70 s in train, waiting for the other ranks"


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("look.pulse is not None and look.silent_s > timeout_s", "look.silent_s > timeout_s"),
        ("look.silent_s > timeout_s\n", "look.silent_s > 2 * timeout_s\n"),
        ("if any(look.silent_s > timeout_s / 3 for look in looks)", "if silent"),
        ("GAP_FACTOR * longest", "2 * longest"),
        ("max(timeout_s, GAP_FACTOR * longest)", "GAP_FACTOR * longest"),
        ("max(timeout_s, GAP_FACTOR * longest)", "timeout_s"),
        ("call.method in look.pulse.gaps and ", ""),
        (" and call.waits is not Waits.DEADLINE", ""),
        ("for each in looks if each.pulse is not None)", "for each in [look])"),
        ("if call.waits is Waits.NOT", "if True"),
        ("len(stuck) == len(looks)", "stuck"),
        ("if not culprits and len(stuck) == len(looks):", "if False:"),
    ],
)
def test_each_part_of_the_rule_is_needed(text: str, changed: str) -> None:
    source = Path(pulse_module.__file__).read_text(encoding="utf-8")
    rule = source[source.index("def hung_members") :]
    assert rule.count(text) == 1
    mutant = dict(vars(pulse_module))
    exec(rule.replace(text, changed), mutant)
    found = {name: sorted(mutant["hung_members"](looks, TIMEOUT_S)) for name, (looks, _) in CASES.items()}
    assert found != {name: expected for name, (_, expected) in CASES.items()}


class Clock:
    """Virtual time in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Members:
    """Members of one role in virtual time: each step is four micro-batches of each, and then all wait for each other.

    seconds: of a micro-batch. slow: the member that is ten times slower, and from which step on. blocked: the one that
    makes no progress any more."""

    def __init__(
        self, draw: random.Random, size: int, seconds: float, slow: tuple[int, int] = (-1, 0),
        blocked: tuple[int, int] = (-1, 0),
    ) -> None:  # fmt: skip
        self._draw, self._seconds, self._slow, self._blocked = draw, seconds, slow, blocked
        self._clock = Clock()
        self._recorders = [PulseRecorder(self._clock) for _ in range(size)]
        self._arrived = [0] * size

    def run(self, steps: int, timeout_s: float) -> set[int]:
        """The members that are found to hang first; empty if all end their steps."""
        works = [self._work(rank, steps) for rank in range(len(self._recorders))]
        contexts = [contextvars.copy_context() for _ in works]
        due: dict[int, float] = dict.fromkeys(range(len(works)), 0.0)
        found: set[int] = set()
        look_at, interval_s = 0.0, max(timeout_s / 4, self._seconds / 4)
        while due and not found:
            rank, at = min(due.items(), key=lambda item: item[1])
            self._clock.now = min(at, look_at)
            if look_at <= at:
                look_at += interval_s
                looks = [Look(pulse=Pulse(calls=each.calls(), gaps=each.gaps())) for each in self._recorders]
                found = set(hung_members(looks, timeout_s))
            elif (seconds := contexts[rank].run(next, works[rank], None)) is None:
                del due[rank]
            else:
                due[rank] = at + seconds
        for context, work in zip(contexts, works, strict=True):
            context.run(work.close)
        return found

    def _work(self, rank: int, steps: int) -> Generator[float, None, None]:
        """Yields the seconds until it continues."""
        for step in range(steps):
            with self._recorders[rank].call("train"):
                for _ in range(4):
                    pace = 10 if self._slow[0] == rank and self._slow[1] <= step else 1
                    yield 1e9 if self._blocked == (rank, step) else pace * self._seconds * self._draw.uniform(0.3, 1.7)
                    progress()
                with waiting(PEERS):
                    self._arrived[rank] += 1
                    while min(self._arrived) <= step:
                        yield self._seconds / 20
            yield self._draw.uniform(0.0, 1.0)


def run_with_a_slow_member(seed: int) -> set[int]:
    draw = random.Random(seed)
    size = draw.randint(2, 5)
    members = Members(draw, size, draw.uniform(0.1, 60.0), slow=(draw.randrange(size), draw.randrange(4)))
    return members.run(6, timeout_s=draw.uniform(0.5, 60.0))


@pytest.mark.parametrize("seed", range(30))
def test_a_member_that_is_ten_times_slower_than_its_siblings_never_hangs(seed: int) -> None:
    assert run_with_a_slow_member(seed) == set()


def test_with_a_smaller_factor_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse_module, "GAP_FACTOR", 4)
    assert [seed for seed in range(30) if run_with_a_slow_member(seed)] != []


@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(1, 5), st.floats(0.1, 60.0), st.floats(0.5, 60.0))
def test_a_member_that_is_blocked_after_its_first_step_is_the_one_that_hangs(
    seed: int, size: int, step: int, seconds: float, timeout_s: float
) -> None:
    draw = random.Random(seed)
    rank = draw.randrange(size)
    assert Members(draw, size, seconds, blocked=(rank, step)).run(6, timeout_s) == {rank}


def test_a_wait_with_a_deadline_is_no_gap_and_a_wait_for_peers_is_one() -> None:
    clock = Clock()
    recorder = PulseRecorder(clock)
    for method, waits in (("fetch", DEADLINE), ("train", PEERS)):
        with recorder.call(method):
            clock.now += 2.0
            with waiting(waits):
                clock.now += 100.0
                assert recorder.calls()[0].waits is waits
            clock.now += 1.0
    assert recorder.gaps() == {"fetch": 2.0, "train": 100.0}
    assert recorder.calls() == ()


def test_a_call_in_a_call_is_a_part_of_it_and_outside_of_calls_marks_do_nothing() -> None:
    clock = Clock()
    recorder = PulseRecorder(clock)
    progress()
    with waiting(PEERS), recorder.call("save_hf"), recorder.call("write_hf"):
        clock.now += 3.0
        progress()
        clock.now += 4.0
        (call,) = recorder.calls()
    assert (call.method, call.idle_s, call.waits) == ("save_hf", 4.0, NOT)
    assert recorder.gaps() == {"save_hf": 4.0}


def test_several_calls_of_a_method_wait_only_if_each_of_them_does() -> None:
    recorder, begun, go_on = PulseRecorder(), threading.Event(), threading.Event()

    def other() -> None:
        with recorder.call("score"):
            begun.set()
            go_on.wait(60)

    thread = threading.Thread(target=other)
    with recorder.call("score"), waiting(DEADLINE):
        assert recorder.calls()[0].waits is DEADLINE
        thread.start()
        assert begun.wait(60)
        assert recorder.calls()[0].waits is NOT
        go_on.set()
        thread.join()
        assert recorder.calls()[0].waits is DEADLINE
