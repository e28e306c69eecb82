"""Unknown flags are reported at once; those of slime's scripts that mean nothing here are accepted with a word."""

from __future__ import annotations

import argparse

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.errors import ConfigError
from buffer_rl.options.help import FlagParser, add_options, flags_of, given_flags, take_items
from buffer_rl.options.sources import take_unknown


def parse(*argv: str, options: bool = True) -> tuple[argparse.Namespace, list[str]]:
    parser = FlagParser(prog="buffer-rl train")
    if options:
        add_options(parser, CORE_SECTIONS)
        parser.set_defaults(sections=CORE_SECTIONS)
    namespace, extra = parser.parse_known_args(argv)
    unknown = take_items(namespace, extra)
    return namespace, take_unknown(namespace, unknown, flags_of(parser), prog="buffer-rl train")


def refusal(*argv: str, options: bool = True) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(*argv, options=options)
    return str(caught.value)


def test_all_unknown_flags_are_in_one_error_each_with_what_is_known_of_it() -> None:
    text = refusal(
        "--rolout-batch-size", "3", "--swiglu", "--tensor-model-parallel-size", "2", "--foo", "-1", "--lr", "1",
        "--hidden-dropout=0.1",
    )  # fmt: skip
    head, *lines, hint = text.splitlines()
    assert head == "4 unknown flags"
    assert lines[0] == "  --rolout-batch-size: did you mean --rollout-batch-size?"
    assert lines[1].startswith("  --tensor-model-parallel-size: not there yet: ")
    assert lines[2] == "  --foo"
    assert lines[3] == "  --hidden-dropout: changes the result: there is no dropout here"
    assert "plugins/buffer_rl_slime/README.md" in hint
    assert "swiglu" not in text


def test_one_unknown_flag_is_one_line() -> None:
    assert refusal("--cou", "3").splitlines()[0] == "unknown flag --cou"
    shown = "unknown flag --release-train: not there yet: models and Adam"
    assert refusal("--release-train").startswith(shown)
    assert refusal("--foo").splitlines() == ["unknown flag --foo", "  hint: see buffer-rl train --help"]


def test_flags_that_mean_nothing_here_are_accepted_with_a_word_for_each_reason() -> None:
    namespace, notices = parse(
        "--swiglu", "--num-layers", "36", "--lr", "1e-5", "--hidden-dropout", "0.0", "--norm-epsilon=1e-6",
        "--tensor-model-parallel-size", "1", "--moe-layer-freq", "[0,1]",
    )  # fmt: skip
    assert given_flags(namespace) == {"lr": "1e-5"}
    shape, dropout, split = notices
    assert shape.endswith("--hf-checkpoint: --swiglu --num-layers --norm-epsilon --moe-layer-freq")
    assert "no dropout" in dropout
    assert split.endswith("--tensor-model-parallel-size")


def test_renamed_flags_are_read_as_the_options_that_they_are() -> None:
    namespace, notices = parse("--calculate-per-token-loss", "--disable-grpo-std-normalization")
    assert given_flags(namespace) == {"loss_agg_mode": "token-mean", "grpo_std_normalization": "false"}
    assert [notice.partition(":")[0] for notice in notices] == [
        "--calculate-per-token-loss",
        "--disable-grpo-std-normalization",
    ]
    assert "differ" in refusal("--calculate-per-token-loss", "--loss-agg-mode", "seq-mean-token-mean")
    assert given_flags(parse("--calculate-per-token-loss", "--loss-agg-mode", "token-mean")[0])


def test_commands_without_options_take_no_flags_of_slime() -> None:
    assert refusal("--swiglu", options=False).startswith("unknown flag --swiglu")
    assert "unexpected argument 'x'" in refusal("x", options=False)


def test_an_option_of_a_blocked_plugin_names_the_plugin() -> None:
    assert "an option of the plugin sglang" in refusal("-p", "no:sglang", "--sglang-python", "x")
    item = refusal("-p", "no:sglang", "--sglang-mem-fraction-static", "0.8")
    assert "an option of the plugin sglang, which -p no:... blocks" in item
    assert "blocks" not in refusal("-p", "no:sglang", "--foo", "x")
    assert "blocks" not in refusal("-p", "no:megatron", "--foo", "x")
