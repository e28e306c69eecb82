"""The fixed task of the golden runs: a tiny model, eight prompts, and functions as a user would write them.

Nothing of the package is imported here, so that moving its parts cannot change the task.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHARACTERS = "abc="
SPECIAL = ("<pad>", "<eos>", "<unk>")
WORDS = ("ab", "ba", "abc", "bca", "cab", "acb", "bb", "cc")

USER_FUNCTIONS = '''
"""What a user brings along: as little of the package as each contract allows."""

import asyncio
import itertools
import json
import pathlib
import urllib.request
import zlib

CALLS = itertools.count()


def count_a(args, sample):
    return sample.response.count("a")


async def count_a_once_killed(args, sample):
    """From the second rollout on, waits until somebody has killed what this run is about."""
    first = args.rollout_batch_size * args.n_samples_per_prompt
    waits = next(CALLS) >= first
    while waits and not pathlib.Path(f"{args.run_dir}.killed").exists():
        await asyncio.sleep(0.02)
    return count_a(args, sample)


def some_a(args, group):
    return any(sample.reward > 0 for sample in group)


def mask_some(args, groups):
    for group in groups:
        for sample in group:
            sample.remove_sample = sample.sample_index == group.uid.row % 4


def half_loss(args, inputs):
    """The plain policy gradient, halved."""
    from buffer_rl.kinds.token_loss import TokenLoss

    return TokenLoss(-inputs.log_probs * inputs.advantages / 2)


class Letters:
    """Endless prompts: row ``n`` is ``n`` written in the letters a, b, c."""

    def __init__(self, args):
        self.args, self.next = args, 0

    def __len__(self):
        return 9

    def get_samples(self, num_samples):
        from buffer_rl.records.groups import GroupUid, Sample, SampleGroup

        groups = []
        for _ in range(num_samples):
            epoch, row = divmod(self.next, len(self))
            uid = GroupUid("letters", row, epoch)
            prompt = "abc"[row // 3] + "abc"[row % 3] + "="
            samples = [
                Sample(uid=uid, sample_index=i, prompt=prompt, label=prompt)
                for i in range(self.args.n_samples_per_prompt)
            ]
            groups.append(SampleGroup(uid=uid, samples=samples))
            self.next += 1
        return groups

    def save(self, path):
        with open(path, "w") as file:
            json.dump(self.next, file)

    def load(self, path):
        with open(path) as file:
            self.next = json.load(file)


IDS = {character: 3 + number for number, character in enumerate("abc=")}


def ask(args, sample):
    prompt = [IDS[character] for character in sample.prompt]
    seed = zlib.crc32(f"{sample.uid} {sample.sample_index}".encode()) >> 1
    params = {"max_new_tokens": args.rollout_max_response_len, "temperature": 1.0, "sampling_seed": seed}
    body = json.dumps({"input_ids": prompt, "sampling_params": params, "return_logprob": True}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {args.engine_api_key}"}
    request = urllib.request.Request(f"{args.router_url}/generate", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        found = json.load(answer)
    pairs = found["meta_info"]["output_token_logprobs"]
    sample.tokens = prompt + [pair[1] for pair in pairs]
    sample.rollout_log_probs = [pair[0] for pair in pairs]
    sample.response, sample.response_length = found["text"], len(pairs)
    sample.status = "completed" if found["meta_info"]["finish_reason"]["type"] == "stop" else "truncated"
    sample.reward = count_a(args, sample)


async def some_of_many(args, rollout_id, buffer, evaluation=False):
    """Leases six groups, finishes the first, the second and the fourth, and gives the others back, the last one first:
    which are finished next depends on the order of the queue."""
    groups = await buffer.aget_samples(6)
    chosen = [groups[0], groups[1], groups[3]]
    for group in chosen:
        for sample in group:
            await asyncio.to_thread(ask, args, sample)
    await buffer.aadd_samples([groups[5], groups[4], groups[2]])
    return chosen
'''


def make_task(folder: Path) -> None:
    """Write ``model/``, ``train.jsonl`` and ``functions.py`` into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": f"{word}=", "label": word[::-1]} for word in WORDS]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "functions.py").write_text(USER_FUNCTIONS)
    _make_model(folder / "model")


def _make_model(folder: Path) -> None:
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    names = [*SPECIAL, *CHARACTERS]
    backend = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    config = Qwen3Config(
        vocab_size=len(names),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
