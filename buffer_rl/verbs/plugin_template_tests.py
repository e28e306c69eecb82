"""The tests that ``buffer-rl plugins new`` writes beside its plugins: the bodies of these functions, line by line."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import numpy as np
import torch
from safetensors.torch import save_file

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.kinds.token_loss import LossInputs
from buffer_rl.options.section import compose
from buffer_rl.records.groups import GroupUid, QueueHeader, RowId, Sample, SampleGroup, TrainBatch
from buffer_rl.testing.lint import failures
from buffer_rl.testing.lint_estimator import lint_estimator
from buffer_rl.testing.lint_loss import lint_loss
from buffer_rl.train.torch_trainer import TorchTrainer
from buffer_rl.verbs.plugin_templates import (
    MyConverter,
    MyDataSource,
    MyLogger,
    MyRole,
    MyTrainer,
    MyWeightTransport,
    my_advantage,
    my_all_samples_process,
    my_buffer_filter,
    my_correction,
    my_engine,
    my_eval_rollout_log,
    my_filter,
    my_generate,
    my_group_reward,
    my_loss,
    my_model_provider,
    my_reward,
    my_reward_post_process,
    my_rollout,
    my_rollout_log,
    my_sample_filter,
    my_samples_to_train_data,
)
from buffer_rl.weights.disk import DiskTransport


# fmt: off
def test_my_rollout(tmp_path):
    assert list(inspect.signature(my_rollout).parameters) == ['args', 'rollout_id', 'buffer', 'evaluation']


def test_my_generate(tmp_path):
    assert list(inspect.signature(my_generate).parameters) == ['args', 'sample', 'sampling_params']


def test_my_reward(tmp_path):
    assert my_reward(None, Sample(response=" right", label="right")) == 1.0
    assert my_reward(None, Sample(label="right")) == 0.0


def test_my_group_reward(tmp_path):
    uid = GroupUid("data", 0, 0)
    samples = [Sample(uid=uid, sample_index=i, response="right", label="right", reward=float(i)) for i in range(2)]
    group = SampleGroup(uid=uid, samples=samples)
    assert my_group_reward(None, group) == [0.5, 0.5]


def test_my_filter(tmp_path):
    uid = GroupUid("data", 0, 0)
    samples = [Sample(uid=uid, sample_index=i, response="right", label="right", reward=float(i)) for i in range(2)]
    group = SampleGroup(uid=uid, samples=samples)
    assert my_filter(None, group).keep
    group[0].reward = 1.0
    assert not my_filter(None, group).keep


def test_my_sample_filter(tmp_path):
    uid = GroupUid("data", 0, 0)
    samples = [Sample(uid=uid, sample_index=i, response="right", label="right", reward=float(i)) for i in range(2)]
    group = SampleGroup(uid=uid, samples=samples)
    group[1].response = ""
    my_sample_filter(None, [group])
    assert [sample.remove_sample for sample in group] == [False, True]


def test_my_all_samples_process(tmp_path):
    uid = GroupUid("data", 0, 0)
    samples = [Sample(uid=uid, sample_index=i, response="right", label="right", reward=float(i)) for i in range(2)]
    group = SampleGroup(uid=uid, samples=samples)
    my_all_samples_process(None, [group])
    assert group[0].metadata == {'group_size': 2}


def test_my_rollout_log(tmp_path):
    uid = GroupUid("data", 0, 0)
    samples = [Sample(uid=uid, sample_index=i, response="right", label="right", reward=float(i)) for i in range(2)]
    group = SampleGroup(uid=uid, samples=samples)
    metrics = {"rollout/raw_reward": 0.5}
    group[0].response = ""
    assert my_rollout_log(0, None, group.samples, metrics, 1.0) is False
    assert metrics["rollout/empty_responses"] == 0.5


def test_my_eval_rollout_log(tmp_path):
    metrics = {}
    assert my_eval_rollout_log(0, None, {"dev": {"rewards": [0.0, 1.0]}}, metrics) is False
    assert metrics == {"eval/dev/best": 1.0}


def test_my_buffer_filter(tmp_path):
    attempts = [2, 0, 1]
    queue = [
        QueueHeader(uid=GroupUid("data", i, 0), admitted=i, prompt_length=1, attempts=n) for i, n in enumerate(attempts)
    ]
    assert [header.admitted for header in my_buffer_filter(None, 0, queue, 2)] == [1, 2]


def test_my_reward_post_process(tmp_path):
    uid = GroupUid("data", 0, 0)
    samples = [Sample(uid=uid, sample_index=i, response="right", label="right", reward=float(i)) for i in range(2)]
    group = SampleGroup(uid=uid, samples=samples)
    assert my_reward_post_process(None, group.samples) == ([0.0, 1.0], [-0.5, 0.5])


def test_my_samples_to_train_data(tmp_path):
    samples = [Sample(tokens=[5, 6, 7], response_length=2, reward=float(i)) for i in range(2)]
    columns = my_samples_to_train_data(None, samples)
    assert columns["reward"].tolist() == [-0.5, 0.5]
    assert [len(mask) for mask in columns["loss_mask"]] == [2, 2]


def test_my_advantage(tmp_path):
    columns = {"reward": np.asarray([0.5], dtype=np.float32), "response_length": np.asarray([2], dtype=np.int32)}
    row_ids = [RowId(GroupUid("data", 0, 0), 0)]
    batch = TrainBatch(rollout_id=0, task="train_0", row_ids=row_ids, columns=columns)
    my_advantage(None, batch)
    assert batch.columns["advantages"][0].tolist() == [0.5, 0.5]
    assert not failures(lint_estimator(my_advantage, None))


def test_my_loss(tmp_path):
    log_probs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    columns = {"advantages": torch.tensor([[2.0, 3.0]])}
    inputs = LossInputs(
        log_probs=log_probs, entropy=torch.zeros(1, 2), loss_mask=torch.ones(1, 2),
        row_ids=[RowId(GroupUid("data", 0, 0), 0)], column=columns.get,
    )
    loss = my_loss(None, inputs)
    assert loss.values.tolist() == [[2.0, 6.0]]
    loss.values.sum().backward()
    assert log_probs.grad.tolist() == [[-2.0, -3.0]]
    assert not failures(lint_loss(my_loss, compose(CORE_SECTIONS)()))


def test_my_correction(tmp_path):
    columns = {"old_log_probs": torch.tensor([[-1.0, -2.0]]), "rollout_log_probs": torch.tensor([[-3.0, -2.0]])}
    inputs = LossInputs(
        log_probs=torch.zeros(1, 2), entropy=torch.zeros(1, 2), loss_mask=torch.ones(1, 2),
        row_ids=[RowId(GroupUid("data", 0, 0), 0)], column=columns.get,
    )
    assert my_correction(None, inputs).tolist() == [[2.0, 1.0]]  # e^2, cut off, and 1


def test_my_data_source(tmp_path):
    args = SimpleNamespace(n_samples_per_prompt=2)
    source = MyDataSource(args)
    _, second = source.get_samples(2)
    source.save(str(tmp_path / "state"))
    restored = MyDataSource(args)
    restored.load(str(tmp_path / "state"))
    assert source.get_samples(10) == restored.get_samples(10)
    assert (len(second), second[0].label) == (2, "2")


def test_my_converter(tmp_path):
    model, weights = torch.nn.Linear(2, 2), {"weight": torch.eye(2), "bias": torch.ones(2)}
    save_file(weights, tmp_path / "model.safetensors")
    converter = MyConverter(None)
    converter.load(model, str(tmp_path))
    assert {name: tensor.tolist() for name, tensor in converter.export(model)} == {
        name: tensor.tolist() for name, tensor in weights.items()
    }


def test_my_model_provider(tmp_path):
    assert list(inspect.signature(my_model_provider).parameters) == ['args']


def test_my_trainer(tmp_path):
    assert issubclass(MyTrainer, TorchTrainer)


def test_my_role(tmp_path):
    batch = TrainBatch(rollout_id=0, task="train_0", row_ids=[], columns={"response_length": np.array([3, 5])})
    assert MyRole(None).compute(batch)["tail"].tolist() == [0, 2]


def test_my_engine(tmp_path):
    assert list(inspect.signature(my_engine).parameters) == ['args', 'index', 'log_path']


def test_my_weight_transport(tmp_path):
    assert issubclass(MyWeightTransport, DiskTransport)


def test_my_logger(tmp_path):
    logger = MyLogger(None, str(tmp_path))
    logger.log({"train/loss": 0.5}, 3)
    logger.close()
    assert (tmp_path / "my_log.txt").read_text() == "3 {'train/loss': 0.5}\n"
