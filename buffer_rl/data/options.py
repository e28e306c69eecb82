"""Options of the data sources."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from buffer_rl.options.section import Section, option


class DataOptions(Section):
    """Prompts and how their rows are read."""

    heading: ClassVar[str] = "Data"

    prompt_data: list[str] | None = option(
        None,
        "training prompts: .jsonl or .parquet files (compressed too), folders or patterns of several "
        "('data/*.parquet'), or folders saved by Hugging Face datasets; PATH@[start:end] is a slice. Local, what "
        "fsspec reaches, or hf://datasets/ORG/NAME",
        metavar="PATH",
    )
    prompt_data_weights: list[float] | None = option(
        None,
        "the share of each source of --prompt-data, as relative weights; without, the sources are one data set",
    )
    data_source_path: str | None = option(
        None,
        "a data source of your own, which runs in a process of its own, in place of the built-in one; it may read "
        "--prompt-data in its own way",
        kind="data_source",
    )
    data_source_timeout_s: float = option(
        600.0, "deadline of one call to the data source of --data-source-path, in seconds", gt=0
    )
    input_key: str = option("prompt", "the field that holds the prompt (text or chat messages)")
    label_key: str | None = option("label", "the field that holds the label; rows may lack it")
    metadata_key: str = option("metadata", "the field that holds a mapping for rewards and filters")
    tool_key: str | None = option(
        "tools", "the field that holds a row's tools for the chat template, a list of JSON schemas; rows may lack it"
    )
    id_key: str = option("id", "the field that holds a row's id, where rows have one; ids must be unique")
    multimodal_keys: dict[str, str] | None = option(
        None, "fields to pass through into sample.multimodal_inputs: MEDIA=FIELD, for example image=images"
    )
    decode_json: bool = option(
        True,
        "decode JSON text in prompts: the text of a list of chat messages, and the arguments of tool calls where they "
        "are the text of an object, which chat templates would write as JSON once more, or refuse",
    )
    add_special_tokens: bool = option(
        True,
        "plain-text prompts get the special tokens that the tokenizer adds to a text, such as <bos>; a resumed run "
        "does as the one before, unless this is given",
    )
    apply_chat_template: bool = option(False, "render prompts with the tokenizer's chat template")
    apply_chat_template_kwargs: dict[str, Any] | None = option(
        None, 'what the chat template receives besides messages and tools, for example {"enable_thinking": false}'
    )
    loss_mask_type: Literal["auto", "qwen", "qwen3", "distill_qwen"] = option(
        "auto",
        "how supervised fine-tuning finds the assistant's tokens in a conversation: by the template's {% generation %} "
        "marks, without them as 'qwen' (auto), as what each answer appends to the text before it (qwen), with each "
        "answer rendered by itself, so that every answer keeps its thinking (qwen3), or the last answer alone, as it "
        "is written (distill_qwen)",
    )
    accept_changed_rows: bool = option(
        False,
        "with --load: go on although rows of the training data, or the names of their fields, were changed; as many "
        "rows in the same order, of which each keeps its place in the epoch",
    )
    rollout_shuffle: bool = option(True, "shuffle the rows in each epoch")
    rollout_seed: int = option(42, "seed of the epoch order and of sampling")
