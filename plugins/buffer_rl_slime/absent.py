"""Names that rollout functions import at their top and need in some cases only, which do not exist here: images, and
data sets that a function reads itself. Using one raises ConfigError."""

from __future__ import annotations

from typing import Any, NoReturn

from buffer_rl.errors import ConfigError
from buffer_rl_slime.missing import PAGE


def _refuse(name: str, hint: str) -> NoReturn:
    raise ConfigError(f"{name} cannot be had here", where="an import of slime", hint=f"{hint}; see {PAGE}")


class Dataset:
    """Refused when it is made: the Buffer reads ``--prompt-data`` and the evaluation sets."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse("slime.utils.data.Dataset", "data_source.get_samples gives the prompts")


class EvalDatasetConfig:
    """Refused when it is made: ``--eval-config`` describes evaluation sets."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse("slime.utils.eval_config.EvalDatasetConfig", "--eval-config describes evaluation sets")


def build_processor_kwargs(multimodal_inputs: Any = None) -> NoReturn:
    """Refused: there are no images here."""
    _refuse("build_processor_kwargs", "there are no images")


def encode_image_for_rollout_engine(image: Any) -> NoReturn:
    """Refused: there are no images here."""
    _refuse("encode_image_for_rollout_engine", "there are no images")
