"""Log-probabilities and entropies of response tokens under a causal language model.

Suffix legend: ``_bt`` is ``[num_rows, max_response]``; ``_n`` is ``[num_response_tokens]``; ``_nv`` is
``[num_response_tokens, vocabulary]``.

Rows go through the model packed if it takes them so (``buffer_rl.trainer.packing``). Else they are padded on the right
and no attention mask is passed: under causal attention no token sees what comes after it, so padding cannot reach a
real token, positions are right as they stand, and attention takes its fast causal path.
The vocabulary is only evaluated where a response token is predicted: prompt and padding positions are left out just
before the output layer. Output layer and softmax are one function of some tokens at a time, so that memory does not
grow with response tokens times vocabulary (``buffer_rl.trainer.output_layer``). A model that scales or caps the logits
of its output layer keeps these: they and their gradient are then all that is so large.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from buffer_rl.args import Args
from buffer_rl.errors import TrainError
from buffer_rl.files.hf_config import length_problem
from buffer_rl.kinds.objective import Objective
from buffer_rl.observe.pulse import progress
from buffer_rl.records.groups import TrainBatch
from buffer_rl.trainer.collate import MicroBatch, collate, no_rows, require_vocabulary, row_blocks, split_rows
from buffer_rl.trainer.output_layer import at_predictors, fused_log_probs, is_fused
from buffer_rl.trainer.packing import is_packed
from buffer_rl.trainer.routing_replay import Differing, RoutingReplay
from buffer_rl.trainer.vocabulary import in_chunks, of_logits


def response_log_probs(
    model: PreTrainedModel, micro: MicroBatch, temperature: float, *, with_entropy: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(log_probs_bt, entropy_bt)`` in nats, float32, 0 on padding; both differentiable in the model's weights.

    temperature: the logits are divided by it, so that the probabilities are those that the engine sampled from.
    The entropy is 0 without ``with_entropy``. Where ``micro`` has kept tokens, both are of the distribution
    renormalised over these.
    """
    if is_fused(model):
        outputs_n2 = _outputs(model, micro, partial(_fused, model, micro, temperature, with_entropy))
        log_probs_n, entropy_n = outputs_n2.float().unbind(-1)
    else:
        logits_nv = _outputs(model, micro)
        of_chunk = partial(of_logits, temperature, with_entropy)
        log_probs_n, entropy_n = in_chunks(of_chunk, logits_nv, micro.target_n, micro.kept)
    return _pad(log_probs_n, micro), _pad(entropy_n, micro)


def _fused(
    model: PreTrainedModel, micro: MicroBatch, temperature: float, with_entropy: bool, hidden_nh: torch.Tensor
) -> torch.Tensor:
    """What the output layer returns in place of logits: ``[num_response_tokens, 2]``."""
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    rest = (micro.target_n, *micro.kept)
    # The weight is read here, inside the layer's call: a sharded one is gathered for it alone.
    return fused_log_probs(hidden_nh, head.weight, *rest, temperature=temperature, with_entropy=with_entropy)


def response_values(model: PreTrainedModel, micro: MicroBatch) -> torch.Tensor:
    """The values of a model with a value head before each response token, ``[num_rows, max_response]`` float32, 0 on
    padding: what its output layer returns, whatever the architecture makes of logits after it. Raises TrainError for an
    output layer with more than one output."""
    found: list[torch.Tensor] = []
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    with head.register_forward_hook(lambda _module, _args, output: found.append(output)):
        _outputs(model, micro)
    if found[0].shape[-1] != 1:
        what = f"the output layer of {type(model).__name__} has {found[0].shape[-1]} outputs"
        raise TrainError(what, expected="one, the value")
    return _pad(found[0].float().reshape(-1), micro)


def _outputs(
    model: PreTrainedModel, micro: MicroBatch, compute: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> torch.Tensor:
    """Logits ``[num_response_tokens, vocabulary]`` of the positions before each response token; with ``compute`` what
    it gives of the hidden states there in place of the output layer."""
    head: torch.nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if head is None:
        raise TrainError(f"{type(model).__name__} has no output layer", expected="a causal language model")
    if isinstance(model, PreTrainedModel):
        config = model.config.get_text_config(decoder=True)
        if problem := length_problem(vars(config), micro.tokens_bl.shape[1]):
            expected = f"rows of at most {problem[1]} tokens"
            hint = f"--rollout-max-context-len {problem[1]}, or a rollout function that keeps to it"
            raise TrainError(f"a row has {micro.tokens_bl.shape[1]} tokens: {problem[0]}", expected=expected, hint=hint)

    inputs: dict[str, Any] = {"input_ids": micro.tokens_bl}
    predictor_n = micro.predictor_n
    if micro.packing is not None and is_packed(model):
        inputs, predictor_n = micro.packing.inputs(), micro.packing.predictor_n
    with at_predictors(head, predictor_n, compute):
        outputs = model(**inputs, use_cache=False).logits
    if outputs.shape[:2] != (1, micro.predictor_n.numel()):
        what = f"{type(model).__name__} returned logits of shape {tuple(outputs.shape)}"
        raise TrainError(what, expected=f"(1, {micro.predictor_n.numel()}, vocabulary)")
    selected: torch.Tensor = outputs.squeeze(0)  # whose gradient is a view, too
    return selected


def _pad(values_n: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    return values_n.new_zeros(micro.response_bt.shape).masked_scatter(micro.response_bt, values_n)


def batch_outputs(
    args: Args,
    model: PreTrainedModel,
    batch: TrainBatch,
    device: torch.device,
    objective: Objective,
    num_passes: Callable[[int], int] = lambda own: own,
    replay: RoutingReplay | None = None,
) -> list[np.ndarray]:
    """Log-probabilities in nats at the temperature of the objective, or a critic's values: per row
    ``[response_length]`` float32, in the micro-batches of the objective. Reads ``max_tokens_per_gpu`` and
    ``deterministic``. num_passes, replay: as in ``passes``. Raises TrainError for a token that the model does not
    know."""
    _require_vocabulary(model, batch)
    rows: list[np.ndarray] = [np.zeros(0, dtype=np.float32)] * len(batch)
    for indices, micro in passes(args, model, batch, device, objective, num_passes, replay):
        with torch.no_grad(), replayed(replay, model, micro):
            if objective.critic:
                outputs_bt = response_values(model, micro)
            else:
                outputs_bt, _ = response_log_probs(model, micro, objective.temperature, with_entropy=False)
        computed = split_rows(outputs_bt, micro.response_lengths) if indices else []
        for index, row in zip(indices, computed, strict=True):
            rows[index] = row
    return rows


def passes(
    args: Args,
    model: PreTrainedModel,
    batch: TrainBatch,
    device: torch.device,
    objective: Objective,
    num_passes: Callable[[int], int] = lambda own: own,
    replay: RoutingReplay | None = None,
) -> Iterator[tuple[list[int], MicroBatch]]:
    """The rows of each micro-batch of the objective, by their numbers in the batch. num_passes: how many there are, of
    the number that these rows need; what is more has no rows. replay: without it, tokens have no experts."""
    if replay is None and "routed_experts" in batch.columns:
        columns = {name: column for name, column in batch.columns.items() if name != "routed_experts"}
        batch = dataclasses.replace(batch, columns=columns)
    if replay is not None:
        replay.check(batch)
    packed = is_packed(model)
    blocks = row_blocks(args, batch, objective.unit, packed=packed) if len(batch) else []
    blocks += [[] for _ in range(num_passes(len(blocks)) - len(blocks))]
    for indices in blocks:
        yield indices, collate(batch.select(indices), device, packed=packed) if indices else no_rows(device)
        progress()


def replayed(
    replay: RoutingReplay | None, model: PreTrainedModel, micro: MicroBatch
) -> AbstractContextManager[Differing | None]:
    """For a pass over ``micro``: its tokens go to their experts."""
    return nullcontext() if replay is None else replay.within(model, micro.experts)


def _require_vocabulary(model: PreTrainedModel, batch: TrainBatch) -> None:
    if isinstance(model, PreTrainedModel):
        size = int(model.config.get_text_config(decoder=True).vocab_size)
        require_vocabulary(batch, size, model.config._name_or_path or type(model).__name__)
