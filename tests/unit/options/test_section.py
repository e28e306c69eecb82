from __future__ import annotations

import json
import pickle
import subprocess
import sys
from importlib import resources
from typing import ClassVar, Literal

import pytest
import yaml
from pydantic import ValidationError

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.data.options import DataOptions
from buffer_rl.errors import ConfigError
from buffer_rl.kinds.table import KINDS
from buffer_rl.options.section import Section, compose, did_you_mean, dump_args, load_args, load_section, option
from buffer_rl.rollout.options import RolloutOptions


class Fruit(Section):
    heading: ClassVar[str] = "Fruit"
    apples: int = option(1, "how many", ge=1)
    sort: Literal["red", "green"] = option("red", "which")


class Twin(Section):
    apples: int = option(2, "a clash")


def test_composed_args_are_instances_of_every_section() -> None:
    args = compose(CORE_SECTIONS)()
    assert isinstance(args, RolloutOptions)
    assert isinstance(args, DataOptions)


def test_fields_keep_the_order_of_the_sections() -> None:
    names = list(compose([Fruit, DataOptions]).model_fields)
    assert names == [*Fruit.model_fields, *DataOptions.model_fields]


def test_composed_args_are_frozen_and_refuse_unknown_names() -> None:
    args = compose([Fruit])()
    with pytest.raises(ValidationError, match="frozen"):
        args.apples = 3  # type: ignore[attr-defined]
    with pytest.raises(ValidationError, match="pears"):
        compose([Fruit])(pears=1)  # type: ignore[call-arg]


def test_two_sections_with_one_name_are_an_error_that_names_both() -> None:
    with pytest.raises(ConfigError) as caught:
        compose([Fruit, Twin])
    assert "apples" in str(caught.value)
    assert ":Fruit" in str(caught.value)
    assert ":Twin" in str(caught.value)


def test_equal_sections_give_the_same_class() -> None:
    assert compose(CORE_SECTIONS) is compose(list(CORE_SECTIONS))


@pytest.mark.parametrize(
    "reference", ["buffer_rl.data.options:Nothing", "no.such:Thing", "buffer_rl.errors:ConfigError", ""]
)
def test_a_reference_that_is_no_section_is_an_error(reference: str) -> None:
    with pytest.raises(ConfigError):
        compose([reference])


def test_infinite_and_undefined_numbers_are_refused() -> None:
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValidationError):
            compose(CORE_SECTIONS)(lr=value)  # type: ignore[call-arg]


def test_dumped_args_load_as_equal_args_of_the_same_class() -> None:
    args = compose(CORE_SECTIONS)(lr=0.1 + 0.2, rollout_stop=["ü", "\n"], num_rollout=None)  # type: ignore[call-arg]
    again = load_args(dump_args(args))
    assert again == args
    assert type(again) is type(args)


def test_another_process_rebuilds_the_same_args() -> None:
    args = compose(CORE_SECTIONS)(rollout_batch_size=7)  # type: ignore[call-arg]
    program = (
        "import sys\nfrom buffer_rl.options.section import load_args\n"
        "from buffer_rl.rollout.options import RolloutOptions\n"
        "args = load_args(sys.stdin.read())\n"
        "assert isinstance(args, RolloutOptions)\nprint(args.rollout_batch_size)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=dump_args(args), capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "7"


def test_args_can_be_pickled() -> None:
    args = compose(CORE_SECTIONS)(seed=5)  # type: ignore[call-arg]
    assert pickle.loads(pickle.dumps(args)) == args


def test_a_section_inside_a_function_cannot_be_sent() -> None:
    class Local(Section):
        value: int = option(1, "something")

    with pytest.raises(ConfigError, match="defined inside a function"):
        dump_args(compose([Local])())


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", json.dumps({"sections": list(CORE_SECTIONS), "options": {"lr": "x"}})]
)
def test_damaged_text_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError):
        load_args(text)


def test_the_nearest_name_is_suggested_only_if_it_is_near() -> None:
    assert did_you_mean("rolout_seed", ["rollout_seed", "seed"]) == "did you mean rollout_seed?"
    assert did_you_mean("zebra", ["rollout_seed"]) == ""


SYNONYMS: dict[str, list[str]] = yaml.safe_load(
    resources.files("buffer_rl.options").joinpath("synonyms.yaml").read_text("utf-8")
)


def test_every_synonym_leads_to_an_option_or_a_kind_that_exists_and_is_none_itself() -> None:
    options = {name for section in CORE_SECTIONS for name in load_section(section).model_fields}
    assert set(SYNONYMS) <= options | set(KINDS)
    assert not {other for others in SYNONYMS.values() for other in others} & (options - {"advantage_estimator"})
    assert all(len(others) == len(set(others)) for others in SYNONYMS.values())


@pytest.mark.parametrize(
    ("name", "known", "answer"),
    [
        ("learning_rate", ["lr", "min_lr"], "lr"),
        ("--learning-rate", ["--lr", "--min-lr"], "--lr"),
        ("--Learning_Rate", ["--lr", "--min-lr"], "--lr"),
        ("BUFFER_RL_LEARNING_RATE", ["BUFFER_RL_LR", "BUFFER_RL_MIN_LR"], "BUFFER_RL_LR"),
        ("--temperature", ["--eval-temperature", "--rollout-temperature"], "--rollout-temperature"),
        ("--output-dir", ["--save", "--run-dir"], "--save or --run-dir"),
        ("estimator", ["reward", "advantage", "loss"], "advantage"),
        ("estimator", ["advantage_estimator", "loss_type"], "advantage_estimator"),
        ("rewrad", ["reward", "advantage"], "reward"),
        ("actor_rollout_ref.rollout.n", ["--num-rollout", "--n-samples-per-prompt"], "--n-samples-per-prompt"),
        ("--data.train_batch_size", ["--rollout-batch-size", "--global-batch-size"], "--rollout-batch-size"),
        ("actor.kl_loss_coef", ["--kl-coef", "--kl-loss-coef"], "--kl-loss-coef"),
    ],
)
def test_names_of_other_toolkits_lead_to_the_name_here(name: str, known: list[str], answer: str) -> None:
    assert did_you_mean(name, known) == f"did you mean {answer}?"
    assert did_you_mean("zzz", known) == ""
