from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from buffer_rl.errors import TrainError
from buffer_rl.records.groups import TrainBatch
from buffer_rl.testing.tiny import ARCHITECTURES, make_tiny_model
from buffer_rl.trainer import vocabulary
from buffer_rl.trainer.collate import collate
from buffer_rl.trainer.forward import passes, response_log_probs
from buffer_rl.trainer.output_layer import FUSED
from buffer_rl.trainer.pretrained import load_model
from harness.losses import objective_of

CPU = torch.device("cpu")


def _plain(model: PreTrainedModel, batch: TrainBatch, temperature: float) -> list[tuple[list[float], list[float]]]:
    """Row by row without padding, from the full logits: log-probabilities and entropies of the response."""
    results = []
    for tokens, length in zip(batch.columns["tokens"], batch.columns["response_length"], strict=True):
        ids = torch.tensor(tokens.tolist())[None]
        with torch.no_grad():
            log_probs = (model(input_ids=ids).logits[0].double() / temperature).log_softmax(-1)
        rows = [(log_probs[t - 1, ids[0, t]], log_probs[t - 1]) for t in range(len(tokens) - length, len(tokens))]
        results.append(([float(chosen) for chosen, _ in rows], [float(-(lp.exp() * lp).sum()) for _, lp in rows]))
    return results


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_entropies_equal_a_plain_forward_of_each_row(
    architecture: str, temperature: float, tmp_path: Path, make_batch: Callable[..., TrainBatch]
) -> None:
    folder = make_tiny_model(tmp_path, architecture=architecture, characters="abcdefghijklmnopqrstuvwxyz=")
    model = load_model(folder, CPU, "--hf-checkpoint")
    batch = make_batch(6)
    log_probs_bt, entropy_bt = response_log_probs(model, collate(batch, CPU), temperature)
    for row, (log_probs, entropies) in enumerate(_plain(model, batch, temperature)):
        length = len(log_probs)
        assert log_probs_bt[row, :length].tolist() == pytest.approx(log_probs, abs=2e-5)
        assert entropy_bt[row, :length].tolist() == pytest.approx(entropies, abs=2e-5)
        assert log_probs_bt[row, length:].abs().sum() == 0
        assert entropy_bt[row, length:].abs().sum() == 0


class ArraysMade(TorchDispatchMode):
    """Counts the arrays of ``[num_rows, width]`` that operations make; views are none."""

    def __init__(self, num_rows: int, width: int) -> None:
        super().__init__()
        self.num_rows, self.width, self.count = num_rows, width, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape[-1:] == (self.width,) and not result._is_view():
            given = [a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)]
            is_whole = result.numel() == self.num_rows * self.width
            self.count += is_whole and result.untyped_storage().data_ptr() not in given
        return result


@pytest.mark.parametrize(("fused", "large"), [(True, 0), (False, 2)])  # the logits and their gradient
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunks_change_values_and_gradients_by_rounding_alone_and_make_few_large_arrays(
    temperature: float,
    fused: bool,
    large: int,
    model_path: str,
    make_batch: Callable[..., TrainBatch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    micro = collate(make_batch(6), CPU)
    size = load_model(model_path, CPU, "--hf-checkpoint").config.vocab_size
    found = []
    for chunk in (1 << 24, 5 * size):
        monkeypatch.setattr(vocabulary, "CHUNK_ELEMENTS", chunk)
        model = load_model(model_path, CPU, "--hf-checkpoint")
        setattr(model.get_output_embeddings(), FUSED, fused)
        with ArraysMade(len(micro.target_n), size) as made:
            log_probs_bt, entropy_bt = response_log_probs(model, micro, temperature)
            (log_probs_bt * torch.linspace(-1, 1, log_probs_bt.shape[1]) + 0.3 * entropy_bt).sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found.append((made.count, [log_probs_bt, entropy_bt, *gradients]))
    (whole, expected), (chunked, values) = found
    for one, other in zip(expected, values, strict=True):
        assert (one - other).abs().max() <= 1e-5 * one.abs().max()
    assert (chunked, whole > 3) == (large, True)


def test_capped_logits_keep_their_cap(tmp_path: Path, make_batch: Callable[..., TrainBatch]) -> None:
    """Gemma caps the logits after the output layer: narrowing that layer's input must not skip it."""
    folder = make_tiny_model(tmp_path, architecture="gemma3", init_scale=1.0, final_logit_softcapping=2.0)
    model = load_model(folder, CPU, "--hf-checkpoint")
    batch = make_batch(4)
    log_probs_bt, _ = response_log_probs(model, collate(batch, CPU), 1.0)
    for row, (log_probs, _) in enumerate(_plain(model, batch, 1.0)):
        assert log_probs_bt[row, : len(log_probs)].tolist() == pytest.approx(log_probs, abs=2e-5)


def test_the_entropy_carries_a_gradient_and_is_0_where_it_is_not_asked_for(
    model_path: str, make_batch: Callable[..., TrainBatch]
) -> None:
    model = load_model(model_path, CPU, "--hf-checkpoint")
    micro = collate(make_batch(4), CPU)
    assert response_log_probs(model, micro, 1.0)[1].requires_grad
    assert response_log_probs(model, micro, 1.0, with_entropy=False)[1].abs().sum() == 0


def test_passes_that_other_ranks_need_have_no_rows_and_give_no_numbers(
    model_path: str, make_batch: Callable[..., TrainBatch]
) -> None:
    model, args = load_model(model_path, CPU, "--hf-checkpoint"), SimpleNamespace(max_tokens_per_gpu=10**6)
    args.deterministic = False
    found = list(passes(args, model, make_batch(2), CPU, objective_of(), lambda own: own + 2))  # type: ignore[arg-type]
    assert [indices for indices, _ in found] == [[0, 1], [], []]
    assert response_log_probs(model, found[-1][1], 1.0)[0].shape == (1, 0)


def test_the_output_layer_is_as_before_afterwards(model_path: str, make_batch: Callable[..., TrainBatch]) -> None:
    model = load_model(model_path, CPU, "--hf-checkpoint")
    ids = torch.tensor([[4, 5, 6]])
    before = model(input_ids=ids).logits
    response_log_probs(model, collate(make_batch(4), CPU), 1.0)
    assert torch.equal(model(input_ids=ids).logits, before)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rows_longer_than_a_rope_whose_frequencies_change_are_refused(
    kind: str, tmp_path: Path, make_batch: Callable[..., TrainBatch]
) -> None:
    batch = make_batch(6)
    longest = max(batch.lengths)
    factors = {"short_factor": [1.0] * 8, "long_factor": [8.0] * 8} if kind == "longrope" else {}
    for limit in (longest, longest - 1):
        rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **factors}
        rope["original_max_position_embeddings"] = limit
        folder = make_tiny_model(tmp_path / str(limit), characters="abcdefghijklmnopqrstuvwxyz=", rope_parameters=rope)
        model = load_model(folder, CPU, "--hf-checkpoint")
        if limit == longest:
            log_probs_bt, _ = response_log_probs(model, collate(batch, CPU), 1.0)
            for row, (log_probs, _) in enumerate(_plain(model, batch, 1.0)):
                assert log_probs_bt[row, : len(log_probs)].tolist() == pytest.approx(log_probs, abs=2e-5)
        else:
            with pytest.raises(
                TrainError, match=rf"a row has {longest} tokens(.|\n)*--rollout-max-context-len {limit}"
            ):
                response_log_probs(model, collate(batch, CPU), 1.0)
