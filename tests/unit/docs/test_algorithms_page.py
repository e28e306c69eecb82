"""The page on algorithms has a row for each of them, with what the code declares and the test of its numbers."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from buffer_rl.algo.corrections import TOKEN_MODES
from buffer_rl.algo.options import AlgorithmOptions, LossOptions
from buffer_rl.args import CORE_SECTIONS
from buffer_rl.kinds.marks import needs_of, scope_of, unit_of
from buffer_rl.options.checks import check_options
from buffer_rl.options.help import FlagParser, add_options, given_flags
from buffer_rl.options.section import compose, flag_of
from buffer_rl.plan.algorithms import ALGORITHMS, LOSSES, REFERENCES

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "algorithms.md"
Row = dict[str, str]


def tables() -> list[list[Row]]:
    """Each table of the page: its rows, by the heads of their columns."""
    found: list[list[Row]] = []
    for block in re.findall(r"(?:^\|.*\n)+", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE):
        cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in block.splitlines()]
        found.append([dict(zip(cells[0], row, strict=True)) for row in cells[2:]])
    return found


def table(*heads: str) -> dict[str, Row]:
    """The rows of the table that has these columns, by their names."""
    (rows,) = [rows for rows in tables() if set(heads) <= rows[0].keys()]
    return {next(iter(row.values())).strip("`"): row for row in rows}


def choices(option: str) -> set[str]:
    return set(get_args(LossOptions.model_fields[option].annotation))


def quoted(cell: str) -> frozenset[str]:
    return frozenset(re.findall(r"`([^`]+)`", cell))


def registered(kind: str, name: str) -> Any:
    return pkgutil.resolve_name(REFERENCES[kind][name])


def test_every_estimator_has_a_row_with_its_scope_needs_and_options() -> None:
    rows = table("scope", "needs")
    assert rows.keys() == ALGORITHMS.keys() == table("verl `algorithm.adv_estimator`").keys()
    flags = {flag_of(name) for name in AlgorithmOptions.model_fields}
    for name, algorithm in ALGORITHMS.items():
        estimator = registered("advantage", name)
        assert (rows[name]["scope"], quoted(rows[name]["needs"])) == (str(scope_of(estimator)), needs_of(estimator)), (
            name
        )
        assert quoted(rows[name]["options"]) & flags == {flag_of(option) for option in algorithm.options}, name


def test_the_flags_of_every_algorithm_can_be_typed_and_choose_every_estimator_and_loss() -> None:
    parser = FlagParser(prog="buffer-rl")
    add_options(parser, CORE_SECTIONS)
    always = "--hf-checkpoint MODEL --prompt-data rows.jsonl --num-rollout 1 --rm-type exact_match "
    chosen = {"grpo", "policy_loss"}
    for name, row in table("algorithm", "flags").items():
        commands = [text for text in re.findall(r"`([^`]+)`", row["flags"]) if text.startswith("--")]
        assert commands or name == "GRPO"
        for command in commands:
            flags = (always + command).replace(" L", " 1").split()
            args: Any = compose(CORE_SECTIONS)(**given_flags(parser.parse_args(flags)))
            check_options(args)
            chosen |= {args.advantage_estimator, args.loss_type}
        chosen |= quoted(row["flags"])
    assert chosen >= ALGORITHMS.keys() - {"gae", "reinforce_plus_plus_baseline"}
    assert chosen >= LOSSES.keys() - {"gspo_token", "gspo", "cispo"}  # the estimators of the last two choose them


def test_every_loss_has_a_row_with_its_unit_and_needs() -> None:
    rows = table("loss", "unit")
    assert rows.keys() == LOSSES.keys() == table("verl `policy_loss.loss_mode`").keys()
    for name in LOSSES:
        loss = registered("loss", name)
        assert (rows[name]["unit"], quoted(rows[name]["needs"])) == (str(unit_of(loss)), needs_of(loss)), name


def test_every_correction_has_a_row_with_its_unit() -> None:
    rows = table("weight", "unit")
    assert rows.keys() == choices("tis_mode") == table("verl `rollout_correction`").keys() - {"bounds"}
    assert {name for name, row in rows.items() if row["unit"] == "token"} == set(TOKEN_MODES)


@pytest.mark.parametrize(
    ("option", "head"), [("kl_loss_type", "verl `kl_loss_type`"), ("loss_agg_mode", "verl `loss_agg_mode`")]
)
def test_every_choice_has_a_row(option: str, head: str) -> None:
    assert table(head).keys() == choices(option)


def test_every_row_names_a_test_file_that_there_is() -> None:
    of_names = [rows for rows in tables() if rows[0].keys() & {"name", "`--tis-mode`"}]
    assert len(of_names) >= 8
    for row in (row for rows in of_names for row in rows):
        links = re.findall(r"\]\((\.\./tests/[\w/]+/test_\w+\.py)\)", row["test"])
        assert links, row
        assert all((PAGE.parent / link).is_file() for link in links), row


def test_the_page_and_the_code_name_the_same_papers() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "buffer_rl" / "algo").glob("*.py"))
    number = r"\b\d{4}\.\d{5}\b"
    assert set(re.findall(number, PAGE.read_text(encoding="utf-8"))) == set(re.findall(number, code))
