"""Adapters published to engines: their names, which are bounded, and engines that confirm one and do not apply it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.engines.client import EngineClient
from buffer_rl.engines.control import EngineControlClient
from buffer_rl.engines.protocol import Adapter
from buffer_rl.errors import EngineError
from buffer_rl.options.section import compose
from buffer_rl.testing.fake_engine import FakeEngine
from buffer_rl.weights.adapters import AdapterCheck, AdapterTransport, MergedShare, tolerance
from buffer_rl.weights.publish import ATTEMPTS, NUM_TOKENS, Publisher

TOLERANCE = tolerance("float32", 2)
TRAINER, BASE = -1.0, -1.25
Many = Sequence[Sequence[int]]


def tokens(prompt: list[int], seed: int) -> Sequence[int]:
    return [0] * NUM_TOKENS


class Run:
    """A trainer with numbers by hand, and the requests' adapter."""

    def __init__(self, folder: Path, engines: Sequence[FakeEngine], control: Any, options: Any) -> None:
        args: Any = compose(CORE_SECTIONS)(run_dir=str(folder), hf_checkpoint=str(folder), lora_rank=4, **options)
        self.announced: list[Adapter] = []
        self.trainer, self.base = TRAINER, BASE
        self.transport = AdapterTransport(args, lambda path: Path(path).mkdir(parents=True), self.announced.append)
        self.control = control([engine.url for engine in engines], timeout_s=20)

        def numbers(of_base: bool) -> Callable[[Many, int], Any]:
            return lambda many, num: [[self.base if of_base else self.trainer] * num for _ in many]

        newest = lambda: self.transport.newest  # noqa: E731
        check = AdapterCheck(numbers(False), numbers(True), newest, temperature=1.0, max_diff=TOLERANCE)
        unused: Any = None
        self.publisher = Publisher(
            self.transport, unused, self.control, check=check, first_pause_s=0.0, announce=self.transport.announce
        )


Make = Callable[..., Run]
Engines = list[FakeEngine]


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as stack:

        def make(*engines: FakeEngine, control: Any = EngineControlClient, **options: Any) -> Run:
            run = Run(tmp_path, engines, control, options)
            stack.callback(run.control.close)
            return run

        yield make


@pytest.fixture
def engines() -> Iterator[Engines]:
    with FakeEngine(tokens, adapter_log_prob=TRAINER) as one, FakeEngine(tokens, adapter_log_prob=TRAINER) as other:
        yield [one, other]


@pytest.mark.parametrize("name", ["num_hidden_layers", "n_layer"])
def test_the_tolerance_is_of_the_layers_whatever_their_number_is_called(tmp_path: Path, name: str) -> None:
    """GPT-2 has another name for it. Four times half an epsilon, by a logit of 10, by the root of 16: 80 epsilons."""
    (tmp_path / "config.json").write_text(f'{{"{name}": 8}}')
    args: Any = compose(CORE_SECTIONS)(hf_checkpoint=str(tmp_path))
    unused: Any = None
    assert AdapterCheck.of(args, unused, unused, unused).max_diff == pytest.approx(80 * 2.0**-23)


@pytest.mark.parametrize(("options", "most"), [({}, 2), ({"schedule": "async", "max_staleness": 2}, 4)])
def test_adapters_that_no_request_can_name_are_unloaded_and_their_folders_removed(
    make_run: Make, engines: Engines, tmp_path: Path, options: dict[str, Any], most: int
) -> None:
    run = make_run(*engines, **options)
    for version in range(12):
        run.publisher.publish(version)
        kept = [adapter.name for adapter in run.announced[-most:]]
        assert [engine.adapters for engine in engines] == [kept, kept]
        assert len(list((tmp_path / "weights").iterdir())) == len(kept)
    assert [adapter.version for adapter in run.announced] == list(range(12))
    assert len({adapter.name for adapter in run.announced}) == 12
    assert {mode for engine in engines for mode in engine.log.pauses} == {"in_place"}  # nothing is retracted


def test_a_server_that_confirms_an_adapter_and_serves_the_base_ends_the_publication(
    make_run: Make, engines: Engines
) -> None:
    run = make_run(*engines)
    run.publisher.publish(0)
    engines[1].adapter_log_prob, engines[0].log_prob, engines[1].log_prob = None, BASE, BASE
    with pytest.raises(
        EngineError, match=r"-1.25 by the engine, -1 by the trainer, -1.25 by the trainer without"
    ) as no:
        run.publisher.publish(1)
    assert engines[1].url in str(no.value)
    assert engines[0].url not in str(no.value)
    assert [adapter.version for adapter in run.announced] == [0]  # requests never name it
    assert engines[0].log.pauses.count("in_place") == 1 + ATTEMPTS


@pytest.mark.parametrize(
    ("trainer", "found"),
    [
        (BASE, ""),  # an adapter that begins with 0
        (BASE + TOLERANCE / 5, ""),  # no larger than rounding may be
        (BASE + TOLERANCE / 2, "log-probabilities of the base, not of the adapter"),
        (BASE + 2 * TOLERANCE, "nats a token from the trainer's"),
    ],
)
def test_an_adapter_of_little_effect_is_found_out_as_soon_as_it_is_no_rounding(
    make_run: Make, trainer: float, found: str
) -> None:
    with FakeEngine(tokens, log_prob=BASE) as engine:
        run = make_run(engine)
        run.trainer = trainer
        with pytest.raises(EngineError, match=found) if found else nullcontext():
            run.publisher.publish(0)


class FailingOnce(EngineControlClient):
    """The first time, the engines have loaded the adapter, and the answer is lost."""

    has_failed = False

    def versions(self) -> dict[str, str]:
        if not self.has_failed:
            self.has_failed = True
            raise EngineError("lost")
        return super().versions()


def test_an_attempt_that_failed_leaves_nothing_once_another_succeeded(make_run: Make, engines: Engines) -> None:
    run = make_run(*engines, control=FailingOnce)
    run.publisher.publish(0)
    assert [engine.adapters for engine in engines] == [[run.announced[0].name]] * 2


async def test_requests_name_the_newest_adapter_and_their_tokens_are_of_its_version(
    make_run: Make, engines: Engines, tmp_path: Path
) -> None:
    run = make_run(engines[0])
    await asyncio.to_thread(run.publisher.publish, 3)
    async with EngineClient(engines[0].url, [engines[0].url]) as client:
        client.adapter = run.announced[-1]
        await asyncio.to_thread(run.control.load_adapter, "later", str(tmp_path), 4)
        answers = await client.agenerate_rows("r", [5, 6], 3, {"max_new_tokens": 4})
        assert {row["lora_path"] for row in engines[0].log.requests[-3:]} == {run.announced[-1].name}
        assert [[span.version for span in answer.spans] for answer in answers] == [[3]] * 3


async def test_a_request_to_an_engine_without_its_adapter_is_sent_again_under_the_newest() -> None:
    with FakeEngine(tokens) as engine:
        engine.adapters.append("v2-b")
        async with EngineClient(engine.url, [engine.url]) as client:
            client.adapter = Adapter("v1-a", 1)
            asyncio.get_running_loop().call_later(0.1, setattr, client, "adapter", Adapter("v2-b", 2))
            answer = await client.agenerate("r", [5, 6], {"max_new_tokens": 4})
        assert [span.version for span in answer.spans] == [2]
        assert [request["lora_path"] for request in engine.log.requests][-1] == "v2-b"


def test_adapters_that_rounding_swallows_are_noticed_once() -> None:
    notices: list[str] = []
    shares = iter([0.3, 0.7, 0.9])

    args: Any = compose(CORE_SECTIONS)(lora_rank=4, engine_dtype="bfloat16")
    measure = MergedShare(args, lambda: next(shares), notices.append)
    assert [measure()["publish/unchanged_share"] for _ in range(3)] == [0.3, 0.7, 0.9]
    assert notices == [
        "70% of the elements of adapted matrices are to the engines the same bfloat16 numbers as before: "
        "--lora-publish adapter publishes adapters without that rounding"
    ]
