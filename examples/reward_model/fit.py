"""Fits a reward model for the quickstart's task on the spot: a classifier that starts from the warmed-up policy, and
learns what share of an answer's tokens is right, from right and wrong answers that a rule has labelled.

    python examples/reward_model/fit.py [--policy FOLDER] [--out FOLDER] [--steps N] [--seed N]

Needs the quickstart's data and warm-up: ``examples/quickstart/prepare.py``, then ``sft.yaml``.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
QUICKSTART = HERE.parent / "quickstart" / "build"
BATCH = 64
LAYERS = 4  # those of the policy, and two more
MAX_ANSWER = 12  # tokens, as --rollout-max-response-len


def wrong_answer(label: str, alphabet: str, rng: random.Random) -> tuple[str, bool]:
    """An answer that is not ``label``, in one of the ways in which a policy errs, and whether it ends."""
    letters, place = list(label), rng.randrange(len(label))
    if rng.random() < 0.1:  # it runs on, or stops in mid-answer
        return (label + "".join(rng.choices(alphabet, k=MAX_ANSWER)))[:MAX_ANSWER], False
    for _ in range(rng.choice((1, 1, 2, 3))):
        place = rng.randrange(len(letters))
        kind = rng.choice(("replace", "swap", "drop", "double"))
        if kind == "replace":
            letters[place] = rng.choice(alphabet)
        elif kind == "swap":
            other = rng.randrange(len(letters))
            letters[place], letters[other] = letters[other], letters[place]
        elif kind == "drop" and len(letters) > 1:
            del letters[place]
        else:
            letters.insert(place, letters[place])
    answer = "".join(letters)[:MAX_ANSWER]
    return (answer, True) if answer != label else wrong_answer(label, alphabet, rng)


def make_row(
    row: dict[str, Any], right: bool, alphabet: str, tokenizer: Any, rng: random.Random
) -> tuple[list[int], list[float]]:
    """Token ids of a prompt with a right or a wrong answer, and for each token of the answer the share that is right so
    far; -1 in the prompt."""
    answer, ends = (row["label"], True) if right else wrong_answer(row["label"], alphabet, rng)
    eos = [tokenizer.eos_token_id]
    prompt, label = tokenizer.encode(row["prompt"]), tokenizer.encode(row["label"]) + eos
    tokens = tokenizer.encode(answer) + eos * ends
    right_tokens = [place < len(label) and token == label[place] for place, token in enumerate(tokens)]
    shares = [sum(right_tokens[:end]) / end for end in range(1, len(tokens) + 1)]
    return prompt + tokens, [-1.0] * len(prompt) + shares


def fit(policy: Path, data: Path, out: Path, *, steps: int, seed: int = 0) -> float:
    """Fit a classifier to the words of the file ``data`` and write it to ``out``. Returns how far its shares of whole
    answers were from the rule's, on average over the last 20 batches, each before it was trained on.

    As a reward model it is asked at the last token of an answer; it is trained at every one."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(seed)
    rng = random.Random(seed)
    tokenizer: Any = AutoTokenizer.from_pretrained(policy)
    sizes = {"num_hidden_layers": LAYERS, "layer_types": ["full_attention"] * LAYERS}
    model: Any = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1, **sizes)
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    alphabet = "".join(sorted({letter for row in rows for letter in row["prompt"] + row["label"]}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps, pct_start=0.1)
    errors: list[float] = []
    for _ in range(steps):
        batch = [make_row(rng.choice(rows), bool(number % 2), alphabet, tokenizer, rng) for number in range(BATCH)]
        ids, mask, wanted = (
            torch.nn.utils.rnn.pad_sequence([torch.tensor(line) for line in lines], True, fill)
            for lines, fill in (
                ([tokens for tokens, _ in batch], tokenizer.pad_token_id),
                ([[1] * len(tokens) for tokens, _ in batch], 0),
                ([labels for _, labels in batch], -1.0),
            )
        )
        logits = model.score(model.model(input_ids=ids, attention_mask=mask).last_hidden_state)[..., 0]
        answered = wanted >= 0
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits[answered], wanted[answered])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        row, last = torch.arange(BATCH), mask.sum(-1) - 1
        errors.append(float((logits[row, last].sigmoid() - wanted[row, last]).detach().abs().mean()))
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return sum(errors[-20:]) / len(errors[-20:])


def main() -> None:
    """Read the flags, fit the classifier and say how good it is."""
    parser = argparse.ArgumentParser(description="fit a reward model for the quickstart's task")
    parser.add_argument("--policy", type=Path, default=QUICKSTART / "sft" / "hf", help="the model to start from")
    parser.add_argument("--data", type=Path, default=QUICKSTART / "data" / "train.jsonl", help="words and answers")
    parser.add_argument("--out", type=Path, default=HERE / "build" / "model", help="folder of the reward model")
    parser.add_argument("--steps", type=int, default=600, help=f"batches of {BATCH} answers")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    error = fit(flags.policy, flags.data, flags.out, steps=flags.steps, seed=flags.seed)
    print(f"reward model: {error:.3f} from the share of right tokens, on average   {flags.out}")


if __name__ == "__main__":
    main()
