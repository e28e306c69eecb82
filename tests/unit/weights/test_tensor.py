"""Publication by tensor: the order of its calls, and that the memory is freed however it ends."""

from __future__ import annotations

from typing import Any

import pytest

from buffer_rl.config import compose
from buffer_rl.errors import EngineError
from buffer_rl.options import CORE_SECTIONS
from buffer_rl.testing.fake_roles import FakeEngines, local_senders
from buffer_rl.types import Topology
from buffer_rl.weights.publish import Publisher
from buffer_rl.weights.tensor import LOAD_FORMAT, TensorSender, TensorTransport


class Memory:
    """Shares two buckets, in the place of a sender; notes what was asked."""

    def __init__(self, buckets: int = 2) -> None:
        self.buckets = buckets
        self.asked: list[tuple[str | None, int]] = []
        self.shared = False

    def sender(self, args: Any, topology: Any) -> Memory:
        return self

    def share(self, buckets: Any, load_format: str | None, num_receivers: int) -> list[list[str]]:
        self.asked.append((load_format, num_receivers))
        self.shared = True
        return [["handle"] * num_receivers] * self.buckets

    def release(self, buckets: Any) -> None:
        self.shared = False


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


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({"rollout_num_engines": 3}, (LOAD_FORMAT, 3)),
        ({"engine_urls": ["http://127.0.0.1:1", "http://127.0.0.1:2"]}, (LOAD_FORMAT, 2)),
        ({"rollout_engine": "sglang"}, (None, 1)),
    ],
)
def test_there_is_a_handle_for_each_engine_in_the_form_that_it_reads(options: Any, asked: tuple[Any, int]) -> None:
    memory = Memory()
    publisher(memory, FakeEngines(), **options).publish(1)
    assert memory.asked == [asked]


def test_a_trainer_without_weights_is_an_error() -> None:
    with pytest.raises(EngineError, match="no weights to share"):
        publisher(Memory(buckets=0), FakeEngines()).publish(1)
