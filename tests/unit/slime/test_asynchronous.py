"""Commands that generate while they train: the schedule that they mean, and names of other toolkits for it."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.errors import ConfigError
from buffer_rl.options.help import FlagParser, add_options, flags_of, given_flags, take_items
from buffer_rl.options.section import compose, flag_of
from buffer_rl.options.sources import take_unknown
from buffer_rl.plan.schedule import Schedule
from buffer_rl.plan.staleness import check_async
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl_slime.scripts import flags as slime_flags
from buffer_rl_slime.scripts import peers
from buffer_rl_slime.scripts.flags import known_flag
from buffer_rl_slime.scripts.meaning import Verdict, reasons
from buffer_rl_slime.scripts.shell_expansion import Argument
from buffer_rl_slime.scripts.shell_script import Launch
from buffer_rl_slime.scripts.translation import RELAX, Line, translate
from buffer_rl_slime.scripts.verdicts import Target

OPTIONS = compose(CORE_SECTIONS)
FULLY_ASYNC = "--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async"
SYNC, AHEAD, RELAX_PROGRAM = "train.py", "train_async.py", "relax.entrypoints.train"


def translated(command: str, program: str, project: str = "slime") -> tuple[dict[str, Any], dict[str, Line]]:
    """The options that the file would have, and the lines of the report by flag."""
    arguments = tuple(Argument(word, "run.sh:1") for word in command.split())
    launch = Launch(program=program, arguments=arguments, words=arguments, where="run.sh:1")
    names = PluginRegistry.from_flags([]).names
    target = Target(
        options_class=OPTIONS, names=names, megatron=frozenset(), with_megatron=False, laptop=True, project=project
    )
    found = translate(launch, target)
    every = [*found.added, *found.lines]
    options = {name: raw for line in every if not line.left_out for name, raw in line.options.items()}
    return options, {line.flag: line for line in found.lines}


@pytest.mark.parametrize(
    ("command", "program", "expected"),
    [
        ("--lr 1", SYNC, {}),
        ("--lr 1", AHEAD, {"schedule": "one-step-off", "use_tis": "true"}),
        ("--use-tis", "/x/train_async.py", {"schedule": "one-step-off", "use_tis": "true"}),
        ("--use-rollout-logprobs", AHEAD, {"schedule": "one-step-off", "use_rollout_logprobs": "true"}),
        ("--keep-old-actor", AHEAD, {"schedule": "one-step-off", "use_rollout_logprobs": "true"}),
        ("--loss-type sft_loss", AHEAD, {}),
        (FULLY_ASYNC, AHEAD, {"schedule": "async", "use_tis": "true"}),
        (FULLY_ASYNC, SYNC, {"schedule": "async", "use_tis": "true"}),
        ("--rollout-function-path mine.generate", AHEAD, {"schedule": "one-step-off", "use_tis": "true"}),
        (
            "--fully-async --max-weight-staleness 3",
            AHEAD,
            {"schedule": "async", "max_staleness": "3", "use_tis": "true"},
        ),
        ("--fully-async --max-staleness 0", RELAX_PROGRAM, {"schedule": "async", "max_staleness": "0"}),
        ("--hybrid --max-staleness 2", RELAX_PROGRAM, {"schedule": "async", "max_staleness": "2", "use_tis": "true"}),
    ],
)
def test_the_schedule_and_the_correction_of_a_command(command: str, program: str, expected: dict[str, str]) -> None:
    options, _ = translated(command, program)
    named = ("schedule", "max_staleness", "use_tis", "use_rollout_logprobs")
    assert {name: options[name] for name in named if name in options} == expected


def test_the_correction_that_is_added_is_said_as_a_change_of_the_result() -> None:
    _, lines = translated("--lr 1", AHEAD)
    line = lines["(no --use-tis)"]
    assert (line.verdict, dict(line.options)) == (Verdict.CHANGES, {"use_tis": "true"})
    assert "corrects nothing" in line.why
    assert "(no --use-tis)" not in translated("--lr 1 --use-tis", AHEAD)[1]


@pytest.mark.parametrize(
    "command",
    [
        "--lr 1",
        "--partial-rollout --mask-offpolicy-in-partial-rollout --over-sampling-batch-size 64",
        f"{FULLY_ASYNC} --deterministic-mode --partial-rollout",
        "--deterministic-mode",
    ],
)
def test_what_a_run_with_older_weights_refuses_is_left_out_and_said(command: str) -> None:
    options, lines = translated(f"{command} --rollout-batch-size 32 --n-samples-per-prompt 2", AHEAD)
    known = {name: raw for name, raw in options.items() if name in OPTIONS.model_fields}
    check_async(OPTIONS.model_validate({**known, "label_key": None}))
    for flag in ("--partial-rollout", "--over-sampling-batch-size"):
        if flag in command:
            assert lines[flag].verdict is Verdict.CHANGES
            assert translated("--over-sampling-batch-size 64 --partial-rollout", SYNC)[1][flag].verdict is Verdict.SAME


def test_of_over_sampling_a_batch_of_the_same_size_stays() -> None:
    options, _ = translated("--rollout-batch-size 8 --over-sampling-batch-size 8", AHEAD)
    assert options["over_sampling_batch_size"] == "8"


RESOURCE = '--resource {"actor":[1,2],"rollout":[1,4],"reference":[1,1],"actor_fwd":[1,1],"advantages":[1,0]}'


@pytest.mark.parametrize(
    ("more", "left_out"),
    [
        ("--rollout-batch-size 4 --n-samples-per-prompt 2 --global-batch-size 8", {"reference", "actor_fwd"}),
        ("--rollout-batch-size 4 --n-samples-per-prompt 2 --global-batch-size 4", {"reference"}),
        ("--rollout-batch-size 4 --n-samples-per-prompt 2 --global-batch-size 4 --use-kl-loss", set()),
        ("--kl-coef 0.1", {"actor_fwd"}),
        ("--kl-coef 0.0", {"reference", "actor_fwd"}),
    ],
)
def test_roles_of_relax_without_work_are_left_out(more: str, left_out: set[str]) -> None:
    line = translated(f"--fully-async {RESOURCE} {more}", RELAX_PROGRAM, RELAX)[1]["--resource"]
    roles = {"actor", "rollout", "reference", "actor_fwd", "advantages"}
    assert {role for role in roles if f'"{role}"' in str(line.options["resource"])} == roles - left_out
    assert {role for role in roles if f"without {role}:" in line.why} == left_out


def test_without_a_bound_relax_has_none_of_older_weights() -> None:
    assert translated("--fully-async", RELAX_PROGRAM, RELAX)[0]["max_staleness"] == "0"
    assert "max_staleness" not in translated("--fully-async", AHEAD)[0]


def on_command_line(*argv: str) -> tuple[Mapping[str, object], list[str]]:
    parser = FlagParser(prog="buffer-rl train")
    add_options(parser, CORE_SECTIONS)
    parser.set_defaults(sections=CORE_SECTIONS)
    namespace: argparse.Namespace
    namespace, extra = parser.parse_known_args(argv)
    notices = take_unknown(namespace, take_items(namespace, extra), flags_of(parser), prog="buffer-rl train")
    return given_flags(namespace), notices


def test_relaxs_and_miless_own_flags_are_taken_with_a_word_each() -> None:
    options, notices = on_command_line(
        "--fully-async", "--max-staleness", "2", "--num-iters-per-train-update", "8", "--use-health-check",
        "--num-data-storage-units", "1", "--update-weights-interval", "1",
    )  # fmt: skip
    assert options == {"schedule": "async", "max_staleness": "2", "num_data_storage_units": "1"}
    assert [notice for notice in notices if notice.startswith("--fully-async: it is --schedule async")]
    assert len(notices) == 4
    options, _ = on_command_line("--fully-async", "--max-weight-staleness", "4", "--pause-generation-mode", "retract")
    assert options == {"schedule": "async", "max_staleness": "4", "publication": "retract"}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("--pause-generation-mode in_place", ["cache of the old weights", "retract or drain"]),
        ("--pause-generation-mode abort", ["throw away", "retract or drain"]),
        ("--update-weights-interval 3", ["after each step", "--max-staleness 3"]),
        ("--max-head-offpolicyness 4", ["AReaL", "--schedule async --max-staleness 4?"]),
        ("--rollout.max_head_offpolicyness=4", ["AReaL", "--schedule async --max-staleness 4?"]),
        ("--max_async_level 1", ["prime-rl", "--max-staleness 1?"]),
        ("--orchestrator.max-off-policy-steps 8", ["prime-rl", "--max-staleness 8?"]),
        ("--max-staleness-steps 0", ["SkyRL", "--schedule lockstep?"]),
        ("--max-trajectory-age-steps 1", ["NeMo-RL", "--max-staleness 1?"]),
        ("--staleness-threshold 0.5", ["verl", "--max-staleness 1 --target-staleness 1?"]),
        ("--trigger-parameter-sync-step 4", ["verl", "--num-steps-per-rollout 4?"]),
        ("--target-offpolicy-steps 1", ["torchtitan", "--target-staleness 1 --max-staleness 2?"]),
        ("--window-fraction 0.3", ["torchtitan", "5 for --target-staleness 3"]),
        ("--max-head-offpolicyness", ["--schedule async --max-staleness M?"]),
    ],
)
def test_a_name_of_another_toolkit_is_answered_with_the_options_and_values_here(command: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        on_command_line(*command.split())
    assert [word for word in words if word not in str(caught.value)] == []


def test_every_name_in_the_table_of_the_page_is_answered() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "schedules.md").read_text(encoding="utf-8")
    section = text.partition(f"## {peers.PAGE.partition('#')[2].replace('-', ' ').capitalize()}\n")[2]
    cells = [line.split("|")[2] for line in section.splitlines() if line.startswith("|")][2:]
    names = {name.rpartition(".")[2] for cell in cells for name in re.findall(r"`(?:--)?([\w.-]+)", cell)}
    said_elsewhere = {"in_flight_weight_updates", "partial_rollout"}  # true or false, and an option here
    by_path = {"rollout-function-path", "train_async"}
    assert len(names) == 21
    for name in names - said_elsewhere - by_path - OPTIONS.model_fields.keys() - {"max-staleness"}:
        assert known_flag(name, ["1"]) or peers.elsewhere(name, ["1"]), name


@pytest.mark.parametrize("groups", [1, 2, 8, 64])
@pytest.mark.parametrize("target", [1, 3, 7])
@pytest.mark.parametrize("fraction", [0.1, 0.3, 1.0])
def test_the_bound_for_a_window_of_torchtitan_holds_for_any_number_of_groups(
    fraction: float, target: int, groups: int
) -> None:
    window = max(1, math.floor(fraction * (target + 1) * groups))
    oldest = ((target + 1) * groups + window - 2) // groups
    bound = peers.bound_of_window(fraction, target)
    assert oldest <= bound <= oldest + 1 + (groups == 1)
    mine = OPTIONS(schedule="async", target_staleness=target, max_staleness=bound)
    assert Schedule.of(mine).window(groups) >= window


def test_the_tables_of_peers_agree_with_the_options_and_with_slimes_tables() -> None:
    names = [name for each in reasons() for name in each.flags]
    assert sorted(names) == sorted(set(names))
    assert not {*names, *slime_flags.RENAMED} & peers.RENAMED.keys()
    core = {flag_of(name)[2:] for name in OPTIONS.model_fields}
    assert not core & {*names, *peers.RENAMED}
    assert {option for pairs in peers.RENAMED.values() for option, _ in pairs} <= OPTIONS.model_fields.keys()
    for name in ("max-head-offpolicyness", "staleness-threshold", "window-fraction"):
        assert known_flag(name, ["1"]) is None
