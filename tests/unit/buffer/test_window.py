"""Which finished groups an asynchronous step takes, and that no token is older than the bound by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

import pytest

from buffer_rl.buffer.window import Window
from buffer_rl.plan.schedule import Mode, Schedule
from buffer_rl.records.groups import GroupUid
from harness.broken_windows import Forgetful, Greedy, OldPlace


def uid_of(row: int) -> GroupUid:
    return GroupUid("data", row, 0)


class Named:
    """A window whose groups are letters."""

    def __init__(self, groups_per_step: int, size: int, leased: str) -> None:
        self.window = Window(groups_per_step, size)
        self.lease(leased)

    def lease(self, letters: str) -> None:
        for letter in letters:
            self.window.lease(uid_of(ord(letter)))

    def finish(self, letters: str) -> None:
        for letter in letters:
            self.window.finish(uid_of(ord(letter)))

    def leave(self, letters: str) -> None:
        for letter in letters:
            self.window.leave(uid_of(ord(letter)))

    def choose(self, num_groups: int | None = None) -> str | None:
        chosen = self.window.choose(num_groups)
        return None if chosen is None else "".join(chr(uid.row) for uid in chosen)

    def take(self) -> str | None:
        if (chosen := self.window.choose()) is not None:
            self.window.take(chosen)
        return None if chosen is None else "".join(chr(uid.row) for uid in chosen)

    def certain(self) -> str:
        return "".join(chr(uid.row) for uid in self.window.certain())


# -- worked out by hand ---------------------------------------------------------------------------------------------


def test_with_a_window_of_one_groups_are_taken_in_the_order_of_their_leases() -> None:
    window = Named(2, 1, "abcdef")
    window.finish("bcdef")
    assert window.take() is None, "a would be passed"
    window.finish("a")
    assert [window.take(), window.take(), window.take(), window.take()] == ["ab", "cd", "ef", None]


def test_the_oldest_finished_groups_are_taken_whatever_finished_first() -> None:
    window = Named(2, 100, "abcdef")
    window.finish("fdb")
    assert window.take() == "bd"


def test_passes_of_one_group_are_counted_over_all_steps() -> None:
    """P = 2, W = 4: a may be passed three times. The first step passes it twice, the second would do so again."""
    window = Named(2, 4, "abcdefg")
    window.finish("bd")
    assert window.take() == "bd"  # a is passed by both, c by d alone
    window.finish("ef")
    assert window.take() is None, "a would be passed four times in all"
    window.finish("a")
    assert window.take() == "ae", "c is passed a second time"
    window.finish("g")
    assert window.take() is None, "c would be passed a third and a fourth time"
    window.leave("c")
    assert window.take() == "fg"


def test_a_group_at_the_limit_is_passed_no_more_and_one_below_it_once_more() -> None:
    """P = 1, W = 3."""
    window = Named(1, 3, "abcd")
    window.finish("bcd")
    assert [window.take(), window.take(), window.take()] == ["b", "c", None]
    window.finish("a")
    assert [window.take(), window.take()] == ["a", "d"]


def test_of_several_in_a_step_only_those_behind_it_pass_a_group() -> None:
    """P = 3, W = 2: c is passed by d alone."""
    window = Named(3, 2, "abcde")
    window.finish("abd")
    assert window.take() == "abd"
    window.finish("e")
    assert window.choose(1) is None, "a second time is too often"


def test_a_group_that_leaves_brings_those_behind_it_forward_and_comes_back_as_the_youngest() -> None:
    window = Named(1, 1, "abc")
    window.finish("bc")
    window.leave("a")
    window.lease("a")
    assert window.take() == "b"
    window.finish("a")
    assert [window.take(), window.take()] == ["c", "a"]


def test_a_group_that_comes_back_has_been_passed_by_none() -> None:
    """P = 1, W = 2."""
    window = Named(1, 2, "abcd")
    window.finish("bcd")
    assert window.take() == "b"
    window.leave("a")
    window.lease("a")
    assert [window.take(), window.take()] == ["c", "d"]


def test_a_finished_group_that_leaves_is_not_taken_and_one_that_is_not_live_is_ignored() -> None:
    window = Named(1, 9, "ab")
    window.finish("a")
    window.leave("ax")
    assert (window.choose(), len(window.window)) == (None, 1)


def test_certain_are_finished_groups_with_fewer_than_p_live_ones_before_them() -> None:
    window = Named(3, 2, "abcdef")
    window.finish("bdf")
    assert window.certain() == "b"
    window.finish("c")
    assert window.certain() == "bc"
    window.leave("a")
    assert window.certain() == "bcd"
    assert window.take() == "bcd"


def test_a_short_step_takes_all_that_are_live() -> None:
    window = Named(4, 1, "ab")
    window.finish("ab")
    assert (window.choose(), window.choose(2)) == (None, "ab")
    assert Named(4, 1, "").choose(0) == ""


# -- a model that looks at every group ------------------------------------------------------------------------------


@dataclass
class Live:
    """A live group of the model."""

    uid: GroupUid
    finished: bool = False
    passed: int = 0


def model_choice(live: list[Live], groups_per_step: int, size: int) -> tuple[list[GroupUid], list[int]] | None:
    """The step, and how often each group that stays was then passed, by what the rule says of every pair of groups."""
    chosen = [place for place, group in enumerate(live) if group.finished][:groups_per_step]
    if len(chosen) < groups_per_step:
        return None
    passed = [
        group.passed + sum(other > place for other in chosen) for place, group in enumerate(live) if place not in chosen
    ]
    return None if any(times > size - 1 for times in passed) else ([live[place].uid for place in chosen], passed)


@pytest.mark.parametrize("seed", range(60))
def test_in_any_sequence_of_events_the_window_gives_what_the_rule_says_of_every_group(seed: int) -> None:
    draw = Random(seed)
    per_step, rows = draw.randint(1, 4), count()
    size = draw.choice([1, 1 + per_step, 1 + 2 * per_step, draw.randint(1, 12)])
    window, live, left = Window(per_step, size), list[Live](), list[GroupUid]()
    certain: set[GroupUid] = set()
    for _ in range(200):
        event = draw.choice(["lease", "lease", "finish", "finish", "finish", "leave", "take"])
        running = [group for group in live if not group.finished]
        if event == "lease" and len(live) < 5 * per_step:
            uid = left.pop() if left and draw.random() < 0.5 else uid_of(next(rows))
            window.lease(uid)
            live.append(Live(uid))
        elif event == "finish" and running:
            group = draw.choice(running)
            window.finish(group.uid)
            group.finished = True
        elif event == "leave" and running:
            group = draw.choice(running)
            window.leave(group.uid)
            live.remove(group)
            left.append(group.uid)
        expected = model_choice(live, per_step, size)
        assert window.choose() == (expected and expected[0])
        certain |= set(window.certain())
        assert certain == {group.uid for group in live[:per_step] if group.finished}, "once certain, always certain"
        if event == "take" and expected is not None:
            chosen, passed = expected
            assert certain <= set(chosen)
            window.take(chosen)
            live = [group for group in live if group.uid not in chosen]
            for group, times in zip(live, passed, strict=True):
                group.passed = times
            certain.clear()
        assert len(window) == len(live)


# -- the bound ------------------------------------------------------------------------------------------------------


@dataclass
class Open:
    """A ticket: the groups that it may still lease, and those that are leased."""

    missing: int
    leased: list[GroupUid] = field(default_factory=list)


class Run:
    """A run of random events in random order, with admission by ``Schedule.num_admitted``; ``worst`` is the largest
    staleness that a step trained on. admits_on_commit, keeps_tokens: two things that break the bound."""

    def __init__(
        self,
        draw: Random,
        schedule: Schedule,
        per_step: int,
        make: Callable[[int, int], Window] = Window,
        *,
        admits_on_commit: bool = False,
        keeps_tokens: bool = False,
    ) -> None:
        self.draw, self.schedule, self.per_step = draw, schedule, per_step
        self.window = make(per_step, schedule.window(per_step))
        self.admits_on_commit, self.keeps_tokens = admits_on_commit, keeps_tokens
        self.version = self.trained = self.num_opened = self.worst = self.num_leased = 0
        self.tickets: dict[int, Open] = {}
        self.queue: list[GroupUid] = []
        self.versions: dict[GroupUid, int] = {}  # at the lease
        self.taken: dict[int, list[GroupUid]] = {}  # of steps that are not released
        self.weights = {name: draw.choice([1, 4, 16]) for name in ("lease", "finish", "train", "step", "publish")}
        self.weights |= {"open": 16, "end": 2}
        self.weights |= {name: draw.choice([0, 1]) for name in ("reject", "requeue", "stop")}
        self.young_first = draw.random()

    def go(self, num_steps: int) -> int:
        """Returns the largest staleness."""
        while self.trained < num_steps:
            events = self.possible()
            assert events, "the run does not go on"
            weights = [self.weights[name] for name in events]
            name = self.draw.choices(events, weights)[0] if any(weights) else self.draw.choice(events)
            getattr(self, name)()
        return self.worst

    def possible(self) -> list[str]:
        running = [ticket for ticket in self.tickets.values() if ticket.leased]
        missing = [ticket for ticket in self.tickets.values() if ticket.missing]
        in_training = self.trained in self.taken
        checks = {
            "open": self.room() > 0,
            "lease": missing,
            "finish": running,
            "reject": running,
            "requeue": running,
            "end": any(not ticket.missing and not ticket.leased for ticket in self.tickets.values()),
            "stop": any(ticket.missing and not ticket.leased for ticket in self.tickets.values()),
            "train": not in_training and self.choice() is not None,
            "step": in_training,
            "publish": self.version < self.trained,
        }
        return [name for name, holds in checks.items() if holds]

    def room(self) -> int:
        held = len(self.window) + sum(map(len, self.taken.values())) + sum(t.missing for t in self.tickets.values())
        version = self.trained if self.admits_on_commit else self.version
        if self.admits_on_commit:
            held -= sum(len(self.taken[step]) for step in self.taken if step < self.trained)
        return self.schedule.num_admitted(self.num_opened, version, held, self.per_step)

    def choice(self) -> list[GroupUid] | None:
        if (chosen := self.window.choose()) is not None:
            return chosen
        newest = self.trained + self.schedule.target
        is_last = self.version == self.trained and not self.tickets and self.num_opened > newest
        return self.window.choose(len(self.window)) if is_last else None

    def any_ticket(self, *, leased: bool) -> Open:
        return self.draw.choice([t for t in self.tickets.values() if (t.leased if leased else t.missing)])

    def any_leased(self) -> GroupUid:
        ticket = self.any_ticket(leased=True)
        is_young = self.draw.random() < self.young_first
        return ticket.leased.pop(-1 if is_young else self.draw.randrange(len(ticket.leased)))

    def open(self) -> None:
        self.tickets[self.num_opened] = Open(self.room())
        self.num_opened += 1

    def lease(self) -> None:
        ticket = self.any_ticket(leased=False)
        by_filter = self.queue and self.draw.random() < 0.5  # a buffer filter may leave groups in the queue
        uid = self.queue.pop(self.draw.randrange(len(self.queue))) if by_filter else uid_of(self.num_leased)
        self.num_leased += 1
        self.window.lease(uid)
        if uid not in self.versions or not self.keeps_tokens:
            self.versions[uid] = self.version
        ticket.missing -= 1
        ticket.leased.append(uid)

    def finish(self) -> None:
        self.window.finish(self.any_leased())

    def reject(self) -> None:
        ticket = self.any_ticket(leased=True)
        self.window.leave(ticket.leased.pop(self.draw.randrange(len(ticket.leased))))
        ticket.missing += 1

    def requeue(self) -> None:
        ticket = self.any_ticket(leased=True)
        uid = ticket.leased.pop(self.draw.randrange(len(ticket.leased)))
        self.window.leave(uid)
        self.queue.append(uid)
        ticket.missing += 1

    def end(self) -> None:
        self.tickets = {number: t for number, t in self.tickets.items() if t.missing or t.leased}

    def stop(self) -> None:
        """A rollout function returns before its ticket is full."""
        number = self.draw.choice([n for n, t in self.tickets.items() if t.missing and not t.leased])
        del self.tickets[number]

    def train(self) -> None:
        chosen = self.choice()
        assert chosen is not None
        self.worst = max([self.worst, *(self.trained - self.versions[uid] for uid in chosen)])
        self.window.take(chosen)
        self.taken[self.trained] = chosen

    def step(self) -> None:
        self.trained += 1

    def publish(self) -> None:
        self.version = self.draw.randint(self.version + 1, self.trained)
        self.taken = {step: uids for step, uids in self.taken.items() if step >= self.version}


def worst_of(seeds: range, schedule: Schedule, make: Callable[[int, int], Window] = Window, **more: bool) -> list[int]:
    runs = []
    for seed in seeds:
        draw = Random(seed)
        runs.append(Run(draw, schedule, draw.randint(1, 4), make, **more).go(14))
    return runs


SCHEDULES = [
    Schedule(mode=Mode.ASYNC, target=target, max_staleness=bound)
    for target, bound in ((0, 0), (1, 1), (1, 2), (1, 3), (2, 2), (2, 4), (3, 4), (4, 4), (4, 6))
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"target {s.target} bound {s.max_staleness}")
def test_no_step_trains_on_tokens_older_than_the_bound_and_some_do_on_such_that_are_as_old(schedule: Schedule) -> None:
    """Rejected, requeued and late groups, tickets that end short, publications that lag."""
    assert max(worst_of(range(60), schedule)) == schedule.max_staleness


BROKEN: dict[str, dict[str, Any]] = {
    "passes are forgotten with each step": {"make": Forgetful},
    "greedy choice": {"make": Greedy},
    "a requeued group keeps its place": {"make": OldPlace},
    "a ticket opens with the commit": {"admits_on_commit": True},
    "a requeued group keeps its tokens": {"keeps_tokens": True},
}


@pytest.mark.parametrize("rule", BROKEN)
def test_where_one_rule_is_broken_the_bound_does_not_hold(rule: str) -> None:
    """An old place does so with a window of one alone; passes do not matter there."""
    schedules = [Schedule(mode=Mode.ASYNC, target=1, max_staleness=bound) for bound in (1, 2)]
    assert any(max(worst_of(range(150), schedule, **BROKEN[rule])) > schedule.max_staleness for schedule in schedules)
