"""Publication: the order of its calls, that an engine goes on only with a version that it confirmed, and what engines
sample against numbers by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.cluster.calling import Call
from buffer_rl.cluster.dispatch import all_answers
from buffer_rl.engines.protocol import ServerInfo
from buffer_rl.errors import ConfigError, EngineError, PluginError, WorkerError
from buffer_rl.options.section import compose
from buffer_rl.plan.layout import layout_of
from buffer_rl.weights.disk import DiskSender, DiskTransport
from buffer_rl.weights.publish import NUM_TOKENS, PROMPT, LogProbCheck, Publisher
from buffer_rl.weights.sender import Senders
from harness.fake_roles import PREPARING_ENGINE, FakeEngines, local_senders, of_one_rank


class Weights:
    """One tensor, in which the number of exports so far stands."""

    def __init__(self) -> None:
        self.exports = 0

    def export(self) -> Iterator[dict[str, torch.Tensor]]:
        self.exports += 1
        yield {"number": torch.tensor(self.exports)}


def publisher(folder: Path, engines: Any, weights: Weights | None = None, **options: Any) -> Publisher:
    args: Any = compose(CORE_SECTIONS)(run_dir=str(folder), hf_checkpoint=str(folder))
    options = {"first_pause_s": 0.0, **options}
    trainer = local_senders(DiskTransport, args, (weights or Weights()).export)
    return Publisher(DiskTransport(args), trainer, engines=engines, **options)


def test_engines_are_paused_flushed_updated_checked_and_continued(tmp_path: Path) -> None:
    engines = FakeEngines()
    publisher(tmp_path, engines).publish(3)
    assert engines.calls == ["pause", "flush", "update", "versions", "resume"]
    assert engines.version == 3


STAGED = ["prepare", "pause", "flush", "swap", "versions", "resume"]
IN_PAUSE = ["pause", "flush", "update", "versions", "resume"]


def test_engines_that_can_prepare_a_version_before_the_pause(tmp_path: Path) -> None:
    engines = FakeEngines(info=PREPARING_ENGINE)
    publisher(tmp_path, engines).publish(3)
    assert engines.calls == STAGED
    assert engines.version == 3


@pytest.mark.parametrize(
    ("call", "first"),
    [("prepare", ["prepare"]), ("flush", STAGED[:3]), ("swap", STAGED[:4]), ("versions", STAGED[:5])],
)
def test_after_a_failure_engines_that_prepare_take_the_version_in_the_pause(
    tmp_path: Path, call: str, first: list[str]
) -> None:
    engines = FakeEngines(info=PREPARING_ENGINE, fail_on=call, error=EngineError("broken"), failures=1)
    publisher(tmp_path, engines).publish(3)
    assert engines.calls == first + IN_PAUSE
    assert engines.version == 3


@pytest.mark.parametrize("calls", [["a"], ["a", "b"], ["b"]])
def test_engines_that_are_not_those_that_prepared_take_the_version_in_the_pause(
    tmp_path: Path, calls: list[str]
) -> None:
    class Changing(FakeEngines):
        urls: tuple[str, ...] = ("a", "c")

        def targets(self) -> tuple[str, ...]:
            return self.urls

        def server_info(self) -> dict[str, ServerInfo]:
            return dict.fromkeys(self.urls, PREPARING_ENGINE)

        def pause(self, mode: str) -> None:
            super().pause(mode)
            self.urls = tuple(calls)

    engines = Changing()
    publisher(tmp_path, engines).publish(3)
    assert engines.calls == (STAGED if calls == ["a"] else ["prepare", *IN_PAUSE])


def test_beside_an_engine_that_cannot_prepare_none_does(tmp_path: Path) -> None:
    class Mixed(FakeEngines):
        def server_info(self) -> dict[str, ServerInfo]:
            return {"a": PREPARING_ENGINE, "b": ServerInfo()}

    engines = Mixed()
    publisher(tmp_path, engines).publish(3)
    assert engines.calls == IN_PAUSE


def test_the_pause_ends_when_engines_continue_and_preparing_is_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    class Slow(FakeEngines):
        def _note(self, call: str) -> None:
            nonlocal now
            now += {"prepare": 10.0, "swap": 1.0, "resume": 0.5}.get(call, 0.0)
            super()._note(call)

        def end_publication(self) -> None:
            nonlocal now
            now += 100.0

    monkeypatch.setattr("time.monotonic", lambda: now)
    metrics = publisher(tmp_path, Slow(info=PREPARING_ENGINE)).publish(3)
    assert (metrics["perf/publish_write"], metrics["perf/publish_pause"]) == (10.0, 1.5)


@pytest.mark.parametrize("call", ["flush", "update", "versions"])
def test_an_engine_stays_paused_until_a_publication_to_it_succeeds(tmp_path: Path, call: str) -> None:
    engines = FakeEngines(fail_on=call, error=EngineError("broken", where="http://engine-0"), failures=3)
    with pytest.raises(EngineError, match="broken") as caught:
        publisher(tmp_path, engines).publish(1)
    assert "resume" not in engines.calls
    assert engines.paused
    assert "did not confirm version 1 stay paused" in caught.value.__notes__[0]
    publisher(tmp_path, engines).publish(1)
    assert not engines.paused


@pytest.mark.parametrize("call", ["pause", "flush", "update", "versions", "resume"])
def test_a_call_that_fails_is_made_again_for_the_version_that_was_written_once(tmp_path: Path, call: str) -> None:
    engines = FakeEngines(fail_on=call, error=EngineError("broken\nfor now", where="http://engine-0"), failures=2)
    weights, notices = Weights(), []
    publisher(tmp_path, engines, weights, notice=notices.append).publish(3)
    assert engines.version == 3
    assert not engines.paused
    assert engines.calls.count("pause") == 3
    assert engines.calls.count("resume") == (3 if call == "resume" else 1)
    assert engines.calls[engines.calls.index("drop failed") :].count("pause") == 1  # the last attempt alone
    assert weights.exports == 1
    assert notices == [
        f"the publication of version 3 is tried again ({number} of 2): http://engine-0: broken for now"
        for number in (1, 2)
    ]
    assert (tmp_path / "weights" / "v000003").is_dir()


def test_engines_that_keep_failing_end_the_publication_after_three_attempts(tmp_path: Path) -> None:
    engines = FakeEngines(fail_on="update", error=EngineError("broken"))
    with pytest.raises(EngineError, match="broken"):
        publisher(tmp_path, engines).publish(1)
    assert [engines.calls.count(call) for call in ("pause", "update", "versions", "resume")] == [3, 3, 0, 0]
    assert engines.version == 0


class Noting(DiskTransport):
    """Notes which engines it was connected to."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.connected: list[tuple[str, ...]] = []

    def connect(self, trainer: Any, engines: Any) -> None:
        super().connect(trainer, engines)
        self.connected.append(tuple(engines.targets()))


def test_a_transport_is_connected_at_first_before_each_retry_and_when_engines_come_and_go(tmp_path: Path) -> None:
    class Changing(FakeEngines):
        urls: tuple[str, ...] = ("a",)
        joins_at_pause = False

        def targets(self) -> tuple[str, ...]:
            return self.urls

        def pause(self, mode: str) -> None:
            super().pause(mode)
            if self.joins_at_pause:
                self.urls = ("a", "b")

    args: Any = compose(CORE_SECTIONS)(run_dir=str(tmp_path), hf_checkpoint=str(tmp_path))
    engines = Changing(fail_on="flush", error=EngineError("broken"), failures=2)
    transport = Noting(args)
    trainer = local_senders(Noting, args, Weights().export)
    chosen = Publisher(transport, trainer, engines, first_pause_s=0.0)  # type: ignore[arg-type]  # a fake
    chosen.publish(1)
    assert transport.connected == [("a",)] * 3
    chosen.publish(2)
    assert len(transport.connected) == 3
    engines.joins_at_pause = True
    chosen.publish(3)
    assert transport.connected[3:] == [("a", "b")]
    engines.urls, engines.joins_at_pause = ("b",), False
    chosen.publish(4)
    assert transport.connected[4:] == [("b",)]


def test_no_attempt_begins_after_the_deadline(tmp_path: Path) -> None:
    engines, notices = FakeEngines(fail_on="pause", error=EngineError("broken")), []
    with pytest.raises(EngineError, match="broken"):
        publisher(tmp_path, engines, first_pause_s=60.0, timeout_s=59.0, notice=notices.append).publish(1)
    assert engines.calls.count("pause") == 1
    assert notices == []


def test_what_is_no_failure_of_an_engine_is_not_tried_again(tmp_path: Path) -> None:
    engines = FakeEngines(fail_on="update", error=PluginError("a transport's mistake"))
    with pytest.raises(PluginError):
        publisher(tmp_path, engines).publish(1)
    assert engines.calls == ["pause", "flush", "update"]


def test_a_version_that_no_engine_reports_is_not_published(tmp_path: Path) -> None:
    class Nobody(FakeEngines):
        def versions(self) -> dict[str, str]:
            return {}

    with pytest.raises(EngineError, match="no engine reports the weights of version 1"):
        publisher(tmp_path, Nobody()).publish(1)


def test_an_engine_that_keeps_its_old_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="other weights than version 2"):
        publisher(tmp_path, FakeEngines(keeps_version=True)).publish(2)


def test_a_failed_continue_is_raised(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="cannot go on"):
        publisher(tmp_path, FakeEngines(fail_on="resume", error=EngineError("cannot go on"))).publish(1)


def test_the_folder_of_a_version_is_whole_and_older_ones_go(tmp_path: Path) -> None:
    chosen = publisher(tmp_path, FakeEngines())
    chosen.publish(1)
    chosen.publish(2)
    folders = sorted(path.name for path in (tmp_path / "weights").iterdir())
    assert folders == ["v000002"]
    assert load_file(tmp_path / "weights" / "v000002" / "model-00001.safetensors")["number"] == 2


def three_ranks(args: Any, folders: Sequence[str], share: bool) -> Senders:
    """Ranks of three replicas with equal weights. folders: where each writes what is to be in the run's folder."""
    senders = [DiskSender(args, layout_of(3).topology(rank, shares=share)) for rank in range(3)]

    def start(method: str, folder: str, *more: Any) -> Call:
        answers: list[Future[Any]] = [Future() for _ in senders]
        for sender, answer, root in zip(senders, answers, folders, strict=True):
            buckets = iter([{"a": torch.zeros(2)}, {"b": torch.ones(3)}, {"c": torch.ones(1)}, {"d": torch.ones(4)}])
            answer.set_result(getattr(sender, method)(buckets, root + folder, *more))
        return Call(role="train", method="", members=["0", "1", "2"], futures=answers, collect=all_answers)

    return Senders(start)


@pytest.mark.parametrize("share", [True, False])
def test_each_rank_that_has_the_weights_writes_some_of_the_files(
    share: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together they are those that one writes alone, once each."""
    args: Any = compose(CORE_SECTIONS)(update_weight_disk_dir=str(tmp_path), hf_checkpoint=str(tmp_path))
    written: list[str] = []
    save = safetensors.torch.save_file

    def noted(tensors: Any, path: Path, **how: Any) -> None:
        written.append(path.name)
        save(tensors, path, **how)

    monkeypatch.setattr(safetensors.torch, "save_file", noted)
    transport = DiskTransport(args)
    transport.connect(three_ranks(args, ["", "", ""], share), FakeEngines())
    transport.prepare(7)
    assert [len(load_file(path)) for path in sorted((tmp_path / "v000007").glob("*.safetensors"))] == [1, 1, 1, 1]
    by_rank = ["3", "1", "4", "2"] if share else ["1", "2", "3", "4"]
    assert written == [f"model-0000{number}.safetensors" for number in by_rank]
    index = json.loads((tmp_path / "v000007" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: f"model-0000{at}.safetensors" for at, name in enumerate("abcd", start=1)}
    assert index["metadata"] == {"total_size": 40}


def test_where_ranks_write_to_disks_of_their_own_the_source_writes_all(tmp_path: Path) -> None:
    args: Any = compose(CORE_SECTIONS)(update_weight_disk_dir=str(tmp_path / "here"), hf_checkpoint=str(tmp_path))
    transport = DiskTransport(args)
    transport.connect(three_ranks(args, ["", str(tmp_path / "other"), ""], share=True), FakeEngines())
    for version in (1, 2):
        transport.prepare(version)
        assert len(list((tmp_path / "here" / f"v00000{version}").glob("*.safetensors"))) == 4
    assert len(list((tmp_path / "other").glob("**/*.safetensors"))) == 2  # of the first attempt alone


def test_folders_that_are_no_versions_stay_where_the_versions_are_told_to_go(tmp_path: Path) -> None:
    args: Any = compose(CORE_SECTIONS)(update_weight_disk_dir=str(tmp_path), hf_checkpoint=str(tmp_path))
    (tmp_path / "vendor").mkdir()
    (tmp_path / "config.json").write_text("{}")
    trainer = local_senders(DiskTransport, args, Weights().export)
    for version in (1, 2):
        Publisher(DiskTransport(args), trainer, FakeEngines()).publish(version)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "v000002", "vendor"]
    assert (tmp_path / "v000002" / "config.json").read_text() == "{}"


def test_a_half_written_version_of_a_killed_run_goes_with_the_next_publication(tmp_path: Path) -> None:
    for name in (".v000007.tmp", "v000006"):
        (tmp_path / "weights" / name).mkdir(parents=True)
    publisher(tmp_path, FakeEngines()).publish(3)
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["v000003"]


def test_a_folder_that_the_driver_does_not_see_is_named(tmp_path: Path) -> None:
    args: Any = compose(CORE_SECTIONS)(update_weight_disk_dir=str(tmp_path), hf_checkpoint=str(tmp_path))
    written: Future[None] = Future()
    written.set_result(None)
    elsewhere = Senders(lambda *call: of_one_rank(written))  # to a disk of its own
    engines = FakeEngines()
    with pytest.raises(ConfigError, match="is not on the driver's node") as caught:
        Publisher(DiskTransport(args), elsewhere, engines).publish(1)
    assert caught.value.where == f"--update-weight-disk-dir {tmp_path}"
    assert engines.calls == []


def test_engines_that_serve_different_weights_are_an_error_where_they_are_compared(tmp_path: Path) -> None:
    for checksums, compare in (({"a": "1", "b": "2"}, False), ({"a": "1", "b": "1"}, True)):
        publisher(tmp_path, FakeEngines(checksums=checksums), compare=compare).publish(1)
    engines = FakeEngines(checksums={"http://engine-0": "1", "http://engine-1": "2"})
    with pytest.raises(EngineError, match="serve different weights as version 2"):
        publisher(tmp_path, engines, compare=True).publish(2)
    assert engines.paused


URL = "http://engine"


def answer(log_prob: float, *, num_tokens: int = NUM_TOKENS, version: str = "3") -> dict[str, Any]:
    ids = list(range(num_tokens))
    meta = {
        "finish_reason": {"type": "length"},
        "output_token_logprobs": [[log_prob, token, None] for token in ids],
        "weight_versions": [{"version": version, "start": 0, "end": num_tokens}],
    }
    return {"text": "", "output_ids": ids, "meta_info": meta}


class SamplingEngines:
    def __init__(self, raw: dict[str, Any]) -> None:
        self._raw = raw

    def sample(self, urls: Any, body: dict[str, Any]) -> dict[str, Any]:
        assert body["input_ids"] == list(PROMPT)
        return {URL: self._raw}


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (answer(-1.1), {}),
        (answer(-1.3), {URL: "log-probabilities 0.3 nats a token from the trainer's"}),
        (answer(-1.0, version="2"), {URL: "tokens of version [2]"}),
        (answer(-1.0, num_tokens=3), {URL: "3 tokens in place of 32"}),
    ],
)
def test_what_differs_is_named(raw: dict[str, Any], found: dict[str, str]) -> None:
    def trainer(sequences: Sequence[Sequence[int]], num_tokens: int) -> list[list[float]]:
        assert [len(sequence) for sequence in sequences] == [len(PROMPT) + NUM_TOKENS] * len(sequences)
        return [[-1.0] * num_tokens for _ in sequences]

    check = LogProbCheck(trainer, temperature=1.0, max_diff=0.2)
    engines: Any = SamplingEngines(raw)
    assert check.differing(engines, [URL], 3) == found


def test_a_failure_of_a_sender_names_the_rank_and_the_method_that_was_called() -> None:
    failed: Future[None] = Future()
    failed.set_exception(OSError("no space"))
    with pytest.raises(WorkerError, match=r"^train 0\.write: OSError: no space"):
        Senders(lambda *call: of_one_rank(failed)).send(DiskSender.write, "folder")
