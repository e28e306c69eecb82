"""Evaluation sets and what each chooses for itself: those that the command line names, ``NAME=PATH``, and those of the
file of ``--eval-config``:

    defaults: {temperature: 0.6, max_response_len: 512}
    datasets:
      - {name: aime, path: "${here}/aime.parquet", n_samples_per_eval_prompt: 16, rm_type: numeric}
      - {name: dev, path: "${here}/dev.jsonl@[:100]"}

``defaults`` holds for every set that does not say otherwise. The sets may also be a mapping from names, and both keys
may stand under one key ``eval``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from buffer_rl.args import Args
from buffer_rl.data.dataset import KEY_OPTIONS, PromptRow, RowKeys
from buffer_rl.errors import ConfigError, all_of
from buffer_rl.options.section import did_you_mean
from buffer_rl.options.values import parse_yaml, plain_value, where_of

NAME = re.compile(r"[A-Za-z0-9_.-]+")


class EvalSet(BaseModel):
    """One evaluation set. What is None comes from the options.

    name: its name in metrics. path: its file, perhaps with a slice.
    rm_type: the registered reward that scores every row of the set. metadata_overrides: added to every row's metadata.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(pattern=f"^{NAME.pattern}$")
    path: Annotated[str, AfterValidator(os.path.expanduser)] = Field(min_length=1)
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
        names = ("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids")
        chosen = {"max_new_tokens": self.max_response_len, **{name: getattr(self, name) for name in names}}
        return {name: value for name, value in chosen.items() if value is not None}

    def row_keys(self, keys: RowKeys) -> RowKeys:
        """The names of the set's fields, where they differ from ``keys``."""
        chosen = self.model_dump(include=set(KEY_OPTIONS), exclude_none=True)
        return replace(keys, **{KEY_OPTIONS[option]: field for option, field in chosen.items()})

    def chosen_reward(self) -> str | None:
        """The registered reward that the set chooses for all its rows; empty if it takes away what rows choose, None
        if it leaves that to them."""
        added = self._added_metadata()
        return str(added["rm_type"] or "") if "rm_type" in added else None

    def adapt(self, row: PromptRow) -> PromptRow:
        """The row with the metadata that the set adds."""
        added = self._added_metadata()
        if not added:
            return row
        choices = {"rewards", "rm_type"}  # what the set says about rewards takes the place of all that a row says
        own = {name: each for name, each in row.metadata.items() if name not in choices or not choices & added.keys()}
        return replace(row, metadata={**own, **added})

    def _added_metadata(self) -> dict[str, Any]:
        return {**({"rm_type": self.rm_type} if self.rm_type else {}), **self.metadata_overrides}


@dataclass(kw_only=True)
class EvalDatasetConfig:
    """An evaluation set as functions that were written for slime find it in ``args.eval_datasets``. What is None is the
    option's."""

    name: str
    path: str
    rm_type: str | None = None
    custom_rm_path: str | None = None
    custom_generate_function_path: str | None = None
    input_key: str | None = None
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: str | None = None
    multimodal_keys: dict[str, str] | None = None
    apply_chat_template: bool | None = None
    apply_chat_template_kwargs: dict[str, Any] | None = None
    n_samples_per_eval_prompt: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_response_len: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_new_tokens: int | None = None
    repetition_penalty: float | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    metadata_overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def cache_key(self) -> tuple[Any, ...]:
        """What the rows that are read depend on."""
        return (self.name, self.path, self.input_key, self.label_key, self.tool_key, self.metadata_key)

    def inject_metadata(self, metadata: Mapping[str, Any] | None) -> dict[str, Any]:
        """A row's metadata with what the set adds."""
        return {**(metadata or {}), **({"rm_type": self.rm_type} if self.rm_type else {}), **self.metadata_overrides}


def eval_datasets(args: Args) -> list[EvalDatasetConfig]:
    """The evaluation sets of the options, with what these say where a set does not. Raises ConfigError as
    ``eval_sets_of``."""
    keys = RowKeys.of_evaluation(args)
    known = {each.name for each in fields(EvalDatasetConfig)}
    of_options = {option: getattr(keys, name) for option, name in KEY_OPTIONS.items() if option in known}
    of_options["n_samples_per_eval_prompt"] = args.n_samples_per_eval_prompt
    for name in ("temperature", "top_p", "top_k", "max_response_len"):
        value = getattr(args, f"eval_{name}")
        of_options[name] = getattr(args, f"rollout_{name}") if value is None else value
    return [
        EvalDatasetConfig(**of_options | eval_set.model_dump(include=known, exclude_none=True))
        for eval_set in eval_sets_of(args)
    ]


def parse_eval_sets(texts: Sequence[str]) -> list[EvalSet]:
    """Read texts ``NAME=PATH``, or a name and a path one after the other. Raises ConfigError for a malformed text and
    a name that comes twice."""
    sets: dict[str, EvalSet] = {}
    rest = iter(texts)
    for text in rest:
        name, equals, path = text.partition("=")
        if not equals and (path := next(rest, "")):
            equals = "="
        if not (equals and path and NAME.fullmatch(name)):
            expected = "NAME=PATH, or NAME PATH, the name of letters, digits, '_', '-' and '.'"
            raise ConfigError(f"{text!r} is no evaluation set", where="--eval-prompt-data", expected=expected)
        if name in sets:
            raise ConfigError(f"two evaluation sets have the name {name!r}", where="--eval-prompt-data")
        sets[name] = EvalSet(name=name, path=path)
    return list(sets.values())


_KEYS = (*EvalSet.model_fields, "prompt_key")  # prompt_key: another name of input_key


def eval_sets_of(args: Args) -> list[EvalSet]:
    """The evaluation sets of the options, those of the command line first. Reads the file of ``--eval-config``.

    Raises ConfigError for a malformed text or file, and for a name that comes twice.
    """
    sets = parse_eval_sets(args.eval_prompt_data)
    if args.eval_config is None:
        return sets
    names = {eval_set.name for eval_set in sets}
    for eval_set in read_eval_config(args.eval_config, environ=os.environ):
        if eval_set.name in names:
            what = f"the evaluation set {eval_set.name!r} is named twice"
            raise ConfigError(what, where=f"--eval-prompt-data and --eval-config {args.eval_config}")
        sets.append(eval_set)
    return sets


def rewards_named(args: Args) -> list[str]:
    """The rewards that the options and the evaluation sets name."""
    named = [args.custom_group_rm_path, args.rm_type, args.custom_rm_path, *args.row_rm_types]
    return [name for name in (*named, *(chosen.rm_type for chosen in eval_sets_of(args))) if name]


def read_eval_config(path: str, *, environ: Mapping[str, str]) -> list[EvalSet]:
    """Read and validate the file; ``${here}`` and ``${env:NAME}`` are filled in.

    Raises ConfigError with all mistakes, each with ``file:line``.
    """
    file = _File(path, environ)
    root = parse_yaml(path)
    top = file.entries(root, expected="the keys 'datasets' and, perhaps, 'defaults'")
    if set(top) == {"eval"}:
        top = file.entries(top["eval"], expected="the keys 'datasets' and, perhaps, 'defaults'")
    for key, node in top.items():
        if key not in ("datasets", "defaults"):
            hint = did_you_mean(key, ["datasets", "defaults"])
            file.note(f"unknown key {key!r}", node, expected="datasets, defaults", hint=hint)
    sets: dict[str, EvalSet] = {}
    try:
        defaults = file.set_options(top["defaults"]) if "defaults" in top else {}
        if "name" in defaults or "path" in defaults:
            raise ConfigError("a name or path cannot be a default", where=where_of(path, top["defaults"]))
        for name, node in file.datasets(top.get("datasets")):
            made = file.eval_set(name, node, defaults)
            if made is not None and made.name in sets:
                file.note(f"two evaluation sets have the name {made.name!r}", node)
            elif made is not None:
                sets[made.name] = made
    except ConfigError as error:
        file.errors.append(error)
    if file.errors:
        raise all_of(file.errors)
    return list(sets.values())


class _File:
    """One file's nodes as values. errors: what is wrong and did not end the reading."""

    def __init__(self, path: str, environ: Mapping[str, str]) -> None:
        self._path = path
        self._environ = environ
        self.errors: list[ConfigError] = []

    def note(self, what: str, node: yaml.Node, *, expected: str = "", hint: str = "") -> None:
        """Note an error of ``node``."""
        self.errors.append(ConfigError(what, where=where_of(self._path, node), expected=expected, hint=hint))

    def entries(self, node: yaml.Node | None, expected: str) -> dict[str, yaml.Node]:
        """The nodes of a mapping by key. Raises ConfigError for another node and a key that comes twice."""
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError("this is not a mapping", where=self._where(node), expected=expected)
        found: dict[str, yaml.Node] = {}
        for key, value in node.value:
            if str(key.value) in found:
                raise ConfigError(f"the key {key.value!r} comes twice", where=where_of(self._path, key))
            found[str(key.value)] = value
        return found

    def datasets(self, node: yaml.Node | None) -> Iterator[tuple[str | None, yaml.Node]]:
        """Every set's node, with its name where the sets are a mapping."""
        if isinstance(node, yaml.MappingNode) and node.value:
            yield from self.entries(node, expected="").items()
        elif isinstance(node, yaml.SequenceNode) and node.value:
            yield from ((None, item) for item in node.value)
        else:
            what = "there are no evaluation sets in the file"
            expected = "datasets: a list of mappings with name and path"
            raise ConfigError(what, where=self._where(node), expected=expected)

    def _where(self, node: yaml.Node | None) -> str:
        return self._path if node is None else where_of(self._path, node)

    def set_options(self, node: yaml.Node) -> dict[str, Any]:
        """The options of one set, or the defaults. Notes an error for each unknown one, with the nearest name."""
        found: dict[str, Any] = {}
        for key, value in self.entries(node, expected="the options of an evaluation set").items():
            if key not in _KEYS:
                what, hint = f"unknown option {key!r} of an evaluation set", did_you_mean(key, _KEYS)
                self.note(what, value, expected=", ".join(_KEYS), hint=hint)
                continue
            try:
                found[key] = plain_value(self._path, value, self._environ)
            except ConfigError as error:
                self.errors.append(error)
        return found

    def eval_set(self, name: str | None, node: yaml.Node, defaults: Mapping[str, Any]) -> EvalSet | None:
        """One validated set; None if it has errors, which are noted."""
        nodes = self.entries(node, expected="a mapping with name and path")
        before = len(self.errors)
        own = {key: value for key, value in self.set_options(node).items() if value is not None}
        values = {**defaults, **({} if name is None else {"name": name}), **own}
        try:
            made = EvalSet.model_validate(values)
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                key = str(detail["loc"][0])
                if key in nodes and key not in values:  # its error is noted already
                    continue
                why = "it may hold letters, digits, '_', '-' and '.'" if key == "name" else detail["msg"]
                what = f"{key!r}: {values[key]!r}: {why}" if key in values else f"{key!r} is missing"
                self.note(f"evaluation set {values.get('name', '?')!r}: {what}", nodes.get(key, node))
        return None if len(self.errors) > before else made
