"""On-policy distillation: what a teacher adds to advantages, and that every schedule and role adds the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from buffer_rl.errors import DataError, PluginError, TrainError
from buffer_rl.options.section import Options
from buffer_rl.plan.roles import ADVANTAGE_FIELDS, SAMPLED_FIELDS
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import GroupUid, RowId, TrainBatch
from buffer_rl.testing.tiny import make_tiny_model
from buffer_rl.trainer.role_model import RoleModel
from buffer_rl.trainer.role_worker import RoleWorker
from buffer_rl.trainer.stream import Stage, gradient_stage
from harness.losses import objective_of, outcome, rows_of
from harness.trainers import make_trainer

CHARACTERS = "abcdefghijklmnopqrstuvwxyz="
POLICY = [[-1.0, -5.0, -3.0], [-2.0]]
TEACHER = [[-2.0, np.inf, -1.0], [-0.5]]
"""log pi - log teacher: 1, (masked), -2; -1.5."""


def rows(**more: Any) -> TrainBatch:
    columns = {"loss_mask": [[1.0, 0.0, 1.0], [1.0]], "reward": [2.0, -4.0]}
    return rows_of(**columns, old_log_probs=POLICY, teacher_log_probs=TEACHER, **more)


def lists(column: Any) -> list[list[float]]:
    return [row.tolist() for row in column]


def test_the_log_ratio_to_the_teacher_is_subtracted_from_the_advantages_of_unmasked_tokens() -> None:
    batch = rows()
    objective_of(use_opd=True, opd_kl_coef=0.5).compute_advantages(batch)
    # 2 - 0.5 * 1, 2 (masked), 2 - 0.5 * -2; -4 - 0.5 * -1.5
    assert lists(batch.columns["advantages"]) == [[1.5, 2.0, 3.0], [-3.25]]
    assert lists(batch.columns["returns"]) == [[2.0, 2.0, 2.0], [-4.0]]
    assert lists(batch.columns["opd_reverse_kl"]) == [[1.0, 0.0, -2.0], [-1.5]]
    assert all(row.dtype == np.float32 for row in batch.columns["advantages"])


def test_without_a_reward_the_advantages_are_the_negative_log_ratio() -> None:
    batch = rows()
    batch.columns["reward"] = np.zeros(2, dtype=np.float32)
    objective_of(use_opd=True).compute_advantages(batch)
    assert lists(batch.columns["advantages"]) == [[-1.0, 0.0, 2.0], [1.5]]


def test_the_policy_is_the_engine_where_the_loss_takes_its_ratio_to_it() -> None:
    batch = rows(rollout_log_probs=[[-4.0, 0.0, -1.0], [-0.5]])  # log-ratios -2, (masked), 0; 0
    objective_of(use_opd=True, use_rollout_logprobs=True).compute_advantages(batch)
    assert lists(batch.columns["advantages"]) == [[4.0, 2.0, 2.0], [-4.0]]


def test_advantages_are_normalised_with_the_teachers_part() -> None:
    batch = rows()
    objective_of(use_opd=True, normalize_advantages=True).compute_advantages(batch)
    # Before: 1, (masked), 4; -2.5: mean 2.5 / 3, deviation with divisor 2.
    unmasked = np.array([1.0, 4.0, -2.5])
    first, masked, third, other = np.concatenate(batch.columns["advantages"])
    assert [first, third, other] == pytest.approx(((unmasked - unmasked.mean()) / unmasked.std(ddof=1)).tolist())
    assert masked == 0


def test_the_mean_over_tokens_of_the_log_ratio_is_a_metric() -> None:
    batch, objective = rows(), objective_of(use_opd=True)
    objective.compute_advantages(batch)
    found = outcome(objective, batch, POLICY)
    assert found.means["opd_reverse_kl"] == pytest.approx((1 - 2 - 1.5) / 3)
    # The ratio of the loss is 1: its gradient is minus the advantage, divided by the three unmasked tokens.
    gradients = [row.tolist() for row in found.log_prob_gradients]
    assert gradients == [pytest.approx([-1 / 3, 0, -4 / 3]), pytest.approx([2.5 / 3])]


def test_a_missing_column_and_advantages_of_a_converter_are_named() -> None:
    objective = objective_of(use_opd=True)
    absent = rows()
    del absent.columns["teacher_log_probs"]
    with pytest.raises(PluginError, match=r"the column 'teacher_log_probs'(.|\n)*--opd-teacher-load"):
        objective.compute_advantages(absent)
    with pytest.raises(DataError, match="--use-opd does not change"):
        objective.compute_advantages(rows(advantages=[[0.0, 0.0, 0.0], [0.0]]))
    short = rows()
    short.columns["teacher_log_probs"] = [np.zeros(2), np.zeros(1)]
    with pytest.raises(DataError, match="teacher_log_probs has the shape"):
        objective.compute_advantages(short)


# -- with models -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another architecture than the student's, with the same characters."""
    folder = tmp_path_factory.mktemp("teacher")
    return make_tiny_model(folder, "llama", characters=CHARACTERS, init_scale=0.3, seed=7)


@pytest.fixture
def options(make_args: Callable[..., Options], teacher: str) -> Callable[..., Options]:
    def make(**changes: Any) -> Options:
        return make_args(**{"use_opd": True, "opd_teacher_load": teacher, "deterministic": True, **changes})

    return make


def role(args: Options, name: str) -> Stage:
    """The stage of a role's process, without the process."""
    worker: Any = object.__new__(RoleWorker)
    worker._args, worker._role, worker._registry = args, name, PluginRegistry.from_flags([])
    if name == "teacher":
        worker._model = RoleModel(args, worker._registry, name, 0)
    stage: Stage = worker._make_stage()
    return stage


def groups_of(batch: TrainBatch) -> list[TrainBatch]:
    """The rows as three groups, each a batch."""
    size = len(batch) // 3
    row_ids = [RowId(GroupUid("data", i // size, 0), i % size) for i in range(len(batch))]
    whole = replace(batch, row_ids=row_ids)
    return [whole.select(range(start, start + size)) for start in range(0, len(batch), size)]


def test_the_trainer_and_a_worker_compute_the_teachers_log_probabilities(
    options: Callable[..., Options], make_batch: Callable[..., TrainBatch], teacher: str
) -> None:
    args, batch = options(rollout_temperature=0.8), make_batch()
    found = make_trainer(args).log_probs("teacher", batch)
    (of_worker,) = role(args, "teacher").compute(batch).values()
    assert [row.tobytes() for row in found] == [row.tobytes() for row in of_worker]
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    for tokens, row in zip(batch.columns["tokens"], found, strict=True):
        ids = torch.tensor(tokens.tolist())
        with torch.no_grad():
            log_probs = (model(input_ids=ids[None]).logits[0] / 0.8).log_softmax(-1)
        each = log_probs[:-1].gather(-1, ids[1:, None])[:, 0]
        np.testing.assert_allclose(row, each[len(each) - len(row) :], atol=5e-5)


def test_every_schedule_and_role_ends_with_the_same_parameters(
    options: Callable[..., Options], make_batch: Callable[..., TrainBatch]
) -> None:
    args = options(use_rollout_logprobs=True)

    def weights(trainer: Any) -> list[bytes]:
        return [tensor.numpy().tobytes() for bucket in trainer.export() for tensor in bucket.values()]

    groups = groups_of(make_batch())
    whole = replace(make_batch(), row_ids=[row for group in groups for row in group.row_ids])
    lockstep = make_trainer(args)
    before = weights(lockstep)
    whole.columns["teacher_log_probs"] = lockstep.log_probs("teacher", whole)
    lockstep._objective.compute_advantages(whole)  # type: ignore[attr-defined]
    lockstep.accumulate(whole)
    lockstep.optimizer_step(1 / 30)

    def streamed(dedicated: bool) -> list[bytes]:
        roles = {"num_teacher_workers": 1, "num_advantage_workers": 1} if dedicated else {}
        trainer = make_trainer(options(use_rollout_logprobs=True, stream_gradients=True, **roles))
        models = {} if dedicated else {"teacher": partial(trainer.log_probs, "teacher")}
        fields = ADVANTAGE_FIELDS if dedicated else frozenset[str]()
        objective: Any = trainer._objective
        stage = gradient_stage("train", trainer, objective, models, fields, lambda *_: None)
        for group in groups_of(make_batch()):
            if dedicated:
                group.columns.update(role(trainer._args, "teacher").compute(group))
                advantages = role(trainer._args, "advantages")
                assert advantages.reads.fields == SAMPLED_FIELDS | {"teacher_log_probs"}
                group.columns.update(advantages.compute(group))
            stage.compute(group)
        trainer.optimizer_step(1 / 30)
        return weights(trainer)

    expected = weights(lockstep)
    assert expected != before
    assert streamed(dedicated=False) == expected
    assert streamed(dedicated=True) == expected


def test_distillation_draws_the_student_to_the_teacher(
    options: Callable[..., Options], make_batch: Callable[..., TrainBatch]
) -> None:
    """The expected gradient of one token is that of the reverse KL divergence, over the whole vocabulary."""
    args = options(deterministic=False)
    trainer = make_trainer(args)
    size = trainer._actor.config.vocab_size
    prompt = np.array([5, 9, 4], dtype=np.int32)
    rows = [np.append(prompt, token).astype(np.int32) for token in range(size)]
    batch = TrainBatch(
        rollout_id=0,
        task="train_0",
        row_ids=[RowId(GroupUid("data", 0, 0), i) for i in range(size)],
        columns={
            "tokens": rows,
            "response_length": np.ones(size, dtype=np.int32),
            "loss_mask": [np.ones(1, dtype=np.float32)] * size,
            "reward": np.zeros(size, dtype=np.float32),
        },
    )
    batch.columns["old_log_probs"] = trainer.log_probs("actor", batch)
    batch.columns["teacher_log_probs"] = trainer.log_probs("teacher", batch)
    trainer._objective.compute_advantages(batch)  # type: ignore[attr-defined]
    # Each token once, weighed by its probability: the expectation over the student's samples.
    shares = np.exp(np.concatenate(batch.columns["old_log_probs"]))
    batch.columns["advantages"] = [a * p for a, p in zip(batch.columns["advantages"], shares, strict=True)]
    trainer.accumulate(batch)
    found = {name: p.grad.clone() for name, p in trainer._actor.named_parameters() if p.grad is not None}

    trainer.zero_grad()
    ids = torch.tensor(prompt.tolist())[None]
    student = trainer._actor(input_ids=ids).logits[0, -1].log_softmax(-1)
    with torch.no_grad():
        other = trainer._named("teacher").module(input_ids=ids).logits[0, -1].log_softmax(-1)
    (student.exp() * (student - other)).sum().backward()
    for name, parameter in trainer._actor.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=5e-5, rtol=1e-4)


def test_a_token_that_the_teacher_does_not_know_is_named(
    make_args: Callable[..., Options], make_batch: Callable[..., TrainBatch], tmp_path: Path
) -> None:
    small = make_tiny_model(tmp_path, characters="abc")
    trainer = make_trainer(make_args(use_opd=True, opd_teacher_load=small))
    batch = make_batch()
    batch.columns["tokens"] = [np.minimum(row, 5) for row in batch.columns["tokens"]]
    trainer.log_probs("teacher", batch)
    batch.columns["kept_counts"] = [np.zeros(n, dtype=np.int32) for n in batch.columns["response_length"]]
    batch.columns["kept_tokens"] = [np.zeros(0, dtype=np.int32) for _ in batch.row_ids]
    token = batch.columns["tokens"][4][-1]
    batch.columns["kept_counts"][4][-1], batch.columns["kept_tokens"][4] = 2, np.array([token, 7], dtype=np.int32)
    with pytest.raises(TrainError, match="the token 7 is not in the vocabulary of"):  # it could have been drawn
        trainer.log_probs("teacher", batch)
    batch.columns["tokens"][4][0] = 6  # of ids 0 to 5
    with pytest.raises(TrainError, match=r"the token \d+ is not in the vocabulary of .*(.|\n)*ids below 6"):
        trainer.log_probs("teacher", batch.select([4]))
