"""A byte-level tokenizer whose ids can be read: that of a byte is its value, then merges, then special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

NUM_BYTES = 256


def byte_tokenizer(template: str | None, special: Sequence[str] = (), merges: Sequence[str] = (), **marks: str) -> Any:
    """merges: words that the tokenizer writes as one token, ``NUM_BYTES`` and on. special: special tokens, behind them.
    marks: ``bos_token`` and others, for the template."""
    letters = _letters()
    vocabulary = {letter: byte for byte, letter in enumerate(letters)}
    pairs = []
    for word in merges:
        written = "".join(letters[byte] for byte in word.encode())
        for end in range(2, len(written) + 1):
            if written[:end] not in vocabulary:
                pairs.append((written[: end - 1], written[end - 1]))
                vocabulary[written[:end]] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(tokenizer_object=backend, clean_up_tokenization_spaces=False, **marks)
    tokenizer.chat_template = template
    return tokenizer


def _letters() -> list[str]:
    """The letter of each byte in byte-level vocabularies: that of its value if it can be seen, else one from 256 on."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unseen = iter(range(0x100, 0x200))
    return [chr(byte if byte in seen else next(unseen)) for byte in range(NUM_BYTES)]
