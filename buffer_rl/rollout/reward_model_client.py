"""The rollout worker's side of the reward model (``--rm-model``): samples as its token ids, calls on its processes.

Where every token of the policy's tokenizer has the same id in the reward model's, a sample's own tokens are scored.
Else its text is: as a conversation under the reward model's chat template, where the prompt is a list of messages and
there is one, else as one text.

Ray starts a process that died again, and calls that it had not answered are repeated: a score is a function of the row
alone, so nothing changes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from buffer_rl.args import Args
from buffer_rl.cluster.calling import Answers
from buffer_rl.files.hf_config import length_problem, max_positions, vocab_size
from buffer_rl.options.section import required
from buffer_rl.records.groups import Sample
from buffer_rl.rollout.failures import FailureKind
from buffer_rl.rollout.prompts import load_tokenizer
from buffer_rl.rollout.reward_pool import Outcome

ROLE = "reward"
FLAG = "--rm-model"


class RewardRows:
    """Token ids of the reward model for a sample. tokenizer: the policy's, of whose tokens samples are.

    shares_tokens: whether the samples' own tokens are scored. Raises RolloutError if the folder has no tokenizer."""

    def __init__(self, args: Args, tokenizer: Any) -> None:
        self._policy = tokenizer
        folder = required(args.rm_model, "rm_model")
        self._own = load_tokenizer(folder, FLAG, trust_remote_code=args.trust_remote_code)
        self.shares_tokens = tokenizer.get_vocab().items() <= self._own.get_vocab().items()
        config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
        steady = length_problem(config, None)
        limits = [max_positions(config), self._own.model_max_length, steady[1] if steady else None]
        self._longest = min(limit for limit in limits if limit is not None)
        self._vocabulary = vocab_size(config)

    def encode(self, sample: Sample) -> np.ndarray | Outcome:
        """``[num_tokens]`` int32 of prompt and response, at least one; or why the model cannot score them."""
        try:
            row = np.asarray(self._tokens(sample), dtype=np.int32)
        except Exception as error:  # fault boundary: chat templates raise whatever their authors raise
            return Outcome(kind=FailureKind.EXCEPTION, text=f"{type(error).__name__}: {error}")
        if not 0 < len(row) <= self._longest:
            expected = f"1 to {self._longest} tokens, which is what the reward model takes"
            return Outcome(kind=FailureKind.INVALID, text=f"the sample has {len(row)} tokens", expected=expected)
        if self._vocabulary is not None and (largest := int(row.max())) >= self._vocabulary:
            text = f"the token {largest} is not in the vocabulary of the reward model"
            return Outcome(kind=FailureKind.INVALID, text=text, expected=f"token ids below {self._vocabulary}")
        return row

    def _tokens(self, sample: Sample) -> Any:
        if self.shares_tokens:
            return sample.tokens
        if isinstance(sample.prompt, str) or not self._own.chat_template:
            text = self._policy.decode(sample.tokens, skip_special_tokens=True)
            return self._own(text)["input_ids"]
        turns = [*sample.prompt, {"role": "assistant", "content": sample.response}]
        rendered = self._own.apply_chat_template(turns, tokenize=False)
        return self._own(rendered, add_special_tokens=False)["input_ids"]


class RewardModelClient:
    """Asks the processes of the reward model for rewards. Belongs to one event loop of a rollout worker.

    num_asked: rows that each process was asked for and did not answer yet; a call goes to the one with the fewest.
    Raises DeadlineError after ``--rm-model-timeout-s``, WorkerDiedError once a process is not started again,
    WorkerError or ConfigError if the model fails.
    """

    def __init__(self, args: Args, tokenizer: Any, actors: Sequence[Any]) -> None:
        self._rows = RewardRows(args, tokenizer)
        self._actors = list(actors)
        who, flag = "the reward model", "--rm-model-timeout-s"
        self._answers = Answers(who=who, role=ROLE, timeout_s=args.rm_model_timeout_s, flag=flag)
        self.num_asked = [0] * len(self._actors)

    async def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """One outcome for each sample, in order; a score that is no finite number is one, too."""
        encoded = [self._rows.encode(sample) for sample in samples]
        rows = [row for row in encoded if not isinstance(row, Outcome)]
        scores = iter(await self._ask(rows) if rows else ())
        return [row if isinstance(row, Outcome) else Outcome(value=next(scores)) for row in encoded]

    async def _ask(self, rows: Sequence[np.ndarray]) -> list[float]:
        index = min(range(len(self._actors)), key=self.num_asked.__getitem__)
        self.num_asked[index] += len(rows)
        try:
            scores: list[float] = await self._answers.until("score", partial(self._actors[index].score.remote, rows))
            return scores
        finally:
            self.num_asked[index] -= len(rows)
