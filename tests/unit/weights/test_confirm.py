"""A publication is confirmed by what engines sample: against numbers by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from buffer_rl.weights.confirm import NUM_TOKENS, PROMPT, LogProbCheck

URL = "http://engine"


def answer(log_prob: float, *, num_tokens: int = NUM_TOKENS, version: str = "3") -> dict[str, Any]:
    ids = list(range(num_tokens))
    meta = {
        "finish_reason": {"type": "length"},
        "output_token_logprobs": [[log_prob, token, None] for token in ids],
        "weight_versions": [{"version": version, "start": 0, "end": num_tokens}],
    }
    return {"text": "", "output_ids": ids, "meta_info": meta}


class Engines:
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
    engines: Any = Engines(raw)
    assert check.differing(engines, [URL], 3) == found
