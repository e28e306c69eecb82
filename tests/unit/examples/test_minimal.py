from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from buffer_rl.records.groups import Sample, Status

FILE = Path(__file__).resolve().parents[3] / "examples" / "minimal.py"


def _load():
    spec = importlib.util.spec_from_file_location("minimal_example", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


minimal = _load()


def test_the_file_is_short_enough_to_read():
    assert len(FILE.read_text().splitlines()) <= 300


def test_supervised_steps_raise_the_probability_of_right_answers(tmp_path):
    words = minimal.write_words(tmp_path, seed=0)
    folder = minimal.make_tiny_model(
        tmp_path / "model", seed=0, init_scale=0.02, max_position_embeddings=64, **minimal.MODEL
    )
    args = minimal.options(
        {"prompt_data": words["train"], "hf_checkpoint": folder, "loss_type": "sft_loss", "lr": 2e-3},
        rollout_batch_size=16,
        n_samples_per_prompt=1,
        num_rollout=12,
    )
    engine = minimal.Engine(folder, seed=0)
    trainer = minimal.make_trainer(args)

    def fill(samples):
        minimal.fill_from_label(engine.tokenizer, samples)

    def mean_log_prob(rollout_id):
        buffer = minimal.make_buffer(args)
        ticket = buffer.generate(rollout_id)
        minimal.run_rollout(buffer, ticket, minimal.GroupConverter(args), fill, keep_all=True)
        rows = trainer.log_probs("actor", buffer.get_data(rollout_id))
        return sum(float(row.sum()) for row in rows) / sum(len(row) for row in rows)

    before = mean_log_prob(0)
    assert [done for done, _ in minimal.steps(args, engine, trainer, fill)] == list(range(1, 13))
    assert mean_log_prob(0) > before + 0.5


def test_the_engine_fills_samples_with_the_log_probs_that_the_trainer_computes(tmp_path):
    words = minimal.write_words(tmp_path, seed=0)
    folder = minimal.make_tiny_model(
        tmp_path / "model", seed=0, init_scale=0.3, max_position_embeddings=64, **minimal.MODEL
    )
    args = minimal.options(
        {"prompt_data": words["train"], "hf_checkpoint": folder}, rollout_batch_size=4, n_samples_per_prompt=2
    )
    engine = minimal.Engine(folder, seed=0)
    buffer = minimal.make_buffer(args)
    ticket = buffer.generate(0)
    minimal.run_rollout(
        buffer, ticket, minimal.GroupConverter(args), lambda samples: engine.generate(samples, 0), keep_all=True
    )
    batch = buffer.get_data(0)
    recomputed = minimal.make_trainer(args).log_probs("actor", batch)
    assert len(batch) == 8
    ended = [int(tokens[-1]) == engine.tokenizer.eos_token_id for tokens in batch.columns["tokens"]]
    assert [not truncated for truncated in batch.columns["truncated"]] == ended
    assert not all(ended)  # random weights rarely draw the end token
    for ours, engines in zip(recomputed, batch.columns["rollout_log_probs"], strict=True):
        assert ours == pytest.approx(engines, abs=2e-4)


@pytest.mark.parametrize(
    ("response", "status", "expected"),
    [
        ("tac", Status.COMPLETED, 1.0),
        ("tac", Status.TRUNCATED, 0.0),
        ("tacx", Status.COMPLETED, 0.0),
    ],
)
def test_only_the_whole_answer_with_its_end_is_rewarded(response, status, expected):
    assert minimal.reward(Sample(response=response, label="tac", status=status)) == expected
