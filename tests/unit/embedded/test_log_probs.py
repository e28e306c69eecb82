"""Log-probabilities of prompts, of likeliest tokens and of named ones are those of one forward pass of transformers."""

from __future__ import annotations

import pytest
import torch

from buffer_rl.embedded.fast_decoder import PROMPT_LOGITS_ROWS
from buffer_rl.embedded.protocol import GenerateCall, Limits, parse_generate
from buffer_rl.embedded.sampling import LogProbDetails
from buffer_rl.engines.text import TextCodec

LIMITS = Limits(
    vocab_size=102,
    context_length=512,
    deterministic=False,
    has_tokenizer=False,
    longest_prompt=511,
    longest_sequence=512,
    padded_vocab=102,
)
PROMPT = tuple(3 + i % 90 for i in range(PROMPT_LOGITS_ROWS + 40))


@pytest.fixture
def table(module):
    @torch.no_grad()
    def compute(architecture, ids, temperature=1.0):
        logits = module(architecture)(torch.tensor([ids])).logits[0].double() / temperature
        return torch.log_softmax(logits, dim=-1)

    return compute


@pytest.mark.parametrize(
    ("architecture", "fallback", "start"),
    [("qwen3", False, 7), ("qwen3", True, 7), ("gemma3", False, 7), ("qwen3", False, 39)],  # 39: none follows
)
def test_those_of_a_long_prompt_are_computed_in_blocks(
    make_scheduler, make_request, run, table, architecture, fallback, start
):
    request = make_request("r", PROMPT, max_new_tokens=0)
    request.details = LogProbDetails(start=start, top=2, ids=(5, 9))
    scheduler = make_scheduler(architecture, fallback=fallback)
    scheduler.add(request)
    run(scheduler)
    right = table(architecture, PROMPT)[start:-1]
    own = [float(row[token]) for row, token in zip(right, PROMPT[start + 1 :], strict=True)]
    assert request.details.input_log_probs == pytest.approx(own, abs=1e-4)
    assert request.details.input_top[3] == [
        (pytest.approx(float(value), abs=1e-4), int(token)) for value, token in zip(*right[3].topk(2), strict=True)
    ]
    assert request.details.input_ids[-1] == [(pytest.approx(float(right[-1][t]), abs=1e-4), t) for t in (5, 9)]
    assert (request.finish_reason, request.output_ids) == ({"type": "length", "length": 0}, [])


def test_those_of_output_tokens_are_divided_by_the_temperature_as_the_draw_is(make_scheduler, make_request, run, table):
    request = make_request("r", (5, 6, 7), max_new_tokens=3, temperature=0.5, top_k=3)
    request.details = LogProbDetails(top=1, ids=(4,))
    scheduler = make_scheduler()
    scheduler.add(request)
    run(scheduler)
    right = table("qwen3", (5, 6, 7, *request.output_ids), 0.5)[2:-1]
    assert [row[0][0] for row in request.details.output_top] == pytest.approx(
        right.max(dim=-1).values.tolist(), abs=1e-4
    )
    assert [row[0][0] for row in request.details.output_ids] == pytest.approx(right[:, 4].tolist(), abs=1e-4)


def test_a_prompt_alone_takes_no_slot_and_leaves_no_prefix(make_scheduler, make_request, run):
    scheduler = make_scheduler(running=1)
    for i in range(3):
        scheduler.add(make_request(str(i), (5, 6, i + 8), max_new_tokens=0))
    assert len(scheduler.step()) == 1
    assert len(run(scheduler)) == 2
    assert (len(scheduler.prefixes), scheduler.num_running) == (0, 0)


def parse(**more) -> GenerateCall:
    body = {"input_ids": [[5, 6], [7, 8, 9]], "return_logprob": True, **more}
    return parse_generate(body, TextCodec(None), LIMITS)


def test_each_row_of_a_list_says_what_it_wants():
    call = parse(logprob_start_len=[1, -1], top_logprobs_num=[0, 2], token_ids_logprob=[[3], None])
    assert [(d.start, d.top, d.ids) for d in (r.details for r in call.requests)] == [(1, 0, (3,)), (None, 2, ())]


def test_samples_of_a_prompt_keep_what_was_found_apart():
    first, second, *_ = parse(top_logprobs_num=1, sampling_params={"n": 2}).requests
    first.details.output_top.append([(-1.0, 3)])
    assert (second.details.top, second.details.output_top) == (1, [])


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"logprob_start_len": 3}, "logprob_start_len"),  # the first prompt has 2 tokens
        ({"top_logprobs_num": 103}, "top_logprobs_num"),
        ({"top_logprobs_num": "2"}, "top_logprobs_num"),
        ({"token_ids_logprob": [102]}, "token_ids_logprob"),
        ({"logprob_start_len": [0]}, "logprob_start_len"),
    ],
)
def test_what_is_not_there_is_refused(more, named):
    with pytest.raises(ValueError, match=named):
        parse(**more)
