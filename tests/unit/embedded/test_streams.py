"""The text of a stream: whole characters, nothing that becomes a stop string, and in the end the text of the answer."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from buffer_rl.embedded.protocol import GenerateCall
from buffer_rl.embedded.sampling import SamplingParams
from buffer_rl.embedded.scheduler import Request
from buffer_rl.embedded.streams import Stream
from buffer_rl.engines.text import TextCodec


@pytest.fixture(scope="module")
def codec():
    """One token a byte: a character of three bytes is three tokens."""
    tokens = {f"<0x{byte:02X}>": byte for byte in range(256)}
    backend = Tokenizer(models.BPE(vocab=tokens, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return TextCodec(PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False))


async def streamed(codec, text, stop, finish):
    """The pieces of a request whose tokens come one a step."""
    request = Request(rid="r", prompt_ids=(1,), params=SamplingParams(stop=stop), seed=0)
    call = GenerateCall(requests=[request], as_list=False, return_logprob=[False], left=1)
    stream, pieces = Stream(call, codec), []
    reader = stream.pieces()
    *head, last = text.encode()
    for byte in head:
        request.output_ids.append(byte)
        stream.grow(stream.lengths())
        pieces.append(await anext(reader))
    request.output_ids.append(last)
    request.finish(finish)
    stream.changed.set()
    pieces += [piece async for piece in reader]
    return request, pieces


@pytest.mark.parametrize("seed", range(5))
async def test_pieces_are_whole_characters_and_together_the_answer(codec, seed):
    rng = random.Random(seed)
    text = "".join(rng.choice("aé€😀<") for _ in range(30))
    request, pieces = await streamed(codec, text, (), {"type": "length", "length": 9})
    assert "".join(piece.text for piece in pieces) == text == codec.output_text(request)
    assert not any("\ufffd" in piece.text for piece in pieces)
    assert [piece.start for piece in pieces[1:]] == [piece.end for piece in pieces[:-1]]
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]


async def test_what_may_become_a_stop_string_is_held_back_until_it_is_known(codec):
    _, pieces = await streamed(codec, "ab<x<en", ("<end>",), {"type": "length", "length": 7})
    assert [piece.text for piece in pieces] == ["a", "b", "", "<x", "", "", "<en"]
    _, pieces = await streamed(codec, "ab<end>", ("<end>",), {"type": "stop", "matched": "<end>"})
    assert "".join(piece.text for piece in pieces) == "ab"
