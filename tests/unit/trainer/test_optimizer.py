from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from buffer_rl.errors import CheckpointError, ConfigError, TrainError
from buffer_rl.trainer.optimizer import GradientSum, Optimizer, learning_rate


def _args(**overrides: Any) -> SimpleNamespace:
    defaults = {
        "lr": 0.1,
        "lr_warmup_iters": 0,
        "lr_decay_style": "constant",
        "lr_decay_iters": None,
        "min_lr": 0.0,
        "num_rollout": None,
        "num_steps_per_rollout": 1,
        "num_passes_per_rollout": 1,
        "weight_decay": 0.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_eps": 1e-8,
        "clip_grad": 0.0,
        "deterministic": False,
        "optimizer_cpu_offload": False,
        "save_optim": True,
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


def test_after_the_warm_up_the_rate_falls_to_its_minimum_linearly_or_along_a_cosine() -> None:
    """Warm-up of 2 steps to 0.9, then 4 steps towards 0.1: the cosine of 0, 45, 90, 135 and 180 degrees."""
    common = {"lr": 0.9, "min_lr": 0.1, "lr_warmup_iters": 2, "lr_decay_iters": 6}
    rates = {
        style: [learning_rate(_args(lr_decay_style=style, **common), step) for step in range(8)]
        for style in ("constant", "linear", "cosine")
    }
    assert rates["constant"] == pytest.approx([0.45, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9])
    assert rates["linear"] == pytest.approx([0.45, 0.9, 0.9, 0.7, 0.5, 0.3, 0.1, 0.1])
    root = 0.5**0.5
    cosine = [0.45, 0.9, 0.9, 0.5 + 0.4 * root, 0.5, 0.5 - 0.4 * root, 0.1, 0.1]
    assert rates["cosine"] == pytest.approx(cosine)


def test_the_decay_takes_all_steps_of_the_run_where_nothing_else_is_said() -> None:
    args = _args(lr=1.0, lr_decay_style="linear", num_rollout=5, num_steps_per_rollout=2)
    assert [learning_rate(args, step) for step in (0, 5, 9, 10)] == pytest.approx([1.0, 0.5, 0.1, 0.0])
    twice = _args(lr=1.0, lr_decay_style="linear", num_rollout=5, num_passes_per_rollout=2)
    assert [learning_rate(twice, step) for step in (0, 5, 9, 10)] == pytest.approx([1.0, 0.5, 0.1, 0.0])
    with pytest.raises(ConfigError, match="--lr-decay-iters"):
        learning_rate(_args(lr_decay_style="linear"), 0)


def test_a_decay_that_ends_with_the_warm_up_leaves_the_minimum() -> None:
    args = _args(lr=1.0, min_lr=0.2, lr_decay_style="cosine", lr_warmup_iters=2, lr_decay_iters=2)
    assert [learning_rate(args, step) for step in range(3)] == pytest.approx([0.5, 1.0, 0.2])


def test_the_first_step_of_adam_moves_each_parameter_by_the_learning_rate() -> None:
    layer = _layer()
    optimizer = Optimizer(_args(), layer, world_size=1)
    _set_gradients(layer)
    metrics = optimizer.step(1.0)
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
        optimizer.step(1.0)
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
    optimizer.step(1.0)
    torch.testing.assert_close(layer.weight.detach(), torch.tensor([[0.95, 1.9]]))
    assert layer.bias.item() == 3.0


def test_a_step_that_fails_keeps_step_count_and_moments() -> None:
    layer = _layer()
    optimizer = Optimizer(_args(), layer, world_size=1)
    layer.weight.grad = torch.tensor([[float("nan"), 0.0]])
    with pytest.raises(TrainError, match="step 0"):
        optimizer.step(1.0)
    assert optimizer.step_count == 0
    assert optimizer.state_tensors() == {}
    assert layer.weight.grad is None
    torch.testing.assert_close(layer.weight.detach(), torch.tensor([[1.0, 2.0]]))


def test_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    layer = _layer()
    optimizer = Optimizer(_args(), layer, world_size=1)
    _set_gradients(layer)
    optimizer.step(1.0)
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


def test_a_sum_in_float64_rounds_to_the_same_float32_in_any_order() -> None:
    generator = torch.Generator().manual_seed(0)
    terms = [torch.randn(5000, generator=generator) * 10.0 ** float(i % 7 - 3) for i in range(40)]
    parameter = torch.nn.Parameter(torch.zeros(5000))

    def total(order: list[int]) -> torch.Tensor:
        gradient_sum = GradientSum([parameter])
        for index in order:
            parameter.grad = terms[index].clone()
            gradient_sum.accumulate()
            assert parameter.grad is None
        return gradient_sum.flat().float()

    forward, backward = list(range(40)), list(reversed(range(40)))
    assert torch.equal(total(forward), total(backward))
    plain = [torch.zeros(5000), torch.zeros(5000)]
    for first, last in zip(forward, backward, strict=True):
        plain[0] += terms[first]
        plain[1] += terms[last]
    assert not torch.equal(*plain), "in float32 the order shows: the case above would prove nothing"
