"""The output layer as one function with log-probabilities and entropies, and which models take it so."""

from __future__ import annotations

import copy
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
from buffer_rl.trainer.collate import MicroBatch, collate
from buffer_rl.trainer.forward import response_log_probs, response_values
from buffer_rl.trainer.model import Model
from buffer_rl.trainer.output_layer import FUSED, fuse_where_possible, fused_log_probs, is_fused
from buffer_rl.trainer.packing import is_packed
from buffer_rl.trainer.pretrained import load_model

CPU = torch.device("cpu")
CHARACTERS = "abcdefghijklmnopqrstuvwxyz="
MakeBatch = Callable[..., TrainBatch]


def load(folder: Path | str, *, fused: bool = True, **options: Any) -> PreTrainedModel:
    """A tiny model; without ``fused`` with the path of a model that works on its logits."""
    path = make_tiny_model(folder, characters=CHARACTERS, init_scale=0.3, **options)
    model = load_model(path, CPU, "--hf-checkpoint")
    assert is_fused(model)
    setattr(model.get_output_embeddings(), FUSED, fused)
    return model


def kept_of(target_n: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    """Sets of 0 to 5 tokens, in which each token is; 0 for the whole vocabulary."""
    counts = [(5 * token + place) % 6 for place, token in enumerate(target_n.tolist())]
    ids = [(token + 3 * i) % size for token, count in zip(target_n.tolist(), counts, strict=True) for i in range(count)]
    return torch.tensor(counts, dtype=torch.int64), torch.tensor(ids, dtype=torch.int64)


def double_case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states of 7 tokens, a weight for 11 tokens, and targets."""
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, 4, dtype=torch.float64, generator=generator) for n in (7, 11))
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(11, (7,), generator=generator)


@pytest.mark.parametrize("chunk", [1 << 24, 33, 11])  # all, three, one of seven tokens
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("is_kept", [False, True])
def test_gradients_in_float64_are_those_of_finite_differences(
    chunk: int, temperature: float, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabulary, "CHUNK_ELEMENTS", chunk)
    hidden, weight, target = double_case()
    kept = kept_of(target, 11) if is_kept else ()

    def outputs(states: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        return fused_log_probs(states, matrix, target, *kept, temperature=temperature)

    torch.autograd.gradcheck(outputs, (hidden, weight))


@pytest.mark.parametrize("chunk", [1 << 24, 33])
@pytest.mark.parametrize("coefficient", [0.0, 0.3])
@pytest.mark.parametrize("is_kept", [False, True])
def test_values_and_gradients_in_float64_equal_those_of_autograd(
    chunk: int, coefficient: float, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """coefficient: of the entropy bonus."""
    monkeypatch.setattr(vocabulary, "CHUNK_ELEMENTS", chunk)
    hidden, weight, target = double_case()
    counts, ids = kept_of(target, 11)
    allowed = torch.ones(7, 11, dtype=torch.bool)
    for place, chosen in enumerate(ids.split(counts.tolist()) if is_kept else ()):
        if len(chosen):
            allowed[place] = False
            allowed[place, chosen] = True
    probs = torch.where(allowed, (hidden @ weight.T / 0.7).exp(), 0.0)
    probs = probs / probs.sum(-1, keepdim=True)
    entropy = -torch.special.xlogy(probs, torch.where(allowed, probs, 1.0)).sum(-1)
    expected = torch.stack([probs[torch.arange(7), target].log(), entropy], -1)
    found = fused_log_probs(hidden, weight, target, *((counts, ids) if is_kept else ()), temperature=0.7)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    bonus = torch.linspace(-1, 2, 7, dtype=torch.float64)[:, None] * torch.tensor([1.0, coefficient])
    gradients = [torch.autograd.grad((outputs * bonus).sum(), (hidden, weight)) for outputs in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-12)


def outputs_and_gradients(model: PreTrainedModel, micro: MicroBatch, coefficient: float) -> list[torch.Tensor]:
    """Log-probabilities, entropies and the gradients of all weights, of a weighted sum of both."""
    log_probs_bt, entropy_bt = response_log_probs(model, micro, 0.8)
    weights = torch.linspace(-1, 1, log_probs_bt.shape[1])
    (weights * log_probs_bt + coefficient * weights.flip(0) * entropy_bt).sum().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values()), gradients.keys()
    return [log_probs_bt, entropy_bt, *(gradient for gradient in gradients.values() if gradient is not None)]


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])  # tied embeddings, and an output layer of its own
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("coefficient", [0.0, 0.3])
def test_a_micro_batch_of_one_chunk_has_the_bits_of_the_path_with_logits_and_one_of_several_is_close(
    architecture: str,
    packed: bool,
    is_kept: bool,
    coefficient: float,
    tmp_path: Path,
    make_batch: MakeBatch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = [load(tmp_path, architecture=architecture, fused=fused) for fused in (False, True, True)]
    assert models[0].config.tie_word_embeddings == (architecture == "qwen3")
    micro = collate(make_batch(9), CPU, packed=True)
    if is_kept:
        micro.kept = kept_of(micro.target_n, models[0].config.vocab_size)
    for model in models:
        if not packed:
            model.set_attn_implementation("sdpa")
        assert is_packed(model) == packed
    expected, whole = (outputs_and_gradients(model, micro, coefficient) for model in models[:2])
    assert all(torch.equal(left, right) for left, right in zip(expected, whole, strict=True))
    monkeypatch.setattr(vocabulary, "CHUNK_ELEMENTS", 10 * models[0].config.vocab_size)
    assert len(micro.target_n) > 20
    chunked = outputs_and_gradients(models[2], micro, coefficient)
    for left, right in zip(expected, chunked, strict=True):
        assert (left - right).abs().max() <= 1e-5 * left.abs().max()


def test_values_are_the_same_with_and_without_gradients_whatever_else_is_asked_for(
    tmp_path: Path, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first ratio of new to old probabilities is exactly 1 then."""
    model, micro = load(tmp_path), collate(make_batch(9), CPU, packed=True)
    for chunk in (1 << 24, 10 * model.config.vocab_size):
        monkeypatch.setattr(vocabulary, "CHUNK_ELEMENTS", chunk)
        trained, _ = response_log_probs(model, micro, 0.8)
        with torch.no_grad():
            old, entropy = response_log_probs(model, micro, 0.8, with_entropy=False)
        assert trained.requires_grad
        assert torch.equal(trained, old)
        assert entropy.abs().sum() == 0


def test_a_frozen_output_layer_and_frozen_layers_below_it_get_no_gradient(
    tmp_path: Path, make_batch: MakeBatch
) -> None:
    model, micro = load(tmp_path, architecture="llama"), collate(make_batch(4), CPU, packed=True)
    head = model.get_output_embeddings()
    head.requires_grad_(False)
    response_log_probs(model, micro, 1.0)[0].sum().backward()
    assert head.weight.grad is None
    assert model.get_input_embeddings().weight.grad.abs().sum() > 0
    model.zero_grad()
    model.requires_grad_(False)
    head.requires_grad_(True)
    response_log_probs(model, micro, 1.0)[0].sum().backward()
    assert head.weight.grad.abs().sum() > 0
    assert model.get_input_embeddings().weight.grad is None


def test_a_micro_batch_without_response_tokens_has_a_gradient_of_zeros(tmp_path: Path) -> None:
    model = load(tmp_path)
    none = torch.zeros(0, dtype=torch.int64)
    micro = MicroBatch(
        tokens_bl=torch.zeros((1, 1), dtype=torch.int64),
        response_bt=torch.zeros((1, 0), dtype=torch.bool),
        predictor_n=none,
        target_n=none,
        response_lengths=[0],
    )
    for kept in ((), (none, none)):
        micro.kept = kept
        response_log_probs(model, micro, 1.0)[0].sum().backward()
        assert model.get_output_embeddings().weight.grad.abs().sum() == 0


@pytest.mark.parametrize("chunk", [1 << 24, 100])
def test_products_of_bfloat16_are_summed_and_returned_in_float32(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "CHUNK_ELEMENTS", chunk)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=generator).bfloat16().requires_grad_() for n in (12, 50))
    target = torch.randint(50, (12,), generator=generator)
    found = fused_log_probs(hidden, weight, target)
    assert found.dtype == torch.float32
    wide = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    expected = fused_log_probs(*wide, target)
    assert (found - expected).abs().max() < 1e-4  # products in bfloat16 are off by 1e-2
    factors = torch.linspace(-1, 1, 12)[:, None] * torch.tensor([1.0, 0.5])
    gradients = torch.autograd.grad((found * factors).sum(), (hidden, weight))
    for one, other in zip(gradients, torch.autograd.grad((expected * factors).sum(), wide), strict=True):
        assert one.dtype == torch.bfloat16
        assert (one - other).abs().max() <= 2**-8 * other.abs().max()  # rounded once, to 8 bits


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, torch.Tensor):
                self.bytes = max(self.bytes, each.untyped_storage().nbytes())
        return result


def memory(model: torch.nn.Module, batch: TrainBatch) -> tuple[int, int]:
    """Bytes of the largest tensor of forward and backward pass, and of all that is kept between them, each storage
    once."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    micro: Any = collate(batch, CPU)
    with Largest() as made:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            log_probs, entropy = response_log_probs(model, micro, 0.7)  # type: ignore[arg-type]
        (log_probs.sum() + 0.1 * entropy.sum()).backward()
    return made.bytes, sum(kept.values())


class Bigrams(torch.nn.Module):
    """An embedding and an output layer with a vocabulary that is large beside everything else. after: what it does to
    the logits."""

    def __init__(self, after: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits, **head: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(2000, 4)
        self.head = head.get("head") or torch.nn.Linear(4, 2000, bias=head.get("bias", False))
        self.after = after

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=self.after(self.head(self.embedding(input_ids))))


def test_memory_does_not_grow_with_response_tokens_times_vocabulary(
    make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabulary, "CHUNK_ELEMENTS", 10 * 2000)
    small, large = (make_batch(rows, seed=1) for rows in (40, 160))
    tokens = [int(batch.columns["response_length"].sum()) for batch in (small, large)]
    model = Bigrams()
    fuse_where_possible(model)
    (largest, kept), (largest_of_more, kept_of_more) = (memory(model, batch) for batch in (small, large))
    logits = 10 * 2000 * 4
    assert largest == largest_of_more == logits
    assert kept_of_more - kept < 200 * (tokens[1] - tokens[0])  # hidden states, ids and masks; 8,000 a row of logits
    setattr(model.get_output_embeddings(), FUSED, False)
    largest, kept = memory(model, large)
    assert min(largest, kept) >= 2000 * 4 * tokens[1]  # as other models do, this one keeps all logits


class OwnLinear(torch.nn.Linear):
    """What a subclass computes is its own."""


def hooked() -> torch.nn.Linear:
    head = torch.nn.Linear(4, 2000, bias=False)
    head.register_forward_hook(lambda _module, _args, output: 2 * output)
    return head


def patched() -> torch.nn.Linear:
    head = torch.nn.Linear(4, 2000, bias=False)
    head.forward = lambda hidden: 2 * torch.nn.functional.linear(hidden, head.weight)  # type: ignore[method-assign]
    return head


REFUSED: dict[str, Callable[[], Bigrams]] = {
    "a soft cap of 30": lambda: Bigrams(lambda logits: 30 * (logits / 30).tanh()),
    "a hard cap of 30": lambda: Bigrams(lambda logits: logits.clamp(-30, 30)),
    "a scale": lambda: Bigrams(lambda logits: logits * 0.0625),
    "a token that is never drawn": lambda: Bigrams(
        lambda logits: logits.index_fill(-1, torch.tensor([7]), float("-inf"))
    ),
    "rounding": lambda: Bigrams(lambda logits: logits.bfloat16().float()),
    "a bias": lambda: Bigrams(bias=True),
    "a subclass": lambda: Bigrams(head=OwnLinear(4, 2000, bias=False)),
    "a hook": lambda: Bigrams(head=hooked()),
    "a forward of its own": lambda: Bigrams(head=patched()),
    "the mean of two calls": lambda: Twice(),
    "a check of the width": lambda: Bigrams(lambda logits: logits.view(1, -1, 2000)),
}


class Twice(Bigrams):
    """It calls its output layer twice."""

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        hidden = self.embedding(input_ids)
        return SimpleNamespace(logits=(self.head(hidden) + self.head(hidden.flip(-1))) / 2)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_whose_logits_are_not_those_of_a_plain_linear_layer_keeps_the_path_with_logits(
    name: str, make_batch: MakeBatch
) -> None:
    model, plain = REFUSED[name](), Bigrams()
    for each in (model, plain):  # a cap of 30 is lost in the rounding of logits that are so small
        torch.nn.init.normal_(each.head.weight, std=1e-3)
    fuse_where_possible(model)
    fuse_where_possible(plain)
    assert (is_fused(model), is_fused(plain)) == (False, True)
    micro: Any = collate(make_batch(6), CPU)
    found, _ = response_log_probs(model, micro, 0.7)  # type: ignore[arg-type]
    with torch.no_grad():
        logits = model(micro.tokens_bl, use_cache=False).logits.flatten(0, 1)[micro.predictor_n]
    expected = (logits / 0.7).log_softmax(-1).gather(1, micro.target_n[:, None])[:, 0]
    torch.testing.assert_close(found[micro.response_bt], expected, rtol=1e-5, atol=1e-5)


def test_which_architectures_are_fused(tmp_path: Path) -> None:
    """All but those that scale or cap their logits."""
    for name in ARCHITECTURES:
        assert is_fused(load_model(make_tiny_model(tmp_path / name, architecture=name), CPU, "--hf-checkpoint")), name
    capped = make_tiny_model(tmp_path / "capped", architecture="gemma3", final_logit_softcapping=30.0)
    assert not is_fused(load_model(capped, CPU, "--hf-checkpoint"))


def test_the_probe_draws_no_random_numbers_and_leaves_the_layer_as_it_was() -> None:
    model = Bigrams()
    ids = torch.tensor([[4, 5, 6]])
    before, state, names = model(ids, use_cache=False).logits, torch.get_rng_state(), set(vars(model.head))
    fuse_where_possible(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model(ids, use_cache=False).logits, before)
    assert set(vars(model.head)) - names == {FUSED}
    assert is_fused(copy.deepcopy(model))


def test_the_output_layer_is_its_own_again_after_a_pass_that_fails(make_batch: MakeBatch) -> None:
    model = Bigrams()
    fuse_where_possible(model)
    micro: Any = collate(make_batch(4), CPU)
    micro.target_n = micro.target_n[:-1]
    with pytest.raises(RuntimeError):
        response_log_probs(model, micro, 1.0)  # type: ignore[arg-type]
    assert "forward" not in vars(model.head)
    model.after = lambda logits: logits[:, 1:]
    micro = collate(make_batch(4), CPU)
    with pytest.raises(TrainError, match="returned logits of shape"):
        response_log_probs(model, micro, 1.0)  # type: ignore[arg-type]
    assert "forward" not in vars(model.head)


def test_a_value_head_returns_what_its_layer_computes(tmp_path: Path, make_batch: MakeBatch) -> None:
    model, micro = load(tmp_path), collate(make_batch(6), CPU)
    Model(model).add_value_head()
    head: Any = model.get_output_embeddings()
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(0))
    seen: list[torch.Tensor] = []
    handle = model.base_model.register_forward_hook(lambda _module, _args, output: seen.append(output[0]))
    values = response_values(model, micro)
    handle.remove()
    expected = seen[0].flatten(0, 1)[micro.predictor_n] @ head.weight[0]
    torch.testing.assert_close(values[micro.response_bt], expected, rtol=1e-5, atol=1e-5)
