"""Cases of ``/generate``: shapes, ends, log-probabilities, sampling, lists, limits, errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from conformance.reference import CONTEXT, Reference
from conformance.steps import Case, ask

P = (26, 31, 18, 45)
Q = (7, 60, 33)


def generate(ids: Any = P, *, top: dict[str, Any] | None = None, **params: Any) -> dict[str, Any]:
    """A body of ``/generate``: greedy and past the end token unless ``params`` say otherwise."""
    own = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 8, **params}
    prompt = {"text": ids} if isinstance(ids, str) else {"input_ids": list(ids)}
    return {**prompt, "return_logprob": True, "sampling_params": own, **(top or {})}


def row(finish: str, ids: Any, **more: Any) -> dict[str, Any]:
    """What a row has to be: its end and tokens, with the right log-probabilities of version 0."""
    return {"finish": finish, "ids": ids, "log_probs": "right", **more}


def ok(*rows: Any, **more: Any) -> list[Any]:
    """One answer with these rows."""
    return [{"status": 200, "rows": list(rows), **more}]


def bad(text: str = "") -> list[Any]:
    """One answer 400 whose message has ``text``."""
    return [{"status": 400, "message": lambda message: text in message}]


def one(name: str, body: Any, expect: Sequence[Any], **more: Any) -> Case:
    """A case of one request to ``/generate``."""
    return Case(name=name, steps=[ask("/generate", body)], expect=expect, topic="/generate", **more)


def count(number: int) -> Callable[[Any], bool]:
    """Lists of so many tokens."""
    return lambda ids: len(ids) == number


def cases(ref: Reference) -> list[Case]:
    """All of them."""
    return [*_shapes(ref), *_ends(ref), *_log_probs(ref), *_sampled(ref), *_lists(ref), *_limits(ref), *_errors(ref)]


def _shapes(ref: Reference) -> list[Case]:
    ids = ref.greedy(P, 8)
    full = row("length 8", ids, text=ref.decode(ids), prompt_tokens=4, completion_tokens=8, spans=[["0", 0, 8]])
    text = ref.decode(P)
    cold = {"finish": "length 8", "ids": ids}
    top_only = generate(top={"sampling_params": {"temperature": 0, "ignore_eos": True}})
    return [
        one("greedy tokens", generate(), ok(full)),
        one("temperature 1e-7 is greedy", generate(temperature=1e-7), ok(full)),
        one("top_k 1 is greedy", generate(temperature=1, top_k=1), ok(full)),
        one(
            "top_k 1 with a temperature",
            generate(temperature=0.5, top_k=1),
            ok(full),
            as_sglang=ok(cold),
            why="top_k 1",
        ),
        one("top_k 0 is no limit", generate(top_k=0), ok(full)),
        one("top_p 1e-9 is greedy", generate(temperature=1, top_p=1e-9), ok(full)),
        one("min_p 1 is greedy", generate(temperature=1, min_p=1.0), ok(full)),
        one("a text", generate(text), ok(full)),
        one("a text beside token ids", generate(top={"text": "xyz"}), ok(full)),
        one("an own id", generate(top={"rid": "own"}), ok({**full, "id": "own"})),
        one("no log-probabilities", generate(top={"return_logprob": False}), ok({**full, "log_probs": "none"})),
        one("fields of a router", generate(top={"model": "m", "priority": 3, "extra_key": "k"}), ok(full)),
        one("routing fields", generate(top={"routing_key": "k", "custom_labels": {"a": "b"}}), ok(full)),
        one("128 tokens are the default", top_only, ok(row("length 128", count(128)))),
        Case(name="by PUT", steps=[ask("/generate", generate(), "PUT")], expect=ok(full), topic="/generate"),
        one("a stream", generate(top={"stream": True}), [{"status": 200}]),
        one("one token", generate(max_new_tokens=1), ok(row("length 1", ids[:1]))),
        one(
            "no token",
            generate(max_new_tokens=0),
            ok({"finish": "length 0", "ids": [], "text": "", "completion_tokens": 0}),
            why="detail",
        ),
    ]


def _ends(ref: Reference) -> list[Case]:
    ids, other = ref.greedy(P, 16), ref.greedy(P, 16, banned=[ref.eos])
    text = ref.decode(ids)
    stop, pair, third = ids[5], text[4:6], ids[3]
    first = ids.index(stop) + 1
    end = text.index(pair)
    string = {"stop": pair, "max_new_tokens": 16}
    token = {"stop_token_ids": [stop], "ignore_eos": False, "max_new_tokens": 16}
    eos = ref.greedy(P, 400)
    assert other[0] != ref.eos
    stopped = ids[: end + 2]
    return [
        one("a stop string", generate(**string), ok(row(f"stop {pair}", stopped, text=text[:end]))),
        one("a list of stop strings", generate(**{**string, "stop": ["\t", pair]}), ok(row(f"stop {pair}", stopped))),
        one("a stop string that is not there", generate(stop="\t"), ok(row("length 8", ids[:8]))),
        one(
            "a stop string kept",
            generate(**string, no_stop_trim=True),
            ok(row(f"stop {pair}", stopped, text=text[: end + 2])),
        ),
        one("a stop token", generate(**token), ok(row(f"stop {stop}", ids[:first], text=text[: first - 1]))),
        one("a stop token kept", generate(**token, no_stop_trim=True), ok(row(f"stop {stop}", count(first)))),
        one("a stop token ignored", generate(stop_token_ids=[third]), ok(row("length 8", ids[:8]))),
        one(
            "stop token and string",
            generate(**{**token, "stop": pair}),
            ok(row(f"stop {stop}" if first < end + 2 else f"stop {pair}", ids[: min(first, end + 2)])),
        ),
        one("an empty list of stop strings", generate(stop=[]), ok(row("length 8", ids[:8]))),
        one(
            "at least 8 tokens",
            generate(min_new_tokens=8, stop_token_ids=[stop], ignore_eos=False, max_new_tokens=9),
            ok({"ids": lambda found: len(found) in (8, 9) and stop not in found[:8]}),
        ),
        one(
            "special tokens are shown",
            generate(skip_special_tokens=False),
            ok(row("length 8", ids[:8], text=str(ref.tokenizer.decode(ids[:8], skip_special_tokens=False)))),
        ),
        one("no end token in sight", generate(max_new_tokens=400), ok(row("length 400", eos))),
    ]


def _log_probs(ref: Reference) -> list[Case]:
    ids = ref.greedy(P, 4)
    table = ref.table([*P, *ids])
    scores = [[None, P[0]], *([float(table[i][token]), token] for i, token in enumerate(P[1:]))]
    start = {"logprob_start_len": 0}

    def pairs(position: int, tokens: Sequence[int]) -> list[Any]:
        return [[float(table[position][token]), token] for token in tokens]

    def top(position: int, number: int) -> list[Any]:
        return pairs(position, table[position].topk(number).indices.tolist())

    four = {"max_new_tokens": 4}
    tops = [top(3 + i, 2) for i in range(4)]
    named = [pairs(3 + i, [5, 9]) for i in range(4)]
    last = [[None, P[2]], [float(table[2][P[3]]), P[3]]]
    return [
        one("of the prompt", generate(top=start, **four), ok(row("length 4", ids, input_token_logprobs=scores))),
        one(
            "of the prompt from a position",
            generate(top={"logprob_start_len": 2}, **four),
            ok(row("length 4", ids, input_token_logprobs=last)),
        ),
        one(
            "of the prompt alone",
            generate(top=start, max_new_tokens=0),
            ok({"finish": "length 0", "ids": [], "input_token_logprobs": scores}),
            why="detail",
        ),
        one(
            "of the prompt, whatever the temperature",
            generate(top=start, temperature=0.5, max_new_tokens=1),
            ok({"input_token_logprobs": scores, "log_probs": "right"}),
            sampled=True,
        ),
        one(
            "of the likeliest tokens",
            generate(top={"top_logprobs_num": 2}, **four),
            ok(row("length 4", ids, output_top_logprobs=tops)),
        ),
        one(
            "of the prompt's likeliest tokens",
            generate(top={"top_logprobs_num": 2, **start}, max_new_tokens=1),
            ok({"input_top_logprobs": [None, *(top(i, 2) for i in range(3))]}),
        ),
        one(
            "of named tokens",
            generate(top={"token_ids_logprob": [5, 9]}, **four),
            ok(row("length 4", ids, output_token_ids_logprobs=named)),
        ),
        one(
            "of the prompt's named tokens",
            generate(top={"token_ids_logprob": [5, 9], **start}, max_new_tokens=1),
            ok({"input_token_ids_logprobs": [None, *(pairs(i, [5, 9]) for i in range(3))]}),
        ),
        one("from beyond the prompt", generate(top={"logprob_start_len": 9}), bad()),
    ]


def _sampled(ref: Reference) -> list[Case]:
    def draws(number: int = 24, **params: Any) -> dict[str, Any]:
        own = {"temperature": 1.0, "n": number, "max_new_tokens": 1, **params}
        return generate(**own)

    def within(tokens: list[int]) -> Any:
        return lambda rows: (
            {row["ids"][0] for row in rows} <= set(tokens) and all(r["log_probs"] == "right" for r in rows)
        )

    def several(rows: Any) -> bool:
        return len({tuple(row["ids"]) for row in rows}) > 1 and all(row["log_probs"] == "right" for row in rows)

    probabilities = ref.table(P, 1.3)[-1].exp().sort(descending=True)
    mass, nucleus = 0.0, []
    for value, token in zip(probabilities.values.tolist(), probabilities.indices.tolist(), strict=True):
        if mass < 0.5:
            nucleus.append(token)
        mass += value
    likely = [
        token
        for value, token in zip(probabilities.values.tolist(), probabilities.indices.tolist(), strict=True)
        if value >= 0.6 * float(probabilities.values[0])
    ]

    def rows(check: Any) -> list[Any]:
        return [{"status": 200, "list": True, "rows": check}]

    seeded = [ask("/generate", generate(temperature=1.0, sampling_seed=11)) for _ in range(2)]
    return [
        one("24 samples of a prompt", draws(), rows(several), sampled=True),
        one("top_k 3", draws(top_k=3), rows(within(ref.top(P, 3))), sampled=True),
        one("top_p 0.5 at temperature 1.3", draws(top_p=0.5, temperature=1.3), rows(within(nucleus)), sampled=True),
        one("min_p 0.6 at temperature 1.3", draws(min_p=0.6, temperature=1.3), rows(within(likely)), sampled=True),
        one("temperature 0.7", draws(4, temperature=0.7, max_new_tokens=12), rows(several), sampled=True),
        one("temperature 2", draws(4, temperature=2.0, max_new_tokens=12), rows(several), sampled=True),
        one("a negative seed", generate(sampling_seed=-1), ok(row("length 8", ref.greedy(P, 8)))),
        one("a seed of 2**40", generate(sampling_seed=2**40), ok(row("length 8", ref.greedy(P, 8)))),
        Case(
            name="the same seed twice",
            steps=seeded,
            expect=[{"rows": [row("length 8", count(8))]}] * 2,
            sampled=True,
            topic="/generate",
        ),
    ]


def _lists(ref: Reference) -> list[Case]:
    a, b = ref.greedy(P, 8), ref.greedy(Q, 8)
    two = [list(P), list(Q)]
    both = [row("length 8", a), row("length 8", b)]
    each = [{"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}, {"temperature": 0, "max_new_tokens": 3}]
    ids = [{**part, "id": f"l_{i}"} for i, part in enumerate(both)]
    alone = row("length 8", a)
    return [
        one("two prompts", generate(two), ok(*both, list=True)),
        one("a list of one prompt", generate([list(P)]), ok(alone, list=True)),
        one("two equal prompts", generate([list(P), list(P)]), ok(alone, alone, list=True)),
        one("two texts", generate(top={"text": [ref.decode(P), ref.decode(Q)], "input_ids": None}), ok(*both)),
        one("one id for two prompts", generate(two, top={"rid": "l"}), ok(*ids)),
        one("two ids", generate(two, top={"rid": ["x", "y"]}), ok(*both)),
        one(
            "parameters for each prompt",
            generate(two, top={"sampling_params": each}),
            ok(row("length 2", a[:2]), {"ids": lambda found: found == b[: len(found)]}),
        ),
        one(
            "log-probabilities for one of two",
            generate(two, top={"return_logprob": [True, False]}),
            ok(both[0], {**both[1], "log_probs": "none"}),
        ),
        one("two samples", generate(n=2), ok(alone, alone, list=True)),
        one("two samples of two prompts", generate(two, n=2), ok(alone, alone, both[1], both[1], list=True)),
        one(
            "too few parameters",
            generate(two, top={"sampling_params": each[:1]}),
            [{"status": lambda status: status >= 400}],
            why="status",
        ),
        one("an id twice", generate(two, top={"rid": ["x", "x"]}), bad()),
    ]


def _limits(ref: Reference) -> list[Case]:
    def prompt(length: int) -> list[int]:
        return [3 + i % 90 for i in range(length)]

    def body(length: int, new: int) -> dict[str, Any]:
        return generate(prompt(length), max_new_tokens=new)

    def fits(number: int) -> list[Any]:
        return ok({"finish": f"length {number}", "ids": count(number), "log_probs": "right"})

    last, why = CONTEXT - 12, "context margin"
    return [
        one("the longest prompt of SGLang", body(CONTEXT - 7, 1), fits(1)),
        one("a longer one", body(CONTEXT - 6, 1), fits(1), as_sglang=bad(), why=why),
        one("a prompt 1 below the context", body(CONTEXT - 1, 1), fits(1), as_sglang=bad(), why=why),
        one("a prompt as long as the context", body(CONTEXT, 1), bad()),
        one("up to 2 below the context", body(last, 10), fits(10)),
        one("up to the context", body(last, 12), fits(12), as_sglang=fits(10), why=why),
        one("from a short prompt up to it", body(8, CONTEXT - 8), fits(512), as_sglang=fits(510), why=why),
        one("beyond the context", body(last, 13), bad()),
        one("a long prompt", body(300, 4), ok({"ids": ref.greedy(prompt(300), 4), "log_probs": "right"})),
    ]


def _errors(ref: Reference) -> list[Case]:
    size = ref.vocab_size

    def refused(name: str, body: Any, why: str = "", real: Any = None) -> Case:
        return one(name, body, bad(), why=why, as_sglang=real)

    served = [{"status": 200}]
    return [
        refused("neither text nor token ids", {"sampling_params": {}}),
        refused("an unknown sampling parameter", generate(nonsense=1)),
        refused("a temperature below 0", generate(temperature=-1)),
        refused("top_p 0", generate(temperature=1, top_p=0)),
        refused("top_p 2", generate(temperature=1, top_p=2)),
        refused("min_p 2", generate(temperature=1, min_p=2)),
        refused("max_new_tokens -1", generate(max_new_tokens=-1)),
        refused("more tokens at least than at most", generate(min_new_tokens=9)),
        refused("no JSON", "{"),
        refused("an empty list of token ids", generate([])),
        refused("an id in the padding of the vocabulary", generate([size]), "strict", served),
        refused("an unknown field", generate(top={"nonsense": 1}), "strict", served),
        refused("an empty prompt beside another", generate([list(P), []]), "strict", served),
        refused("experts of a model without them", generate(top={"return_routed_experts": True}), "strict", served),
    ]
