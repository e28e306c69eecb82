"""Stop strings of which special tokens are a part: where they end an answer, and the text that is left of it."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from buffer_rl.embedded.sampling import SamplingParams
from buffer_rl.embedded.scheduler import Request
from buffer_rl.engines.text import TextCodec, first_stop, text_before_stop
from buffer_rl.rollout.generate import end_of_straddling_stop, response_text
from buffer_rl.testing.tiny import make_char_tokenizer

TOKENIZER = make_char_tokenizer()
EOS = 1


def ids(*parts: str | int) -> list[int]:
    """Token ids: one a character, and special tokens by number."""
    return [i for part in parts for i in ([part] if isinstance(part, int) else TOKENIZER.encode(part))]


def stopped(tokens: list[int], stops: list[str], **params: Any) -> Request:
    """A request that drew ``tokens`` one by one until a stop string ended it."""
    request = Request(rid="r", prompt_ids=(5,), params=SamplingParams.parse({"stop": stops, **params}), seed=0)
    codec = TextCodec(TOKENIZER)
    for token in tokens:
        request.output_ids.append(token)
        if (matched := codec.stop_string(request)) is not None:
            request.finish({"type": "stop", "matched": matched})
            break
    return request


@pytest.mark.parametrize(
    ("tokens", "stops", "matched", "length", "trimmed", "shown", "raw"),
    [
        # the stop string is one special token: nothing of it is in the text without special tokens
        (ids("ab", EOS, "c"), ["<eos>"], "<eos>", 3, "ab", "ab", "ab"),
        # it begins in plain text and ends in a special token
        (ids("ab.\n", EOS, "c"), [".\n<eos>"], ".\n<eos>", 5, "ab", "ab.\n", "ab"),
        # it begins with a special token
        (ids("ab", EOS, "\nc"), ["<eos>\n"], "<eos>\n", 4, "ab", "ab\n", "ab"),
        # a part of a special token's own text
        (ids("ab", EOS, "c"), ["eo"], "eo", 3, "ab", "ab", "ab<"),
        # what stands around a hidden special token looks like a stop string and is none
        (ids("x<e", EOS, "os>y", EOS, "!"), ["s>y<eos>!"], "s>y<eos>!", 10, "x<eo", "x<eos>y!", "x<e<eos>o"),
        # no special token at all, and the stop string begins before the newest token
        (ids("abcde"), ["never", "cd"], "cd", 4, "ab", "abcd", "ab"),
    ],
)
def test_a_stop_string_is_found_with_special_tokens_and_cut_from_the_text_that_is_shown(
    tokens: list[int], stops: list[str], matched: str, length: int, trimmed: str, shown: str, raw: str
) -> None:
    for params, text in (
        ({}, trimmed),
        ({"no_stop_trim": True}, shown),
        ({"skip_special_tokens": False}, raw),
        ({"skip_special_tokens": False, "no_stop_trim": True}, raw + matched),
    ):
        request = stopped(tokens, stops, **params)
        assert request.finish_reason == {"type": "stop", "matched": matched}
        assert request.output_ids == tokens[:length]
        assert TextCodec(TOKENIZER).output_text(request) == text
        # a response that was continued gets the text that it would have had in one piece
        assert response_text(TOKENIZER, tokens[:length], {"stop": stops, **params}, matched) == text
    for start in range(1, length):
        assert end_of_straddling_stop(TOKENIZER, tokens, start, stops) == length


def test_a_kept_stop_string_ends_the_text_and_not_what_its_token_has_behind_it() -> None:
    backend = Tokenizer(models.WordLevel({"<eos>": 0, "x": 1, "</b": 2, ">\n\n": 3}, unk_token="x"))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", clean_up_tokenization_spaces=False)
    for tokens, stop, trimmed, kept in (
        ([1, 2, 3], "</b>", "x", "x</b>"),
        ([1, 0, 2, 3], "</b>\n", "x", "x</b>\n"),
        ([1, 2, 3], ">\n\n", "x</b", "x</b>\n\n"),
        ([3], "\n", ">", ">\n"),
        ([1, 3], "x>", "", "x>"),
        ([1, 0], "o", "x", "x"),
    ):
        for no_trim, text in ((False, trimmed), (True, kept)):
            own = SamplingParams(stop=(stop,), no_stop_trim=no_trim)
            request = Request(rid="r", prompt_ids=(1,), params=own, seed=0, output_ids=tokens)
            request.finish({"type": "stop", "matched": stop})
            assert TextCodec(tokenizer).output_text(request) == text
            assert response_text(tokenizer, tokens, {"stop": [stop], "no_stop_trim": no_trim}, stop) == text


def test_of_several_stop_strings_the_one_that_begins_first_counts() -> None:
    assert first_stop("abcabc", ["ca", "bcab", "zz"]) == (1, "bcab")
    assert first_stop("xab", ["abc", "ab", "a"]) == (1, "ab")
    assert first_stop("abc", ["zz"]) is None


def test_a_stop_string_behind_a_character_of_several_tokens_leaves_it_whole() -> None:
    special = 256  # one token a byte, and a special one

    def decode(tokens: Any, skip_special_tokens: bool) -> str:
        parts = [
            b"" if t == special and skip_special_tokens else b"<s>" if t == special else bytes([t]) for t in tokens
        ]
        return b"".join(parts).decode(errors="replace")

    tokens = [*"é→".encode(), special, *"→é!".encode()]
    assert text_before_stop(decode, tokens, ["!"], True) == "é→→é"
    assert text_before_stop(decode, tokens, ["é!"], True) == "é→→"
    assert text_before_stop(decode, tokens, ["<s>→"], True) == "é→"
    assert text_before_stop(decode, tokens, ["→é!"], False) == "é→<s>"
    assert text_before_stop(decode, tokens, ["zz"], True) == "é→→é!"


def test_a_tokenizer_that_knows_no_other_keyword_is_asked_with_none() -> None:
    class Strict:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return str(TOKENIZER.decode(ids, skip_special_tokens=skip_special_tokens))

    assert TextCodec(Strict()).decode(ids("ab", EOS), True) == "ab"


def drew(tokens: list[int], **params: Any) -> Request:
    """A request without stop strings that drew ``tokens``."""
    return Request(rid="r", prompt_ids=(5,), params=SamplingParams(**params), seed=0, output_ids=tokens)


class Shouting(type(TOKENIZER)):  # type: ignore[misc]
    """A tokenizer with a way of its own to decode."""

    def _decode(self, *args: Any, **more: Any) -> str:
        return super()._decode(*args, **more).upper()


def test_texts_of_several_answers_are_those_of_each_alone() -> None:
    answers = [drew(ids(*parts)) for parts in (["ab", EOS], ["a b"], [], [EOS], ["it 's"])]
    answers[0].finish({"type": "stop", "matched": EOS})
    for answer in answers[1:]:
        answer.finish({"type": "length", "length": 9})
    clean: Any = make_char_tokenizer()
    clean.clean_up_tokenization_spaces = True
    shouting = Shouting(tokenizer_object=TOKENIZER.backend_tokenizer, clean_up_tokenization_spaces=False)
    for tokenizer, texts in (
        (TOKENIZER, ["ab", "a b", "", "", "it 's"]),
        (clean, ["ab", "a b", "", "", "it's"]),
        (shouting, ["AB", "A B", "", "", "IT 'S"]),
        (None, [""] * 5),
    ):
        assert TextCodec(tokenizer).output_texts(answers) == texts
    mixed = [drew(ids("ab", EOS, "c"), skip_special_tokens=skip) for skip in (True, False)]
    assert TextCodec(TOKENIZER).output_texts(mixed) == ["abc", "ab<eos>c"]
    cut = [stopped(ids("a.", EOS), ["."]), drew(ids("ab"))]
    assert [TextCodec(TOKENIZER).output_texts(rows) for rows in (cut, cut[::-1])] == [["a", "ab"], ["ab", "a"]]
