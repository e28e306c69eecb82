"""The layouts of the page on runs are those that the flags above them give."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.cluster.devices import Node
from buffer_rl.cluster.placement import Placement
from buffer_rl.options.help import FlagParser, add_options, given_flags
from buffer_rl.options.section import compose
from buffer_rl.options.sources import resolve
from buffer_rl.plan.counts import with_counts

PAGE = Path(__file__).resolve().parents[3] / "docs" / "runs.md"
SECTION = PAGE.read_text(encoding="utf-8").partition("## Which process has which device\n")[2].partition("\n## ")[0]
LAYOUTS = re.findall(r"```\n(--.*?)```\n\n```\n(role.*?)```", SECTION, flags=re.DOTALL)


def placement(command: str, *gpus: int) -> Placement:
    parser = FlagParser(prog="buffer-rl")
    add_options(parser, CORE_SECTIONS)
    flags = given_flags(parser.parse_args(shlex.split(command.replace("\\\n", ""))))
    args = with_counts(resolve(compose(CORE_SECTIONS), flags=flags, environ={}).args)
    nodes = [Node(node_id=f"{at:056x}", address=f"10.0.0.{at + 2}", cpus=8, gpus=n) for at, n in enumerate(gpus)]
    return Placement(args, nodes)


@pytest.mark.parametrize(("layout", "gpus"), [(0, (4,)), (1, (8, 8))])
def test_the_flags_of_a_layout_give_its_table(layout: int, gpus: tuple[int, ...]) -> None:
    command, table = LAYOUTS[layout]
    assert placement(command, *gpus).describe() == table.strip()


def test_the_flags_of_the_laptop_reserve_nothing() -> None:
    (command,) = re.findall(r"`(--actor-num-gpus-per-node 2 [^`]*)`", SECTION)
    found = placement(command, 0)
    assert found.groups == {}
    assert len(found.notices) == 1


def test_the_resource_of_the_table_can_be_typed() -> None:
    (command,) = re.findall(r"`(--resource [^`]*)`", SECTION)
    assert placement(command, 8, 8).node_of("ref", 0) is not None
