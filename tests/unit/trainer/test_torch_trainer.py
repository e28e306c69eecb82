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

from buffer_rl.errors import NonFiniteError, PluginError, TrainError
from buffer_rl.kinds.token_loss import Sums
from buffer_rl.kinds.trainer import Memory
from buffer_rl.options.section import Options
from buffer_rl.records.groups import TrainBatch
from buffer_rl.trainer.torch_trainer import TorchTrainer
from harness.trainers import accumulate, make_trainer, step, with_advantages

MakeArgs = Callable[..., Options]
MakeBatch = Callable[..., TrainBatch]


def _gradients(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in trainer._actor.named_parameters() if p.grad is not None}


def _weights(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for bucket in trainer.export() for name, tensor in bucket.items()}


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
    trainer, batch = make_trainer(args), make_batch()
    batch.columns["ref_log_probs"] = trainer.log_probs("ref", batch)
    noise = np.random.default_rng(1)
    actor = trainer.log_probs("actor", batch)
    batch.columns["old_log_probs"] = [row + noise.normal(0, 0.3, len(row)).astype(np.float32) for row in actor]
    sums = accumulate(trainer, batch)
    metrics = sums.means()

    naive = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    ref = copy.deepcopy(naive)
    loss = _naive_loss(naive, ref, batch, args)
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert 0 < metrics["pg_clipfrac"] < 1
    found = _gradients(trainer)
    for name, parameter in naive.named_parameters():
        torch.testing.assert_close(found[name] / sums.divisor, parameter.grad, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("loss_agg_mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_micro_batches_and_partial_calls_add_up_to_the_whole_batch(
    loss_agg_mode: str, make_args: MakeArgs, make_batch: MakeBatch
) -> None:
    batch = make_batch()
    whole = make_trainer(make_args(loss_agg_mode=loss_agg_mode))
    expected = accumulate(whole, batch)

    small = make_trainer(make_args(loss_agg_mode=loss_agg_mode, max_tokens_per_gpu=20))
    first, second = batch.select(range(0, 5)), batch.select(range(5, len(batch)))
    sums = Sums.of(small.accumulate(part) for part in (first, second, batch.select([])))
    assert sums.divisor == pytest.approx(expected.divisor)
    assert sums.means() == pytest.approx(expected.means(), abs=1e-5)
    found = _gradients(small)
    for name, gradient in _gradients(whole).items():
        torch.testing.assert_close(found[name] / sums.divisor, gradient / sums.divisor, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("max_tokens", [30, 64, 16384])
def test_the_first_ratio_is_exactly_one(max_tokens: int, make_args: MakeArgs, make_batch: MakeBatch) -> None:
    args = make_args(max_tokens_per_gpu=max_tokens, rollout_temperature=0.9)
    trainer, batch = make_trainer(args), make_batch(40)
    batch.columns["old_log_probs"] = trainer.log_probs("actor", batch)
    metrics = accumulate(trainer, batch).means()
    assert metrics["ppo_kl"] == 0.0
    assert metrics["pg_clipfrac"] == 0.0


def test_log_probs_come_back_in_the_order_of_the_rows(make_args: MakeArgs, make_batch: MakeBatch) -> None:
    trainer, batch = make_trainer(make_args(max_tokens_per_gpu=20)), make_batch()
    rows = trainer.log_probs("actor", batch)
    assert [len(row) for row in rows] == batch.columns["response_length"].tolist()
    for index, row in enumerate(rows):
        alone = trainer.log_probs("actor", batch.select([index]))[0]
        np.testing.assert_allclose(row, alone, atol=5e-5)
        assert row.dtype == np.float32
    assert trainer.log_probs("actor", batch.select([])) == []


def test_training_raises_the_probability_of_rewarded_tokens(make_args: MakeArgs, make_batch: MakeBatch) -> None:
    trainer, batch = make_trainer(make_args(lr=3e-3)), make_batch()
    before = trainer.log_probs("actor", batch)
    for _ in range(3):
        step(trainer, batch)
    after = trainer.log_probs("actor", batch)
    masks = batch.columns["loss_mask"]
    gains = [float(((b - a) * m).sum()) for a, b, m in zip(before, after, masks, strict=True)]
    assert np.corrcoef(gains, batch.columns["reward"] * [m.sum() for m in masks])[0, 1] > 0.5


def test_the_reference_stays_while_the_actor_moves(make_args: MakeArgs, make_batch: MakeBatch) -> None:
    trainer, batch = make_trainer(make_args()), make_batch()
    before = trainer.log_probs("ref", batch)
    step(trainer, batch)
    for old, new in zip(before, trainer.log_probs("ref", batch), strict=True):
        assert np.array_equal(old, new)
    moved = trainer.log_probs("actor", batch)
    assert max(abs(a - b).max(initial=0) for a, b in zip(before, moved, strict=True)) > 1e-3
    with pytest.raises(TrainError, match="no model 'critic'"):
        trainer.log_probs("critic", batch)


def test_the_reference_takes_the_weights_of_the_actors_folder_to_the_last_bit(
    make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path
) -> None:
    trainer, batch = make_trainer(make_args(use_kl_loss=True)), make_batch()
    initial = trainer.log_probs("ref", batch)
    batch.columns["ref_log_probs"] = initial
    step(trainer, batch)
    trainer.save_hf(str(tmp_path / "hf"))
    trainer.load_ref(str(tmp_path / "hf"))
    moved = trainer.log_probs("ref", batch)
    assert all(np.array_equal(a, b) for a, b in zip(moved, trainer.log_probs("actor", batch), strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(moved, initial, strict=True))
    step(trainer, batch)
    assert all(np.array_equal(a, b) for a, b in zip(moved, trainer.log_probs("ref", batch), strict=True))


def test_the_supervised_loss_equals_that_of_transformers(
    make_args: MakeArgs, make_batch: MakeBatch, model_path: str
) -> None:
    trainer, batch = make_trainer(make_args(loss_type="sft_loss", rollout_temperature=0.5)), make_batch()
    del batch.columns["reward"], batch.columns["rollout_log_probs"]
    sums = accumulate(trainer, batch)
    metrics = sums.means()

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
        torch.testing.assert_close(found[name] / sums.divisor, parameter.grad, atol=1e-5, rtol=1e-4)


def test_a_saved_run_continues_bit_for_bit(make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path) -> None:
    batches = [make_batch(seed=seed) for seed in range(4)]
    args = make_args(lr_warmup_iters=3)
    first = make_trainer(args)
    for batch in batches[:2]:
        step(first, batch)
    first.save(str(tmp_path))
    drawn = torch.rand(3)
    expected = [step(first, batch) for batch in batches[2:]]

    second = make_trainer(args)
    second.load(str(tmp_path))
    assert torch.equal(torch.rand(3), drawn)
    assert [step(second, batch) for batch in batches[2:]] == expected
    found = _weights(second)
    for name, tensor in _weights(first).items():
        assert torch.equal(found[name], tensor), name


def test_two_runs_with_one_seed_are_equal_bit_for_bit(make_args: MakeArgs, make_batch: MakeBatch) -> None:
    try:
        runs = []
        for _ in range(2):
            trainer = make_trainer(make_args(deterministic=True))
            metrics = [step(trainer, make_batch(seed=seed)) for seed in range(2)]
            runs.append((metrics, _weights(trainer)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(tensor, runs[1][1][name]) for name, tensor in runs[0][1].items())


def test_a_gradient_that_is_not_finite_changes_nothing(make_args: MakeArgs, make_batch: MakeBatch) -> None:
    trainer, batch = make_trainer(make_args()), make_batch()
    before = _weights(trainer)
    with_advantages(trainer, batch)
    batch.columns["advantages"][3][:] = np.inf
    batch.columns["loss_mask"][3][:] = 1
    assert not math.isfinite(trainer.accumulate(batch).loss)
    with pytest.raises(NonFiniteError, match="the gradient norm is nan"):
        trainer.optimizer_step(1.0)
    after = _weights(trainer)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert math.isfinite(step(trainer, make_batch())["grad_norm"])


def test_exported_weights_give_equal_logits_in_plain_transformers(
    make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path, model_path: str
) -> None:
    trainer, batch = make_trainer(make_args()), make_batch()
    step(trainer, batch)
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
    make_trainer(make_args(), rank=1, world_size=2).save_hf(str(tmp_path / "hf"))
    assert not (tmp_path / "hf").exists()


def test_an_unfinished_step_is_not_saved(make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path) -> None:
    trainer, batch = make_trainer(make_args()), make_batch()
    accumulate(trainer, batch)
    with pytest.raises(TrainError, match="unfinished step"):
        trainer.save(str(tmp_path))


def test_a_trainer_that_slept_goes_on_as_it_was(make_args: MakeArgs, make_batch: MakeBatch) -> None:
    args = make_args(deterministic=True, use_kl_loss=True, kl_loss_coef=0.1)
    found = []
    for sleeps in (False, True):
        trainer = make_trainer(args)
        for seed in (0, 1, 2):
            with_ref = make_batch(seed=seed)
            with_ref.columns["ref_log_probs"] = trainer.log_probs("ref", with_ref)
            step(trainer, with_ref)
            if sleeps:
                trainer.sleep()
                trainer.wake_up()
        found.append(_weights(trainer))
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def test_a_trainer_does_not_sleep_in_an_unfinished_step(make_args: MakeArgs, make_batch: MakeBatch) -> None:
    trainer = make_trainer(make_args())
    accumulate(trainer, make_batch())
    with pytest.raises(TrainError, match="unfinished step"):
        trainer.sleep()
    trainer.sleep({Memory.FROZEN})  # has no part in it


@pytest.mark.parametrize("part", Memory)
def test_only_the_parts_that_are_named_move(make_args: MakeArgs, make_batch: MakeBatch, part: Memory) -> None:
    """The part is on a device from which nothing can be moved."""
    trainer, batch = make_trainer(make_args(use_kl_loss=True, kl_loss_coef=0.1)), make_batch()
    batch.columns["ref_log_probs"] = trainer.log_probs("ref", batch)
    step(trainer, batch)
    nowhere = torch.device("meta")
    if part is Memory.OPTIMIZER:
        for state in trainer._optimizer._adam.state.values():
            state["exp_avg"] = state["exp_avg"].to(nowhere)
    else:
        (trainer._model if part is Memory.WEIGHTS else trainer._frozen["ref"]).move(nowhere)
    for move in (trainer.sleep, trainer.wake_up):
        move(set(Memory) - {part})
        with pytest.raises(NotImplementedError, match="meta"):
            move({part})


def test_policy_losses_need_advantages(make_args: MakeArgs, make_batch: MakeBatch) -> None:
    with pytest.raises(TrainError, match="no advantages"):
        make_trainer(make_args()).accumulate(make_batch())


def test_an_unknown_loss_or_estimator_is_an_error_at_the_start(make_args: MakeArgs) -> None:
    with pytest.raises(PluginError, match="policy_los"):
        make_trainer(make_args(loss_type="policy_los"))
    with pytest.raises(PluginError, match="grop"):
        make_trainer(make_args(advantage_estimator="grop"))


def test_the_checkpoint_names_its_step(make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path) -> None:
    trainer = make_trainer(make_args())
    step(trainer, make_batch())
    trainer.save(str(tmp_path))
    assert json.loads((tmp_path / "trainer.json").read_text())["step"] == 1
