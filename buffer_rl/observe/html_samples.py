"""The sample table of the HTML report: which samples it shows, and their text made harmless."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

MAX_STEPS = 12  # rollouts of a kind that are shown, spread evenly, the first and the last one among them
MAX_PER_STEP = 16
MAX_CHARACTERS = 4000  # of one cell; the file has the rest

Record = Mapping[str, Any]


def chosen_samples(records: Iterable[Record]) -> list[Record]:
    """At most ``MAX_STEPS`` rollouts of each kind, and of each the first ``MAX_PER_STEP`` samples, newest first."""
    by_kind: dict[str, dict[int, list[Record]]] = {}
    for record in records:
        step = int(record.get("rollout_id") or 0)
        by_kind.setdefault(str(record.get("kind", "")), {}).setdefault(step, []).append(record)
    chosen = [
        (step, kind, sample)
        for kind, rollouts in by_kind.items()
        for step in spread(sorted(rollouts), MAX_STEPS)
        for sample in rollouts[step][:MAX_PER_STEP]
    ]
    return [sample for _, _, sample in sorted(chosen, key=lambda entry: (-entry[0], entry[1]))]


def spread(values: Sequence[int], count: int) -> list[int]:
    """``count`` of the values, evenly spaced, both ends among them."""
    if len(values) <= count:
        return list(values)
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]


def sample_table(records: Sequence[Record]) -> str:
    """The table with its filter, which the page's script turns on."""
    kinds = sorted({str(record.get("kind", "")) for record in records})
    steps = sorted({int(record.get("rollout_id") or 0) for record in records})
    controls = (
        '<input type="search" placeholder="text in prompt, response or label" aria-label="text">'
        + _select("train and eval", {kind: kind for kind in kinds})
        + _select("every step", {str(step): f"step {step}" for step in steps})
        + _select("every reward", {"+": "reward > 0", "0": "reward = 0", "-": "reward < 0"})
        + '<span class="note" id="count"></span>'
    )
    heads = ("step", "", "prompt", "response", "label", "reward", "status")
    head = "".join(f"<th{' class=num' if name in ('step', 'reward') else ''}>{name}</th>" for name in heads)
    rows = "\n".join(_row(record) for record in records)
    return (
        f'<div id="filter" hidden>{controls}</div>'
        f'<div class="scroll"><table id="samples"><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table></div>'
    )


def plain_text(value: Any) -> str:
    """What a cell says: text as it is, chat messages one ``role: content`` a line, other values as JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(item, Mapping) and "role" in item for item in value):
        return "\n".join(f"{item['role']}: {plain_text(item.get('content'))}" for item in value)
    return json.dumps(value, ensure_ascii=False, default=str)


def _row(record: Record) -> str:
    reward = record.get("reward")
    number = float(reward) if isinstance(reward, int | float) and not isinstance(reward, bool) else None
    sign = "" if number is None else "+" if number > 0 else "-" if number < 0 else "0"
    step, kind = int(record.get("rollout_id") or 0), str(record.get("kind", ""))
    shown_kind = f"{kind}: {record['data_set']}" if record.get("data_set") else kind
    shown_reward = _cell(reward) if number is None else f"{number:.4g}"
    tone = {"+": " good", "-": " bad"}.get(sign, "")
    return (
        f'<tr data-kind="{escape(kind)}" data-step="{step}" data-sign="{sign}"><td class="num">{step}</td>'
        f"<td>{escape(shown_kind)}</td>"
        + "".join(f'<td class="text mono"><div>{_cell(record.get(name))}</div></td>' for name in ("prompt", "response"))
        + f'<td class="text mono"><div>{_cell(record.get("label"))}</div></td>'
        + f'<td class="num{tone}">{shown_reward}</td><td>{_cell(record.get("status"))}</td></tr>'
    )


def _cell(value: Any) -> str:
    text = plain_text(value)
    more = len(text) - MAX_CHARACTERS
    return escape(text[:MAX_CHARACTERS]) + (f" … {more} more characters" if more > 0 else "")


def _select(every: str, choices: Mapping[str, str]) -> str:
    options = "".join(f'<option value="{escape(value)}">{escape(name)}</option>' for value, name in choices.items())
    return f'<select aria-label="{every}"><option value="">{every}</option>{options}</select>'
