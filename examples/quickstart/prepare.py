"""Makes what the quickstart trains on: the words, a character tokenizer and a small model. Needs no network.

    python examples/quickstart/prepare.py [--output FOLDER] [--seed N]

writes, into ``examples/quickstart/build`` unless told otherwise,

    data/train.jsonl, data/dev.jsonl, data/heldout.jsonl    no word is in two of them
    model/                                                  a Hugging Face folder: random weights, tokenizer
"""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path
from typing import Any

from buffer_rl.testing.tiny import make_char_tokenizer

HERE = Path(__file__).resolve().parent
SIZES = {"heldout": 400, "dev": 256, "train": 20_000}
MAX_TOKENS = 64  # the longest prompt has 11 characters, the longest answer 10 and the end token


def load_words() -> list[str]:
    """The lower-case words of 3 to 10 letters in the list that reasoning-gym's ``spell_backward`` draws from."""
    import reasoning_gym

    dataset = reasoning_gym.create_dataset("spell_backward", size=1, seed=0, min_word_len=3, max_word_len=10)
    return sorted({word for word in dataset.words if word.isascii() and word.isalpha() and word.islower()})


def make_row(word: str) -> dict[str, Any]:
    """One line of a data file. The metadata let ``rm_hub.reasoning_gym`` score the answer as well."""
    return {
        "prompt": f"{word}=",
        "label": word[::-1],
        "id": word,
        "metadata": {"source_dataset": "spell_backward", "word": word, "word_len": len(word)},
    }


def make_data(folder: Path, seed: int = 0) -> dict[str, Path]:
    """Write the data files; the held-out and development words are drawn first, so they never reach training."""
    words = load_words()
    random.Random(seed).shuffle(words)
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for name, size in SIZES.items():
        chosen, words = words[:size], words[size:]
        paths[name] = folder / f"{name}.jsonl"
        lines = [json.dumps(make_row(word)) + "\n" for word in chosen]
        paths[name].write_text("".join(lines), encoding="utf-8")
    return paths


def make_model(folder: Path, seed: int = 0) -> int:
    """Write a Qwen3 model with random weights and a tokenizer of single characters; returns its parameter count."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_char_tokenizer()
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=True,
        **special,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, **special)
    tokenizer.model_max_length = MAX_TOKENS
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return int(model.num_parameters())


def main() -> None:
    """Read the flags, make everything and say what was made."""
    parser = argparse.ArgumentParser(description="make the quickstart's data and model")
    parser.add_argument("--output", type=Path, default=HERE / "build", help="folder to write to")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split and of the weights")
    flags = parser.parse_args()
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read when transformers is imported, below
    paths = make_data(flags.output / "data", flags.seed)
    parameters = make_model(flags.output / "model", flags.seed)
    for name, path in paths.items():
        print(f"{name:<8} {SIZES[name]:>6} words   {path}")
    print(f"model    {parameters:>6} parameters   {flags.output / 'model'}")


if __name__ == "__main__":
    main()
