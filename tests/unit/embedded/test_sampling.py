"""Drawing tokens, against numpy and hand-computed numbers."""

from __future__ import annotations

import math
from dataclasses import asdict

import numpy as np
import pytest
import torch

from buffer_rl.embedded.sampling import (
    SamplingError,
    SamplingParams,
    draw,
    truncate,
    uniforms,
)


def padded(rows: np.ndarray) -> torch.Tensor:
    out = np.full((rows.shape[0], 256), -np.inf, dtype=np.float32)
    out[:, : rows.shape[1]] = rows
    return torch.from_numpy(out)


def kept_by_numpy(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Token ids that survive, written for reading: a loop over tokens from the most probable down."""
    probs = np.exp(logits.astype(np.float64) - logits.max())
    probs /= probs.sum()
    kept, mass = set(), 0.0
    for rank, token in enumerate(np.argsort(-probs, kind="stable")):
        full = (top_k > 0 and rank >= top_k) or (top_p < 1.0 and mass >= top_p)
        if not kept or (not full and probs[token] >= min_p * probs.max()):
            kept.add(int(token))
        mass += probs[token]
    return kept


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (5, 1.0, 0.0),
        (-1, 0.6, 0.0),
        (-1, 1.0, 0.2),
        (20, 0.8, 0.05),
        (1, 0.9, 0.5),
        (0, 1e-9, 0.0),
        (500, 1.0, 0.0),
        (0, 0.6, 0.0),
    ],
)
def test_truncation_keeps_what_numpy_keeps(top_k, top_p, min_p):
    rng = np.random.default_rng(0)
    rows = rng.normal(scale=2.0, size=(50, 200)).astype(np.float32)
    logits = padded(rows)
    weights = torch.exp(logits - logits.max(dim=-1, keepdim=True).values)
    params = [SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)] * 50
    kept = truncate(weights, params, weights.sum(dim=-1, keepdim=True, dtype=torch.float64))
    for row, own, before in zip(rows, kept, weights, strict=True):
        chosen = {int(i) for i in torch.nonzero(own)[:, 0]}
        assert chosen == kept_by_numpy(row, top_k, top_p, min_p)
        assert torch.equal(own[own > 0], before[own > 0])


def test_ties_are_cut_to_exactly_k_tokens():
    params = [SamplingParams(top_k=2)]
    kept = truncate(torch.ones(1, 128), params, torch.full((1, 1), 128.0, dtype=torch.float64))
    assert torch.nonzero(kept)[:, 1].tolist() == [0, 1]


def test_a_uniform_number_falls_on_the_token_whose_interval_holds_it():
    # Tokens 0 to 3 have probability 0.1, 0.2, 0.3, 0.4, so their intervals end at 0.1, 0.3, 0.6 and 1.
    logits = padded(np.log(np.array([[0.1, 0.2, 0.3, 0.4]] * 8, dtype=np.float64)).astype(np.float32))
    u = np.array([0.0, 0.0999, 0.1001, 0.2999, 0.3001, 0.5999, 0.6001, np.nextafter(1.0, 0.0)])
    tokens, log_probs, _ = draw(logits, [SamplingParams()] * 8, u)
    assert tokens == [0, 0, 1, 1, 2, 2, 3, 3]
    assert log_probs == pytest.approx([math.log(p) for p in (0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.4)], abs=1e-6)


def test_a_token_without_probability_is_never_drawn():
    rows = np.full((2, 256), -np.inf, dtype=np.float32)
    rows[0, [7, 130]] = 0.0
    rows[1, [0, 255]] = 0.0
    for u in (0.0, 0.4999, 0.5, 0.5001, np.nextafter(1.0, 0.0)):
        tokens, _, _ = draw(torch.from_numpy(rows), [SamplingParams()] * 2, np.full(2, u))
        assert tokens == ([7, 0] if u < 0.5 else [130, 255])


def test_drawn_frequencies_follow_the_distribution():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(1, 200)).astype(np.float32)
    temperature, draws = 0.8, 20_000
    expected = np.exp(logits[0].astype(np.float64) / temperature)
    expected /= expected.sum()
    tokens, _, _ = draw(
        padded(logits).expand(draws, -1),
        [SamplingParams(temperature=temperature)] * draws,
        uniforms([9] * draws, range(draws)),
    )
    counts = np.bincount(tokens, minlength=200)
    # Pearson's chi-square with 199 degrees of freedom: mean 199, standard deviation sqrt(398) = 20.
    assert ((counts - draws * expected) ** 2 / (draws * expected)).sum() < 199 + 4 * 20


def test_reported_log_prob_is_of_the_scaled_distribution_and_not_renormalised():
    rows = np.log(np.array([[0.5, 0.3, 0.2]], dtype=np.float64)).astype(np.float32)
    squared = np.array([0.25, 0.09, 0.04]) / 0.38  # temperature 1/2 squares the probabilities
    params = SamplingParams(temperature=0.5, top_k=1)
    tokens, log_probs, _ = draw(padded(rows), [params], np.array([0.9]))
    assert tokens == [0]
    assert log_probs == pytest.approx([math.log(squared[0])], abs=1e-6)


def test_greedy_takes_the_best_token_and_reports_the_unscaled_log_prob():
    rows = np.log(np.array([[0.2, 0.5, 0.3]] * 2, dtype=np.float64)).astype(np.float32)
    tokens, log_probs, _ = draw(
        padded(rows), [SamplingParams(temperature=0.0), SamplingParams(temperature=2.0)], np.array([0.999, 0.0])
    )
    assert tokens == [1, 0]
    assert log_probs[0] == pytest.approx(math.log(0.5), abs=1e-6)


def test_uniforms_depend_on_seed_and_position_alone():
    seeds, positions = [5, 5, 6, -1, 2**70 + 5], [0, 1, 0, 3, 0]
    together = uniforms(seeds, positions)
    alone = [uniforms([s], [p])[0] for s, p in zip(seeds, positions, strict=True)]
    assert together.tolist() == alone
    assert together[0] == together[4]  # seeds count modulo 2**64
    assert len(set(together[:4].tolist())) == 4


@pytest.mark.parametrize(("seeds", "positions"), [([3] * 4000, range(4000)), (range(4000), [3] * 4000)])
def test_uniforms_are_uniform_and_uncorrelated_along_seeds_and_positions(seeds, positions):
    u = uniforms(list(seeds), list(positions))
    assert ((u >= 0) & (u < 1)).all()
    assert abs(u.mean() - 0.5) < 4 * math.sqrt(1 / 12 / 4000)
    counts = np.bincount((u * 20).astype(int), minlength=20)
    assert ((counts - 200) ** 2 / 200).sum() < 19 + 4 * math.sqrt(38)
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 4 / math.sqrt(4000)


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({"max_tokens": 3}, "max_tokens"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": 2.5}, "max_new_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n must"),
        ({"min_new_tokens": 200}, "min_new_tokens"),
        ({"stop": [3]}, "stop"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"regex": "a+"}, "regex"),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(raw, named):
    with pytest.raises(SamplingError, match=named):
        SamplingParams.parse(raw)


def test_none_means_the_default_and_neutral_values_of_unsupported_parameters_pass():
    raw = {"temperature": None, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "regex": None, "stop": "x"}
    assert SamplingParams.parse(raw) == SamplingParams(stop=("x",))
    assert SamplingParams.parse(asdict(SamplingParams())) == SamplingParams()  # every one may be given


@pytest.mark.parametrize(
    ("temperature", "edge"),
    # min_p 0.25 of probabilities 0.5, 0.3, 0.15, 0.05: the bound is 0.125, so the first three stay, which have 0.95.
    # At temperature 1/2 they are as 0.25, 0.09, 0.0225, 0.0025: the bound is 0.0625, the first two stay, with 0.34.
    [(1.0, [0.5 / 0.95, 0.8 / 0.95, 1.0]), (0.5, [0.25 / 0.34, 1.0])],
)
def test_min_p_cuts_after_the_temperature_and_draws_from_the_rest_in_proportion(temperature, edge):
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    logits = padded(np.log(probabilities)[None].astype(np.float32))
    scaled = probabilities ** (1 / temperature)
    scaled /= scaled.sum()
    params = SamplingParams.parse({"temperature": temperature, "min_p": 0.25})
    inside = [0.0, *(end - 1e-4 for end in edge), *(end + 1e-4 for end in edge[:-1]), 1 - 1e-12]
    for u in inside:
        (token,), (log_prob,), _ = draw(logits, [params], np.array([u]))
        assert token == sum(u >= end for end in edge)
        assert log_prob == pytest.approx(math.log(scaled[token]), abs=1e-6)  # of the whole distribution


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "ebnf"])
def test_a_parameter_of_sglang_that_would_change_the_distribution_is_refused_and_never_ignored(name):
    with pytest.raises(SamplingError, match=f"{name!r} is not supported by the embedded engine"):
        SamplingParams.parse({name: {"5": 1.0} if name == "logit_bias" else "x" if name == "ebnf" else 0.5})


def test_returned_kept_tokens_are_those_drawn_from_and_log_probs_are_renormalised_over_them():
    rows = np.log(np.array([[0.05, 0.5, 0.15, 0.3]] * 5, dtype=np.float64)).astype(np.float32)
    params = [
        SamplingParams(top_p=0.7),  # 0.5 and 0.3: the smallest set with a mass of 0.7
        SamplingParams(min_p=0.25),  # at least 0.125
        SamplingParams(),
        SamplingParams(temperature=0.0, top_k=2),  # greedy: nothing is cut off
        SamplingParams(temperature=0.5, top_k=2, top_p=0.99),  # squares: 0.25 and 0.09
    ]
    u = np.full(5, 0.9)
    tokens, log_probs, kept = draw(padded(rows), params, u, return_kept=True)
    assert tokens == [3, 3, 3, 1, 3]
    assert [np.frombuffer(ids, dtype=np.int32).tolist() for ids in kept] == [[1, 3], [1, 2, 3], [], [], [1, 3]]
    expected = [0.3 / 0.8, 0.3 / 0.95, 0.3, 0.5, 0.09 / 0.34]
    assert log_probs == pytest.approx([math.log(p) for p in expected], abs=1e-6)
    assert draw(padded(rows), params, u)[0] == tokens
    assert draw(padded(rows), params, u)[2] == [b""] * 5
