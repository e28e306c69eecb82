"""Options of the data sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from buffer_rl.args import Args
from buffer_rl.data.difficulty import PoolWeights
from buffer_rl.options.checks import first, refuse
from buffer_rl.options.section import Section, option
from buffer_rl.plan.algorithm import is_supervised
from buffer_rl.plan.schedule import rollout_only, train_only

TEMPLATE_KWARGS = ("conversation", "tools", "tokenize", "add_generation_prompt", "return_dict", "return_tensors")
"""Arguments of the chat template that the package sets."""


class DataOptions(Section):
    """Prompts, their fields and the chat template."""

    heading: ClassVar[str] = "Data"

    prompt_data: list[str] | None = option(
        None,
        "training prompts: .jsonl or .parquet files (also compressed), folders, patterns ('data/*.parquet') or "
        "folders of Hugging Face datasets; PATH@[start:end] is a slice. Local paths, URLs that fsspec reaches, or "
        "hf://datasets/ORG/NAME",
        metavar="PATH",
        common=True,
    )
    prompt_data_weights: list[float] | None = option(
        None, "relative weight of each source of --prompt-data; if not set, all sources form one data set"
    )
    data_source_path: str | None = option(
        None,
        "your own data source, in a separate process; it may read --prompt-data in its own way",
        kind="data_source",
    )
    data_source_timeout_s: float = option(600.0, "deadline for one call to --data-source-path, in seconds", gt=0)
    input_key: str = option("prompt", "field with the prompt (text or chat messages)", common=True)
    label_key: str | None = option(
        "label", "field with the label, or the way to it: reward_model.ground_truth; optional in each row", common=True
    )
    metadata_key: str = option("metadata", "field with a mapping for rewards and filters")
    tool_key: str | None = option("tools", "field with the chat template's tools, JSON schemas; optional in each row")
    id_key: str = option("id", "field with a unique id; optional in each row")
    multimodal_keys: dict[str, str] | None = option(
        None, "fields to pass to sample.multimodal_inputs: MEDIA=FIELD, for example image=images"
    )
    decode_json: bool = option(
        True,
        "decode JSON text in prompts (lists of chat messages, arguments of tool calls); chat templates would "
        "otherwise encode it twice or refuse it",
    )
    add_special_tokens: bool = option(
        True, "add the tokenizer's special tokens, such as <bos>, to plain-text prompts; a resume keeps its value"
    )
    apply_chat_template: bool = option(
        False, "also render texts with the chat template, as chat messages are", common=True
    )
    apply_chat_template_kwargs: dict[str, Any] | None = option(
        None, 'additional arguments of the chat template, for example {"enable_thinking": false}'
    )
    loss_mask_type: Literal["auto", "qwen", "qwen3", "distill_qwen"] = option(
        "auto",
        "how supervised fine-tuning finds the assistant's tokens. With auto: {% generation %} marks of the template, "
        "else as with qwen. With qwen: the text that each answer appends. With qwen3: each answer rendered alone, "
        "so that all keep their thinking. With distill_qwen: only the last answer, as written",
    )
    accept_changed_rows: bool = option(
        False, "with --load: continue although rows or field names changed; their number and order must not"
    )
    prompt_order: Literal["epoch", "difficulty"] = option(
        "epoch",
        "order of the rows in each epoch. epoch: as --rollout-shuffle says. difficulty: the next row is drawn by the "
        "weight of its pool, which is that of its last mean reward",
    )
    difficulty_weights: str | None = option(
        None,
        "with --prompt-order difficulty: relative weights of rows with the lowest reward, between, with the highest "
        "reward, and not tried yet; rows of weight 0 are rejected. The default is 0:0.2,mid:1,1:0.1,unseen:1",
        metavar="LOW:W,mid:W,HIGH:W,unseen:W",
    )
    rollout_shuffle: bool = option(True, "shuffle the rows in each epoch")
    rollout_seed: int = option(42, "seed of the order of rows and of sampling")

    @staticmethod
    def check(args: Args) -> None:
        if args.prompt_data and args.data_source_path is None:
            check_sources(args)
        others = {  # which the Buffer's own order, of rows that it reads, learnt from rewards, is not for
            "--data-source-path": args.data_source_path,
            "recorded rollouts": train_only(args),
            "--debug-rollout-only": rollout_only(args),
            "supervised fine-tuning, which has no rewards": is_supervised(args),
        }
        other = args.prompt_order == "difficulty" and first(others)
        hint = "take it out; a data source of your own decides about its order by itself"
        refuse(other, "--prompt-order difficulty: it does not go with {}", hint)
        check_template_kwargs(args.apply_chat_template_kwargs)


def check_sources(options: DataOptions) -> None:
    """Raises ConfigError if no source is named, or if the weights do not fit the sources. Reads no file."""
    sources, weights = options.prompt_data or (), options.prompt_data_weights
    refuse(not sources, "--prompt-data: there are no training prompts", "add --prompt-data PATH")
    pool_weights(options)
    if weights is not None:
        what = f"--prompt-data-weights: there are {len(weights)} weights and {len(sources)} sources"
        refuse(len(weights) != len(sources), what, expected="one weight for each source of --prompt-data")
        refuse(min(weights) <= 0, f"--prompt-data-weights: they are {weights}", expected="numbers greater than 0")


def pool_weights(options: DataOptions) -> PoolWeights | None:
    """The weights of an order by difficulty; None for another order. Raises ConfigError."""
    if options.prompt_order == "difficulty":
        return PoolWeights.parse(options.difficulty_weights)
    what = f"--difficulty-weights: --prompt-order {options.prompt_order} has no pools"
    refuse(bool(options.difficulty_weights), what, "add --prompt-order difficulty")
    return None


def check_template_kwargs(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """What ``--apply-chat-template-kwargs`` gives. Raises ConfigError for a name that is not the user's to set, and
    for a truth value that is text, which every template takes for true."""
    for name, value in (kwargs or {}).items():
        where, expected = "--apply-chat-template-kwargs", f"other names than {TEMPLATE_KWARGS}"
        refuse(name in TEMPLATE_KWARGS, f"{where}: {name!r} is set by buffer_rl", "take it out", expected)
        is_word = isinstance(value, str) and value.lower() in ("true", "false", "none", "null")
        expected = f"JSON with true, false or null without quotes, for example '{{\"{name}\": false}}'"
        refuse(is_word, f"{where}: {name} is the text {value!r}, which a template takes for true", expected=expected)
    return dict(kwargs or {})
