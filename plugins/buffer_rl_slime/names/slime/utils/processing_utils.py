"""Tokenizers."""

from __future__ import annotations

from buffer_rl_slime.absent import build_processor_kwargs, encode_image_for_rollout_engine
from buffer_rl_slime.missing import missing
from buffer_rl_slime.tools import load_processor, load_tokenizer

__getattr__ = missing(__name__)
__all__ = [
    "build_processor_kwargs",
    "encode_image_for_rollout_engine",
    "load_processor",
    "load_tokenizer",
]
