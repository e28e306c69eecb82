"""One JSON object to one validated ``PromptRow``, and the rows of one data source (a file, several files, or a slice of
them) in order, with the hash that names them.
"""

from __future__ import annotations

import bisect
import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from buffer_rl.args import Args
from buffer_rl.data.json_text import json_value, with_arguments
from buffer_rl.data.options import DataOptions
from buffer_rl.errors import DataError
from buffer_rl.options.redaction import mask_url
from buffer_rl.records.groups import Prompt
from buffer_rl.records.utf8 import lone_surrogate

RowNoun = Literal["line", "row"]
"""How a file's records are counted in errors: lines from 1, or rows from 0 (as slices count them)."""


_NO_TOOLS = "'--tool-key none' leaves the field alone"


def row_label(path: str, unit: RowNoun, number: int) -> str:
    """Where a record stands: ``file.jsonl:7`` or ``file.parquet, row 6``."""
    shown = mask_url(path)
    return f"{shown}:{number}" if unit == "line" else f"{shown}, row {number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """One validated row.

    row: position among the rows that were read, from 0; it is the ``row`` of the group's uid.
    line: line of the file, from 1, blank lines counted; of formats without lines, the row of the file, from 0.
    multimodal: columns passed through as they are, by media type (``--multimodal-keys``); those that the row has.
    decoded: which parts of the prompt were JSON text, as keys of ``DECODED``.
    """

    row: int
    line: int
    prompt: Prompt
    label: Any = None
    metadata: dict[str, Any]
    multimodal: dict[str, Any] | None = None
    id: str | None = None
    decoded: tuple[str, ...] = ()


DECODED = {
    "messages": "the prompts of {} are JSON text of chat messages, and are read as messages",
    "arguments": "the arguments of tool calls in {} are JSON text of objects, and are read as objects",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart:
    """One file of a source. unit: whether its records are counted as lines or rows. first: position of its first row
    among the rows that were read."""

    path: str
    unit: RowNoun
    first: int


@dataclass(slots=True, kw_only=True)
class RowFacts:
    """What rows say all together. rewards: the first row of each reward that metadata choose (``rm_type``,
    ``rewards``); at most a thousand of them. bad_rewards: the first row whose metadata name rewards in another form,
    and what is wrong. media: the multimodal fields that a row has. has_label: whether a row has one. likely_label: the
    flag for the field that probably holds labels, if no row has one. decoded: in how many rows a part of the prompt was
    JSON text."""

    rewards: dict[str, int] = field(default_factory=dict)
    bad_rewards: tuple[int, DataError] | None = None
    media: set[str] = field(default_factory=set)
    has_label: bool = False
    likely_label: str = ""
    decoded: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDataset(Sequence[PromptRow]):
    """Rows in file order; of a large file each is read on access.

    source_hash: 12 hexadecimal digits of the SHA-256 of the file's bytes (decompressed), the slice and the field names.
    It is the ``source`` of every group's uid, so that state saved for other data is recognised.
    path: the file, or what several were found by. parts: the files, in order.
    """

    rows: Sequence[PromptRow]
    source_hash: str
    path: str
    parts: tuple[FilePart, ...]
    facts: RowFacts = field(default_factory=RowFacts)

    def where(self, row: PromptRow) -> str:
        """The file and the row's line or number, for errors."""
        part = self.parts[bisect.bisect_right(self.parts, row.row, key=lambda part: part.first) - 1]
        return row_label(part.path, part.unit, row.line)

    @property
    def notices(self) -> list[str]:
        """What the user should know of how the rows were read."""
        path, counts = mask_url(self.path), self.facts.decoded
        found = [(text, number) for part, text in DECODED.items() if (number := counts[part])]
        rows = [text.format(f"{number} row{'s' * (number != 1)}") for text, number in found]
        return [f"{path}: {text} (--no-decode-json leaves them as text)" for text in rows]

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[PromptRow]:
        return iter(self.rows)


KEY_OPTIONS: Mapping[str, str] = {
    "input_key": "prompt",
    "label_key": "label",
    "metadata_key": "metadata",
    "tool_key": "tools",
    "id_key": "id",
}
"""Options, and keys of an evaluation set, with the fields of ``RowKeys`` that they give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowKeys:
    """The names of a row's fields. Without ``label`` no labels are read, without ``tools`` no tools.

    multimodal: pairs of a media type and the field that holds it, in the order of the media types.
    flags: how the flags begin that name the fields, for errors.
    decode_json: whether JSON text in prompts is decoded: chat messages, and the arguments of tool calls.
    """

    prompt: str = "prompt"
    label: str | None = "label"
    metadata: str = "metadata"
    tools: str | None = "tools"
    id: str = "id"
    multimodal: tuple[tuple[str, str], ...] = ()
    flags: str = "--"
    decode_json: bool = True

    @classmethod
    def from_args(cls, args: DataOptions) -> Self:
        """The names that the options give for training data."""
        named = {name: getattr(args, option) for option, name in KEY_OPTIONS.items()}
        multimodal = tuple(sorted((args.multimodal_keys or {}).items()))
        return cls(**named, multimodal=multimodal, decode_json=args.decode_json)

    @classmethod
    def of_evaluation(cls, args: Args) -> Self:
        """The names that the options give for evaluation sets."""
        keys = cls.from_args(args)
        prompt, label = args.eval_input_key or keys.prompt, args.eval_label_key or keys.label
        return replace(keys, prompt=prompt, label=label, flags="--eval-")

    @property
    def names(self) -> list[str]:
        """Every field that is read; one may come twice."""
        own = [self.prompt, self.label, self.metadata, self.tools, self.id, self.label and self.label.partition(".")[0]]
        return [name for name in (*own, *dict(self.multimodal).values()) if name is not None]


class RowError(ValueError):
    """Why one row is refused; the reader adds file and line, and counts rows with the same reason. detail: what may
    differ between such rows. hint: what to do if all rows are so."""

    def __init__(self, reason: str, *, detail: str = "", hint: str = "") -> None:
        super().__init__(reason + detail)
        self.reason = reason
        self.detail = detail
        self.hint = hint


# The fields of well-known data sets, those that are meant first.
_USUAL_NAMES: Mapping[str, tuple[str, ...]] = {
    "input": (
        *("prompt", "question", "problem", "messages", "conversations"),
        *("instruction", "query", "input", "text"),
    ),
    "label": (
        *("label", "answer", "solution", "ground_truth", "target", "gold", "output", "response", "completion"),
        "reward_model.ground_truth",
    ),
}


def likely_label(keys: RowKeys, fields: Sequence[str]) -> str:
    """The flag for the field that probably holds the labels if rows have none under the usual name; or empty."""
    usual = next((name for name in _USUAL_NAMES["label"] if name.partition(".")[0] in fields), "")
    is_missing = keys.label == RowKeys().label and keys.label not in fields and usual not in ("", keys.prompt)
    return f"{keys.flags}label-key {usual}" if is_missing else ""


def missing_field(keys: RowKeys, what: Literal["input", "label"], fields: Iterable[str]) -> tuple[str, str]:
    """For an error about a field that rows lack: the fields that they have, and the flags to use."""
    names = list(fields)
    near = difflib.get_close_matches(keys.prompt if what == "input" else keys.label or "", names, n=1, cutoff=0.75)
    likely = next((name for name in (*near, *_USUAL_NAMES[what]) if name in names), "")
    flag = f"{keys.flags}{what}-key"
    label = likely_label(replace(keys, prompt=likely), names) if what == "input" else ""
    hint = f"did you mean {flag} {likely}{label and f' {label}'}?" if likely else f"{flag} FIELD names the field"
    typo = f"; did you mean {near[0]}?" if near else ""
    return f" (fields: {', '.join(map(repr, names)) or 'none'}){typo}", hint


def build_row(record: dict[str, Any] | RowError, keys: RowKeys, *, row: int, line: int) -> PromptRow:
    """Validate one object. Raises RowError with the reason."""
    if isinstance(record, RowError):
        raise record
    if keys.prompt not in record:
        detail, hint = missing_field(keys, "input", record)
        raise RowError(f"no prompt: the field {keys.prompt!r} is missing", detail=detail, hint=hint)
    value, decoded = _decoded(record[keys.prompt]) if keys.decode_json else (record[keys.prompt], ())
    found = PromptRow(
        row=row,
        line=line,
        prompt=_prompt(value, keys.prompt),
        label=_label(label_in(record, keys), keys.label),
        metadata=_metadata(record.get(keys.metadata), keys.metadata) | _tools(record, keys.tools),
        multimodal={media: record[name] for media, name in keys.multimodal if record.get(name) is not None} or None,
        id=_id(record.get(keys.id), keys.id),
        decoded=decoded,
    )
    for name in ("prompt", "label", "metadata", "multimodal", "id"):
        if surrogate := lone_surrogate(getattr(found, name)):
            raise RowError(f"the {name} holds {surrogate}, a lone surrogate, which UTF-8 cannot encode")
    return found


def label_in(record: dict[str, Any], keys: RowKeys) -> Any:
    """The field ``keys.label``, or what its dots lead to, as in ``reward_model.ground_truth``; None without either."""
    if keys.label is None or keys.label in record:
        return record.get(keys.label)  # type: ignore[arg-type]  # no field is called None
    value: Any = record
    for part in keys.label.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _decoded(value: Any) -> tuple[Any, tuple[str, ...]]:
    """A prompt without JSON text, and which parts of it were such text."""
    parts = []
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError):  # else it is a text all the same
            value = _prompt(json_value(value), "")
            parts.append("messages")
    if isinstance(value, list) and (messages := with_arguments(value)) is not value:
        value = messages
        parts.append("arguments")
    return value, tuple(parts)


def _prompt(value: Any, key: str) -> Prompt:
    if isinstance(value, str):
        if not value.strip():
            raise RowError(f"the prompt {key!r} is empty")
        return value
    if isinstance(value, int) and not isinstance(value, bool):  # the number of a task, for an environment
        return str(value)
    if not isinstance(value, list):
        raise RowError(f"the prompt {key!r} is {_kind(value)}, not text or a list of chat messages")
    if not value:
        raise RowError(f"the prompt {key!r} is an empty list of chat messages")
    for number, message in enumerate(value):
        _check_message(message, f"message {number} of {key!r}")
    return value


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict):
        raise RowError(f"{where} is {_kind(message)}, not a mapping with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RowError(f"{where} has no role")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return
    if content is None:
        raise RowError(f"{where} has no content")
    if not isinstance(content, str | list):
        raise RowError(f"the content of {where} is {_kind(content)}, not text or a list of parts")


def _label(value: Any, key: str | None) -> Any:
    items = value if isinstance(value, list) else [value]
    for item in items:
        if not (item is None or isinstance(item, str | int | float | dict)):
            kinds = "text, a number, a boolean, null, a mapping or a list of these"
            raise RowError(f"the label {key!r} is or holds {_kind(item)}, not {kinds}")
    return value


def _metadata(value: Any, key: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RowError(f"the metadata {key!r} is {_kind(value)}, not a mapping")
    return value


def _tools(record: dict[str, Any], key: str | None) -> dict[str, Any]:
    """What the row adds to its metadata: its tools, under the name that the prompt encoder looks for."""
    value = record.get(key) if key is not None else None
    if isinstance(value, str):  # tables hold nested values as JSON text
        try:
            value = json_value(value)
        except ValueError as error:
            raise RowError(f"the tools {key!r} are text that is no JSON ({error}); {_NO_TOOLS}") from error
    if value is None:
        return {}
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowError(f"the tools {key!r} are {_kind(value)}, not a list of mappings (JSON schemas); {_NO_TOOLS}")
    return {"tools": value} if value else {}


def _id(value: Any, key: str) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RowError(f"the id {key!r} is {_kind(value)}, not text or an integer")
    return str(value)


def _kind(value: Any) -> str:
    """What JSON calls the value's type."""
    names = {bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list", dict: "a mapping"}
    return names.get(type(value), "null")
