"""Loading, exporting and writing Hugging Face causal language models, from folders only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from buffer_rl.errors import ConfigError

BUCKET_BYTES = 256 * 1024 * 1024
"""Largest bucket of ``weight_buckets``: large enough to amortise a transfer, small beside an engine's memory."""


def pick_device(requested: str) -> torch.device:
    """The device for ``--train-device``: ``auto`` takes CUDA where there is one. Raises ConfigError."""
    if requested == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if requested == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "CUDA was asked for and torch sees no CUDA device",
            where="--train-device",
            hint="use --train-device cpu, or install a CUDA build of torch",
        )
    return torch.device(requested)


def load_model(
    path: str | None, device: torch.device, flag: str, *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model in the folder ``path``, in float32 on ``device``, without dropout.

    Nothing is fetched, and no code of the folder is run unless ``trust_remote_code`` says so. ``flag`` is the option
    that named the folder, for messages. Raises ConfigError if the folder is missing, damaged, or lacks weights that the
    architecture has (transformers would fill them with random numbers).
    """
    folder = checked_folder(path, flag)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except Exception as error:  # fault boundary: a damaged folder fails in many ways, all for the user to mend
        raise ConfigError(
            f"{folder} does not load as a causal language model: {type(error).__name__}: {error}", where=flag
        ) from error
    model: PreTrainedModel = loaded[0]
    absent = sorted(loaded[1]["missing_keys"])
    if absent:
        raise ConfigError(f"{folder} lacks {len(absent)} weights of its architecture, such as {absent[0]}", where=flag)
    # eval() turns dropout off for good: with it, the probabilities of a token would differ between two passes, and
    # the ratio of new to old probabilities would not start at 1.
    torch.nn.Module.to(model, device)
    torch.nn.Module.eval(model)
    _require_causal(model, folder, flag)
    return model


def _require_causal(model: PreTrainedModel, folder: str, flag: str) -> None:
    """Raises ConfigError if a token's logits depend on the tokens after it, as the rows of a batch are padded on the
    right without a mask. What is looked at is the gradient, which is exactly 0 under a causal mask, whatever the size
    of the weights."""
    embedded: list[torch.Tensor] = []

    def keep(_module: torch.nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1] * 1  # some architectures work on it in place, which a leaf does not allow

    embedding: Any = model.get_input_embeddings()
    handle = embedding.register_forward_hook(keep)
    try:
        ids = torch.arange(8, device=embedding.weight.device)[None] % embedding.weight.shape[0]
        with torch.enable_grad():
            logits = model(input_ids=ids, use_cache=False).logits
            (gradient,) = torch.autograd.grad(logits[:, :4].square().sum(), embedded[:1])
        gradient = gradient.reshape(ids.numel(), -1)
    except Exception as error:  # fault boundary: many architectures, not all of which take tokens alone
        raise ConfigError(
            f"{type(model).__name__} cannot be trained: 8 tokens fail with {type(error).__name__}: {error}", where=flag
        ) from error
    finally:
        handle.remove()
    if gradient[4:].abs().max() > 1e-6 * gradient[:4].abs().max():
        raise ConfigError(
            f"{type(model).__name__} in {folder} is no causal language model: a token's logits depend on later tokens",
            where=flag,
            expected="a model that sees only the tokens before it",
            hint='models of the BERT family do with "is_decoder": true in config.json',
        )


def load_tokenizer(path: str | None, flag: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer in the folder ``path``. Raises ConfigError if it is missing or damaged."""
    folder = checked_folder(path, flag)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # fault boundary, as in load_model
        raise ConfigError(
            f"the tokenizer in {folder} does not load: {type(error).__name__}: {error}", where=flag
        ) from error


def save_hf(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Write a folder that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load."""
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def hf_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The weights under the names of a Hugging Face checkpoint; tied weights once, under the name that is kept there.

    The tensors share memory with the model where no conversion is needed.
    """
    return dict(revert_weight_conversion(model, unique_state(model)))


def unique_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The weights under the model's own names, each storage once."""
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    state = model.state_dict()
    kept: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
    for name in sorted(state, key=lambda n: n in tied):  # the sort is stable: a tied name comes after its source
        tensor = state[name].detach()
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if key not in seen or tensor.numel() == 0:
            seen.add(key)
            kept[name] = tensor
    return kept


def weight_buckets(
    state: Mapping[str, torch.Tensor], bucket_bytes: int = BUCKET_BYTES, *, copy: bool = True
) -> Iterator[dict[str, torch.Tensor]]:
    """``state`` in buckets of at most ``bucket_bytes``; a larger tensor has a bucket of its own.

    copy: tensors are copied, on the device that they are on, so that a bucket stays as it is when the weights move on.
    """
    bucket: dict[str, Any] = {}
    filled = 0
    for name, tensor in state.items():
        size = tensor.numel() * tensor.element_size()
        if bucket and filled + size > bucket_bytes:
            yield bucket
            bucket, filled = {}, 0
        bucket[name] = tensor.clone(memory_format=torch.contiguous_format) if copy else tensor.contiguous()
        filled += size
    if bucket:
        yield bucket


def checked_folder(path: str | None, flag: str) -> str:
    """``path``, if it is a folder with a model. Raises ConfigError naming ``flag`` otherwise."""
    if not path:
        raise ConfigError("no model was named", where=flag, expected="a Hugging Face folder")
    folder = Path(path)
    if not (folder / "config.json").is_file():
        what = "has no config.json" if folder.is_dir() else "does not exist"
        raise ConfigError(
            f"the folder {path} {what}",
            where=flag,
            expected="a folder with config.json, safetensors files and a tokenizer",
            hint="download the model first: nothing is fetched from a hub here",
        )
    return str(folder)
