"""Publication by tensor: the order of its calls, and that the memory is freed however it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.engines.protocol import ServerInfo
from buffer_rl.errors import ConfigError, EngineError
from buffer_rl.options.section import compose
from buffer_rl.records.groups import Topology
from buffer_rl.weights.publish import Publisher
from buffer_rl.weights.tensor import LOAD_FORMAT, TensorSender, TensorTransport
from harness.fake_roles import EMBEDDED_ENGINE, FakeEngines, local_senders


class Memory:
    """Shares two buckets, in the place of a sender; notes what was asked."""

    def __init__(self, buckets: int = 2) -> None:
        self.buckets = buckets
        self.asked: list[tuple[str | None, int]] = []
        self.again: list[int] = []
        self.shared = False

    def sender(self, args: Any, topology: Any) -> Memory:
        return self

    def share(self, buckets: Any, load_format: str | None, num_receivers: int) -> list[list[str]]:
        self.asked.append((load_format, num_receivers))
        self.shared = True
        return self.named(num_receivers)

    def handles(self, buckets: Any, num_receivers: int) -> list[list[str]]:
        self.again.append(num_receivers)
        return self.named(num_receivers)

    def named(self, num_receivers: int) -> list[list[str]]:
        return [[f"bucket {i} handle {j}" for j in range(num_receivers)] for i in range(self.buckets)]

    def release(self, buckets: Any) -> None:
        self.shared = False


class Receivers(FakeEngines):
    """Engines as ``infos`` says; notes what each is sent."""

    def __init__(self, infos: Mapping[str, ServerInfo]) -> None:
        super().__init__()
        self.infos = dict(infos)
        self.sent: list[tuple[dict[str, list[str]], str | None]] = []

    def server_info(self) -> dict[str, ServerInfo]:
        return self.infos

    def update_weights_from_tensor(
        self, serialized: Mapping[str, Sequence[str]], load_format: str | None, version: int | None
    ) -> None:
        self.sent.append(({url: list(handles) for url, handles in serialized.items()}, load_format))
        super().update_weights_from_tensor(serialized, load_format, version)


def publisher(memory: Memory, engines: FakeEngines, **options: Any) -> Publisher:
    args: Any = compose(CORE_SECTIONS)(**options)
    trainer: Any = local_senders(memory, args, lambda: iter(()))
    return Publisher(TensorTransport(args), trainer, engines, first_pause_s=0.0)  # type: ignore[arg-type]  # a fake


def test_a_rank_that_is_no_source_iterates_to_the_end_and_shares_nothing() -> None:
    args: Any = compose(CORE_SECTIONS)()
    for place in (Topology(dp_rank=1, dp_size=2), Topology(dp_rank=0, dp_size=1, is_head=False)):
        buckets = iter([{}, {}])
        assert TensorSender(args, place).share(buckets, LOAD_FORMAT, 1) == []
        assert next(buckets, None) is None


def test_buckets_are_staged_between_begin_and_end_and_the_last_has_the_version() -> None:
    memory, engines = Memory(), FakeEngines()
    publisher(memory, engines).publish(3)
    assert engines.calls == ["pause", "flush", "begin", "update", "update", "end", "versions", "resume"]
    assert engines.version == 3
    assert not memory.shared


@pytest.mark.parametrize("call", ["pause", "flush", "begin", "update", "end", "versions", "resume"])
def test_the_memory_is_freed_whatever_fails(call: str) -> None:
    memory, engines = Memory(), FakeEngines(fail_on=call, error=EngineError("broken", where="http://engine-0"))
    with pytest.raises(EngineError, match="broken"):
        publisher(memory, engines).publish(1)
    assert engines.paused is (call != "pause")
    assert not memory.shared


@pytest.mark.parametrize("call", ["begin", "update"])
def test_a_failed_attempt_ends_its_update_once(call: str) -> None:
    engines = FakeEngines(fail_on=call, error=EngineError("broken"), failures=1)
    publisher(Memory(), engines).publish(1)
    first = engines.calls[: engines.calls.index("pause", 1)]
    assert first == ["pause", "flush", "begin", *(["update"] if call == "update" else []), "end"]


@pytest.mark.parametrize("call", ["pause", "begin", "update", "end", "resume"])
def test_a_version_that_is_tried_again_is_shared_once_and_staged_from_its_beginning(call: str) -> None:
    memory, engines = Memory(), FakeEngines(fail_on=call, error=EngineError("broken"), failures=1)
    publisher(memory, engines).publish(3)
    last = len(engines.calls) - engines.calls[::-1].index("pause") - 1
    assert engines.calls[last:] == ["pause", "flush", "begin", "update", "update", "end", "versions", "resume"]
    assert len(memory.asked) == 1
    assert not memory.shared


def test_each_rank_of_each_engine_that_takes_part_has_a_handle_of_its_own_pickled() -> None:
    memory, engines = Memory(), Receivers({"a": ServerInfo(tp_size=2), "b": ServerInfo()})
    publisher(memory, engines).publish(1)
    assert memory.asked == [(None, 3)]
    assert engines.sent == [
        ({"a": [f"bucket {bucket} handle 0", f"bucket {bucket} handle 1"], "b": [f"bucket {bucket} handle 2"]}, None)
        for bucket in (0, 1)
    ]


def test_embedded_engines_get_json_whatever_the_option_says_that_the_run_starts() -> None:
    memory, engines = Memory(), Receivers({"a": EMBEDDED_ENGINE, "b": EMBEDDED_ENGINE})
    publisher(memory, engines, rollout_engine="sglang", rollout_num_engines=5).publish(1)
    assert memory.asked == [(LOAD_FORMAT, 2)]
    assert {load_format for _, load_format in engines.sent} == {LOAD_FORMAT}


def test_handles_that_were_read_are_made_again_for_another_attempt() -> None:
    memory, engines = Memory(), FakeEngines(fail_on="end", error=EngineError("broken"), failures=1)
    publisher(memory, engines).publish(1)
    assert (len(memory.asked), memory.again) == (1, [1])


@pytest.mark.parametrize(
    ("infos", "message"),
    [
        ({"a": ServerInfo(dp_size=2)}, "dp_size 2 takes weights from disk only"),
        ({"a": ServerInfo(), "b": EMBEDDED_ENGINE}, "cannot read the same memory"),
    ],
)
def test_engines_that_cannot_read_it_are_refused_before_anything_is_shared(infos: Any, message: str) -> None:
    memory, engines = Memory(), Receivers(infos)
    with pytest.raises(ConfigError, match=message):
        publisher(memory, engines).publish(1)
    assert (memory.asked, engines.calls) == ([], [])


def test_a_trainer_without_weights_is_an_error() -> None:
    with pytest.raises(EngineError, match="no weights to share"):
        publisher(Memory(buckets=0), FakeEngines()).publish(1)
