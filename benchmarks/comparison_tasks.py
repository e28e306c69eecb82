"""The tasks of ``against_trl.py``: rows, a start model that knows a little, held-out accuracy.

- ``short``: a word of 3 to 10 letters backwards; answers of 4 to 11 tokens.
- ``long``: the sum of two numbers of 1 to 16 digits, column by column; answers of 10 to 116 tokens, of which many are
  short and few are long: a number has n digits with a probability proportional to 1 / n.

Both systems train the same start model on the same rows in the same order; accuracy is that of greedy decoding, by the
code below, of the weights that either system saved. Nothing here depends on TRL.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from buffer_rl.embedded.fast_decoder import FastDecoder
from buffer_rl.embedded.sampling import SamplingParams
from buffer_rl.embedded.scheduler import Request, Scheduler
from buffer_rl.testing.tiny import make_tiny_model

HELD_OUT, DEV = 1000, 256
QUICK_STEPS = 4
MODEL: Mapping[str, Any] = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 24}
MAX_DIGITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """row: a prompt and its answer. max_tokens: of an answer, with the end token. context: of the model. warm_up: the
    start model's accuracy, sampled at temperature 1. target: the accuracy that training is timed to. steps, eval_every:
    length of a run, and how often its weights are saved for their accuracy. held_out: prompts of each evaluation."""

    name: str
    row: Callable[[random.Random], tuple[str, str]]
    characters: str
    max_tokens: int
    context: int
    warm_up: float
    target: float
    steps: int
    eval_every: int
    held_out: int = HELD_OUT


def reversed_word(rng: random.Random) -> tuple[str, str]:
    """``"abc="`` and ``"cba"``."""
    word = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 10)))
    return f"{word}=", word[::-1]


def long_sum(rng: random.Random) -> tuple[str, str]:
    """``"a47b23="`` asks for 24 + 37, column by column from the right; ``"a470=11b231=06:."`` is the answer: of each
    column its letter, digits, carry and their sum; after ``:`` comes a last carry, if there is one."""
    lengths = range(1, MAX_DIGITS + 1)
    columns = rng.choices(lengths, [1 / length for length in lengths])[0]
    carry, prompt, work = 0, "", ""
    for letter in string.ascii_lowercase[:columns]:
        a, b = rng.randrange(10), rng.randrange(10)
        prompt += f"{letter}{a}{b}"
        work += f"{letter}{a}{b}{carry}={a + b + carry:02d}"
        carry = (a + b + carry) // 10
    return f"{prompt}=", f"{work}:{carry or ''}."


TASKS: Mapping[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="short",
            row=reversed_word,
            characters=string.ascii_lowercase + "=",
            max_tokens=12,
            context=64,
            warm_up=0.03,
            target=0.6,
            steps=150,
            eval_every=10,
        ),
        Task(
            name="long",
            row=long_sum,
            characters=string.ascii_lowercase[:MAX_DIGITS] + string.digits + "=:.",
            max_tokens=116,
            context=192,
            warm_up=0.3,
            target=0.5,
            steps=80,
            eval_every=10,
        ),
    )
}


def quick(task: Task) -> Task:
    """Its shortest form, which shows that everything works: hardly any warm-up, few steps, evaluations of few prompts.
    Its name is another, so that no result and no start model is taken for those of the task."""
    return replace(task, name=f"quick_{task.name}", warm_up=0.0, steps=QUICK_STEPS, held_out=DEV // 4)


def rows(task: Task, count: int, part: str) -> list[tuple[str, str]]:
    """``count`` prompts and answers; parts are drawn apart from each other. Short prompts may be in several."""
    rng = random.Random(f"{task.name} {part}")
    return [task.row(rng) for _ in range(count)]


def write_rows(path: Path, pairs: Sequence[tuple[str, str]]) -> None:
    """As a data file of ``buffer-rl train``."""
    lines = (json.dumps({"prompt": prompt, "label": answer}) + "\n" for prompt, answer in pairs)
    path.write_text("".join(lines), encoding="utf-8")


def read_rows(path: Path) -> list[tuple[str, str]]:
    """The inverse of ``write_rows``."""
    found = (json.loads(line) for line in path.read_bytes().split(b"\n") if line)
    return [(row["prompt"], row["label"]) for row in found]


def load(folder: Path) -> tuple[Any, Any]:
    """Model, in float32, and tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM
    return model.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


def accuracy(model: Any, tokenizer: Any, task: Task, pairs: Sequence[tuple[str, str]], temperature: float) -> float:
    """Share of prompts whose answer is right and ended; of one sample each."""
    decoder = FastDecoder(model, task.context)
    scheduler = Scheduler(decoder, max_running_requests=512, eos_token_ids=[tokenizer.eos_token_id])
    params = SamplingParams(max_new_tokens=task.max_tokens, temperature=temperature)
    for number, (prompt, answer) in enumerate(pairs):
        wanted = [*tokenizer.encode(answer), tokenizer.eos_token_id]
        prompt_ids = tuple(tokenizer.encode(prompt))
        scheduler.add(Request(rid=str(number), prompt_ids=prompt_ids, params=params, seed=number, tag=wanted))
    right = 0
    with torch.no_grad():
        while scheduler.has_work:
            right += sum(request.output_ids == request.tag for request in scheduler.step())
    return right / len(pairs)


def held_out_accuracy(folder: Path, task: Task) -> float:
    """Of the weights in a Hugging Face folder, by greedy decoding."""
    return accuracy(*load(folder), task, rows(task, task.held_out, "held-out"), 0.0)


def start_model(folder: Path, task: Task, lr: float = 2e-3, batch: int = 64, most_steps: int = 20_000) -> None:
    """Make a model and train it on worked examples until it is right in ``task.warm_up`` of the cases. What is in
    ``folder`` from an earlier call stays. Raises RuntimeError if it is not reached."""
    if (folder / "config.json").exists():
        return
    made = folder.with_name(folder.name + ".new")
    make_tiny_model(made, characters=task.characters, init_scale=0.02, max_position_embeddings=task.context, **MODEL)
    model, tokenizer = load(made)
    dev, rng = rows(task, DEV, "dev"), random.Random(f"{task.name} warm-up")
    adam = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    for step in range(most_steps):
        for group in adam.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 50)
        _supervised_loss(model, tokenizer, [task.row(rng) for _ in range(batch)]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        if step % 5 == 4 and (reached := accuracy(model, tokenizer, task, dev, 1.0)) >= task.warm_up:
            print(f"{task.name}: warmed up in {step + 1} steps to an accuracy of {reached:.2f}", flush=True)
            model.save_pretrained(made)
            made.rename(folder)
            return
    raise RuntimeError(f"{task.name}: an accuracy of {reached:.2f} after {most_steps} steps of warm-up")


def _supervised_loss(model: Any, tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> torch.Tensor:
    """Mean cross-entropy of the answers' tokens and of the end token after each."""
    prompts, answers = ([tokenizer.encode(text) for text in texts] for texts in zip(*pairs, strict=True))
    length = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)) + 1
    tokens = torch.full((len(pairs), length), tokenizer.pad_token_id)
    labels = torch.full((len(pairs), length), -100)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids = torch.tensor([*prompt, *answer, tokenizer.eos_token_id])
        tokens[row, : len(ids)] = ids
        labels[row, len(prompt) : len(ids)] = ids[len(prompt) :]
    logits = model(input_ids=tokens, use_cache=False).logits
    loss: torch.Tensor = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return loss
