"""Names that rollout functions import at their top and need in some cases only, which do not exist here: images. Using
one raises ConfigError."""

from __future__ import annotations

from typing import Any, NoReturn

from buffer_rl.errors import ConfigError
from buffer_rl_slime.missing import PAGE


def _refuse(name: str, hint: str) -> NoReturn:
    raise ConfigError(f"{name} cannot be had here", where="an import of slime", hint=f"{hint}; see {PAGE}")


def build_processor_kwargs(multimodal_inputs: Any = None) -> NoReturn:
    """Refused: there are no images here."""
    _refuse("build_processor_kwargs", "there are no images")


def encode_image_for_rollout_engine(image: Any) -> NoReturn:
    """Refused: there are no images here."""
    _refuse("encode_image_for_rollout_engine", "there are no images")
