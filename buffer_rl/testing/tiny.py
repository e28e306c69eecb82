"""Tiny language models with random weights and a character tokenizer, made on the spot."""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
DEFAULT_CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    """A file that is written at once needs none, and programs that print make these models."""
    from transformers.utils import logging

    bars: Any = logging
    was_shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            bars.enable_progress_bar()


def make_char_tokenizer(characters: str = DEFAULT_CHARACTERS, *, bos: bool = False) -> PreTrainedTokenizerFast:
    """One token a character, after ``<pad>`` (0), ``<eos>`` (1) and ``<unk>`` (2); decoding joins the characters.

    bos: it has ``<bos>`` as its last token, and adds it before a text, as those of many base models do."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokens = [*SPECIAL_TOKENS, *dict.fromkeys(characters)]
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    make: Any = PreTrainedTokenizerFast
    pad, eos, unk = SPECIAL_TOKENS
    tokenizer: PreTrainedTokenizerFast = make(
        tokenizer_object=backend, pad_token=pad, eos_token=eos, unk_token=unk, clean_up_tokenization_spaces=False
    )
    if bos:
        tokenizer.add_special_tokens({"bos_token": "<bos>"})
        added = [("<bos>", tokenizer.convert_tokens_to_ids("<bos>"))]
        backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=added)
        tokenizer.backend_tokenizer.post_processor = backend.post_processor
    return tokenizer


def make_tiny_model(
    path: str | Path,
    architecture: str = "qwen3",
    vocab: int | None = None,
    seed: int = 0,
    *,
    characters: str = DEFAULT_CHARACTERS,
    init_scale: float = 0.1,
    auto_class: str = "AutoModelForCausalLM",
    chat_template: str | None = None,
    **overrides: Any,
) -> str:
    """Write a random model and its character tokenizer into the folder ``path`` and return it.

    architecture: a key of ``ARCHITECTURES``. vocab: number of embedding rows; the tokenizer's size where absent
    (it may be larger, never smaller). init_scale: standard deviation of every weight matrix; larger values make
    the distributions less flat. auto_class: of transformers; "AutoModelForSequenceClassification" with ``num_labels=1``
    makes a reward model. chat_template: of the tokenizer, a Jinja text. ``overrides`` go to the configuration. Raises
    ValueError for an unknown architecture or too small a vocabulary.
    """
    import torch
    import transformers

    if (wanted := ARCHITECTURES.get(architecture)) is None:
        raise ValueError(f"unknown architecture {architecture!r}; known: {', '.join(ARCHITECTURES)}")
    tokenizer = make_char_tokenizer(characters)
    tokenizer.chat_template = chat_template
    size = len(tokenizer) if vocab is None else vocab
    if size < len(tokenizer):
        raise ValueError(f"vocab is {size}, but the tokenizer has {len(tokenizer)} tokens")
    config = transformers.AutoConfig.for_model(**{**SIZES, "vocab_size": size, **deepcopy({**wanted}), **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        maker: Any = getattr(transformers, auto_class)
        model = maker.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim > 1:
                    weight.normal_(0.0, init_scale)
                elif name.endswith("bias"):
                    weight.normal_(0.0, 0.1)
                else:
                    weight.add_(torch.randn_like(weight) * 0.1)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    with _without_progress_bar():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
)
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_GEMMA_LAYERS = ["sliding_attention", "full_attention"]
ARCHITECTURES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
        "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
        "llama": {"model_type": "llama", "tie_word_embeddings": False, "rope_parameters": _LLAMA3_ROPE},
        "gpt_neox": {"model_type": "gpt_neox", "num_key_value_heads": 4, "tie_word_embeddings": False},
        "gemma3": {
            "model_type": "gemma3_text",
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": _GEMMA_LAYERS,
            "query_pre_attn_scalar": 16,
        },
        "qwen3_moe": {
            "model_type": "qwen3_moe",
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
        "glm4": {"model_type": "glm4", "head_dim": 16, "tie_word_embeddings": False},
    }
)
"""What ``transformers.AutoConfig`` makes the configuration of."""
