"""The file of ``--eval-config``: evaluation sets, each with sampling options and field names of its own.

    defaults: {temperature: 0.6, max_response_len: 512}
    datasets:
      - {name: aime, path: "${here}/aime.parquet", n_samples_per_eval_prompt: 16, rm_type: numeric}
      - {name: dev, path: "${here}/dev.jsonl@[:100]"}

``defaults`` holds for every set that does not say otherwise. The sets may also be a mapping from names, and both keys
may stand under one key ``eval``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import yaml
from pydantic import ValidationError

from buffer_rl.config import did_you_mean
from buffer_rl.configuration.yaml_file import parse_yaml, plain_value, where_of
from buffer_rl.data.eval_sets import EvalSet, parse_eval_sets
from buffer_rl.errors import ConfigError

_KEYS = (*EvalSet.model_fields, "prompt_key")  # prompt_key: another name of input_key


class EvalSetArgs(Protocol):
    """The options that name evaluation sets."""

    @property
    def eval_prompt_data(self) -> list[str]: ...
    @property
    def eval_config(self) -> str | None: ...


def eval_sets_of(args: EvalSetArgs) -> list[EvalSet]:
    """All evaluation sets, those of the command line first. Reads the file of ``--eval-config``.

    Raises ConfigError for a malformed text or file, and for a name that comes twice.
    """
    sets = parse_eval_sets(args.eval_prompt_data)
    if args.eval_config is None:
        return sets
    names = {eval_set.name for eval_set in sets}
    for eval_set in read_eval_config(args.eval_config, environ=os.environ):
        if eval_set.name in names:
            raise ConfigError(
                f"the evaluation set {eval_set.name!r} is named twice",
                where=f"--eval-prompt-data and --eval-config {args.eval_config}",
            )
        sets.append(eval_set)
    return sets


def read_eval_config(path: str, *, environ: Mapping[str, str]) -> list[EvalSet]:
    """Read and validate the file; ``${here}`` and ``${env:NAME}`` are filled in.

    Raises ConfigError with ``file:line``.
    """
    file = _File(path, environ)
    root = parse_yaml(path)
    top = file.entries(root, path, expected="the keys 'datasets' and, perhaps, 'defaults'")
    if set(top) == {"eval"}:
        top = file.entries(top["eval"], path, expected="the keys 'datasets' and, perhaps, 'defaults'")
    for key, node in top.items():
        if key not in ("datasets", "defaults"):
            raise ConfigError(
                f"unknown key {key!r}",
                where=where_of(path, node),
                expected="datasets, defaults",
                hint=did_you_mean(key, ["datasets", "defaults"]),
            )
    defaults = file.set_options(top["defaults"]) if "defaults" in top else {}
    if "name" in defaults or "path" in defaults:
        raise ConfigError("a name or path cannot be a default", where=where_of(path, top["defaults"]))
    sets: dict[str, EvalSet] = {}
    for name, node in file.datasets(top.get("datasets"), path):
        made = file.eval_set(name, node, defaults)
        if made.name in sets:
            raise ConfigError(f"two evaluation sets have the name {made.name!r}", where=where_of(path, node))
        sets[made.name] = made
    return list(sets.values())


class _File:
    """One file's nodes as values."""

    def __init__(self, path: str, environ: Mapping[str, str]) -> None:
        self._path = path
        self._environ = environ

    def entries(self, node: yaml.Node | None, where: str, expected: str) -> dict[str, yaml.Node]:
        """The nodes of a mapping by key. Raises ConfigError for another node and a key that comes twice."""
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(
                "this is not a mapping", where=where if node is None else where_of(self._path, node), expected=expected
            )
        found: dict[str, yaml.Node] = {}
        for key, value in node.value:
            if str(key.value) in found:
                raise ConfigError(f"the key {key.value!r} comes twice", where=where_of(self._path, key))
            found[str(key.value)] = value
        return found

    def datasets(self, node: yaml.Node | None, where: str) -> Iterator[tuple[str | None, yaml.Node]]:
        """Every set's node, with its name where the sets are a mapping."""
        if isinstance(node, yaml.MappingNode) and node.value:
            yield from self.entries(node, where, expected="").items()
        elif isinstance(node, yaml.SequenceNode) and node.value:
            yield from ((None, item) for item in node.value)
        else:
            raise ConfigError(
                "there are no evaluation sets in the file",
                where=where if node is None else where_of(self._path, node),
                expected="datasets: a list of mappings with name and path",
            )

    def set_options(self, node: yaml.Node) -> dict[str, Any]:
        """The options of one set, or the defaults. Raises ConfigError for an unknown one, with the nearest name."""
        nodes = self.entries(node, self._path, expected="the options of an evaluation set")
        for key, value in nodes.items():
            if key not in _KEYS:
                raise ConfigError(
                    f"unknown option {key!r} of an evaluation set",
                    where=where_of(self._path, value),
                    expected=", ".join(_KEYS),
                    hint=did_you_mean(key, _KEYS),
                )
        return {key: plain_value(self._path, value, self._environ) for key, value in nodes.items()}

    def eval_set(self, name: str | None, node: yaml.Node, defaults: Mapping[str, Any]) -> EvalSet:
        """One validated set."""
        nodes = self.entries(node, self._path, expected="a mapping with name and path")
        own = {key: value for key, value in self.set_options(node).items() if value is not None}
        values = {**defaults, **({} if name is None else {"name": name}), **own}
        try:
            return EvalSet.model_validate(values)
        except ValidationError as error:
            detail = error.errors(include_url=False)[0]
            key = str(detail["loc"][0])
            if key == "name" and key in values:
                detail["msg"] = "it may hold letters, digits, '_', '-' and '.'"
            what = f"{key!r}: {values[key]!r}: {detail['msg']}" if key in values else f"{key!r} is missing"
            raise ConfigError(
                f"evaluation set {values.get('name', '?')!r}: {what}",
                where=where_of(self._path, nodes.get(key, node)),
            ) from error
