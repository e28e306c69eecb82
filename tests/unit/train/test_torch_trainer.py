from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from buffer_rl.config import Options
from buffer_rl.errors import ConfigError, PluginError, TrainError
from buffer_rl.train.torch_trainer import TorchTrainer
from buffer_rl.types import TrainBatch

MakeArgs = Callable[..., Options]
MakeBatch = Callable[..., TrainBatch]


def _gradients(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in trainer._actor.named_parameters() if p.grad is not None}


def _weights(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for bucket in trainer.export_buckets() for name, tensor in bucket.items()}


def _step(trainer: TorchTrainer, batch: TrainBatch) -> dict[str, float]:
    trainer.compute_advantages(batch)
    return trainer.forward_backward(batch) | trainer.optimizer_step()


def _naive_loss(model: Any, ref: Any, batch: TrainBatch, args: Options) -> torch.Tensor:
    """The token-mean GRPO objective, token by token, without padding, micro-batches or tensors of losses."""
    columns = batch.columns
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(batch)):
        ids = torch.tensor(columns["tokens"][row].tolist())[None]
        length = int(columns["response_length"][row])
        log_probs = (model(input_ids=ids).logits[0].double() / args.rollout_temperature).log_softmax(-1)
        with torch.no_grad():
            ref_log_probs = (ref(input_ids=ids).logits[0].double() / args.rollout_temperature).log_softmax(-1)
        for t in range(length):
            if columns["loss_mask"][row][t] == 0:
                continue
            position = ids.shape[1] - length + t
            token = ids[0, position]
            new = log_probs[position - 1, token]
            advantage = float(columns["reward"][row])
            ratio = torch.exp(new - float(columns["old_log_probs"][row][t]))
            low, high = 1 - args.eps_clip, 1 + (args.eps_clip_high or args.eps_clip)
            total = total - torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
            gap = ref_log_probs[position - 1, token] - new
            total = total + args.kl_loss_coef * (torch.exp(gap) - 1 - gap)
            total = total + args.entropy_coef * (log_probs[position - 1].exp() * log_probs[position - 1]).sum()
    return total / sum(float(mask.sum()) for mask in columns["loss_mask"])


def test_loss_and_gradient_equal_a_naive_implementation(
    make_args: MakeArgs, make_batch: MakeBatch, model_path: str
) -> None:
    args = make_args(
        rollout_temperature=0.8,
        use_kl_loss=True,
        kl_loss_coef=0.2,
        entropy_coef=0.05,
        eps_clip_high=0.3,
        max_tokens_per_gpu=40,
    )
    trainer, batch = TorchTrainer(args, 0, 1), make_batch()
    batch.columns["ref_log_probs"] = trainer.log_probs("ref", batch)
    noise = np.random.default_rng(1)
    actor = trainer.log_probs("actor", batch)
    batch.columns["old_log_probs"] = [row + noise.normal(0, 0.3, len(row)).astype(np.float32) for row in actor]
    trainer.compute_advantages(batch)
    metrics = trainer.forward_backward(batch)

    naive = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    ref = copy.deepcopy(naive)
    loss = _naive_loss(naive, ref, batch, args)
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert 0 < metrics["pg_clipfrac"] < 1
    found = _gradients(trainer)
    for name, parameter in naive.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("loss_agg_mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_micro_batches_and_partial_calls_add_up_to_the_whole_batch(
    loss_agg_mode: str, make_args: MakeArgs, make_batch: MakeBatch
) -> None:
    batch = make_batch()
    whole = TorchTrainer(make_args(loss_agg_mode=loss_agg_mode), 0, 1)
    whole.compute_advantages(batch)
    expected = whole.forward_backward(batch)

    small = TorchTrainer(make_args(loss_agg_mode=loss_agg_mode, max_tokens_per_gpu=20), 0, 1)
    first, second = batch.select(range(0, 5)), batch.select(range(5, len(batch)))
    shares = [small.forward_backward(part) for part in (first, second, batch.select([]))]
    for name, value in expected.items():
        assert sum(share.get(name, 0.0) for share in shares) == pytest.approx(value, abs=1e-6), name
    found = _gradients(small)
    for name, gradient in _gradients(whole).items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("max_tokens", [30, 64, 16384])
def test_the_first_ratio_is_exactly_one(max_tokens: int, make_args: MakeArgs, make_batch: MakeBatch) -> None:
    args = make_args(max_tokens_per_gpu=max_tokens, rollout_temperature=0.9)
    trainer, batch = TorchTrainer(args, 0, 1), make_batch(40)
    trainer.compute_advantages(batch)
    batch.columns["old_log_probs"] = trainer.log_probs("actor", batch)
    metrics = trainer.forward_backward(batch)
    assert metrics["ppo_kl"] == 0.0
    assert metrics["pg_clipfrac"] == 0.0


def test_log_probs_come_back_in_the_order_of_the_rows(make_args: MakeArgs, make_batch: MakeBatch) -> None:
    trainer, batch = TorchTrainer(make_args(max_tokens_per_gpu=20), 0, 1), make_batch()
    rows = trainer.log_probs("actor", batch)
    assert [len(row) for row in rows] == batch.columns["response_length"].tolist()
    for index, row in enumerate(rows):
        alone = trainer.log_probs("actor", batch.select([index]))[0]
        np.testing.assert_allclose(row, alone, atol=1e-5)
        assert row.dtype == np.float32
    assert trainer.log_probs("actor", batch.select([])) == []


def test_training_raises_the_probability_of_rewarded_tokens(make_args: MakeArgs, make_batch: MakeBatch) -> None:
    trainer, batch = TorchTrainer(make_args(lr=3e-3), 0, 1), make_batch()
    before = trainer.log_probs("actor", batch)
    for _ in range(3):
        _step(trainer, batch)
    after = trainer.log_probs("actor", batch)
    masks = batch.columns["loss_mask"]
    gains = [float(((b - a) * m).sum()) for a, b, m in zip(before, after, masks, strict=True)]
    assert np.corrcoef(gains, batch.columns["reward"] * [m.sum() for m in masks])[0, 1] > 0.5


def test_the_reference_stays_while_the_actor_moves(make_args: MakeArgs, make_batch: MakeBatch) -> None:
    trainer, batch = TorchTrainer(make_args(), 0, 1), make_batch()
    before = trainer.log_probs("ref", batch)
    _step(trainer, batch)
    for old, new in zip(before, trainer.log_probs("ref", batch), strict=True):
        assert np.array_equal(old, new)
    moved = trainer.log_probs("actor", batch)
    assert max(abs(a - b).max(initial=0) for a, b in zip(before, moved, strict=True)) > 1e-3
    with pytest.raises(TrainError, match="no role 'critic'"):
        trainer.log_probs("critic", batch)


def test_the_supervised_loss_equals_that_of_transformers(
    make_args: MakeArgs, make_batch: MakeBatch, model_path: str
) -> None:
    trainer, batch = TorchTrainer(make_args(loss_type="sft_loss", rollout_temperature=0.5), 0, 1), make_batch()
    del batch.columns["reward"], batch.columns["rollout_log_probs"]
    trainer.compute_advantages(batch)
    metrics = trainer.forward_backward(batch)

    longest = max(batch.lengths)
    ids = torch.zeros(len(batch), longest, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    attention = torch.zeros_like(ids)
    for row, tokens in enumerate(batch.columns["tokens"]):
        ids[row, : len(tokens)] = torch.tensor(tokens.tolist())
        attention[row, : len(tokens)] = 1
        mask = batch.columns["loss_mask"][row]
        start = len(tokens) - len(mask)
        labels[row, start : len(tokens)] = torch.where(
            torch.tensor(mask) > 0, ids[row, start : len(tokens)], torch.tensor(-100)
        )
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    loss = model(input_ids=ids, attention_mask=attention, labels=labels).loss
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    found = _gradients(trainer)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-5, rtol=1e-4)


def test_a_saved_run_continues_bit_for_bit(make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path) -> None:
    batches = [make_batch(seed=seed) for seed in range(4)]
    args = make_args(lr_warmup_iters=3)
    first = TorchTrainer(args, 0, 1)
    for batch in batches[:2]:
        _step(first, batch)
    first.save(str(tmp_path))
    drawn = torch.rand(3)
    expected = [_step(first, batch) for batch in batches[2:]]

    second = TorchTrainer(args, 0, 1)
    second.load(str(tmp_path))
    assert torch.equal(torch.rand(3), drawn)
    assert [_step(second, batch) for batch in batches[2:]] == expected
    found = _weights(second)
    for name, tensor in _weights(first).items():
        assert torch.equal(found[name], tensor), name


def test_two_runs_with_one_seed_are_equal_bit_for_bit(make_args: MakeArgs, make_batch: MakeBatch) -> None:
    try:
        runs = []
        for _ in range(2):
            trainer = TorchTrainer(make_args(deterministic=True), 0, 1)
            metrics = [_step(trainer, make_batch(seed=seed)) for seed in range(2)]
            runs.append((metrics, _weights(trainer)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(tensor, runs[1][1][name]) for name, tensor in runs[0][1].items())


def test_a_gradient_that_is_not_finite_changes_nothing(make_args: MakeArgs, make_batch: MakeBatch) -> None:
    trainer, batch = TorchTrainer(make_args(), 0, 1), make_batch()
    before = _weights(trainer)
    trainer.compute_advantages(batch)
    batch.columns["advantages"][3][:] = np.inf
    batch.columns["loss_mask"][3][:] = 1
    trainer.forward_backward(batch)
    with pytest.raises(TrainError, match="the loss is not finite"):
        trainer.optimizer_step()
    after = _weights(trainer)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert math.isfinite(_step(trainer, make_batch())["grad_norm"])


def test_exported_weights_give_equal_logits_in_plain_transformers(
    make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path, model_path: str
) -> None:
    trainer, batch = TorchTrainer(make_args(), 0, 1), make_batch()
    _step(trainer, batch)
    trainer.save_hf(str(tmp_path))
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    updated = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    missing = updated.load_state_dict(_weights(trainer), strict=False)
    assert missing.missing_keys == ["lm_head.weight"], "tied to the embedding, hence exported once"
    assert missing.unexpected_keys == []
    ids = torch.tensor(batch.columns["tokens"][1].tolist())[None]
    logits = trainer._actor(input_ids=ids).logits
    assert torch.equal(reloaded(input_ids=ids).logits, logits)
    assert torch.equal(updated(input_ids=ids).logits, logits)


def test_only_rank_0_writes_the_hugging_face_folder(make_args: MakeArgs, tmp_path: Path) -> None:
    TorchTrainer(make_args(), 1, 1).save_hf(str(tmp_path / "hf"))
    assert not (tmp_path / "hf").exists()


def test_a_sleeping_trainer_refuses_to_compute_and_wakes_as_it_was(make_args: MakeArgs, make_batch: MakeBatch) -> None:
    trainer, batch = TorchTrainer(make_args(), 0, 1), make_batch()
    before = trainer.log_probs("actor", batch)
    trainer.sleep()
    with pytest.raises(TrainError, match="sleeps"):
        trainer.log_probs("actor", batch)
    assert _weights(trainer)
    trainer.wake_up()
    assert all(np.array_equal(a, b) for a, b in zip(before, trainer.log_probs("actor", batch), strict=True))


def test_an_unfinished_step_is_not_saved(make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path) -> None:
    trainer, batch = TorchTrainer(make_args(), 0, 1), make_batch()
    trainer.compute_advantages(batch)
    trainer.forward_backward(batch)
    with pytest.raises(TrainError, match="unfinished step"):
        trainer.save(str(tmp_path))


def test_policy_losses_need_advantages(make_args: MakeArgs, make_batch: MakeBatch) -> None:
    with pytest.raises(TrainError, match="no advantages"):
        TorchTrainer(make_args(), 0, 1).forward_backward(make_batch())


def test_a_loss_of_ones_own_is_used_and_checked(
    make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_loss_module.py").write_text(
        "from buffer_rl.contracts import LossOutputs\n"
        "def good(args, inputs):\n"
        "    return LossOutputs(loss=-inputs.log_probs.sum() / inputs.total_samples, metrics={'mine': 2.0})\n"
        "def detached(args, inputs):\n"
        "    return LossOutputs(loss=inputs.log_probs.sum().detach())\n"
        "def bare(args, inputs):\n"
        "    return inputs.log_probs.sum()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    batch = make_batch()
    good = TorchTrainer(make_args(custom_loss_function_path="own_loss_module:good"), 0, 1)
    expected = -sum(float(row.sum()) for row in good.log_probs("actor", batch)) / len(batch)
    assert good.forward_backward(batch)["mine"] == 2.0
    assert good._objective.loss(_seen(batch, good)).loss.item() == pytest.approx(expected, rel=1e-5)
    for name, message in (("detached", "gradient"), ("bare", "LossOutputs")):
        trainer = TorchTrainer(make_args(custom_loss_function_path=f"own_loss_module:{name}"), 0, 1)
        with pytest.raises(PluginError, match=message):
            trainer.forward_backward(batch)


def _seen(batch: TrainBatch, trainer: TorchTrainer) -> Any:
    from buffer_rl.train.collate import collate, loss_inputs
    from buffer_rl.train.forward import response_log_probs

    micro = collate(batch, torch.device("cpu"))
    return loss_inputs(batch, micro, *response_log_probs(trainer._actor, micro, 1.0))


def test_an_unknown_loss_or_estimator_is_an_error_at_the_start(make_args: MakeArgs) -> None:
    with pytest.raises(PluginError, match="policy_los"):
        TorchTrainer(make_args(loss_type="policy_los"), 0, 1)
    with pytest.raises(PluginError, match="grop"):
        TorchTrainer(make_args(advantage_estimator="grop"), 0, 1)


def test_several_ranks_without_an_address_are_an_error(make_args: MakeArgs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ConfigError, match="MASTER_ADDR not set"):
        TorchTrainer(make_args(), 0, 2)


def test_the_checkpoint_names_its_step(make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path) -> None:
    trainer = TorchTrainer(make_args(), 0, 1)
    _step(trainer, make_batch())
    trainer.save(str(tmp_path))
    assert json.loads((tmp_path / "trainer.json").read_text())["step"] == 1
