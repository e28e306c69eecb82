"""The page for users of slime names only options that exist, and calls missing only what is."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.options.help import FlagParser, add_options, given_flags, take_items
from buffer_rl.options.section import compose
from buffer_rl_sglang.options import SglangOptions
from buffer_rl_slime.scripts.flags import REMARKS, REWARD_NAMES, known_flag
from buffer_rl_slime.scripts.meaning import Verdict
from buffer_rl_trackers.options import TrackerOptions

PAGE = Path(__file__).resolve().parents[3] / "plugins" / "buffer_rl_slime" / "README.md"
TEXT = PAGE.read_text(encoding="utf-8")
SECTIONS = [*CORE_SECTIONS, SglangOptions, TrackerOptions]
OPTIONS = compose(SECTIONS)
FLAGS = {f"--{name.replace('_', '-')}" for name in OPTIONS.model_fields}


def rows(heading: str) -> list[list[str]]:
    section = TEXT.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
    return cells[2:]


def flags(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", text))


def test_the_command_can_be_typed_and_is_what_the_table_says() -> None:
    command = shlex.split(re.findall(r"```\n(buffer-rl train .*?)```", TEXT, flags=re.DOTALL)[0].replace("\\\n", ""))
    parser = FlagParser(prog="buffer-rl")
    add_options(parser, SECTIONS)
    parser.set_defaults(sections=SECTIONS)
    namespace, extra = parser.parse_known_args(command[2:])
    assert take_items(namespace, extra) == []
    args = OPTIONS(**given_flags(namespace))
    assert (args.eps_clip_high, args.eval_prompt_data) == (0.28, ["aime=/data/aime.jsonl"])
    assert (args.rollout_engine, args.sglang_args) == ("sglang", {"mem_fraction_static": "0.8"})
    table = set().union(*(flags(row[1]) for row in rows("A full command line, side by side")))
    assert table - flags(" ".join(command)) == {"--ref-load"}
    assert flags(" ".join(command)) <= table


def test_every_flag_of_slime_on_the_page_has_a_verdict() -> None:
    both = rows("A full command line, side by side") + rows("What is not here")
    named = {flag for flag in set().union(*(flags(row[0]) for row in both)) - FLAGS if not flag.startswith("--sglang-")}
    judged = {flag: known_flag(flag[2:], []) for flag in named - {"--lr-warmup-fraction", "--opd-type", "--wandb-key"}}
    assert [flag for flag, known in judged.items() if known is None] == []
    assert "--micro-batch-size" in named
    verdicts = set(
        re.findall(r"^\| ([a-z ]+) \|", TEXT.partition("## A launch script")[2].partition("## ")[0], re.MULTILINE)
    )
    assert verdicts == {"verdict", *Verdict}


def test_every_flag_on_our_side_is_an_option() -> None:
    ours = set().union(*(flags(row[1]) for row in rows("A full command line, side by side") + rows("What is not here")))
    assert {flag for flag in ours - FLAGS if not flag.startswith("--sglang-")} == set()


def test_what_is_called_missing_is_missing() -> None:
    missing = set().union(*(flags(row[0]) for row in rows("What is not here")))
    assert missing & FLAGS == set()
    assert len(missing) > 10


def test_the_remark_on_evaluation_sets_names_the_rewards_that_are_called_otherwise() -> None:
    _, why = REMARKS["eval-config"]
    said = dict(re.findall(r"(\w+)(?: in it)? is (\w+)", why))
    assert said == REWARD_NAMES
