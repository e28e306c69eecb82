"""What the configuration of a Hugging Face model says about its tokens and its longest sequence, read without torch.

The configurations of composite models keep that of the language model one level down. Rope settings are in
``rope_scaling`` (flat, with ``type`` or ``rope_type``) or ``rope_parameters`` (flat, or one dictionary for each kind of
layer).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from buffer_rl.args import Args
from buffer_rl.errors import ConfigError
from buffer_rl.options.section import required
from buffer_rl.records.experts import ExpertSizes

DOWNLOAD = "a model of the Hub is ORG/NAME, or: hf download ORG/NAME --local-dir FOLDER"
_TEXT_CONFIGS = ("text_config", "decoder", "generator", "llm_config", "language_config")


def read_config(flag: str, folder: str) -> dict[str, Any]:
    """``config.json`` of a model folder. Raises ConfigError if it is not there or no JSON object."""
    path = Path(folder, "config.json")
    if not path.is_file():
        if not path.parent.exists():
            hint = f"the current folder is {Path.cwd()}; {DOWNLOAD}"
            raise ConfigError("there is no such folder", where=f"{flag} {folder}", hint=hint)
        what = f"{folder!r} is no Hugging Face folder: there is no config.json in it"
        raise ConfigError(what, where=flag, hint=DOWNLOAD)
    return json_object(flag, path)


def json_object(flag: str, path: Path) -> dict[str, Any]:
    """The object in the file ``path``. Raises ConfigError naming ``flag``."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"the file cannot be read: {error.strerror}", where=f"{flag} {path}") from error
    except ValueError as error:
        raise ConfigError(f"the file is no JSON: {error}", where=f"{flag} {path}", hint=DOWNLOAD) from error
    if not isinstance(value, dict):
        raise ConfigError("the file holds no JSON object", where=f"{flag} {path}", hint=DOWNLOAD)
    return value


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of ``config.json`` that describes the language model; all of it where there is no such part."""
    found = [config[name] for name in _TEXT_CONFIGS if isinstance(config.get(name), Mapping)]
    return found[0] if found else config


def max_positions(config: Mapping[str, Any]) -> int | None:
    """``max_position_embeddings`` of the language model, or GPT-2's ``n_positions``; None where it states none."""
    text = text_config(config)
    return _length(text.get("max_position_embeddings", text.get("n_positions")))


def vocab_size(config: Mapping[str, Any]) -> int | None:
    """Rows of the language model's embedding, which may be more than its tokenizer has tokens; token ids are below it.
    None where the configuration states none."""
    return _length(text_config(config).get("vocab_size"))


def expert_sizes(args: Args) -> ExpertSizes | None:
    """Of the model in ``args.hf_checkpoint``, for ``--replay-routed-experts``; None without it. Raises ConfigError for
    a model without experts."""
    if not args.replay_routed_experts:
        return None
    folder = required(args.hf_checkpoint, "hf_checkpoint")
    sizes = ExpertSizes.of(text_config(read_config("--hf-checkpoint", folder)))
    if sizes is None:
        what = "the model is no mixture of experts, as far as its config.json says"
        where = f"--replay-routed-experts and --hf-checkpoint {folder}"
        expected = "num_experts (or num_local_experts, n_routed_experts) and num_experts_per_tok"
        raise ConfigError(what, where=where, expected=expected, hint="take --replay-routed-experts out")
    return sizes


def length_problem(config: Mapping[str, Any], longest: int | None) -> tuple[str, int] | None:
    """Why sequences of up to ``longest`` tokens cannot be computed in batches, and the longest that can; None where
    they can. longest: None if no limit is known. config: of the language model or of what it is a part of.

    With ``dynamic`` and ``longrope`` scaling, transformers chooses the frequencies of a whole batch by its longest
    sequence, and those of ``dynamic`` stay for the batches after it. Its sparse attention chooses ``index_topk`` tokens
    among all of a row, those after the token in question and the padding too.
    """
    text = text_config(config)
    limits = [limit for limit in map(_steady_length, _scalings(text)) if limit is not None]
    chosen, kinds = _length(text.get("index_topk")), text.get("layer_types")
    if chosen and (not kinds or "indexed_attention" in kinds):
        limits.append((chosen, "sparse attention, which chooses its tokens among later ones and padding too"))
    if not limits:
        return None
    limit, what = min(limits)
    if longest is not None and longest <= limit:
        return None
    why = f"the model has {what}: beyond {limit} tokens the log-probabilities of a row would depend on other rows"
    return why, limit


def require_short_rows(flag: str, config: Mapping[str, Any], longest: int | None, limit_flag: str) -> None:
    """Raises ConfigError if sequences of up to ``longest`` tokens cannot be computed in batches (``length_problem``).
    flag: names the model; limit_flag: what would limit the sequences."""
    if problem := length_problem(config, longest):
        reason, limit = problem
        where = f"{flag} config.json"
        expected = f"sequences of at most {limit} tokens; here they may have {longest or 'any number'}"
        raise ConfigError(reason, where=where, expected=expected, hint=f"add {limit_flag} {limit}, or less")


def _scalings(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Rope settings, those of each kind of layer on their own, with the lengths that stand beside them."""
    beside = {name: config.get(name) for name in ("model_type", "max_position_embeddings")}
    original = config.get("original_max_position_embeddings")
    for name in ("rope_scaling", "rope_parameters"):
        scaling = config.get(name)
        if not isinstance(scaling, Mapping):
            continue
        for each in (scaling, *(part for part in scaling.values() if isinstance(part, Mapping))):
            yield {**each, **beside, "original": original or each.get("original_max_position_embeddings")}


def _steady_length(scaling: Mapping[str, Any]) -> tuple[int, str] | None:
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    # Early Phi-3 configurations say "su" or "yarn" for what is called longrope now.
    phi3 = str(scaling["model_type"] or "").startswith("phi3") and kind == "yarn"
    if not (phi3 or "dynamic" in kind or kind in ("longrope", "su")):
        return None
    limit = _length(scaling["original"]) or _length(scaling["max_position_embeddings"])
    return (limit or 0, f"{kind!r} rope scaling, whose frequencies follow the longest sequence of a batch")


def _length(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
