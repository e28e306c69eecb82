"""The store of the rollout service: every trajectory is in one state, whatever is repeated, late or killed."""

from __future__ import annotations

import os
import random
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.errors import BufferStateError, ConfigError
from buffer_rl_rollout_service.__main__ import token_of
from buffer_rl_rollout_service.store import FILE, FullError, Rules, Store


class Clock:
    """A time that moves when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(tmp_path: Path, clock: Clock) -> Callable[..., Store]:
    return lambda **rules: Store(tmp_path, Rules(**{"group_size": 2, "timeout_s": 60, "lease_s": 30, **rules}), clock)


def fill(store: Store, instance_id: str, *uids: str) -> None:
    for uid in uids:
        store.write(instance_id, uid, 1.0, b'"%s"' % uid.encode())


def counts(store: Store) -> dict[str, int]:
    return {state: n for state, n in store.statistics()["trajectories"].items() if n}


def test_a_complete_group_is_given_once(make: Callable[..., Store]) -> None:
    store = make()
    fill(store, "p", "a")
    assert store.read("run", 5) == []
    answer = store.write("p", "b", 0.0, b"2")
    assert (answer.size, answer.complete, answer.duplicate) == (2, True, False)
    (peeked,) = store.peek(3)
    (group,) = store.read("run", 5)
    assert group == peeked
    assert (group.instance_id, group.partial, group.bodies) == ("p", False, [b'"a"', b"2"])
    assert store.read("other", 5) == []
    store.acknowledge("run", [group.number], {})
    store.acknowledge("run", [group.number], {})  # the first answer was lost on its way
    assert counts(store) == {"written": 2, "delivered": 2}
    assert store.statistics()["avg_reward"] == 0.5


def test_a_trajectory_that_is_written_again_is_not_doubled(make: Callable[..., Store]) -> None:
    store = make()
    fill(store, "p", "a", "a", "b", "b")
    (group,) = store.read("run", 1)
    assert len(group.bodies) == 2
    store.acknowledge("run", [group.number], {})
    assert store.write("p", "a", 1.0, b"again").duplicate  # when its group is gone
    fill(store, "q", "a")  # the same uid of another problem is another trajectory
    assert counts(store) == {"written": 3, "delivered": 2, "open": 1}
    assert store.statistics()["duplicates"] == 3


def test_groups_with_missing_members_time_out_and_are_counted(make: Callable[..., Store], clock: Clock) -> None:
    store = make(group_size=3, min_group_size=2)
    fill(store, "two", "a", "b")
    fill(store, "one", "a")
    clock.now += 59
    fill(store, "fresh", "a")
    assert store.read("run", 9) == []
    clock.now += 1
    (group,) = store.read("run", 9)
    assert (group.instance_id, group.partial, len(group.bodies)) == ("two", True, 2)
    assert counts(store) == {"written": 4, "open": 1, "leased": 2, "dropped": 1}
    assert store.statistics()["dropped"] == {"timed_out": 1}
    assert store.statistics()["partial_groups"] == 1
    fill(store, "two", "late")  # begins the problem's next group, which its writer may complete
    assert counts(store) == {"written": 5, "open": 2, "leased": 2, "dropped": 1}


def test_a_group_waits_as_long_as_members_come(make: Callable[..., Store], clock: Clock) -> None:
    store = make(group_size=3)
    for uid in "abc":
        fill(store, "p", uid)
        clock.now += 50
    (group,) = store.read("run", 1)
    assert not group.partial


def test_an_expired_lease_goes_to_the_next_reader_and_its_holder_is_refused(
    make: Callable[..., Store], clock: Clock
) -> None:
    store = make()
    fill(store, "p", "a", "b")
    (first,) = store.read("slow", 1)
    clock.now += 31
    (second,) = store.read("quick", 1)
    assert second.bodies == first.bodies
    with pytest.raises(BufferStateError, match="not leased by this reader"):
        store.acknowledge("slow", [first.number], {})
    store.acknowledge("quick", [second.number], {})
    assert counts(store) == {"written": 2, "delivered": 2}
    assert store.statistics()["leases_expired"] == 1


def test_a_late_acknowledgement_counts_where_no_other_reader_took_the_group(
    make: Callable[..., Store], clock: Clock
) -> None:
    store = make()
    fill(store, "p", "a", "b")
    (group,) = store.read("slow", 1)
    clock.now += 31
    store.acknowledge("slow", [group.number], {})
    assert counts(store) == {"written": 2, "delivered": 2}


def test_a_reader_gets_again_what_it_got_at_its_position_and_does_not_have(make: Callable[..., Store]) -> None:
    store = make(group_size=1)
    fill(store, "p", "a")
    fill(store, "q", "a")
    (lost,) = store.read("run", 1, position=4)  # the answer does not arrive
    (again,) = store.read("run", 1, position=4)
    assert again == lost
    (other,) = store.read("run", 1, position=4, have=[again.number])
    assert other.instance_id == "q"
    assert store.read("run", 1, position=4, have=[again.number, other.number]) == []


def test_a_reader_that_goes_back_to_a_checkpoint_gets_the_groups_since_in_their_order(
    make: Callable[..., Store],
) -> None:
    store = make(group_size=1)
    for number in range(8):
        fill(store, f"p{number}", "a")
    for position in range(4):
        for group in store.read("run", 1, position=position, keep_from=max(0, position - 2)):
            store.acknowledge("run", [group.number], {})
    assert counts(store) == {"written": 8, "delivered": 4, "ready": 4}
    seen = []
    for position in (2, 3, 4):
        (group,) = store.read("run", 1, position=position, keep_from=1)
        seen.append(group.instance_id)
        store.acknowledge("run", [group.number], {})
    assert seen == ["p2", "p3", "p4"]
    (forgotten,) = store.read("run", 1, position=0, keep_from=0)  # p0 is no longer kept
    assert forgotten.instance_id == "p1"
    assert store.read("another", 9, position=0)[0].instance_id == "p5"


def test_dropped_groups_are_counted_by_reason_and_never_given_again(make: Callable[..., Store]) -> None:
    store = make()
    fill(store, "p", "a", "b")
    (group,) = store.read("run", 1, position=0)
    store.acknowledge("run", [], {group.number: "unusable"})
    assert store.read("run", 1, position=0) == []
    assert store.statistics()["dropped"] == {"unusable": 2}
    with pytest.raises(BufferStateError):
        store.acknowledge("run", [group.number, 77], {})


def test_a_full_store_begins_no_group_and_completes_those_it_has(make: Callable[..., Store]) -> None:
    store = make(capacity=1)
    fill(store, "p", "a")
    with pytest.raises(FullError, match="1 groups") as refused:
        fill(store, "q", "a")
    assert refused.value.expected == "fewer than 1 groups"
    fill(store, "p", "b")
    (group,) = store.read("run", 1)
    with pytest.raises(FullError):  # a leased group may come back
        fill(store, "q", "a")
    store.acknowledge("run", [group.number], {})
    fill(store, "q", "a")
    assert counts(store) == {"written": 3, "delivered": 2, "open": 1}


def test_the_time_for_which_the_service_was_down_ends_no_group_and_no_lease(
    make: Callable[..., Store], clock: Clock
) -> None:
    store = make()
    fill(store, "open", "a")
    fill(store, "leased", "a", "b")
    (leased,) = store.read("run", 1)
    store.close()
    clock.now += 10_000
    store = make()
    assert counts(store) == {"written": 3, "open": 1, "leased": 2}
    store.acknowledge("run", [leased.number], {})
    fill(store, "open", "b")
    assert len(store.read("run", 1)) == 1


def test_a_file_that_is_no_store_is_refused_and_left_alone(make: Callable[..., Store], tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"my notes, which are long enough to be looked at" * 9)
    with pytest.raises(ConfigError, match="cannot be opened"):
        make()
    assert (tmp_path / FILE).read_bytes().startswith(b"my notes")


def test_two_services_do_not_share_a_store(make: Callable[..., Store]) -> None:
    store = make()
    with pytest.raises(ConfigError, match="locked"):
        make()
    store.close()
    make()


@pytest.mark.parametrize("seed", range(6))
def test_random_writes_reads_deaths_and_time_lose_and_double_nothing(seed: int, tmp_path: Path, clock: Clock) -> None:
    """Beside a model that knows only what was written and what each run finished: deaths keep the file as it is."""
    rng = random.Random(seed)
    rules = Rules(group_size=3, min_group_size=2, timeout_s=40, lease_s=25, capacity=30)
    store = Store(tmp_path / "0", rules, clock)
    written: set[tuple[str, str]] = set()
    taken: dict[str, list[tuple[int, list[Any]]]] = {"x": [], "y": []}
    finished: dict[int, list[bytes]] = {}
    deaths = 0
    for _ in range(500):
        clock.now += rng.choice((0, 1, 5))
        match rng.randrange(8):
            case 0 | 1 | 2 | 3:
                key = (f"p{rng.randrange(12)}", f"u{rng.randrange(60)}")
                try:
                    answer = store.write(*key, 1.0, f"{key}".encode())
                except FullError:
                    assert key not in written
                    continue
                assert answer.duplicate == (key in written)
                written.add(key)
            case 4 | 5:
                reader = rng.choice("xy")
                taken[reader] += [(group.number, group.bodies) for group in store.read(reader, 2)]
            case 6:
                reader = rng.choice("xy")
                for number, bodies in taken[reader]:
                    try:
                        store.acknowledge(reader, [number], {})
                    except BufferStateError:
                        continue
                    assert finished.setdefault(number, bodies) == bodies
                taken[reader] = []
            case 7 if rng.random() < 0.3:  # killed: the files as they are, the log of the database included
                deaths += 1
                shutil.copytree(tmp_path / str(deaths - 1), tmp_path / str(deaths))
                store.close()
                store = Store(tmp_path / str(deaths), rules, clock)
    statistics = store.statistics()["trajectories"]
    assert deaths > 3
    assert statistics["written"] == len(written) == sum(statistics[state] for state in statistics if state != "written")
    delivered = [body for bodies in finished.values() for body in bodies]
    assert len(delivered) == len(set(delivered)) == statistics["delivered"] > 20
    assert {f"{key}".encode() for key in written} >= set(delivered)
    assert statistics["dropped"] > 0


def test_the_files_of_a_store_are_for_their_owner_alone_also_those_that_were_not(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = tmp_path / "store"
        token_of(folder)
        store = Store(folder, Rules(group_size=2))
        store.write("p", "a", 1.0, b"{}")
        assert {path.name for path in folder.iterdir()} == {"token", FILE, f"{FILE}-wal"}
        assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        for path in folder.iterdir():
            path.chmod(0o644)
        store.close()
        Store(folder, Rules(group_size=2)).write("p", "b", 1.0, b"{}")
        assert {stat.S_IMODE((folder / name).stat().st_mode) for name in (FILE, f"{FILE}-wal")} == {0o600}
    finally:
        os.umask(before)
