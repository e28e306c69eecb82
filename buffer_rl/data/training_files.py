"""The files of ``--prompt-data`` and their weights, checked and read."""

from __future__ import annotations

from buffer_rl.data.dataset import PromptDataset
from buffer_rl.data.options import DataOptions
from buffer_rl.data.reader import read_dataset
from buffer_rl.data.row import RowKeys
from buffer_rl.errors import ConfigError, DataError
from buffer_rl.redaction import mask_url


def check_sources(options: DataOptions) -> None:
    """Raises ConfigError if no source is named, or if the weights do not fit the sources. Reads no file."""
    if not options.prompt_data:
        raise ConfigError("there are no training prompts", where="--prompt-data")
    weights = options.prompt_data_weights
    if weights is None:
        return
    if len(weights) != len(options.prompt_data):
        raise ConfigError(
            f"there are {len(weights)} weights and {len(options.prompt_data)} sources",
            where="--prompt-data-weights",
            expected="one weight for each source of --prompt-data, in its order",
        )
    if any(weight <= 0 for weight in weights):
        raise ConfigError(
            f"the weights are {weights}",
            where="--prompt-data-weights",
            expected="numbers greater than 0",
            hint="leave out the source that nothing should come from",
        )


def read_sources(options: DataOptions) -> list[PromptDataset]:
    """Every source of ``--prompt-data``, validated. Raises DataError, also where two hold the same rows and where
    no row of any has a field of ``--multimodal-keys``."""
    keys = RowKeys.from_args(options)
    datasets: list[PromptDataset] = []
    for source in options.prompt_data or ():
        dataset = read_dataset(source, keys)
        for earlier in datasets:
            if earlier.source_hash == dataset.source_hash:
                raise DataError(
                    "the same rows come twice",
                    where=mask_url(f"--prompt-data: {earlier.path} and {source}"),
                    hint="name the source once, with a greater weight in --prompt-data-weights",
                )
        datasets.append(dataset)
    # Of all sources together: one with images may be mixed with one of text alone.
    for media, field in keys.multimodal:
        if all(media not in dataset.facts.media for dataset in datasets):
            raise DataError(
                f"no row of any source has the {media} field {field!r}",
                where="--multimodal-keys",
                hint="see the fields that the rows have",
            )
    return datasets
