"""What is found of a source's rows as they are checked: the bad ones, ids that come twice, and what rows say together.

A row is checked by ``build_row`` alone. ``add_plain_rows`` takes whole blocks of rows for which that is not needed: a
column at a time, it accepts what the rules surely accept, and leaves everything else to them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from buffer_rl.data.dataset import PromptRow, RowError, RowFacts, RowKeys

MAX_PROBLEMS = 20
MAX_REWARD_NAMES = 1000
_NONE: type = type(None)


@dataclass(slots=True, kw_only=True)
class Problem:
    """A reason for which rows are refused. position, where: of the first such row. count: of such rows."""

    position: int
    where: str
    error: RowError
    count: int = 1


@dataclass(slots=True, kw_only=True)
class Findings:
    """problems: the first reasons for which rows are refused; num_problems: number of all refused rows. id_hashes: of
    each row's id. facts: of the good rows."""

    problems: dict[str, Problem] = field(default_factory=dict)
    num_problems: int = 0
    id_hashes: array[int] = field(default_factory=lambda: array("q"))
    facts: RowFacts = field(default_factory=RowFacts)

    def refuse(self, position: int, where: str, error: RowError) -> None:
        """Count a bad row."""
        self.num_problems += 1
        if error.reason in self.problems:
            self.problems[error.reason].count += 1
        elif len(self.problems) < MAX_PROBLEMS:
            self.problems[error.reason] = Problem(position=position, where=where, error=error)

    def add(self, row: PromptRow) -> None:
        """Count a good row."""
        if row.id is not None:
            self.id_hashes.append(hash(row.id))
        self.facts.has_label = self.facts.has_label or row.label is not None
        self.facts.media.update(row.multimodal or ())
        self.facts.decoded.update(row.decoded)
        if (name := row.metadata.get("rm_type")) and len(self.facts.rewards) < MAX_REWARD_NAMES:
            self.facts.rewards.setdefault(str(name), row.row)

    def add_plain_rows(self, records: list[dict[str, Any]], position: int, keys: RowKeys) -> bool:
        """Count the rows that begin at ``position`` if all are surely good; false if ``build_row`` has to say."""
        prompts, labels, metadata, tools, ids = (
            [record.get(name) for record in records]  # type: ignore[arg-type]  # no field is called None
            for name in (keys.prompt, keys.label, keys.metadata, keys.tools, keys.id)
        )
        label_types = _types(labels)
        if list in label_types:
            labels = list(chain.from_iterable(label if type(label) is list else (label,) for label in labels))
        if not (
            _are_plain_prompts(prompts, may_hold_json=keys.decode_json)
            and _types(labels) <= {str, int, float, bool, _NONE}
            and _types(metadata) <= {dict, _NONE}
            and _types(rewards := [values.get("rm_type") if values else None for values in metadata]) <= {str, _NONE}
            and _types(tools) <= {list, _NONE}
            and _types(chain.from_iterable(filter(None, tools))) <= {dict}
            and _types(ids) <= {str, int, _NONE}
        ):
            return False
        self.id_hashes.extend([hash(str(name)) for name in ids if name is not None])
        self.facts.has_label = self.facts.has_label or label_types != {_NONE}
        self.facts.media.update(
            media for media, name in keys.multimodal if any(record.get(name) is not None for record in records)
        )
        for reward in set(filter(None, rewards)) - self.facts.rewards.keys():
            if len(self.facts.rewards) < MAX_REWARD_NAMES:
                self.facts.rewards[reward] = position + rewards.index(reward)
        return True

    def repeated_ids(self) -> set[int]:
        """The hashes that several ids have; hardly ever because two ids have the same one."""
        hashes = np.sort(np.asarray(self.id_hashes))
        return set(hashes[1:][hashes[1:] == hashes[:-1]].tolist())


def _are_plain_prompts(prompts: list[Any], *, may_hold_json: bool) -> bool:
    """Whether all are text, or all are chat messages with role and content. may_hold_json: those of which a part may be
    JSON text are not."""
    types = _types(prompts)
    if types == {str}:
        stripped = list(map(str.strip, prompts))
        return all(stripped) and not (may_hold_json and any(text[0] == "[" for text in stripped))
    if types != {list} or not all(prompts):
        return False
    messages = list(chain.from_iterable(prompts))
    if _types(messages) != {dict}:
        return False
    if may_hold_json and any("tool_calls" in message for message in messages):
        return False
    roles = [message.get("role") for message in messages]
    contents = [message.get("content") for message in messages]
    return _types(roles) == {str} and all(roles) and _types(contents) <= {str, list}


def _types(values: Iterable[Any]) -> set[type]:
    return set(map(type, values))
