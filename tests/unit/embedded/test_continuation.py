"""A partial response that is sent back as part of the prompt goes on as it would have."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize("cut", [1, 7, 19])
def test_a_continued_response_has_the_tokens_and_log_probs_of_one_in_one_piece(
    make_scheduler: Any, make_request: Any, run: Any, cut: int
) -> None:
    def respond(rid: str, prompt: list[int], max_new_tokens: int) -> Any:
        scheduler = make_scheduler(deterministic=True)
        scheduler.add(make_request(rid, prompt, seed=11, max_new_tokens=max_new_tokens))
        (request,) = run(scheduler)
        return request

    prompt = [5, 9, 30, 12]
    whole = respond("whole", prompt, 20)
    first = respond("first", prompt, cut)
    second = respond("second", [*prompt, *first.output_ids], 20 - cut)
    assert [*first.output_ids, *second.output_ids] == whole.output_ids
    assert [*first.log_probs, *second.log_probs] == pytest.approx(whole.log_probs, abs=1e-5)
