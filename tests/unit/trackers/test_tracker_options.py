"""The options of trackers: what switches one on, what is refused before anything starts."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.cli import main
from buffer_rl.errors import ConfigError
from buffer_rl.options.section import compose, dump_args, load_args
from buffer_rl_trackers.options import TrackerOptions

MADE = compose([*CORE_SECTIONS, TrackerOptions])


def args_of(**options: Any) -> Any:
    return MADE(**options)


@pytest.mark.parametrize(
    ("options", "loggers"),
    [
        ({}, ["tensorboard"]),
        ({"use_wandb": True}, ["tensorboard", "wandb"]),
        ({"use_wandb": "true", "logger": ["mlflow"]}, ["mlflow", "wandb"]),
        ({"use_wandb": True, "logger": "wandb"}, ["wandb"]),
        ({"use_wandb": True, "logger": []}, ["wandb"]),
        ({"logger": ["wandb"]}, ["wandb"]),
    ],
)
def test_use_wandb_adds_wandb_to_the_loggers(options: dict[str, Any], loggers: list[str]) -> None:
    args = MADE.model_validate(options)
    assert args.logger == loggers
    assert load_args(dump_args(args)) == args


def test_functions_of_users_see_the_option_and_not_what_stands_for_it() -> None:
    assert args_of(use_wandb=True).for_user_code.use_wandb is True
    assert args_of(wandb_group="a").for_user_code.wandb_group == "a"
    assert compose(CORE_SECTIONS)().for_user_code.use_wandb is False


@pytest.mark.parametrize("flag", ["--wandb-key", "--wandb-api-key", "--wandb_key"])
def test_a_key_as_a_flag_is_refused_with_the_variable_that_is_read(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", flag, "0123456789abcdef"]) == 2
    err = capsys.readouterr().err
    assert "set the variable WANDB_API_KEY" in err
    assert "0123456789abcdef" not in err


def test_a_key_in_a_file_is_refused_with_the_variable_that_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text("wandb_key: 0123456789abcdef\n")
    assert main(["train", "--config", str(tmp_path / "run.yaml")]) == 2
    err = capsys.readouterr().err
    assert "run.yaml:1: unknown option 'wandb_key'" in err
    assert "WANDB_API_KEY" in err
    assert "0123456789abcdef" not in err


def test_an_address_with_a_password_in_a_file_is_refused_with_the_variables_that_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text("mlflow_tracking_uri: https://me:0123456789@example.org\n")
    assert main(["train", "--config", str(tmp_path / "run.yaml")]) == 2
    err = capsys.readouterr().err
    assert "MLFLOW_TRACKING_PASSWORD" in err
    assert "0123456789" not in err


@pytest.mark.parametrize(
    ("loggers", "uri", "installed", "package", "extra"),
    [
        (["wandb"], None, [], "wandb", "wandb"),
        (["buffer_rl_trackers.trackers:WandbLogger"], None, [], "wandb", "wandb"),
        (["trackio"], None, ["wandb"], "trackio", "trackio"),
        (["mlflow"], None, ["mlflow"], "sqlalchemy", "mlflow"),
        (["mlflow"], "http://127.0.0.1:1", [], "mlflow", "mlflow"),
    ],
)
def test_a_tracker_that_is_not_installed_is_an_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
    loggers: list[str],
    uri: str | None,
    installed: list[str],
    package: str,
    extra: str,
) -> None:
    real = importlib.util.find_spec("json")
    monkeypatch.setattr("buffer_rl_trackers.options.find_spec", lambda name: real if name in installed else None)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConfigError, match=f"the package {package} is not installed") as caught:
        TrackerOptions.check(args_of(logger=loggers, mlflow_tracking_uri=uri))
    assert caught.value.hint == f"pip install 'buffer-rl[{extra}]'"


def test_a_server_of_mlflow_needs_no_database_here(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec("json")
    monkeypatch.setattr("buffer_rl_trackers.options.find_spec", lambda name: real if name == "mlflow" else None)
    TrackerOptions.check(args_of(logger=["mlflow", "tensorboard"], mlflow_tracking_uri="http://127.0.0.1:1"))


def test_a_folder_with_the_name_of_a_package_is_not_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb_like").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("buffer_rl_trackers.options.packages_of", lambda name, args: ("wandb_like",))
    assert importlib.util.find_spec("wandb_like") is not None
    with pytest.raises(ConfigError, match="wandb_like is not installed"):
        TrackerOptions.check(args_of(logger=["wandb"]))
