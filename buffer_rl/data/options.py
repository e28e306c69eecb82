"""Options of the data sources."""

from __future__ import annotations

from typing import ClassVar

from buffer_rl.config import Section, option


class DataOptions(Section):
    """Prompts and how their rows are read."""

    heading: ClassVar[str] = "Data"

    prompt_data: list[str] | None = option(
        None,
        "training prompts: .jsonl or .parquet files, or folders saved by Hugging Face datasets; file@[start:end] is a "
        "slice. Local, or what fsspec reaches",
        metavar="PATH",
    )
    prompt_data_weights: list[float] | None = option(
        None,
        "the share of each source of --prompt-data, as relative weights; without, the sources are one data set",
    )
    input_key: str = option("prompt", "the field that holds the prompt (text or chat messages)")
    label_key: str | None = option("label", "the field that holds the label; rows may lack it")
    metadata_key: str = option("metadata", "the field that holds a mapping for rewards and filters")
    id_key: str = option("id", "the field that holds a row's id, where rows have one; ids must be unique")
    multimodal_keys: dict[str, str] | None = option(
        None, "fields to pass through into sample.multimodal_inputs: MEDIA=FIELD, for example image=images"
    )
    apply_chat_template: bool = option(False, "render prompts with the tokenizer's chat template")
    rollout_shuffle: bool = option(True, "shuffle the rows anew each epoch")
    rollout_seed: int = option(42, "seed of the epoch order and of sampling")
