"""What is asked of the engines before anything starts: context lengths, determinism, what a launcher checks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.errors import ConfigError, DataError, EngineError, PluginError, RolloutError
from buffer_rl.options.section import compose
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.testing.decoding import SglangRules
from buffer_rl.testing.fake_engine import FakeEngine
from buffer_rl.testing.tiny import make_char_tokenizer
from buffer_rl.verbs.engine_checks import check_engines, check_eval_prompts
from buffer_rl.verbs.train import read_data

ROPE = {"rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0], "original_max_position_embeddings": 16}
IMITATING = "harness.sglang_service:launch_imitating_sglang"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 30}')
    make_char_tokenizer("a").save_pretrained(folder)
    return folder


def options(model: Path, **changes: Any) -> Any:
    place = {"hf_checkpoint": str(model), "run_dir": str(model.parent / "run")}
    chosen = {**place, "rollout_max_response_len": 8, **changes}
    return compose(CORE_SECTIONS)(**chosen)


def served(engine: FakeEngine) -> dict[str, Any]:
    return {"router_url": engine.url, "engine_urls": [engine.url]}


def behind(engine: FakeEngine, model: Path, **changes: Any) -> Any:
    return options(model, **{**served(engine), **changes})


def look(args: Any) -> None:
    registry = PluginRegistry()
    check_eval_prompts(args, check_engines(args, registry), read_data(args, registry))


def eval_options(model: Path, lengths: list[int], **changes: Any) -> Any:
    path = model.parent / "dev.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a" * length}) + "\n" for length in lengths))
    return options(model, eval_prompt_data=[f"dev={path}"], **changes)


def test_evaluation_prompts_that_leave_no_room_are_named_with_their_lengths(model: Path) -> None:
    look(eval_options(model, [1, 29]))
    with pytest.raises(DataError) as caught:
        look(eval_options(model, [1, 30, 29, 31]))
    text = str(caught.value)
    assert "dev.jsonl:2: 30 tokens" in text
    assert "dev.jsonl:4: 31 tokens" in text
    assert "dev.jsonl:3" not in text
    assert "fewer than 30 tokens (the model's max_position_embeddings)" in text
    with pytest.raises(DataError, match=r"fewer than 20 tokens \(--rollout-max-context-len\)"):
        look(eval_options(model, [20], rollout_max_context_len=20))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"router_args": {"cache_treshold": "0.5"}}, ["--router-NAME: the router refuses", "--router-cache-treshold"]),
        ({"router": "smgg"}, ["there is no router of that name", "smg"]),
    ],
)
def test_what_the_router_of_the_run_refuses_is_named(model: Path, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises((ConfigError, PluginError)) as caught:
        look(options(model, **changes))
    assert [word for word in words if word not in str(caught.value)] == []
    with FakeEngine() as engine:
        look(behind(engine, model, **changes))  # the run starts none


def test_the_tokenizer_is_not_loaded_where_no_prompt_can_be_too_long(model: Path) -> None:
    (model / "config.json").write_text('{"max_position_embeddings": 4096}')
    (model / "tokenizer.json").write_text("{}")
    look(eval_options(model, [1, 500]))
    with pytest.raises(RolloutError, match="the tokenizer does not load: KeyError"):
        look(eval_options(model, [1, 5000]))  # the file above is no tokenizer


@pytest.mark.parametrize(
    "config",
    [
        {"max_position_embeddings": 30, "rope_scaling": ROPE},
        {"model_type": "gemma3", "text_config": {"max_position_embeddings": 30, "rope_parameters": {"full": ROPE}}},
    ],
)
def test_the_embedded_engine_is_refused_sequences_beyond_a_changing_rope_and_others_are_not(
    model: Path, config: Any
) -> None:
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ConfigError, match=r"'longrope'.*beyond 16 tokens(.|\n)*add --engine-context-length 16, or less"
    ):
        look(options(model))
    look(options(model, engine_context_length=16))
    look(options(model, debug_train_only=True))
    with FakeEngine() as engine:
        look(behind(engine, model))


@pytest.mark.parametrize(("own", "prompt", "sequence"), [(True, 63, 64), (False, 57, 62)])
def test_a_server_takes_prompts_and_sequences_up_to_its_margins(
    model: Path, own: bool, prompt: int, sequence: int
) -> None:
    (model / "config.json").write_text('{"max_position_embeddings": 200}')
    rules = None if own else SglangRules()
    with FakeEngine(sglang=rules, server_info={"context_length": 64}) as engine:
        look(eval_options(model, [prompt], **served(engine)))
        with pytest.raises(DataError, match=rf"fewer than {prompt + 1} tokens \({engine.url}, with a context of 64"):
            look(eval_options(model, [prompt + 1], **served(engine)))
        for fits in (
            {"rollout_max_response_len": sequence - 1},
            {"rollout_max_response_len": sequence - 10, "rollout_max_prompt_len": 10},
            {"rollout_max_response_len": 999, "rollout_max_context_len": sequence},
            {"rollout_max_prompt_len": prompt, "rollout_max_response_len": sequence - prompt},
            {"rollout_max_response_len": 999, "custom_generate_function_path": "my:function"},
            {"rollout_max_response_len": 999, "num_rollout": 0},
        ):
            look(behind(engine, model, **fits))
        args = eval_options(model, [1], **served(engine), rollout_max_response_len=999, num_rollout=0)
        look(args.model_copy(update={"eval_max_response_len": sequence - 1}))
        with pytest.raises(ConfigError, match=f"--eval-max-response-len: (.|\n)*at most {sequence} tokens"):
            look(args.model_copy(update={"eval_max_response_len": sequence}))
        with pytest.raises(ConfigError, match="--rollout-max-response-len: "):
            look(args)
        for name, wrong in (
            ("rollout-max-response-len", {"rollout_max_response_len": sequence}),
            ("rollout-max-response-len", {"rollout_max_response_len": sequence - 9, "rollout_max_prompt_len": 10}),
            ("rollout-max-response-len", {"rollout_max_response_len": 999, "rollout_max_context_len": sequence + 1}),
            ("rollout-max-prompt-len", {"rollout_max_prompt_len": prompt + 1, "rollout_max_response_len": 1}),
        ):
            with pytest.raises(
                ConfigError, match=f"--{name}: (.|\n)*{engine.url}(.|\n)*at most ({prompt}$|{sequence} )"
            ):
                look(behind(engine, model, **wrong))


def test_a_server_that_names_no_context_has_that_of_its_model(model: Path) -> None:
    with FakeEngine(sglang=SglangRules(), server_info={"context_length": None}) as engine:
        look(behind(engine, model, rollout_max_response_len=27))
        with pytest.raises(ConfigError, match="at most 28 tokens together"):
            look(behind(engine, model, rollout_max_response_len=28))


def test_a_server_that_does_not_answer_is_named_before_the_run_starts(model: Path) -> None:
    with FakeEngine() as engine:
        args = behind(engine, model)
    with pytest.raises(EngineError, match=engine.url):
        look(args)


def promising(args: Any, index: int, log_path: str) -> Any: ...


promising.deterministic = True  # type: ignore[attr-defined]


def test_deterministic_runs_need_engines_whose_launcher_says_that_they_are(model: Path) -> None:
    look(options(model, deterministic=True))
    look(options(model, deterministic=True, rollout_engine=f"{__file__}:promising"))
    look(options(model, rollout_engine=IMITATING))
    with pytest.raises(ConfigError, match=r"--deterministic and --rollout-engine .*imitating(.|\n)*do not promise"):
        look(options(model, deterministic=True, rollout_engine=IMITATING))
    look(options(model, deterministic=True, rollout_engine=IMITATING, debug_train_only=True))
    look(options(model, deterministic=True, rollout_engine=IMITATING, loss_type="sft_loss"))


def test_deterministic_runs_with_servers_need_all_of_them_to_say_that_they_are(model: Path) -> None:
    promises = {"deterministic": True}
    with FakeEngine(server_info=promises) as first, FakeEngine(server_info=promises) as second:
        look(behind(first, model, deterministic=True, engine_urls=[first.url, second.url]))
        with FakeEngine(sglang=SglangRules(deterministic=True)) as other:
            urls = [first.url, other.url]
            look(behind(first, model, engine_urls=urls))
            with pytest.raises(ConfigError, match=rf"--deterministic: the engine {other.url} does"):
                look(behind(first, model, deterministic=True, engine_urls=urls))


def test_a_set_of_the_evaluation_file_has_its_own_length(model: Path) -> None:
    (model / "dev.jsonl").write_text('{"prompt": "a"}\n')
    for length in (29, 30):
        (model / "eval.yaml").write_text(
            f"datasets: [{{name: dev, path: {model}/dev.jsonl, max_response_len: {length}}}]\n"
        )
        args = options(model, eval_config=str(model / "eval.yaml"), rollout_max_response_len=999, num_rollout=0)
        if length == 29:
            look(args)
        else:
            with pytest.raises(ConfigError, match=r"the set 'dev': prompt and response may have 31 tokens"):
                look(args)


def test_responses_that_leave_no_room_for_a_prompt_are_refused_where_the_run_starts_the_engines(model: Path) -> None:
    look(options(model, rollout_max_response_len=29))
    for more in ({}, {"engine_context_length": 20}):
        limit = more.get("engine_context_length", 30)
        with pytest.raises(ConfigError, match=f"may have {limit + 1} tokens(.|\n)*at most {limit} tokens together"):
            look(options(model, rollout_max_response_len=limit, **more))
