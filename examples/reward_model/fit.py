"""Fits a reward model for the quickstart's task on the spot: a classifier that starts from the warmed-up policy, and
learns to tell right answers from wrong ones that a rule has labelled.

    python examples/reward_model/fit.py [--policy FOLDER] [--out FOLDER] [--steps N] [--seed N]

Needs the quickstart's data and warm-up: ``examples/quickstart/prepare.py``, then ``sft.yaml``.
"""

from __future__ import annotations

import argparse
import json
import random
import string
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
QUICKSTART = HERE.parent / "quickstart" / "build"
BATCH = 64
MAX_ANSWER = 12  # tokens, as --rollout-max-response-len


def wrong_answer(label: str, rng: random.Random) -> tuple[str, bool]:
    """An answer that is not ``label``, in one of the ways in which a policy errs, and whether it ends."""
    letters, place = list(label), rng.randrange(len(label))
    if rng.random() < 0.1:  # it runs on, or stops in mid-answer
        return (label + "".join(rng.choices(string.ascii_lowercase, k=MAX_ANSWER)))[:MAX_ANSWER], False
    for _ in range(rng.choice((1, 1, 2, 3))):
        place = rng.randrange(len(letters))
        kind = rng.choice(("replace", "swap", "drop", "double"))
        if kind == "replace":
            letters[place] = rng.choice(string.ascii_lowercase)
        elif kind == "swap":
            other = rng.randrange(len(letters))
            letters[place], letters[other] = letters[other], letters[place]
        elif kind == "drop" and len(letters) > 1:
            del letters[place]
        else:
            letters.insert(place, letters[place])
    answer = "".join(letters)[:MAX_ANSWER]
    return (answer, True) if answer != label else wrong_answer(label, rng)


def make_batch(rows: list[dict[str, Any]], tokenizer: Any, rng: random.Random) -> tuple[list[list[int]], list[float]]:
    """Token ids of prompts with answers, half of them right, and 1 for those that are."""
    tokens, labels = [], []
    for number in range(BATCH):
        row = rng.choice(rows)
        answer, ends = (row["label"], True) if number % 2 else wrong_answer(row["label"], rng)
        tokens.append(tokenizer.encode(row["prompt"] + answer) + [tokenizer.eos_token_id] * ends)
        labels.append(float(number % 2))
    return tokens, labels


def fit(policy: Path, data: Path, out: Path, *, steps: int, seed: int = 0) -> float:
    """Fit a classifier to the words of the file ``data``, write it to ``out``, and return the share of the last 20
    batches that it got right, each before it was trained on."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(seed)
    rng = random.Random(seed)
    tokenizer: Any = AutoTokenizer.from_pretrained(policy)
    model = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1, dtype=torch.float32)
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps, pct_start=0.1)
    right: list[float] = []
    for _ in range(steps):
        tokens, labels = make_batch(rows, tokenizer, rng)
        padded = tokenizer.pad({"input_ids": tokens}, return_tensors="pt", padding_side="right")
        logits, wanted = model(**padded).logits[:, 0], torch.tensor(labels)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, wanted)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        right.append(float(((logits > 0) == (wanted > 0)).float().mean()))
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    last = right[-20:]
    return sum(last) / len(last)


def main() -> None:
    """Read the flags, fit the classifier and say how good it is."""
    parser = argparse.ArgumentParser(description="fit a reward model for the quickstart's task")
    parser.add_argument("--policy", type=Path, default=QUICKSTART / "sft" / "hf", help="the model to start from")
    parser.add_argument("--data", type=Path, default=QUICKSTART / "data" / "train.jsonl", help="words and answers")
    parser.add_argument("--out", type=Path, default=HERE / "build" / "model", help="folder of the reward model")
    parser.add_argument("--steps", type=int, default=600, help=f"batches of {BATCH} answers")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    accuracy = fit(flags.policy, flags.data, flags.out, steps=flags.steps, seed=flags.seed)
    print(f"reward model: {100 * accuracy:.1f}% of answers judged as the rule does   {flags.out}")


if __name__ == "__main__":
    main()
