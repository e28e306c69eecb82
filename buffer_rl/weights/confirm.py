"""Confirms a publication by log-probabilities: an engine that took other weights than the trainer has says success too.

Each engine samples a few tokens, and the trainer computes their log-probabilities. Both are the same quantity of the
same weights, whatever path the weights took.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from buffer_rl.engines.client import GenerateResult, parse_answer
from buffer_rl.plan.algorithm import is_supervised

if TYPE_CHECKING:
    from buffer_rl.args import Args
    from buffer_rl.cluster.actor_group import ActorGroup
    from buffer_rl.engines.control import EngineControlClient

PROMPT = (0, 1, 2, 3, 2, 1)
"""Token ids that every vocabulary has."""
NUM_TOKENS = 32
"""A mean over few tokens is far from that over a rollout, which ``--max-logprob-diff`` is about."""
TrainerLogProbs = Callable[[Sequence[Sequence[int]], int], Sequence[Sequence[float]]]
"""``(sequences of token ids, n) -> log-probabilities [n] of the last n tokens of each``."""


class LogProbCheck:
    """Compares engines with the trainer.

    log_probs: the trainer's, at ``temperature``. max_diff: the most that they may be apart, in nats a token on average.
    """

    def __init__(self, log_probs: TrainerLogProbs, *, temperature: float, max_diff: float) -> None:
        self._log_probs = log_probs
        self._max_diff = max_diff
        params = {"max_new_tokens": NUM_TOKENS, "temperature": temperature, "ignore_eos": True}
        self._body: dict[str, Any] = {"input_ids": list(PROMPT), "sampling_params": params, "return_logprob": True}

    @classmethod
    def from_args(cls, args: Args, train: ActorGroup) -> LogProbCheck | None:
        """With the actor's ranks ``train``; None under ``--max-logprob-diff none``, and under ``--offload-rollout``:
        engines sample once they have their cache again, and the trainer may sleep then."""
        if args.max_logprob_diff is None or args.offload_rollout:
            return None

        def log_probs(sequences: Sequence[Sequence[int]], num_tokens: int) -> Any:
            return train.call("log_probs_of", sequences, num_tokens, timeout_s=args.train_timeout_s)

        samples = not is_supervised(args) and args.rollout_temperature > 0  # as the actor's objective
        temperature = args.rollout_temperature if samples else 1.0
        return cls(log_probs, temperature=temperature, max_diff=args.max_logprob_diff)

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
        expected = self._log_probs(sequences, NUM_TOKENS) if sequences else []
        for (url, answer), own in zip(whole.items(), expected, strict=True):
            if found := self._difference(answer, own, version):
                wrong[url] = found
        return wrong

    def _difference(self, answer: GenerateResult, expected: Sequence[float], version: int) -> str:
        named = sorted({span.version for span in answer.spans})
        if named != [version]:
            return f"tokens of version {named}"
        gaps = [abs(own - float(theirs)) for own, theirs in zip(answer.log_probs, expected, strict=True)]
        mean = sum(gaps) / len(gaps)
        return "" if mean <= self._max_diff else f"log-probabilities {mean:.3g} nats a token from the trainer's"
