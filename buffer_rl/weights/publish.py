"""The publication of one version: connect → prepare → pause → flush → begin → publish → end → confirm → continue.

Where all engines can prepare weights while they generate, and the transport has them do so, begin and publish come
before the pause, in which the engines only swap: connect → prepare → stage → pause → flush → swap → confirm →
continue. A retry, and a publication that an engine joined between stage and pause, have the order above, as only
engines that are paused wait for it.

Who waits for whom: the publisher waits for the trainer (to send) and for every engine (each call with a deadline);
where the run's last engine died, for its replacement; if it drains, before the pause, for the requests of the rollout
workers, which send no other until its end.
What still runs in the pause is retracted, in every mode: it continues with the new weights over a cache that they
computed. A cache of the weights before would give log-probabilities of no policy, and an abort loses the response.
An engine continues only after it confirmed the version: an attempt that fails leaves all of them paused for the next
one, which connects again and sends what was prepared once. Engines of the run's own fleet that fail the last attempt,
or that leave a call open which others answer, are dropped and replaced, and the others continue; any other failure ends
the run, with the engines paused.

An engine that took other weights than the trainer has says success too. So engines that are not embedded sample a few
tokens, and the trainer computes their log-probabilities: the same quantity of the same weights, whatever path these
took.

Roles take the actor's weights after the engines have them: see ``buffer_rl.weights.role_weights``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Any

from buffer_rl.args import Args
from buffer_rl.engines.client import GenerateResult, parse_answer
from buffer_rl.engines.control import EngineControlClient
from buffer_rl.errors import BufferRLError, EngineError, WorkerDiedError
from buffer_rl.kinds.engine import Releases, Stages, WeightTransport
from buffer_rl.kinds.kind import implements
from buffer_rl.plan.algorithm import is_supervised
from buffer_rl.weights.sender import Senders

ATTEMPTS = 3
FIRST_PAUSE_S = 0.5  # doubled after each attempt; the engines stay paused
TIMEOUT_S = 600.0
MAX_REASON_CHARS = 500
PROMPT = (0, 1, 2, 3, 2, 1)
"""Token ids that every vocabulary has."""
NUM_TOKENS = 32
"""A mean over few tokens is far from that over a rollout, which ``--max-logprob-diff`` is about."""
NUM_RETRACTED = 128
"""Tokens of the request that is retracted once: enough to be caught in the middle."""
CONTEXT_MARGIN = 8  # SGLang keeps some of the context free
RETRACTIONS = 12
FIRST_RETRACTION_S = 0.05
TrainerLogProbs = Callable[[Sequence[Sequence[int]], int], Sequence[Sequence[float]]]
"""``(sequences of token ids, n) -> log-probabilities [n] of the last n tokens of each``."""


@dataclass(eq=False)
class Publisher:
    """Publishes versions through one transport.

    compare: after each, compare the weights that the engines serve. check: after each, compare what they sample with
    the trainer; not of embedded engines, which take nothing that does not fit. timeout_s: of one publication; no
    attempt begins later, and none is longer than a call to an engine and one to the trainer may be. first_pause_s:
    between the first attempt and the second. notice: called with a line on a failed attempt.
    hold, unhold: have the rollout workers send no request, and return when none runs; have them send again. Called
    around each publication if it ``drains``; what they wait for does not count for ``timeout_s``.
    follow: called with each version that the engines have, while the trainer has it (``FollowFolder.write``).
    announce: called once all engines that will go on have the version, before they do. measure: called after that for
    more metrics.
    """

    transport: WeightTransport
    trainer: Senders
    engines: EngineControlClient
    _: KW_ONLY
    compare: bool = False
    check: LogProbCheck | None = None
    timeout_s: float = TIMEOUT_S
    first_pause_s: float = FIRST_PAUSE_S
    notice: Callable[[str], object] = lambda _: None
    hold: Callable[[], object] = lambda: None
    unhold: Callable[[], object] = lambda: None
    drains: bool = False
    follow: Callable[[int], object] | None = None
    announce: Callable[[], object] = lambda: None
    measure: Callable[[], Mapping[str, float]] = dict

    def __post_init__(self) -> None:
        self._connected: tuple[str, ...] | None = None
        self._doubtful: set[str] = set()
        self._staged: frozenset[str] = frozenset()
        self._newest = -1

    def publish(self, version: int) -> dict[str, float]:
        """Have every engine sample from ``version``, which the trainer has now: it sends what it has, under this
        number. Returns the seconds of each part, and ``perf/retracted_tokens`` if engines report them.

        Raises EngineError if, in the last of ``ATTEMPTS``, an engine that is not the run's own did not confirm the
        version, or none did. Engines that did not stay paused."""
        assert version >= self._newest, f"version {version} after version {self._newest}: the trainer has no older one"
        self._newest, self._staged, self._metrics = version, frozenset(), dict[str, float]()
        self._began = self._paused_at = time.monotonic()
        self._is_held, self._deadline = False, self._began + self.timeout_s
        try:
            self._publish_with_retries(version)
        except BaseException as error:
            self._abandon(version, error)
            raise
        finally:
            self.engines.end_publication()
            if self._is_held:
                with contextlib.suppress(WorkerDiedError):  # the worker in its place sends anyway
                    self.unhold()
        if implements(self.transport, Releases):
            self.transport.release(version)
        if (share := getattr(self.transport, "sent_share", None)) is not None:
            self._metrics["perf/publish_sent_share"] = share
        self._metrics |= self.measure()
        if self.follow is not None:
            ended = time.monotonic()
            self.follow(version)
            self._metrics["perf/publish_follow"] = time.monotonic() - ended
        return self._metrics

    def try_retraction(self) -> bool:
        """Whether engines flush their cache while a request is retracted. If not, publications drain from now on, and a
        notice says so. Call it before the first publication that may meet requests, while nothing else runs.

        It is tried at one engine of the run's own, as they are all alike and one may end in it, and at all others."""
        try:
            self.engines.wait_for_engine()
            urls = self.engines.targets()
            for url in urls[:1] if self.engines.replaces else urls:
                self._retract_once(url)
            return True
        except EngineError as error:
            reason = _in_short(error)
        self.drains = True
        self.notice(f"publications wait for the end of running requests (--publication drain): {reason}")
        return False

    def _retract_once(self, url: str) -> None:
        """Raises EngineError if the engine refuses it, or is gone then."""
        length = self.engines.server_info()[url].context_length
        num_tokens = NUM_RETRACTED if length is None else min(NUM_RETRACTED, length - len(PROMPT) - CONTEXT_MARGIN)
        params = {"max_new_tokens": num_tokens, "temperature": 1.0, "ignore_eos": True}
        wait_s = FIRST_RETRACTION_S
        for _ in range(RETRACTIONS):
            answer, early = self.engines.try_retraction(
                url, {"input_ids": [*PROMPT], "sampling_params": params}, wait_s
            )
            if answer["meta_info"].get("num_retractions"):
                return
            wait_s *= 0.5 if early else 1.5
        what = f"in {RETRACTIONS} attempts no request ran at the moment of its retraction"
        raise EngineError(what, where=url, expected="num_retractions of 1 in the answer")

    def close(self) -> None:
        """Free what the transport has, at the end of the run."""
        self._connected = None
        self.transport.close()

    def _publish_with_retries(self, version: int) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            pause_s = self.first_pause_s * 2 ** (attempt - 1)
            try:
                if attempt == ATTEMPTS:
                    self.engines.drop_failed_engines()
                if attempt > 1:
                    self._connected, self._staged = None, frozenset()
                self._attempt(version)
                return
            except EngineError as error:
                if attempt == ATTEMPTS or time.monotonic() + pause_s >= self._deadline:
                    raise
                again = f"is tried again ({attempt} of {ATTEMPTS - 1})"
                self.notice(f"the publication of version {version} {again}: {_in_short(error)}")
            time.sleep(pause_s)

    def _attempt(self, version: int) -> None:
        self.engines.wait_for_engine()
        if "perf/publish_write" not in self._metrics:
            self._connect()
            self.transport.prepare(version)
            self._metrics["perf/publish_write"] = time.monotonic() - self._began
            self._stage(version)
            self._metrics["perf/publish_write"] = time.monotonic() - self._began
            if self.drains:  # return when no request runs, and none is sent
                began, self._is_held = time.monotonic(), True
                with contextlib.suppress(WorkerDiedError):  # what it sent ends with its connections; it is replaced
                    self.hold()
                self._metrics["perf/publish_drain"] = seconds = time.monotonic() - began
                self._deadline += seconds
            self._paused_at = time.monotonic()
        keeps_requests = getattr(self.transport, "keeps_requests", False)
        if (retracted := self.engines.pause("in_place" if keeps_requests else "retract")) is not None:
            self._metrics["perf/retracted_tokens"] = retracted + self._metrics.get("perf/retracted_tokens", 0.0)
        self._connect()  # after the pause: it has found engines that hang, and has those that waited for weights
        if not keeps_requests:
            self.engines.flush()
        self._update(version)
        serving = self._sampled(version, self._confirmed(version))
        self.announce()
        self.engines.resume(serving)
        self._metrics["perf/publish_pause"] = time.monotonic() - self._paused_at

    def _connect(self) -> None:
        receivers = tuple(self.engines.targets())
        if receivers != self._connected:
            self._connected = None
            self.transport.connect(self.trainer, self.engines)
            if self.check is not None:
                everyone, infos = self.check.checks_all, self.engines.server_info()
                self._doubtful = {url for url, info in infos.items() if everyone or not info.is_ours}
            self._connected = receivers

    def _stage(self, version: int) -> None:
        """Have the engines prepare the version while they generate, if all of them can, and what it is takes the place
        of what they serve: adapters are loaded beside it."""
        if getattr(self.transport, "keeps_requests", False) or not implements(self.transport, Stages):
            return
        infos = self.engines.server_info()
        if all(info.prepares_weights for info in infos.values()):
            self.transport.stage(version)
            self._staged = frozenset(infos)

    def _update(self, version: int) -> None:
        if self._staged and self._staged.issuperset(self.engines.targets()) and implements(self.transport, Stages):
            self.transport.swap(version)
            return
        if not self.transport.staged:
            self.transport.publish(version)
            return
        try:
            self.engines.begin_weight_update()
            self.transport.publish(version)
        except BaseException:
            with contextlib.suppress(BufferRLError):  # an engine that got everything takes it, any other refuses
                self.engines.end_weight_update()
            raise
        self.engines.end_weight_update()

    def _confirmed(self, version: int) -> list[str]:
        """The engines that serve the whole version; those that do not are dropped, where the last attempt drops."""
        reported = self.engines.versions()
        if not reported:
            raise EngineError(f"no engine reports the weights of version {version}", where="publish")
        wrong = {url: found for url, found in reported.items() if found != str(version)}
        if wrong and (len(wrong) == len(reported) or not self.engines.drop(wrong)):
            raise EngineError(f"engines report other weights than version {version}: {wrong}", where="publish")
        if self.compare and len(set((found := self.engines.checksums()).values())) > 1:
            raise EngineError(f"engines serve different weights as version {version}: {found}", where="publish")
        return [url for url in reported if url not in wrong]

    def _sampled(self, version: int, urls: list[str]) -> list[str]:
        """Of the engines at ``urls`` those that sample from the version, after ``check``; the others as in
        ``_confirmed``, and paused."""
        doubtful = self._doubtful.intersection(urls)
        if self.check is None or not doubtful:
            return urls
        wrong: dict[str, str] | None = None
        try:
            wrong = self.check.differing(self.engines, doubtful, version)
        finally:
            if wrong or wrong is None:
                with contextlib.suppress(BufferRLError):  # one that is gone samples nothing
                    self.engines.halt(doubtful)
        if wrong and (self.check.ends_run or len(wrong) == len(urls) or not self.engines.drop(wrong)):
            raise EngineError(f"engines do not sample from the weights of version {version}: {wrong}", where="publish")
        return [url for url in urls if url not in wrong]

    def _abandon(self, version: int, failure: BaseException) -> None:
        if isinstance(failure, EngineError):
            failure.add_note(f"engines that did not confirm version {version} stay paused until a publication succeeds")
        try:
            self.close()
        except BufferRLError as error:
            failure.add_note(f"and what was prepared for them could not be freed: {error}")


def _in_short(error: EngineError) -> str:
    return " ".join(str(error).split())[:MAX_REASON_CHARS]


def check_temperature(args: Args) -> float:
    """That of the actor's objective."""
    samples = not is_supervised(args) and args.rollout_temperature > 0
    return args.rollout_temperature if samples else 1.0


@dataclass(eq=False)
class LogProbCheck:
    """Compares engines with the trainer.

    log_probs: the trainer's, at ``temperature``. max_diff: the most that they may be apart, in nats a token on average.
    checks_all: embedded engines, too. ends_run: an engine that differs is not replaced.
    """

    checks_all = False
    ends_run = False

    log_probs: TrainerLogProbs
    _: KW_ONLY
    temperature: InitVar[float]
    max_diff: float

    def __post_init__(self, temperature: float) -> None:
        params = {"max_new_tokens": NUM_TOKENS, "temperature": temperature, "ignore_eos": True}
        self._body: dict[str, Any] = {"input_ids": list(PROMPT), "sampling_params": params, "return_logprob": True}

    @classmethod
    def from_args(cls, args: Args, log_probs: TrainerLogProbs) -> LogProbCheck | None:
        """With the actor's ``log_probs``; None under ``--max-logprob-diff none``, and under ``--offload-rollout``:
        engines sample once they have their cache again, and the trainer may sleep then."""
        if args.max_logprob_diff is None or args.offload_rollout:
            return None
        return cls(log_probs, temperature=check_temperature(args), max_diff=args.max_logprob_diff)

    def differing(self, engines: EngineControlClient, urls: Collection[str], version: int) -> dict[str, str]:
        """Those of the engines at ``urls`` that do not sample from the trainer's weights as ``version``, with what was
        found. Generation goes on at all of them."""
        answers = {url: parse_answer(raw, url) for url, raw in engines.sample(urls, self._body).items()}
        whole = {url: answer for url, answer in answers.items() if len(answer.output_ids) == NUM_TOKENS}
        wrong = {
            url: f"{len(answer.output_ids)} tokens in place of {NUM_TOKENS}"
            for url, answer in answers.items()
            if url not in whole
        }
        sequences = [[*PROMPT, *answer.output_ids] for answer in whole.values()]
        expected = self._expected(sequences, NUM_TOKENS) if sequences else []
        for (url, answer), own in zip(whole.items(), expected, strict=True):
            if found := self._difference(answer, own, version):
                wrong[url] = found
        return wrong

    def _expected(self, sequences: Sequence[Sequence[int]], num_tokens: int) -> Sequence[Any]:
        return self.log_probs(sequences, num_tokens)

    def _difference(self, answer: GenerateResult, expected: Any, version: int) -> str:
        named = sorted({span.version for span in answer.spans})
        if named != [version]:
            return f"tokens of version {named}"
        gaps = [abs(own - float(theirs)) for own, theirs in zip(answer.log_probs, expected, strict=True)]
        mean = sum(gaps) / len(gaps)
        return "" if mean <= self.max_diff else f"log-probabilities {mean:.3g} nats a token from the trainer's"
