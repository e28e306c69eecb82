"""Hugging Face folders: what a run starts from, loaded without a network."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from buffer_rl.args import Args
from buffer_rl.cluster.environment import set_variables
from buffer_rl.errors import ConfigError
from buffer_rl.files.hf_config import read_config
from buffer_rl.options.section import flag_of
from buffer_rl.plan.roles import CRITIC
from buffer_rl.trainer.output_layer import fuse_where_possible
from buffer_rl.trainer.packing import pack_where_possible, probe_of
from buffer_rl.trainer.sharding import gather_tied_once, reshard


def prepare_torch(args: Args, seed: int) -> None:
    """Threads, random state and determinism of this process, as ``args`` say; before a model is built."""
    torch.set_num_threads(args.num_train_threads)
    seed_all(seed)
    # The run has a display of its own, and what this process prints goes into a log file.
    disable_progress_bar()  # type: ignore[no-untyped-call]
    if args.deterministic:
        workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with one
        set_variables({"CUBLAS_WORKSPACE_CONFIG": workspace})
        torch.use_deterministic_algorithms(True)


def seed_all(seed: int) -> None:
    """Seed the random numbers of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def initial_folder(args: Args, model: str) -> tuple[str | None, str]:
    """The folder of weights that ``model`` ("actor", "ref", "teacher" or "critic") starts with, and the flag that names
    it."""
    option = {"ref": "ref_load", "teacher": "opd_teacher_load", CRITIC: "critic_load"}.get(model, "hf_checkpoint")
    if not getattr(args, option):
        option = "hf_checkpoint"
    return getattr(args, option), flag_of(option)


def pick_device(requested: str) -> torch.device:
    """The device for ``--train-device``: ``auto`` takes CUDA where there is one. Raises ConfigError."""
    if requested == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if requested == "cuda" and not torch.cuda.is_available():
        what = "CUDA was asked for and torch sees no CUDA device"
        raise ConfigError(what, where="--train-device", hint="use --train-device cpu, or install a CUDA build of torch")
    return torch.device(requested)


def load_model(
    path: str | None, device: torch.device, flag: str, *, trust_remote_code: bool = False, **how: Any
) -> PreTrainedModel:
    """The causal language model in the folder ``path``, as ``load_pretrained`` loads it. Raises ConfigError, too, for
    one that is not causal."""
    what, how = "causal language model", {"trust_remote_code": trust_remote_code, **how}
    model = load_pretrained(AutoModelForCausalLM, what, path, device, flag, **how)
    gather_tied_once(model)
    probe = probe_of(model)
    _require_causal(probe, str(path), flag)
    pack_where_possible(model)
    fuse_where_possible(model, probe)
    reshard(model)
    return model


def load_pretrained(
    auto_class: Any,
    what: str,
    path: str | None,
    device: torch.device,
    flag: str,
    *,
    trust_remote_code: bool,
    dtype: torch.dtype = torch.float32,
    **how: Any,
) -> PreTrainedModel:
    """The model that ``auto_class`` of transformers makes of the folder ``path``, on ``device``, without dropout.
    what: such a model, for messages, as ``flag``, the option that named the folder. how: more of ``from_pretrained``.

    Nothing is fetched, and no code of the folder is run unless ``trust_remote_code`` says so. Raises ConfigError if the
    folder is missing, damaged, quantized, or lacks weights that the architecture has (transformers would fill them with
    random numbers).
    """
    folder = checked_folder(path, flag)
    if (quantized := read_config(flag, folder).get("quantization_config")) is not None:
        method = quantized.get("quant_method", "unknown") if isinstance(quantized, dict) else quantized
        expected = "weights in float32, bfloat16 or float16; adapters need such a base too"
        hint = "engines may have a quantized folder of their own"
        raise ConfigError(f"the weights in {folder} are quantized ({method})", where=flag, expected=expected, hint=hint)
    try:
        loaded: Any = auto_class.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **how,
        )
    except Exception as error:  # fault boundary: a damaged folder fails in many ways, all for the user to mend
        raise ConfigError(f"{folder} does not load as a {what}: {type(error).__name__}: {error}", where=flag) from error
    model: PreTrainedModel = loaded[0]
    absent = sorted(loaded[1]["missing_keys"])
    if absent:
        raise ConfigError(f"{folder} lacks {len(absent)} weights of its architecture, such as {absent[0]}", where=flag)
    # eval() turns dropout off for good: with it, the probabilities of a token would differ between two passes, and
    # the ratio of new to old probabilities would not start at 1.
    torch.nn.Module.to(model, device)
    torch.nn.Module.eval(model)
    return model


def _require_causal(model: PreTrainedModel, folder: str, flag: str) -> None:
    """Raises ConfigError if a token's logits depend on the tokens after it, as the rows of a batch are padded on the
    right without a mask. The check reads the gradient, which is exactly 0 under a causal mask, whatever the size of
    the weights."""
    embedded: list[torch.Tensor] = []

    def keep(_module: torch.nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1] * 1  # some architectures work on it in place, which a leaf does not allow

    embedding: Any = model.get_input_embeddings()
    try:
        ids = torch.arange(8, device=embedding.weight.device)[None] % embedding.weight.shape[0]
        with torch.enable_grad(), embedding.register_forward_hook(keep):
            logits = model(input_ids=ids, use_cache=False).logits
            (gradient,) = torch.autograd.grad(logits[:, :4].square().sum(), embedded[:1])
        gradient = gradient.reshape(ids.numel(), -1)
    except Exception as error:  # fault boundary: many architectures, not all of which take tokens alone
        what = f"{type(model).__name__} cannot be trained: 8 tokens fail with {type(error).__name__}: {error}"
        raise ConfigError(what, where=flag) from error
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
        what = f"the tokenizer in {folder} does not load: {type(error).__name__}: {error}"
        raise ConfigError(what, where=flag) from error


def checked_folder(path: str | None, flag: str) -> str:
    """``path``, if it is a folder with a model. Raises ConfigError naming ``flag`` otherwise."""
    if not path:
        raise ConfigError("no model was named", where=flag, expected="a Hugging Face folder")
    folder = Path(path)
    if not (folder / "config.json").is_file():
        what = "has no config.json" if folder.is_dir() else "does not exist"
        expected = "a folder with config.json, safetensors files and a tokenizer"
        hint = "download the model first: nothing is fetched from a hub here"
        raise ConfigError(f"the folder {path} {what}", where=flag, expected=expected, hint=hint)
    return str(folder)
