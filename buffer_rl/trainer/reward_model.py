"""The processes of the reward model (``--rm-model``): a sequence classifier that scores prompts with their responses.

Who waits for whom: rollout workers wait for ``score``. A process waits for nothing; it holds no state that cannot be
loaded again, so Ray starts it again when it dies, and its callers repeat the calls that it had not answered.

Calls that wait while a forward pass is under way share the next one, up to ``--max-tokens-per-gpu`` tokens, padding
included. Rows are padded on the right under an attention mask, so the score of a row is the same alone and in any
batch, but for rounding; with ``--deterministic`` no forward pass has rows of two calls, and it is the same to the bit.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from buffer_rl.args import Args
from buffer_rl.cluster.actor_group import ActorGroup, redirect_output
from buffer_rl.cluster.calling import JoinedCalls
from buffer_rl.cluster.hangs import ReplacementWatch
from buffer_rl.cluster.member import Member
from buffer_rl.cluster.placement import Placement
from buffer_rl.errors import ConfigError, WorkerDiedError
from buffer_rl.options.section import dump_args, load_args, required
from buffer_rl.rollout.reward_model_client import FLAG, ROLE

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class RewardModel:
    """A sequence classifier with one label. device: where it computes, in float32."""

    def __init__(self, folder: str, device: torch.device, *, trust_remote_code: bool = False) -> None:
        from transformers import AutoModelForSequenceClassification

        from buffer_rl.trainer.pretrained import load_pretrained

        self._device = device
        self._model: PreTrainedModel = load_pretrained(
            AutoModelForSequenceClassification,
            "sequence classifier",
            folder,
            device,
            FLAG,
            trust_remote_code=trust_remote_code,
        ).requires_grad_(False)
        config = self._model.config
        if config.num_labels != 1:
            raise ConfigError(f"{folder} has {config.num_labels} labels", where=FLAG, expected="one, the reward")
        config.use_cache = False
        # A head finds a row's last token by what is not padding; without a padding token it takes one row at a time.
        self._pad: int | None = config.get_text_config().pad_token_id

    def scores(self, rows: Sequence[np.ndarray], max_tokens: int) -> list[float]:
        """The logit of each row of token ids, ``[num_tokens]`` int, at least one. max_tokens: of one forward pass,
        padding included; a longer row has a pass of its own."""
        from buffer_rl.trainer.collate import micro_batches

        found = [0.0] * len(rows)
        lengths = [len(row) for row in rows]
        for indices in micro_batches(lengths, 1 if self._pad is None else max_tokens):
            logits = self._logits([rows[index] for index in indices])
            for index, logit in zip(indices, logits, strict=True):
                found[index] = logit
        return found

    def _logits(self, rows: Sequence[np.ndarray]) -> list[float]:
        import torch
        from torch.nn.utils.rnn import pad_sequence

        tokens = [torch.tensor(row, dtype=torch.int64) for row in rows]
        ids_bl = pad_sequence(tokens, batch_first=True, padding_value=self._pad or 0)
        mask_bl = pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True)
        with torch.no_grad():
            output = self._model(input_ids=ids_bl.to(self._device), attention_mask=mask_bl.to(self._device))
        logits: list[float] = output.logits.float().reshape(len(rows)).tolist()
        return logits


class RewardModelWorker(Member):
    """One process of the role ``reward``: an asynchronous actor, whose forward passes have a thread of their own."""

    def __init__(self, args_text: str, log_path: str = "") -> None:
        if log_path:
            redirect_output(log_path)
        self._args = load_args(args_text)
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._calls = JoinedCalls(self._score_all, self._num_together)

    async def ready(self) -> None:
        """Answers once the model is loaded. Raises ConfigError if it cannot be."""
        await self._in_thread(lambda: self._model)

    async def pid(self) -> int:
        """The process, at once, also during a forward pass."""
        return os.getpid()

    async def score(self, rows: Sequence[np.ndarray]) -> list[float]:
        """The score of each row of token ids, ``[num_tokens]`` int, at least one; it may be no finite number."""
        scores: list[float] = await self._calls.make(rows)
        return scores

    async def _score_all(self, calls: list[Sequence[np.ndarray]]) -> list[list[float]]:
        scores = iter(await self._in_thread(partial(self._scores, [row for rows in calls for row in rows])))
        return [list(islice(scores, len(rows))) for rows in calls]

    def _num_together(self, calls: Sequence[Sequence[np.ndarray]]) -> int:
        """The first calls that one forward pass takes, at least one."""
        num_rows = longest = 0
        for number, rows in enumerate(calls):
            num_rows, longest = num_rows + len(rows), max([longest, *map(len, rows)])
            if number and (self._args.deterministic or num_rows * longest > self._args.max_tokens_per_gpu):
                return number
        return len(calls)

    def _scores(self, rows: Sequence[np.ndarray]) -> list[float]:
        return self._model.scores(rows, self._args.max_tokens_per_gpu)

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    @cached_property
    def _model(self) -> RewardModel:
        """Loaded in a call, not with the actor, for Ray keeps a constructor's error as text alone."""
        args = self._args
        from buffer_rl.trainer.pretrained import pick_device, prepare_torch

        prepare_torch(args, args.seed)
        folder = required(args.rm_model, "rm_model")
        return RewardModel(folder, pick_device(args.train_device), trust_remote_code=args.trust_remote_code)


def start_reward_model(args: Args, log_dir: str, placement: Placement) -> ActorGroup:
    """Start the processes of the reward model; each has it loaded once ``ready`` is answered."""
    text = dump_args(args)
    return ActorGroup.of(
        ROLE,
        RewardModelWorker,
        lambda index: (text, f"{log_dir}/reward_{index}.log"),
        args.num_reward_workers,
        options=lambda index: {**placement.options(ROLE, index), "max_restarts": args.role_max_restarts},
    )


def watch_reward_model(group: ActorGroup, max_deaths: int, notice: Callable[[str], None]) -> ReplacementWatch[int]:
    """A watcher of the driver: calls ``notice`` with a line when a process of ``group`` was replaced. Raises
    WorkerDiedError once there were more deaths than ``max_deaths``, or if a process is not started again."""
    deaths = 0

    def gone(index: int, error: Exception | None = None) -> None:
        what = f"process {index} of the reward model died; {deaths + (error is not None)} deaths of the role in all"
        hint = f"logs/reward_{index}.log has what it printed; --role-max-restarts says how often one is replaced"
        raise WorkerDiedError(what, where=ROLE, hint=hint) from error

    def replaced(index: int, pid: int) -> None:
        nonlocal deaths
        deaths += 1
        how = "hung" if group.hung.pop(group.name_of(index), "") else "died"
        if deaths > max_deaths:
            gone(index)
        text = f"process {index} of the reward model {how} and was replaced"
        notice(f"{text} ({deaths} of {max_deaths}; process {pid})")

    return ReplacementWatch(group.actors, RewardModelWorker.pid, replaced=replaced, gone=gone)
