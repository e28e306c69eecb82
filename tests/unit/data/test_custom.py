"""A user's data source in its process: what its code may do, and what is said when it does something else."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.data.custom import (
    CustomSource,
    Delivery,
    DeliveryRequest,
    GroupReader,
    source_name,
)
from buffer_rl.errors import BufferRLError, DataError, PluginError
from buffer_rl.options.section import compose
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import GroupUid, Sample, SampleGroup
from buffer_rl.rollout.data_source import delivery_answers, source_answers

HEAD = """
import asyncio
from pathlib import Path
from buffer_rl.records.groups import GroupUid, Sample, SampleGroup


class Source:
    def __init__(self, args):
        self.args, self.drawn = args, 0

    def get_samples(self, num_samples):
        groups = [[Sample(prompt=f"p{self.drawn + i}") for _ in range(2)] for i in range(num_samples)]
        self.drawn += num_samples
        return groups

    def add_samples(self, groups):
        raise AssertionError("the queue is the Buffer's")

    def save(self, path):
        Path(path).write_text(str(self.drawn))

    def load(self, path):
        self.drawn = int(Path(path).read_text())

    def __len__(self):
        return 7
"""

Host = Callable[..., CustomSource]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """Hosts ``Source`` of HEAD and ``code``, whose ``name`` may be another class."""

    def make(code: str = "", name: str = "Source", **options: Any) -> CustomSource:
        path = tmp_path / f"folder_{len(list(tmp_path.iterdir()))}" / "my_source.py"  # a module is imported once
        path.parent.mkdir()
        path.write_text(HEAD + code)
        args = compose(CORE_SECTIONS)(data_source_path=f"{path}:{name}", n_samples_per_prompt=2)
        return CustomSource(args, PluginRegistry(), **options)

    return make


def request(number: int, num_groups: int, first_group: int = 0, state: bytes = b"") -> DeliveryRequest:
    return DeliveryRequest(number=number, num_groups=num_groups, first_group=first_group, state=state)


def prompts(delivery: Delivery) -> list[Any]:
    return [group[0].prompt for group in delivery.groups]


def test_batches_are_made_once_each_and_bear_the_state_after_them(host: Host) -> None:
    source = host()
    first = source.take(request(0, 2))
    assert prompts(first) == ["p0", "p1"]
    assert first.state == b"2"
    assert source.take(request(0, 1)) == first  # asked for again: the Buffer did not take it in
    second = source.take(request(1, 1, 2, b"2"))
    assert (prompts(second), second.state) == (["p2"], b"3")
    assert source.num_rows() == 7


def test_a_replaced_process_goes_on_after_the_batch_whose_state_it_got(host: Host) -> None:
    source = host()
    saved = source.take(request(0, 3))
    lost = source.take(request(1, 2, 3, saved.state))
    made_again = host().take(request(1, 2, 3, saved.state))
    assert prompts(made_again) == prompts(lost) == ["p3", "p4"]
    assert [batch.state for batch in (made_again, lost)] == [b"5", b"5"]


def test_a_batch_is_made_from_the_state_after_the_batch_before_it_and_from_no_other(host: Host) -> None:
    source = host()
    assert prompts(source.take(request(2, 1, 7, b"7"))) == ["p7"]
    # The Buffer took in a batch 2 of two groups, which a process made that died.
    assert prompts(source.take(request(3, 1, 9, b"9"))) == ["p9"]


def test_a_source_that_stands_at_the_state_is_not_loaded(host: Host) -> None:
    code = "\n\nclass Mine(Source):\n    def load(self, path):\n        raise OSError('it is slow')\n"
    source = host(code, "Mine")
    assert prompts(source.take(request(0, 2))) == ["p0", "p1"]
    assert prompts(source.take(request(1, 1, 2, b"2"))) == ["p2"]
    with pytest.raises(PluginError, match="it is slow"):
        source.take(request(2, 1, 9, b"9"))


def test_a_source_may_wrap_the_built_in_one_and_give_lists_of_its_samples(host: Host, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    source = host(
        f"""
from buffer_rl.data.source import PromptDataSource

class Wrapping(Source):
    def __init__(self, args):
        own = args.model_copy(update={{"prompt_data": ["{tmp_path / "rows.jsonl"}"], "rollout_shuffle": False}})
        self.inner = PromptDataSource(own)

    def get_samples(self, num_samples):
        groups = self.inner.get_samples(num_samples)
        assert len(sum((group.samples for group in groups), [])) == 2 * num_samples
        return [group.samples for group in groups]

    def save(self, path):
        Path(path).write_text("")
""",
        "Wrapping",
    )
    delivery = source.take(request(0, 2))
    assert [[sample.prompt for sample in group] for group in delivery.groups] == [["a", "a"], ["b", "b"]]


def test_groups_without_a_uid_get_their_running_number_and_samples_their_place(host: Host) -> None:
    source = host()
    delivery = source.take(request(0, 2, first_group=40))
    name = source_name(source.reference)
    assert [str(group.uid) for group in delivery.groups] == [f"{name}:40:0", f"{name}:41:0"]
    assert name.startswith("custom:")
    assert GroupUid.parse(str(delivery.groups[1].uid)) == GroupUid(name, 41, 0)
    assert [[s.sample_index for s in group] for group in delivery.groups] == [[0, 1], [0, 1]]
    assert [[s.group_index for s in group] for group in delivery.groups] == [[40, 40], [41, 41]]
    assert [[s.index for s in group] for group in delivery.groups] == [[80, 81], [82, 83]]
    assert {sample.uid for sample in delivery.groups[1]} == {delivery.groups[1].uid}


def test_uids_and_numbers_of_the_sources_own_are_kept() -> None:
    uid, other = GroupUid("t", 5, 2), GroupUid("t", 6, 2)
    sample = Sample(uid=uid, prompt="a", index=9, group_index=3)
    listed, made = GroupReader("m:S", 2).read(
        [[sample] * 2, SampleGroup(uid=other, samples=[Sample(), Sample()])], request(0, 2)
    )
    assert listed.uid == uid
    assert [(s.sample_index, s.index, s.group_index) for s in listed] == [(0, 9, 3), (1, 9, 3)]
    assert listed[0] is not listed[1]
    assert (made.uid, made[1].uid) == (other, other)


class Level(IntEnum):
    HARD = 3


class Text(str):
    __slots__ = ()


def test_what_a_prompt_is_made_of_becomes_plain() -> None:
    sample = Sample(
        prompt=[{"role": "user", "content": Text("hi")}],
        label=np.float32(0.5),
        metadata={"level": Level.HARD, "pair": (1, True), "scores": np.arange(2), "text": Text("x"), "big": 2**64},
        multimodal_inputs={"image": [b"\x00"]},
        response="not kept",
        response_length=1,
        tokens=[1],
    )
    ((plain, _),) = GroupReader("m:S", 2).read([[sample, sample]], request(0, 1))
    assert plain.prompt == [{"role": "user", "content": "hi"}]
    assert type(plain.prompt[0]["content"]) is str
    assert plain.metadata == {"level": 3, "pair": [1, True], "scores": [0, 1], "text": "x", "big": 2**64}
    assert [type(value) for value in plain.metadata.values()] == [int, list, list, str, int]
    assert (plain.label, plain.multimodal_inputs) == (0.5, {"image": [b"\x00"]})
    assert (plain.response, plain.tokens, plain.response_length) == ("", [], 0)


def group(**fields: Any) -> list[Sample]:
    return [Sample(**fields), Sample(**fields)]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], ["get_samples(2) returned no group", "must not end", "next epoch"]),
        (None, ["get_samples returned None", "a list of groups"]),
        (SampleGroup(uid=GroupUid("s", 0, 0), samples=group()), ["SampleGroup", "a list of groups"]),
        ([group()] * 3, ["returned 3 groups", "at most 2", "groups, not samples"]),
        ([Sample(), Sample()], ["entry 0 is of type buffer_rl.records.sample.Sample"]),
        ([group(), ["text", "text"]], ["group 1 holds of type builtins.str", "buffer_rl.records.groups.Sample"]),
        ([group()[:1]], ["group 0 has 1 samples", "--n-samples-per-prompt, which is 2"]),
        ([[Sample(uid=GroupUid("s", 0, 0)), Sample()]], ["group 0 have several uids"]),
        ([group(uid="row 7")], ["the uid of group 0 is of type builtins.str", "GroupUid"]),
        ([group(prompt=b"x")], ["sample 0: the prompt is of type builtins.bytes", "chat messages"]),
        ([group(metadata=None)], ["metadata is None", "a mapping"]),
        ([group(label={"set"})], ["sample 0: label is of type builtins.set", "JSON"]),
        ([group(metadata={"a": [0, float("nan")]})], ["metadata['a'][1] is nan"]),
        ([group(metadata={3: "x"})], ["metadata is of type builtins.dict", "by text"]),
        ([group(prompt="\ud800")], ["prompt holds \\ud800, a lone surrogate"]),
        ([group(metadata={"\udcff": 1})], ["the key '\\udcff' of row", "holds \\udcff, a lone surrogate"]),
        ([group(uid=GroupUid("\ud800", 0, 0))], ["the uid of group 0 holds \\ud800, a lone surrogate"]),
    ],
)
def test_groups_that_could_not_be_trained_on_or_saved_are_named(value: Any, words: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        GroupReader("m:S", 2).read(value, request(0, 2))
    for word in ["data_source 'm:S'", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        ("def get_samples(self, num_samples):\n        return 1 / 0", PluginError, ["get_samples", "ZeroDivision"]),
        (
            "def save(self, path):\n        if not hasattr(self, 'x'):\n            self.x = 1\n"
            "            raise OSError('disk full')",
            PluginError,
            ["save", "disk full", "line 33"],
        ),
        ("def save(self, path):\n        pass", DataError, ["save wrote no state", "an empty file"]),
        ("def save(self, path):\n        Path(f'{path}.pt').touch()", DataError, ["no state, but state.pt"]),
        ("def save(self, path):\n        Path(path).mkdir()", DataError, ["no state, but state"]),
        ("def save(self, path):\n        Path(path).write_text('x' * 99)", DataError, ["wrote 99 bytes", "at most 64"]),
    ],
)
def test_a_source_that_fails_is_named_and_stays_failed(
    host: Host, code: str, error: type[BufferRLError], words: list[str]
) -> None:
    source = host(f"\n\nclass Mine(Source):\n    {code}\n", "Mine", max_state_bytes=64)
    for _ in range(2):  # the second time too: its groups are gone, and nobody may go on without them
        with pytest.raises(error) as caught:
            source.take(request(0, 1))
        for word in ["data_source '", "my_source.py:Mine'", *words]:
            assert word in str(caught.value)


@pytest.mark.parametrize(
    ("code", "act", "words"),
    [
        (
            "def __len__(self):\n        raise TypeError('endless')",
            CustomSource.num_rows,
            "__len__: it raised TypeError",
        ),
        ("def __len__(self):\n        return 0", CustomSource.num_rows, "its length is 0"),
        (
            "def load(self, path):\n        raise KeyError('row')",
            lambda s: s.take(request(1, 1)),
            "load: it raised KeyError",
        ),
        ("def __init__(self, args):\n        args.x", lambda s: None, "while it was constructed: it raised Attribute"),
    ],
)
def test_other_failures_name_the_method(host: Host, code: str, act: Callable[[Any], Any], words: str) -> None:
    with pytest.raises((PluginError, DataError)) as caught:
        act(host(f"\n\nclass Mine(Source):\n    {code}\n", "Mine"))
    assert words in str(caught.value)
    assert "my_source.py:Mine" in str(caught.value)


def test_async_methods_are_awaited(host: Host) -> None:
    code = """

class Mine(Source):
    async def get_samples(self, num_samples):
        await asyncio.sleep(0)
        return super().get_samples(num_samples)

    async def save(self, path):
        super().save(path)
"""
    delivery = host(code, "Mine").take(request(0, 2))
    assert (prompts(delivery), delivery.state) == (["p0", "p1"], b"2")


def test_a_factory_must_build_a_data_source(host: Host) -> None:
    assert prompts(host("\n\ndef make(args):\n    return Source(args)\n", "make").take(request(0, 1))) == ["p0"]
    with pytest.raises(PluginError, match="no get_samples"):
        host("\n\ndef make(args):\n    return object()\n", "make")


def test_a_delivery_may_take_as_long_as_the_source_and_its_two_calls_of_the_buffer() -> None:
    args = compose(CORE_SECTIONS)(data_source_path="mine:Rows", data_source_timeout_s=2.0, buffer_timeout_s=5.0)
    assert (source_answers(args).timeout_s, delivery_answers(args).timeout_s) == (2.0, 12.0)
