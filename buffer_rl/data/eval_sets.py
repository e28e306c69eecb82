"""One evaluation set and what it chooses for itself; the sets that the command line names, ``NAME=PATH``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from buffer_rl.data.dataset import PromptRow
from buffer_rl.data.row import RowKeys
from buffer_rl.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9_.-]+")


class EvalSet(BaseModel):
    """One evaluation set. What is None comes from the options.

    name: its name in metrics. path: its file, perhaps with a slice.
    rm_type: the registered reward that scores every row of the set. metadata_overrides: added to every row's metadata.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(pattern=f"^{NAME.pattern}$")
    path: str = Field(min_length=1)
    n_samples_per_eval_prompt: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    max_response_len: int | None = Field(None, ge=1)
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    rm_type: str | None = None
    input_key: str | None = Field(None, validation_alias=AliasChoices("input_key", "prompt_key"))
    label_key: str | None = None
    metadata_key: str | None = None
    tool_key: str | None = None
    id_key: str | None = None
    metadata_overrides: dict[str, Any] = {}

    def sampling_params(self) -> dict[str, Any]:
        """What the set says about sampling, under the names of SGLang's protocol."""
        chosen = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "max_new_tokens": self.max_response_len,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
        }
        return {name: value for name, value in chosen.items() if value is not None}

    def row_keys(self, keys: RowKeys) -> RowKeys:
        """The names of the set's fields, where they differ from ``keys``."""
        own: dict[str, Any] = {
            "prompt": self.input_key,
            "label": self.label_key,
            "metadata": self.metadata_key,
            "tools": self.tool_key,
            "id": self.id_key,
        }
        chosen = {name: value for name, value in own.items() if value is not None}
        return replace(keys, **chosen)

    def chosen_reward(self) -> str | None:
        """The registered reward that the set chooses for all its rows; empty if it takes away what rows choose, None
        if it leaves that to them."""
        added = self._added_metadata()
        return str(added["rm_type"] or "") if "rm_type" in added else None

    def adapt(self, row: PromptRow) -> PromptRow:
        """The row with the metadata that the set adds."""
        added = self._added_metadata()
        return replace(row, metadata={**row.metadata, **added}) if added else row

    def _added_metadata(self) -> dict[str, Any]:
        return {**({"rm_type": self.rm_type} if self.rm_type else {}), **self.metadata_overrides}


def parse_eval_sets(texts: Sequence[str]) -> list[EvalSet]:
    """Read ``NAME=PATH`` texts. Raises ConfigError for a malformed text and a name that comes twice."""
    sets: dict[str, EvalSet] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not (equals and path and NAME.fullmatch(name)):
            raise ConfigError(
                f"{text!r} is no evaluation set",
                where="--eval-prompt-data",
                expected="NAME=PATH, the name of letters, digits, '_', '-' and '.'",
            )
        if name in sets:
            raise ConfigError(f"two evaluation sets have the name {name!r}", where="--eval-prompt-data")
        sets[name] = EvalSet(name=name, path=path)
    return list(sets.values())
