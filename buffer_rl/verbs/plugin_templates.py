"""The plugins that ``buffer-rl plugins new`` writes: for each kind a working one, called ``my_KIND`` or ``MyKind``.

Each is copied with the imports that it needs, and its name is exchanged. Its test is in ``plugin_template_tests``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from buffer_rl.kinds.engine import EngineProcess
from buffer_rl.kinds.marks import loss_unit, scoped
from buffer_rl.kinds.objective import Objective
from buffer_rl.kinds.rollout import RolloutBuffer
from buffer_rl.kinds.token_loss import LossInputs, Metric, TokenLoss
from buffer_rl.plan.roles import Role
from buffer_rl.records.groups import (
    Column,
    FilterDecision,
    GroupUid,
    QueueHeader,
    RolloutOutput,
    Sample,
    SampleGroup,
    TrainBatch,
)
from buffer_rl.rollout.default import DefaultRollout
from buffer_rl.rollout.generate import generate
from buffer_rl.train.converter import NameMap
from buffer_rl.train.torch_trainer import TorchTrainer
from buffer_rl.weights.disk import DiskTransport


async def my_rollout(args: Any, rollout_id: int, buffer: RolloutBuffer, evaluation: bool = False) -> RolloutOutput:
    """The built-in rollout with one metric more.

    One of your own leases buffer.ticket.num_groups groups with buffer.aget_samples, fills them, and reports each with
    buffer.afinish or buffer.areject, or returns them in RolloutOutput(groups=[...]).
    """
    output = await DefaultRollout(args)(args, rollout_id, buffer, evaluation)
    output.metrics["my_metric"] = float(rollout_id)
    return output


async def my_generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample | list[Sample]:
    """The built-in generation at half the temperature. A tool call or a second turn would stand behind it."""
    return await generate(args, sample, sampling_params | {"temperature": sampling_params["temperature"] / 2})


def my_reward(args: Any, sample: Sample) -> float:
    """1 if the response is the label, else 0. Any finite number will do; "async def" works too."""
    return float(sample.response.strip() == str(sample.label))


def my_group_reward(args: Any, group: SampleGroup) -> list[float]:
    """One reward a sample, in order: 1 for the label, shared by all samples that have it."""
    hits = [sample.response.strip() == str(sample.label) for sample in group]
    return [hit / max(1, sum(hits)) for hit in hits]


def my_filter(args: Any, group: SampleGroup) -> FilterDecision:
    """Keep a group whose rewards differ."""
    rewards = {sample.get_reward_value(args) for sample in group}
    return FilterDecision(keep=len(rewards) > 1, reason="" if len(rewards) > 1 else "all_alike")


def my_sample_filter(args: Any, groups: list[SampleGroup]) -> None:
    """Keep empty responses out of the loss."""
    for group in groups:
        for sample in group:
            sample.remove_sample = sample.remove_sample or not sample.response


def my_all_samples_process(args: Any, groups: list[SampleGroup]) -> None:
    """Note how many samples were generated for each prompt. Kept groups are trained on as this function leaves them."""
    for group in groups:
        for sample in group:
            sample.metadata["group_size"] = len(group)


def my_rollout_log(
    rollout_id: int, args: Any, samples: list[Sample], rollout_extra_metrics: dict[str, float], rollout_time: float
) -> bool:
    """Log one number more. True would say that nothing is left to log."""
    rollout_extra_metrics["rollout/empty_responses"] = sum(not sample.response for sample in samples) / len(samples)
    return False


def my_eval_rollout_log(
    rollout_id: int, args: Any, data: dict[str, dict[str, list[Any]]], extra_metrics: dict[str, float]
) -> bool:
    """Log the best reward of each evaluation set. True would say that nothing is left to log."""
    for name, answers in data.items():
        extra_metrics[f"eval/{name}/best"] = max(answers["rewards"])
    return False


def my_buffer_filter(args: Any, rollout_id: int, buffer: list[QueueHeader], num_samples: int) -> list[QueueHeader]:
    """The queued groups to lease next: those with the fewest attempts, then the oldest."""
    return sorted(buffer, key=lambda header: (header.attempts, header.admitted))[:num_samples]


def my_reward_post_process(args: Any, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """The raw rewards of one group, and those to train on: centred at the mean."""
    raw = [sample.get_reward_value(args) for sample in samples]
    mean = sum(raw) / len(raw)
    return raw, [reward - mean for reward in raw]


def my_samples_to_train_data(args: Any, samples: list[Sample]) -> dict[str, Column]:
    """The training columns of one group, one row a sample; see buffer_rl.records.groups.TrainBatch."""
    rewards = np.asarray([sample.get_reward_value(args) for sample in samples], dtype=np.float32)
    return {
        "tokens": [np.asarray(sample.tokens, dtype=np.int32) for sample in samples],
        "response_length": np.asarray([sample.response_length for sample in samples], dtype=np.int32),
        "loss_mask": [np.ones(sample.response_length, dtype=np.float32) for sample in samples],
        "raw_reward": rewards,
        "reward": rewards - rewards.mean(),
    }


@scoped("row")  # each row by itself; "group" if it compares the rows of a prompt (batch.row_ids[i].uid)
def my_advantage(args: Any, batch: TrainBatch) -> None:
    """Every response token gets its row's reward, as advantage and as return."""
    rows = zip(batch.columns["reward"], batch.columns["response_length"], strict=True)
    values = [np.full(length, reward, dtype=np.float32) for reward, length in rows]
    batch.columns["advantages"] = values
    batch.columns["returns"] = values


@loss_unit("token")  # "row" if it sums over a row's tokens, "group" if it compares the rows of a prompt
def my_loss(args: Any, inputs: LossInputs) -> TokenLoss:
    """The policy gradient without clipping: a number for each response token, [num_rows, max_response]. The framework
    masks and weighs them, and divides their sum, as --loss-agg-mode says."""
    values = -inputs.advantages * inputs.log_probs
    return TokenLoss(values, metrics={"largest_loss": Metric(values, "max")})


@loss_unit("token")  # "row" if it reads all tokens of a row
def my_correction(args: Any, inputs: LossInputs) -> Any:
    """Importance weights from the engine's to the trainer's policy, at most 2: [num_rows, max_response]. The values of
    the loss are multiplied by them."""
    return (inputs.old_log_probs - inputs.rollout_log_probs).exp().clamp(max=2)


class MyDataSource:
    """Ten prompts over and over. A group's uid is its source, its row there, and the epoch."""

    def __init__(self, args: Any) -> None:
        self._num_samples: int = args.n_samples_per_prompt
        self._next = 0

    def __len__(self) -> int:
        return 10

    def get_samples(self, num_samples: int) -> list[SampleGroup]:
        """The next num_samples groups."""
        return [self._make(self._advance()) for _ in range(num_samples)]

    def save(self, path: str) -> None:
        """Write the state, so that a resumed run goes on with the same groups."""
        Path(path).write_text(json.dumps({"next": self._next}), encoding="utf-8")

    def load(self, path: str) -> None:
        """The inverse of save."""
        self._next = json.loads(Path(path).read_text(encoding="utf-8"))["next"]

    def _advance(self) -> GroupUid:
        epoch, row = divmod(self._next, len(self))
        self._next += 1
        return GroupUid("MyDataSource", row, epoch)

    def _make(self, uid: GroupUid) -> SampleGroup:
        samples = [
            Sample(uid=uid, sample_index=i, prompt=f"{uid.row}+1=", label=str(uid.row + 1))
            for i in range(self._num_samples)
        ]
        return SampleGroup(uid=uid, samples=samples)


class MyConverter(NameMap):
    """The trainer's names are Hugging Face's, as with the built-in model. Rename, reshape and split tensors here.

    To join several tensors into one write load and export; see docs/plugins.md.
    """

    def to_trainer(self, name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
        """One tensor of the folder as any number of the trainer's."""
        yield name, tensor

    def to_hf(self, name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
        """The inverse."""
        yield name, tensor


def my_model_provider(args: Any) -> Any:
    """The model of --hf-checkpoint, as transformers loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(args.hf_checkpoint)


class MyTrainer(TorchTrainer):
    """The built-in trainer with one metric more; see buffer_rl.kinds.trainer.Trainer for all that can be replaced."""

    def __init__(self, args: Any, rank: int, world_size: int, objective: Objective) -> None:
        super().__init__(args, rank, world_size, objective)

    def optimizer_step(self, scale: float) -> dict[str, float]:
        """Step, and say something about it."""
        return {**super().optimizer_step(scale), "my_metric": 1.0}


class MyRole:
    """Adds ``tail`` ``[num_rows]`` to finished groups, which a loss reads as inputs["tail"]: how far a response goes on
    after the shortest one of the batch, in tokens."""

    role = Role(name="my_role", fields=("tail",))

    def __init__(self, args: Any) -> None:
        self._args = args

    def compute(self, batch: TrainBatch) -> Mapping[str, Column]:
        """The fields of the role for whole groups."""
        lengths = np.asarray(batch.columns["response_length"], dtype=np.float32)
        return {"tail": lengths - lengths.min()}


def my_engine(args: Any, index: int, log_path: str) -> EngineProcess:
    """The embedded engine, started by this function. Anything with url, wait_ready and stop may be returned."""
    from buffer_rl.embedded.launcher import launch

    return launch(args, index, log_path)


class MyWeightTransport(DiskTransport):
    """The transport by disk, with a line for each version. Its side in the trainer's ranks is the class ``sender``."""

    def prepare(self, version: int) -> None:
        """Bring the version to where the engines can take it."""
        print(f"publishing version {version}")
        super().prepare(version)


class MyLogger:
    """Writes a line for each step into --run-dir."""

    def __init__(self, args: Any, run_dir: str) -> None:
        self._file = (Path(run_dir) / "my_log.txt").open("a", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """metrics: flat numbers by name."""
        print(step, dict(metrics), file=self._file, flush=True)

    def close(self) -> None:
        """Called once, at the end of the run."""
        self._file.close()
