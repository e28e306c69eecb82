from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from buffer_rl.errors import CheckpointError, TrainError
from buffer_rl.train.optimizer import Optimizer, learning_rate


def _args(**overrides: Any) -> SimpleNamespace:
    defaults = {
        "lr": 0.1,
        "lr_warmup_iters": 0,
        "weight_decay": 0.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_eps": 1e-8,
        "clip_grad": 0.0,
    }
    return SimpleNamespace(**(defaults | overrides))


def _layer() -> torch.nn.Linear:
    layer = torch.nn.Linear(2, 1)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 2.0]]))
        layer.bias.copy_(torch.tensor([3.0]))
    return layer


def _set_gradients(layer: torch.nn.Linear) -> None:
    layer.weight.grad = torch.tensor([[3.0, 0.0]])
    layer.bias.grad = torch.tensor([4.0])


def test_the_learning_rate_warms_up_linearly_and_stays() -> None:
    rates = [learning_rate(_args(lr=0.8, lr_warmup_iters=4), step) for step in range(6)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])
    assert learning_rate(_args(lr=0.8), 0) == 0.8


def test_the_first_step_of_adam_moves_each_parameter_by_the_learning_rate() -> None:
    layer = _layer()
    optimizer = Optimizer(_args(), layer, world_size=1)
    _set_gradients(layer)
    metrics = optimizer.step()
    assert metrics == {"grad_norm": pytest.approx(5.0), "lr": 0.1}
    torch.testing.assert_close(layer.weight.detach(), torch.tensor([[0.9, 2.0]]))
    torch.testing.assert_close(layer.bias.detach(), torch.tensor([2.9]))
    assert layer.weight.grad is None


def test_two_steps_equal_the_formulas_of_adamw() -> None:
    layer = _layer()
    args = _args(weight_decay=0.5, clip_grad=1.0)
    optimizer = Optimizer(args, layer, world_size=1)
    weight, first, second = 1.0, 0.0, 0.0
    for step in (1, 2):
        _set_gradients(layer)
        optimizer.step()
        gradient = 3.0 / 5.0  # clipped from a norm of 5 to 1
        first = 0.9 * first + 0.1 * gradient
        second = 0.95 * second + 0.05 * gradient**2
        weight -= 0.1 * 0.5 * weight
        weight -= 0.1 * (first / (1 - 0.9**step)) / ((second / (1 - 0.95**step)) ** 0.5 + 1e-8)
    assert layer.weight[0, 0].item() == pytest.approx(weight, rel=1e-5)


def test_weight_decay_leaves_biases_alone() -> None:
    layer = _layer()
    optimizer = Optimizer(_args(weight_decay=0.5), layer, world_size=1)
    layer.weight.grad, layer.bias.grad = torch.zeros(1, 2), torch.zeros(1)
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), torch.tensor([[0.95, 1.9]]))
    assert layer.bias.item() == 3.0


def test_a_step_that_fails_keeps_step_count_and_moments() -> None:
    layer = _layer()
    optimizer = Optimizer(_args(), layer, world_size=1)
    layer.weight.grad = torch.tensor([[float("nan"), 0.0]])
    with pytest.raises(TrainError, match="step 0"):
        optimizer.step()
    assert optimizer.step_count == 0
    assert optimizer.state_tensors() == {}
    assert layer.weight.grad is None
    torch.testing.assert_close(layer.weight.detach(), torch.tensor([[1.0, 2.0]]))


def test_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    layer = _layer()
    optimizer = Optimizer(_args(), layer, world_size=1)
    _set_gradients(layer)
    optimizer.step()
    state = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    other = Optimizer(_args(), _layer(), world_size=1)
    incomplete = {name: tensor for name, tensor in state.items() if name != "exp_avg.bias"}
    for wrong in (
        incomplete,
        {**state, "exp_avg.weight": torch.zeros(5)},
        {**state, "exp_avg.nothing": torch.zeros(1)},
    ):
        with pytest.raises(CheckpointError):
            other.load_state_tensors(wrong, 1)
        assert other.state_tensors() == {}
        assert other.step_count == 0
    other.load_state_tensors(state, 1)
    assert other.step_count == 1
    assert set(other.state_tensors()) == set(state)
