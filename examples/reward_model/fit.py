"""Fits a reward model for the quickstart's task on the spot: a classifier that starts from the warmed-up policy, learns
the task from right answers, and then with what share of the right one an answer begins, from the policy's own answers.

    python examples/reward_model/fit.py [--policy FOLDER] [--output FOLDER] [--steps N] [--seed N]

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
SHOWN = 100  # steps between two lines of progress
LAYERS = 4  # those of the policy, and two more
SIZES = {"num_hidden_layers": LAYERS, "layer_types": ["full_attention"] * LAYERS}
MAX_ANSWER = 12  # tokens, as --rollout-max-response-len


def shares_right(label: list[int], answer: list[int]) -> list[float]:
    """For each token of an answer, what share of the label the answer has begun with by then."""
    right = 0
    shares = []
    for place, token in enumerate(answer):
        right += right == place < len(label) and token == label[place]
        shares.append(right / len(label))
    return shares


def padded(lines: list[list[Any]], fill: float) -> Any:
    """Lines of numbers as one tensor, ``fill`` behind the shorter ones."""
    import torch

    return torch.nn.utils.rnn.pad_sequence([torch.tensor(line) for line in lines], True, fill)


def optimizer_steps(what: str, model: Any, steps: int, peak: float, loss_of_batch: Any) -> None:
    """AdamW on ``loss_of_batch()``, with a learning rate that rises to ``peak`` and falls to 0. what: is learned."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=peak)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=peak, total_steps=steps, pct_start=0.1)
    for step in range(1, steps + 1):
        loss = loss_of_batch()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % SHOWN == 0 or step == steps:
            print(f"{what}: step {step}/{steps}  loss {loss.item():.4f}", flush=True)


def learn_task(policy: Path, draw: Any, steps: int) -> Any:
    """The policy with two layers more, after ``steps`` batches of right answers: who judges has to know better."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(policy, **SIZES)

    def loss() -> Any:
        rows = draw(2 * BATCH)
        ids = padded([prompt + label for prompt, label in rows], 0)
        wanted = padded([[-100] * len(prompt) + label for prompt, label in rows], -100)
        logits = model(input_ids=ids).logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted[:, 1:].flatten(), ignore_index=-100)

    optimizer_steps("the task", model, steps, 2e-3, loss)
    return model


def sampled(policy: Any, prompts: list[list[int]], pad: int, eos: int) -> list[list[int]]:
    """An answer of the policy to each prompt, up to its end token."""
    import torch

    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.no_grad():
        found = policy.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=MAX_ANSWER, pad_token_id=pad
        )
    answers = found[:, width:].tolist()
    return [answer[: answer.index(eos) + 1] if eos in answer else answer for answer in answers]


def fit(policy: Path, data: Path, out: Path, *, steps: int, seed: int = 0) -> float:
    """Fit a classifier to the words of the file ``data`` and write it to ``out``. Returns how far its shares of whole
    answers were from the rule's, on average over the last 20 batches, each before it was trained on.

    As a reward model it is asked at the last token of an answer; it is trained at every one."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, logging

    logging.set_verbosity_error()  # it reports the two new layers as missing, and they are made here
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tokenizer: Any = AutoTokenizer.from_pretrained(policy)
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    rows = [json.loads(line) for line in data.read_bytes().split(b"\n") if line]

    def draw(count: int) -> list[tuple[list[int], list[int]]]:
        chosen = [rng.choice(rows) for _ in range(count)]
        return [(tokenizer.encode(row["prompt"]), [*tokenizer.encode(row["label"]), eos]) for row in chosen]

    sampler: Any = AutoModelForCausalLM.from_pretrained(policy)
    model: Any = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1, **SIZES)
    model.model.load_state_dict(learn_task(policy, draw, steps).model.state_dict())
    errors: list[float] = []

    def loss() -> Any:
        batch = draw(BATCH)
        answers = sampled(sampler, [prompt for prompt, _ in batch], pad, eos)
        answers[::4] = [label for _, label in batch[::4]]  # a quarter is right
        triples = [(prompt, label, answer) for (prompt, label), answer in zip(batch, answers, strict=True)]
        ids = padded([prompt + answer for prompt, _, answer in triples], pad)
        mask = padded([[1] * len(prompt + answer) for prompt, _, answer in triples], 0)
        wanted = padded([[-1.0] * len(prompt) + shares_right(label, answer) for prompt, label, answer in triples], -1.0)
        logits = model.score(model.model(input_ids=ids, attention_mask=mask).last_hidden_state)[..., 0]
        row, last = torch.arange(BATCH), mask.sum(-1) - 1
        errors.append(float((logits[row, last].sigmoid() - wanted[row, last]).detach().abs().mean()))
        answered = wanted >= 0
        return torch.nn.functional.binary_cross_entropy_with_logits(logits[answered], wanted[answered])

    optimizer_steps("the scores", model, steps, 1e-3, loss)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return sum(errors[-20:]) / len(errors[-20:])


def main() -> None:
    """Read the flags, fit the classifier and say how good it is."""
    parser = argparse.ArgumentParser(description="fit a reward model for the quickstart's task")
    parser.add_argument("--policy", type=Path, default=QUICKSTART / "sft" / "hf", help="the model to start from")
    parser.add_argument("--data", type=Path, default=QUICKSTART / "data" / "train.jsonl", help="words and answers")
    parser.add_argument("--output", type=Path, default=HERE / "build" / "model", help="folder of the reward model")
    parser.add_argument("--steps", type=int, default=600, help="batches of right answers, and as many of the policy's")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    error = fit(flags.policy, flags.data, flags.output, steps=flags.steps, seed=flags.seed)
    print(f"reward model: {error:.3f} from the share of right tokens, on average   {flags.output}")


if __name__ == "__main__":
    main()
