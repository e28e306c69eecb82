"""Weights broadcast by gloo into real engines: one sender, two processes that receive, against the same weights by
disk, and against groups as torch makes them itself, which is how SGLang makes its own."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from buffer_rl.cluster.process import reserved_port
from buffer_rl.embedded.launcher import EmbeddedEngine, launch
from buffer_rl.embedded.loader import LoadedModel, LoadOptions
from buffer_rl.embedded.staged_update import StagedUpdate
from buffer_rl.embedded.weight_groups import WeightGroups
from buffer_rl.engines.control import EngineControlClient
from buffer_rl.errors import EngineError
from buffer_rl.testing.tiny import ARCHITECTURES
from buffer_rl.trainer.model import Model, weight_buckets
from buffer_rl.trainer.pretrained import load_model
from buffer_rl.weights.distributed import JOIN, LEAVE, UPDATE, join_group, receive_bucket
from buffer_rl.weights.process_group import Rendezvous, WeightGroup, described
from harness.processes import holds_within

GROUP_TIMEOUT_S = 6.0
ENGINE_OPTIONS = {"update_weights_timeout_s": GROUP_TIMEOUT_S}
NORM = "model.norm.weight"
start = ThreadPoolExecutor(8).submit  # for calls that need a counterpart before they can end


@pytest.fixture
def new(model_folder: Callable[..., str]) -> dict[str, torch.Tensor]:
    """The weights of seed 1."""
    return dict(Model(load_model(model_folder("qwen3", 1), torch.device("cpu"), "--hf-checkpoint")).weights())


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port of this machine at which nothing listens unless the test does."""
    with reserved_port("127.0.0.1") as held:
        yield held.getsockname()[1]


def post(engine: EmbeddedEngine, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(engine.url + path, json.dumps(body).encode(), timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def body_of_join(port: int, **changes: Any) -> dict[str, Any]:
    body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "group_name": "w"}
    return body | {"backend": "gloo"} | changes


@contextmanager
def grouped(engines: EngineControlClient, name: str = "w") -> Iterator[WeightGroup]:
    """Rank 0 of a group with all engines."""
    rendezvous = Rendezvous(timeout_s=20)
    urls = engines.targets()
    joined = start(join_group, engines, rendezvous.address, rendezvous.port, dict.fromkeys(urls, 1), name=name)
    group = rendezvous.group(name, len(urls) + 1)
    joined.result(20)
    yield group
    group.close()


def send(
    engines: EngineControlClient,
    group: WeightGroup,
    bucket: dict[str, torch.Tensor],
    version: int | None = None,
    *,
    flattened: bool = False,
) -> None:
    how: dict[str, Any] = {"name": group.name, "version": version, "flattened": flattened}
    received = start(receive_bucket, engines, described(bucket), **how)
    group.send(list(bucket.values()), 20, flattened=flattened)
    received.result(20)


def disk_checksums(client: EngineControlClient, folder: str) -> dict[str, str]:
    """The checksums after an update from disk; the engines serve seed 0 again then."""
    before = client.checksums()
    client.update_weights_from_disk(folder, 5)
    found = client.checksums()
    assert found != before
    return found


@pytest.mark.parametrize("flattened", [False, True])
def test_two_engines_get_bit_for_bit_what_they_get_from_disk(
    control: EngineControlClient,
    served: EngineControlClient,
    model_folder: Callable[..., str],
    new: dict[str, torch.Tensor],
    flattened: bool,
) -> None:
    old, by_disk = served.checksums(), disk_checksums(control, model_folder("qwen3", 1))
    served.update_weights_from_disk(model_folder("qwen3"), 0)
    buckets = list(weight_buckets(new.items(), bucket_bytes=100_000))
    assert len(buckets) > 2
    served.pause()
    with grouped(served) as group:
        served.begin_weight_update()
        for index, bucket in enumerate(buckets):
            assert served.checksums() == old, "staged weights are served"
            send(served, group, bucket, 7 if index == len(buckets) - 1 else None, flattened=flattened)
        assert set(served.versions().values()) == {"0"}
        served.end_weight_update()
        served.post(LEAVE, {"group_name": "w"})
    served.resume()
    assert served.checksums() == by_disk
    assert set(served.versions().values()) == {"7"}


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_an_engine_knows_the_names_and_shapes_that_a_trainer_exports(
    architecture: str, model_folder: Callable[..., str]
) -> None:
    folder = model_folder(architecture)
    exported = dict(Model(load_model(folder, torch.device("cpu"), "--hf-checkpoint")).weights())
    known = LoadedModel(LoadOptions(model_path=folder)).checkpoint_shapes
    assert {name: known.get(name) for name in exported} == {name: tuple(t.shape) for name, t in exported.items()}


def torch_group(port: int, rank: int, world_size: int, name: str) -> Any:
    """A group as torch makes it from an address and a name beside its default group; SGLang does the same."""
    from torch.distributed import distributed_c10d as c10d

    timeout = timedelta(seconds=20)
    store, *_ = next(c10d.rendezvous(f"tcp://127.0.0.1:{port}", rank, world_size, timeout=timeout))  # type: ignore[no-untyped-call]
    make: Any = c10d._new_process_group_helper
    keys = c10d.PrefixStore(name, store)
    return make(world_size, rank, [], c10d.Backend("gloo"), keys, group_name=name, timeout=timeout)[0]


def test_an_engine_receives_from_a_group_that_torch_made(
    engines: list[EmbeddedEngine], served: EngineControlClient, new: dict[str, torch.Tensor], free_port: int
) -> None:
    with EngineControlClient([engines[0].url]) as one:
        joined = start(join_group, one, "127.0.0.1", free_port, dict.fromkeys(one.targets(), 1), name="theirs")
        group = torch_group(free_port, 0, 2, "theirs")
        joined.result(20)
        one.begin_weight_update()
        received = start(receive_bucket, one, described(new), name="theirs", version=3)
        for tensor in new.values():
            group.broadcast([tensor.clone()], dist.BroadcastOptions()).wait()
        received.result(20)
        one.end_weight_update()
        assert one.versions() == {engines[0].url: "3"}


RECEIVER = """
import sys, torch, torch.distributed as dist
print("ready", flush=True)
group = torch_group(int(sys.argv[1]), 2, 3, "ours")
tensor = torch.empty(64)
group.broadcast([tensor], dist.BroadcastOptions()).wait()
print(tensor.tolist())
"""


def test_a_sender_reaches_members_that_torch_made(engines: list[EmbeddedEngine], served: EngineControlClient) -> None:
    code = f"from typing import Any\nfrom datetime import timedelta\n{inspect.getsource(torch_group)}{RECEIVER}"
    rendezvous = Rendezvous(timeout_s=20)
    command = [sys.executable, "-c", code, str(rendezvous.port)]
    theirs = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert theirs.stdout
    assert theirs.stdout.readline() == "ready\n"
    body = body_of_join(rendezvous.port, world_size=3, group_name="ours")
    joined = start(post, engines[0], JOIN, **body)
    group = rendezvous.group("ours", 3)
    assert joined.result(20)[0] == 200
    post(engines[0], "/begin_weight_update")
    sent = {NORM: torch.arange(64.0)}
    received = start(post, engines[0], UPDATE, **described(sent), group_name="ours")
    group.send(list(sent.values()), 20)
    assert received.result(20)[0] == 200
    assert json.loads(theirs.communicate(timeout=60)[0]) == list(range(64))


SENDER = """
import json, sys, torch
from buffer_rl.weights.process_group import Rendezvous
rendezvous = Rendezvous(timeout_s=60)
print(rendezvous.port, flush=True)
group = rendezvous.group("w", 3)
shapes = json.loads(sys.stdin.readline())
group.send([torch.zeros(shape) for shape in shapes], 20)
print("sent", flush=True)
sys.stdin.read()
"""


def test_a_sender_that_is_killed_leaves_the_old_weights_and_the_group_can_be_made_again(
    served: EngineControlClient, new: dict[str, torch.Tensor], model_folder: Callable[..., str]
) -> None:
    old = served.checksums()
    sender = subprocess.Popen([sys.executable, "-c", SENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert sender.stdin
    assert sender.stdout
    port = int(sender.stdout.readline())
    join_group(served, "127.0.0.1", port, dict.fromkeys(served.targets(), 1), name="w")
    served.begin_weight_update()
    received = start(receive_bucket, served, described(new), name="w", version=9)
    print(json.dumps([list(tensor.shape) for tensor in list(new.values())[:4]]), file=sender.stdin, flush=True)
    assert sender.stdout.readline() == "sent\n"
    assert not received.done(), "the engines wait for the fifth tensor"
    sender.send_signal(signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"2 of 2 engines failed(.|\n)*HTTP 400(.|\n)*a broadcast failed"):
        received.result(20)
    assert time.monotonic() - started < GROUP_TIMEOUT_S - 2, "they noticed it by the deadline only"
    sender.wait()
    with pytest.raises(EngineError, match="no weight update is under way"):
        served.end_weight_update()
    assert (served.checksums(), set(served.versions().values())) == (old, {"0"})
    with grouped(served) as group:
        served.begin_weight_update()
        send(served, group, new, 9)
        served.end_weight_update()
    assert served.checksums() == disk_checksums_of(served, model_folder("qwen3", 1))


def disk_checksums_of(client: EngineControlClient, folder: str) -> dict[str, str]:
    client.update_weights_from_disk(folder, 0)
    return client.checksums()


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"names": ["model.norm.bias"]}, "no weights 'model.norm.bias'"),
    ({"names": [7]}, "no weights '7'"),
    ({"names": [NORM, NORM], "dtypes": ["float32"] * 2, "shapes": [[64]] * 2}, "came twice"),
    ({"names": [NORM, NORM]}, "one entry for each tensor"),
    ({"names": [], "dtypes": [], "shapes": []}, "at least one"),
    ({"names": NORM}, "'names' must be a list"),
    ({"dtypes": ["complex64"]}, "dtype 'complex64'"),
    ({"dtypes": [None]}, "dtype None"),
    ({"shapes": [[10**15]]}, "shape"),
    ({"shapes": [[8, 8]]}, "shape"),
    ({"shapes": ["64"]}, "shape"),
    ({"load_format": "direct"}, "load_format 'direct'"),
    ({"weight_version": 3}, "'weight_version' must be a string"),
]


@pytest.mark.parametrize(("change", "message"), REFUSALS)
def test_a_bucket_that_does_not_fit_the_model_is_refused_and_ends_the_update(
    engines: list[EmbeddedEngine], served: EngineControlClient, change: dict[str, Any], message: str
) -> None:
    old = served.checksums()
    with EngineControlClient([engines[0].url]) as one, grouped(one) as group:
        one.begin_weight_update()
        body = {"names": [NORM], "dtypes": ["float32"], "shapes": [[64]], "group_name": "w", **change}
        status, answer = post(engines[0], UPDATE, **body)
        assert (status, answer["success"]) == (400, False)
        assert message in answer["message"]
        started = time.monotonic()
        with pytest.raises(EngineError, match="broadcast failed"):
            group.send([torch.zeros(64)], 20)
        assert time.monotonic() - started < 10, "the engine has not left the group"
        assert "no weight update is under way" in post(engines[0], "/end_weight_update")[1]["message"]
    assert served.checksums() == old


def test_a_bucket_without_a_begin_or_a_group_is_refused(
    engines: list[EmbeddedEngine], served: EngineControlClient
) -> None:
    bucket = {"names": [NORM], "dtypes": ["float32"], "shapes": [[64]]}
    post(engines[0], "/begin_weight_update")
    status, answer = post(engines[0], UPDATE, **bucket, group_name="strange")
    assert (status, "no weight group 'strange'" in answer["message"]) == (400, True)
    with EngineControlClient([engines[0].url]) as one, grouped(one):
        status, answer = post(engines[0], UPDATE, **bucket, group_name="w")
        assert (status, "begin_weight_update first" in answer["message"]) == (400, True)
    assert post(engines[0], LEAVE, group_name="w")[0] == 400


def test_weights_that_come_twice_are_refused(served: EngineControlClient, new: dict[str, torch.Tensor]) -> None:
    with grouped(served) as group:
        served.begin_weight_update()
        send(served, group, {NORM: new[NORM]})
        with pytest.raises(EngineError, match=f"{NORM} came twice"):
            receive_bucket(served, described({NORM: new[NORM]}), name="w")


@pytest.mark.parametrize(
    "change",
    [
        {"master_address": ""},
        {"master_address": 3},
        {"master_port": 0},
        {"master_port": "80"},
        {"world_size": 1},
        {"world_size": 2.0},
        {"rank_offset": 0},
        {"rank_offset": 2},
        {"group_name": ""},
        {"group_name": ["w"]},
        {"backend": "nccl"},
    ],
)
def test_a_call_to_join_of_another_form_is_400(
    engines: list[EmbeddedEngine], served: EngineControlClient, change: dict[str, Any]
) -> None:
    status, answer = post(engines[0], JOIN, **body_of_join(9, **change))
    assert (status, answer["success"]) == (400, False)
    assert next(iter(change)) in answer["message"]


@pytest.mark.slow
def test_a_group_that_does_not_get_whole_is_given_up_at_the_deadline_and_the_engine_generates_meanwhile(
    engines: list[EmbeddedEngine], served: EngineControlClient
) -> None:
    rendezvous = Rendezvous()
    started = time.monotonic()
    joining = start(post, engines[0], JOIN, **body_of_join(rendezvous.port, world_size=3))
    greedy = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
    while not joining.done():
        begun = time.monotonic()
        assert post(engines[0], "/generate", input_ids=[5, 6], sampling_params=greedy)[0] == 200
        assert time.monotonic() - begun < GROUP_TIMEOUT_S - 2
    status, answer = joining.result(20)
    assert (status, "3 members did not meet within 6 s" in answer["message"]) == (400, True)
    assert GROUP_TIMEOUT_S - 1 < time.monotonic() - started < GROUP_TIMEOUT_S + 60


@pytest.mark.slow
def test_a_sender_that_is_not_there_is_named(
    engines: list[EmbeddedEngine], served: EngineControlClient, free_port: int
) -> None:
    status, answer = post(engines[0], JOIN, **body_of_join(free_port))
    assert status == 400
    assert f"127.0.0.1:{free_port}" in answer["message"]
    assert "cannot be reached" in answer["message"]


async def test_joining_under_a_name_again_leaves_the_group_before(free_port: int) -> None:
    groups = WeightGroups({}, StagedUpdate(), 20.0)
    first = asyncio.create_task(groups.init(body_of_join(free_port)))
    await asyncio.sleep(0)  # it has begun
    for _ in range(2):
        rendezvous = Rendezvous(timeout_s=20)
        joining = asyncio.create_task(groups.init(body_of_join(rendezvous.port)))
        group = await asyncio.to_thread(rendezvous.group, "w", 2)
        await joining
        group.close()
    with pytest.raises(EngineError, match=f"127.0.0.1:{free_port}"):
        await first
    groups.destroy({"group_name": "w"})  # the first call's end leaves the later group
    with pytest.raises(EngineError, match="no weight group"):
        groups.destroy({"group_name": "w"})


def test_buckets_of_one_update_may_come_by_several_groups(
    control: EngineControlClient,
    served: EngineControlClient,
    model_folder: Callable[..., str],
    new: dict[str, torch.Tensor],
) -> None:
    buckets = list(weight_buckets(new.items(), bucket_bytes=100_000))
    with grouped(served, "a") as a, grouped(served, "b") as b:
        served.begin_weight_update()
        for index, bucket in enumerate(buckets):
            send(served, (a, b)[index % 2], bucket, 2, flattened=index % 3 == 0)
        served.end_weight_update()
    found = served.checksums()
    assert found == disk_checksums_of(control, model_folder("qwen3", 1))


async def test_a_bucket_that_arrives_after_its_update_has_ended_is_not_taken_by_the_next() -> None:
    staged = StagedUpdate()
    groups = WeightGroups({"a": (3,)}, staged, 20.0)
    rendezvous = Rendezvous(timeout_s=20)
    joining = asyncio.create_task(groups.init(body_of_join(rendezvous.port)))
    group = await asyncio.to_thread(rendezvous.group, "w", 2)
    await joining
    staged.begin()
    bucket = described({"a": torch.ones(3)})
    receiving = asyncio.create_task(groups.update({**bucket, "group_name": "w", "weight_version": "4"}))
    named = lambda: any(thread.name == "weight-group" for thread in threading.enumerate())  # noqa: E731
    assert await asyncio.to_thread(holds_within, 60, named)
    staged.begin()
    await asyncio.to_thread(group.send, [torch.ones(3)], 20)
    with pytest.raises(EngineError, match="begun again"):
        await receiving
    with pytest.raises(EngineError, match="no weight update is under way"):
        staged.finish()


@pytest.mark.slow
def test_an_engine_that_is_joining_a_group_ends_at_once_on_a_signal(
    engine_args: Callable[..., Any], tmp_path: Path
) -> None:
    engine = launch(engine_args(update_weights_timeout_s=600.0), 0, str(tmp_path / "log"))
    try:
        engine.wait_ready(120)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            start(post, engine, JOIN, **body_of_join(silent.getsockname()[1]))
            first, second = silent.accept(), silent.accept()  # the second is the store's, which waits for an answer
            os.kill(engine.process.pid, signal.SIGTERM)
            assert holds_within(60, lambda: engine.process.exit_status is not None)
            first[0].close()
            second[0].close()
    finally:
        engine.stop()


def test_engines_that_are_left_out_of_a_group_are_not_told_and_each_other_one_has_a_rank_of_its_own(
    engines: list[EmbeddedEngine], served: EngineControlClient, new: dict[str, torch.Tensor]
) -> None:
    old = served.checksums()
    only = engines[1].url
    rendezvous = Rendezvous(timeout_s=20)
    with EngineControlClient([only]) as second:
        joined = start(join_group, served, rendezvous.address, rendezvous.port, {only: 1}, name="w")
        group = rendezvous.group("w", 2)
        joined.result(20)
        assert post(engines[0], LEAVE, group_name="w")[0] == 400
        second.begin_weight_update()
        send(second, group, new, 8)
        second.end_weight_update()
    assert served.versions() == {engines[0].url: "0", only: "8"}
    assert served.checksums()[engines[0].url] == old[engines[0].url]
    rendezvous = Rendezvous(timeout_s=20)
    urls = list(reversed(served.targets()))
    joined = start(join_group, served, "127.0.0.1", rendezvous.port, dict.fromkeys(urls, 1), name="w")
    rendezvous.group("w", 3)
    joined.result(20)
