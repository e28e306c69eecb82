"""Options of the server under its own names, and what a run is told before it starts."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.errors import ConfigError
from buffer_rl.options.help import FlagParser, add_options, given_flags, normalise_flags, take_items
from buffer_rl.options.section import compose
from buffer_rl.options.sources import resolve
from buffer_rl.testing.tiny import make_tiny_model
from buffer_rl_sglang.launcher import launch
from buffer_rl_sglang.options import SglangOptions, buffer_rl_configure, server_arguments


def parse(*argv: str, config: str | None = None) -> tuple[Any, list[str]]:
    """The options of a command line, and the arguments that are left over."""
    parser = FlagParser(prog="buffer-rl")
    add_options(parser, [SglangOptions])
    parser.set_defaults(sections=[SglangOptions])
    namespace, extra = parser.parse_known_args(normalise_flags(argv))
    rest = take_items(namespace, extra)
    resolved = resolve(
        compose([*CORE_SECTIONS, SglangOptions]),
        flags=given_flags(namespace),
        environ={},
        config_paths=[config] if config else [],
    )
    return resolved.args, rest


def test_each_argument_of_the_server_is_a_flag_with_its_own_name() -> None:
    args, rest = parse(
        *("--sglang-mem-fraction-static", "0.8", "--sglang_enable_metrics", "--other", "x"),
        *("--sglang-cuda-graph-bs", "1", "2", "--sglang-python", "p", "--sglang-log-level=error"),
    )
    assert args.sglang_python == "p"
    assert args.sglang_args == {
        "mem_fraction_static": "0.8",
        "enable_metrics": True,
        "cuda_graph_bs": ["1", "2"],
        "log_level": "error",
    }
    assert rest == ["--other", "x"]
    assert server_arguments(args) == (
        ["--mem-fraction-static", "0.8", "--enable-metrics", "--cuda-graph-bs", "1", "2", "--log-level", "error"]
    )


def test_a_file_sets_them_too_and_flags_add_to_it(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("sglang_mem_fraction_static: 0.7\nsglang-page-size: 16\nsglang_enable_metrics: false\n")
    args, _ = parse("--sglang-page-size", "8", config=str(path))
    assert args.sglang_args == {"mem_fraction_static": 0.7, "page_size": "8", "enable_metrics": False}
    assert server_arguments(args) == ["--mem-fraction-static", "0.7", "--page-size", "8"]


@pytest.mark.parametrize(("name", "instead"), [("tp_size", "--rollout-num-gpus-per-engine"), ("port", "")])
def test_what_the_run_sets_itself_is_refused(name: str, instead: str) -> None:
    args, _ = parse(f"--sglang-{name}", "2")
    with pytest.raises(ConfigError, match="the run sets this argument") as caught:
        server_arguments(args)
    assert instead in caught.value.hint
    assert caught.value.where == f"--sglang-{name.replace('_', '-')}"


def test_the_installed_server_checks_its_arguments(options: Callable[..., Any]) -> None:
    launch.check(options(sglang_args={"mem_fraction_static": "0.7"}))
    with pytest.raises(
        ConfigError, match=r"there is no --sglang-mem-fraktion; did you mean --sglang-mem-fraction-static\?"
    ):
        launch.check(options(sglang_args={"mem_fraktion": "0.7"}))
    with pytest.raises(ConfigError, match="invalid float value: 'much'"):
        launch.check(options(sglang_args={"mem_fraction_static": "much"}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout_top_p": 0.9}, ["--rollout-top-k -1", "--rollout-top-k 2 to 4096", "add --rollout-top-k 4096"]),
        ({"rollout_top_k": 1}, ["--rollout-top-k 2 to 4096"]),
        ({"rollout_top_k": 4097}, ["--rollout-top-k 2 to 4096"]),
        (
            {"rollout_top_k": 9, "sglang_args": {"sampling_mask_max_tokens": "8"}},
            ["add --rollout-top-k 8", "--sglang-sampling-mask-max-tokens"],
        ),
        ({"rollout_top_k": 9, "eval_top_k": 4097}, ["--eval-top-k 4097", "at most 4096", "lower it to 4096"]),
        ({"rollout_top_k": 4096, "router": "sglang"}, ["drops return_sampling_mask", "add --router smg"]),
    ],
)
def test_kept_tokens_that_the_servers_would_not_send_are_refused(
    options: Callable[..., Any], changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        launch.check(options(**{"replay_kept_tokens": True, "router": "smg", **changes}))
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("top_k", [2, 4096])
def test_kept_tokens_of_a_bounded_number_are_not_refused(options: Callable[..., Any], top_k: int) -> None:
    launch.check(options(replay_kept_tokens=True, router="smg", rollout_top_k=top_k))
    launch.check(options(rollout_top_p=0.9))  # replayed by nobody
    launch.check(options(replay_kept_tokens=True, router="smg", rollout_top_k=top_k, eval_top_k=-1))  # not asked for


@pytest.mark.parametrize(("temperature", "refused"), [("1.0", True), ("0.0", False)])
def test_evaluations_ask_for_kept_tokens_too_and_greedy_ones_for_one(
    options: Callable[..., Any], tmp_path: Path, temperature: str, refused: bool
) -> None:
    rows, sets = tmp_path / "rows.jsonl", tmp_path / "sets.yaml"
    rows.write_text('{"prompt": "a"}\n')
    sets.write_text(f"datasets:\n- {{name: a, path: {rows}, top_k: 5000, temperature: {temperature}}}\n")
    args = options(replay_kept_tokens=True, router="smg", rollout_top_k=9, eval_config=str(sets))
    with pytest.raises(ConfigError, match=r"the set 'a', top_k 5000") if refused else contextlib.nullcontext():
        launch.check(args)
    launch.check(args.model_copy(update={"eval_config": None, "eval_top_k": 5000, "eval_temperature": 0.0}))


def test_routed_experts_want_a_model_that_has_some_and_a_router_that_forwards_the_field(
    options: Callable[..., Any], tmp_path: Path
) -> None:
    mixture = make_tiny_model(tmp_path / "hf", "qwen3_moe")
    launch.check(options(replay_routed_experts=True, router="smg", hf_checkpoint=mixture))
    with pytest.raises(ConfigError, match="drops return_routed_experts") as caught:
        launch.check(options(replay_routed_experts=True, router="sglang", hf_checkpoint=mixture))
    assert "--replay-routed-experts and --router sglang" in str(caught.value)
    assert caught.value.hint == "add --router smg"
    with pytest.raises(ConfigError, match="no mixture of experts"):
        launch.check(options(replay_routed_experts=True, router="smg"))


@pytest.mark.parametrize("version", ["0.5.20", "0.6.0"])
def test_a_server_with_another_protocol_is_refused(
    version: str, options: Callable[..., Any], sglang_python: Callable[..., str]
) -> None:
    with pytest.raises(ConfigError, match=f"SGLang {version} speaks another protocol"):
        launch.check(options(sglang_python=sglang_python(version)))


def test_a_python_without_the_server_is_named(options: Callable[..., Any], sglang_python: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match="No module named 'sglang'") as caught:
        launch.check(options(sglang_python=sglang_python(None)))
    assert "--sglang-python" in str(caught.value.where)
    with pytest.raises(ConfigError, match="cannot be run"):
        launch.check(options(sglang_python="/no/such/python"))


def test_items_need_a_section_that_takes_them() -> None:
    assert take_items(argparse.Namespace(), ["--sglang-page-size", "8"]) == ["--sglang-page-size", "8"]


@pytest.mark.parametrize(
    ("items", "error"),
    [
        ({"api-key": "k"}, "--sglang-api-key: the run sets"),
        ({"model": "/other"}, "--sglang-model: the run sets"),
        ({"hf_token": "t"}, "a secret would be in the server's command line"),
        ({"log_level": "info"}, "the engines' API key"),
    ],
)
def test_what_would_overrule_the_run_or_tell_a_secret_is_refused(
    items: dict[str, Any], error: str, options: Callable[..., Any]
) -> None:
    with pytest.raises(ConfigError, match=error):
        server_arguments(options(sglang_args=items))


def test_mappings_are_json_and_the_key_may_be_logged_where_there_is_none(options: Callable[..., Any]) -> None:
    args = options(sglang_args={"json_model_override_args": {"a": [1, True]}, "log_level": "info"}, engine_auth=False)
    assert server_arguments(args) == ["--json-model-override-args", '{"a": [1, true]}', "--log-level", "info"]


def test_a_value_too_many_is_refused_before_anything_starts(options: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="unexpected values: true"):
        launch.check(options(sglang_args={"sleep_on_idle": ["true"]}))


@pytest.mark.parametrize("changes", [{"rollout_engine": "embedded"}, {"router_url": "http://127.0.0.1:1"}])
def test_arguments_of_servers_that_are_not_started_are_refused(
    changes: dict[str, Any], options: Callable[..., Any]
) -> None:
    with pytest.raises(ConfigError, match="--sglang-page-size: the run starts no SGLang server"):
        buffer_rl_configure(options(sglang_args={"page_size": 8}, **changes))
    buffer_rl_configure(options(sglang_args={"page_size": 8}))


def test_an_option_beside_the_items_is_set_where_a_command_has_no_flag_for_it() -> None:
    namespace = argparse.Namespace(sections=[SglangOptions])
    assert take_items(namespace, ["--sglang-python", "p", "--sglang-b", "2"]) == []
    assert given_flags(namespace) == {"sglang_python": "p", "sglang_args": {"b": "2"}}


@pytest.mark.parametrize(
    ("text", "flags", "error"),
    [
        ("sglang_args: none of it\nsglang_page_size: 3\n", [], "is no mapping"),
        ("sglang_page_size: 3\nsglang-page-size: 4\n", [], "is set twice"),
        ("", ["--sglang-page-size", "3", "--sglang-page-size", "4"], "is given twice"),
        ("", ["--sglang-args", "junk", "--sglang-page-size", "4"], "is no mapping"),
    ],
)
def test_items_that_cannot_be_added_are_refused(text: str, flags: list[str], error: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=error):
        parse(*flags, config=str(path))


def test_items_are_added_to_a_whole_mapping_from_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("sglang_args: a=1\nsglang_b: 2\n")
    args, _ = parse('--sglang-json={"x": 1}', config=str(path))
    assert args.sglang_args == {"a": "1", "b": 2, "json": '{"x": 1}'}


@pytest.mark.parametrize("version", ["0.5.24rc1", "0.5.24+cu129"])
def test_a_version_with_a_suffix_is_known(
    version: str, options: Callable[..., Any], sglang_python: Callable[..., str]
) -> None:
    launch.check(options(sglang_python=sglang_python(version)))
