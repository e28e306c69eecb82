"""The value model in the torch trainer, and the trained role that has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from buffer_rl.errors import CheckpointError, ConfigError, TrainError
from buffer_rl.options.section import Options
from buffer_rl.plan.algorithm import role_args
from buffer_rl.plan.roles import CRITIC
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import Topology, TrainBatch
from buffer_rl.trainer.collate import collate
from buffer_rl.trainer.forward import response_values
from buffer_rl.trainer.model import Model
from buffer_rl.trainer.objective import Objective
from buffer_rl.trainer.pretrained import load_model, prepare_torch
from buffer_rl.trainer.rank import build_trainer
from buffer_rl.trainer.torch_trainer import TorchTrainer

MakeArgs = Callable[..., Options]
MakeBatch = Callable[..., TrainBatch]
CPU = torch.device("cpu")


def make_critic(args: Any, rank: int = 0) -> TorchTrainer:
    args = role_args(args, CRITIC)
    prepare_torch(args, args.seed + rank)
    return TorchTrainer(args, rank, 1, Objective(args, PluginRegistry.from_flags(()), CRITIC))


def with_returns(batch: TrainBatch, values: list[np.ndarray], returns: list[np.ndarray] | None = None) -> TrainBatch:
    """Returns of each token: drawn from a seed where none are given."""
    rng = np.random.default_rng(3)
    drawn = [rng.normal(size=len(row)).astype(np.float32) for row in values]
    return replace(batch, columns={**batch.columns, "values": values, "returns": returns or drawn})


def step(critic: TorchTrainer, batch: TrainBatch) -> dict[str, float]:
    sums = critic.accumulate(batch)
    return sums.means() | critic.optimizer_step(1 / sums.divisor)


def test_values_are_those_of_a_linear_layer_on_the_hidden_state_before_each_token(
    model_path: str, make_batch: MakeBatch
) -> None:
    model, plain = load_model(model_path, CPU, "--hf-checkpoint"), load_model(model_path, CPU, "--hf-checkpoint")
    Model(model).add_value_head()
    batch = make_batch()
    micro = collate(batch, CPU)
    with torch.no_grad():
        with pytest.raises(TrainError, match="outputs"):
            response_values(plain, micro)
        assert not response_values(model, micro).any()
        assert not model.get_output_embeddings()._forward_hooks
        weight = torch.randn(1, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
        cast("Any", model.get_output_embeddings()).weight.copy_(weight)
        found_bt = response_values(model, micro)
        for row, (tokens, length) in enumerate(
            zip(batch.columns["tokens"], batch.columns["response_length"], strict=True)
        ):
            hidden = plain.model(input_ids=torch.from_numpy(np.asarray(tokens, dtype=np.int64))[None])[0][0]
            expected = (hidden @ weight[0])[len(tokens) - length - 1 : len(tokens) - 1]
            torch.testing.assert_close(found_bt[row, :length], expected, atol=1e-4, rtol=1e-5)
            assert not found_bt[row, length:].any()
    # The output layer was tied to the embeddings, which keep their gradient and their size.
    assert model.get_input_embeddings().weight.shape == plain.get_input_embeddings().weight.shape


def test_what_an_architecture_does_to_logits_is_not_done_to_values(tmp_path: Path, make_batch: MakeBatch) -> None:
    """Gemma 2 squeezes logits into 30 tanh(x / 30)."""
    config = Gemma2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        final_logit_softcapping=30.0,
    )
    model = Gemma2ForCausalLM(config).eval()
    Model(model).add_value_head()
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(1.0)
        values = response_values(model, collate(make_batch(), CPU))
        model.get_output_embeddings().weight.mul_(100.0)
        torch.testing.assert_close(
            response_values(model, collate(make_batch(), CPU)), 100 * values, rtol=1e-4, atol=1e-3
        )
    assert (100 * values).abs().max() > 100


def test_an_output_layer_that_is_not_linear_is_refused() -> None:
    class Provided(torch.nn.Module):
        def get_output_embeddings(self) -> torch.nn.Module:
            return torch.nn.Bilinear(2, 2, 3)

    with pytest.raises(ConfigError, match=r"output layer of Provided is a Bilinear"):
        Model(cast("Any", Provided())).add_value_head()


def test_a_critic_learns_the_returns(make_args: MakeArgs, make_batch: MakeBatch) -> None:
    critic = make_critic(make_args(advantage_estimator="gae", use_critic=True, critic_lr=1e-2, value_clip=None))
    batch = with_returns(make_batch(), critic.values(make_batch()))
    losses = [step(critic, batch)["loss"] for _ in range(120)]
    assert losses[-1] < 0.1 * losses[0]
    after = step(critic, batch)
    assert after["explained_variance"] > 0.8
    assert after["lr"] == 1e-2


@pytest.mark.parametrize("half", [False, True])
def test_its_first_values_and_those_of_the_step_are_equal_bit_for_bit(
    half: bool, make_args: MakeArgs, make_batch: MakeBatch
) -> None:
    """Else some values would be clipped before they moved."""
    critic = make_critic(make_args(use_critic=True, max_tokens_per_gpu=40, value_clip=1e-30, bf16=half))
    batch = with_returns(make_batch(), critic.values(make_batch()))
    step(critic, batch)
    batch = with_returns(make_batch(), critic.values(make_batch()))
    assert any(row.any() for row in batch.columns["values"])
    assert step(critic, batch)["value_clipfrac"] == 0.0
    if half:
        torch.distributed.destroy_process_group()


def test_a_saved_critic_continues_bit_for_bit(make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path) -> None:
    args = make_args(use_critic=True, critic_lr=3e-3)
    critic, other = make_critic(args), make_critic(args)
    batch = with_returns(make_batch(), critic.values(make_batch()))
    step(critic, batch)
    critic.save(str(tmp_path))
    other.load(str(tmp_path))
    for trainer in (critic, other):
        step(trainer, batch)
    for one, two in zip(critic.values(make_batch(1)), other.values(make_batch(1)), strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_policys_checkpoint_is_no_critics(make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path) -> None:
    args = make_args(use_critic=True)
    TorchTrainer(args, 0, 1, Objective(args, PluginRegistry.from_flags(()))).save(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"weights do not fit"):
        make_critic(args).load(str(tmp_path))


def test_a_critic_starts_from_the_folder_of_its_own(make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--critic-load: the folder .* does not exist"):
        make_critic(make_args(use_critic=True, critic_load=str(tmp_path / "absent")))


class WithoutValues:
    """A backend for policies alone."""

    topology = Topology(dp_rank=0, dp_size=1)

    def __init__(self, args: Any, rank: int, world_size: int, objective: Any) -> None:
        """Nothing is built."""

    log_probs = accumulate = optimizer_step = zero_grad = export = save_hf = save = load = id


def test_a_backend_without_values_is_refused_as_a_critic(make_args: MakeArgs) -> None:
    registry = PluginRegistry.from_flags(())
    args = make_args(use_critic=True, train_backend=f"{__file__}:WithoutValues")
    build_trainer(args, registry, 0, 1, Objective(args, registry))
    with pytest.raises(ConfigError, match=r"(?s)has no value model.*values\(batch\)"):
        build_trainer(args, registry, 0, 1, Objective(args, registry, CRITIC))
