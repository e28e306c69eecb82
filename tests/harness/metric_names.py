"""The names of metrics: those that ``docs/metrics.md`` explains, and those that the source gives.

What is only known in a run is written ``<>``: ``rollout/drop_<reason>`` of the page and ``f"rollout/drop_{reason}"`` of
the source are both ``rollout/drop_<>``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from buffer_rl.kinds.token_loss import VALUE_MOMENTS
from buffer_rl.observe.metrics import read_metrics
from buffer_rl.plan.algorithms import LOSSES
from buffer_rl.plan.roles import MODEL_FIELDS
from buffer_rl.trainer.objective import OWN_METRICS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "metrics.md"

_INSIDE = {"agent": "rollout/agent", "mismatch": "train/mismatch"}
"""Beginnings that get a part in front where they are gathered."""
_FULL = re.compile(rf"(?:rollout|production|staleness|train|critic|eval|perf|publish|{'|'.join(_INSIDE)})/[\w<>{{/]+")
_MAY_GIVE = re.compile(rf"[\"']{_FULL.pattern}|_times\.of\(|\._timed\(")

# Where names are written without their part: file, function or class ("" is any), and the part.
_GIVERS = (
    ("buffer_rl/rollout/stats.py", "RolloutStats", "rollout"),
    ("buffer_rl/agents/play.py", "_count", "rollout/agent"),
    *(("buffer_rl/algo/losses.py", name, "train") for name in LOSSES),
    ("buffer_rl/algo/losses.py", "value_loss", "critic"),
    ("buffer_rl/algo/dpo.py", "", "train"),
    ("buffer_rl/algo/corrections.py", "mismatch_metrics", "train/mismatch"),
    ("buffer_rl/kinds/token_loss.py", "means", "train"),
    ("buffer_rl/trainer/objective.py", "_metrics", "train"),
    ("buffer_rl/trainer/steps.py", "metrics_of", "train"),
    ("buffer_rl/trainer/routing_replay.py", "sums", "train"),
    ("plugins/buffer_rl_rollout_service/rollout.py", "metrics", "rollout"),
)
_OF_BOTH_ROLES = ("loss", "grad_norm", "lr", "divisor", "loss_tokens", "loss_samples", "non_finite_steps")
_NO_METRICS = {
    *("rollout/<>", "production/<>", "rollout/agent/<>", "train/mismatch/<>", "perf/<>_time"),  # a part for given names
    "rollout/agent/samples",  # what the other counts are divided by
    "train/explained_variance",  # of the critic alone, as its parts are
    *(f"{part}/{name}" for part in ("train", "critic") for name in VALUE_MOMENTS - {"returns", "value_error"}),
}


def documented() -> list[str]:
    """The names that the page has a row for, as it writes them."""
    rows = [line.split("|")[1] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def without_row(names: Iterable[str]) -> list[str]:
    """Those of ``names`` that the page does not explain. A name of tickets is explained by that of the rollout."""
    rows = [re.compile(".+".join(map(re.escape, re.split(r"<[^>]*>", name)))) for name in documented()]

    def is_explained(name: str) -> bool:
        forms = {name, re.sub("^production/", "rollout/", name)}
        return any(row.fullmatch(form) for row in rows for form in forms)

    return sorted(name for name in set(names) if not is_explained(name))


def check_metrics(run_dir: str | Path, own: Iterable[str] = ()) -> None:
    """Every metric of a run that has ended is on the page, but for ``own``, which its functions give."""
    names = {name for record in read_metrics(run_dir) for name in record.keys() - {"step", "kind"} - set(own)}
    unknown = without_row(names)
    assert not unknown, f"{PAGE.name} has no row for {', '.join(unknown)} of {run_dir}"


def emitted() -> set[str]:
    """The names that the source gives: whole ones, and by ``_GIVERS`` those without their part."""
    found: set[str] = set()
    givers = {file for file, _, _ in _GIVERS}
    for folder in ("buffer_rl", "plugins"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name, source = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
            if not name.startswith("buffer_rl/testing/") and (name in givers or _MAY_GIVE.search(source)):
                found |= set(_names_in(name, ast.parse(source)))
    found |= {f"perf/{field}_time" for field in MODEL_FIELDS} | {f"train/{name}" for name in OWN_METRICS}
    found |= {f"critic/{name}" for name in (*_OF_BOTH_ROLES, "explained_variance")}
    return found - _NO_METRICS


def _names_in(file: str, module: ast.Module) -> Iterator[str]:
    constants = {
        node.targets[0].id: node.value.value
        for node in module.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(module):
        text = _text(node, constants)
        if _FULL.fullmatch(text) and not text.endswith("/"):
            first, _, rest = text.partition("/")
            yield f"{_INSIDE.get(first, first)}/{rest}" + ("<>" if text.endswith("_") else "")
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("of", "_timed") and node.args:
            owner = ast.unparse(node.func)
            if owner.endswith(("_times.of", "._timed")) and (phase := _text(node.args[0], constants)):
                yield f"perf/{phase}_time"
    for given_by, function, part in _GIVERS:
        if given_by == file:
            for node in ast.walk(module):
                if not function or getattr(node, "name", None) == function:
                    yield from (f"{part}/{key}" for key in _keys(node, constants) if not _FULL.fullmatch(key))


def _keys(node: ast.AST, constants: dict[str, object]) -> Iterator[str]:
    """The keys that mappings get inside ``node``, and what ``drop_metrics`` is told to begin names with."""
    for inner in ast.walk(node):
        keys: list[ast.expr | None] = []
        if isinstance(inner, ast.Dict):
            keys = list(inner.keys)
        elif isinstance(inner, ast.DictComp):
            keys = [inner.key]
        elif isinstance(inner, ast.Subscript) and isinstance(inner.ctx, ast.Store):
            keys = [inner.slice]
        elif isinstance(inner, ast.Call) and getattr(inner.func, "attr", "") == "setdefault":
            keys = inner.args[:1]
        elif isinstance(inner, ast.Call) and getattr(inner.func, "id", "") == "drop_metrics":
            yield from (f"{_text(begin, constants)}<>" for begin in inner.args[1:2])
        yield from (text for key in keys if key is not None and (text := _text(key, constants)) and text != "<>")


def _text(node: ast.AST, constants: dict[str, object]) -> str:
    """The text of a literal, with ``<>`` for what is only known in a run; empty for what is no text."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, constants) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _text(node.value, constants) or "<>"
    value = constants.get(node.id) if isinstance(node, ast.Name) else getattr(node, "value", None)
    return value if isinstance(value, str) else ""
