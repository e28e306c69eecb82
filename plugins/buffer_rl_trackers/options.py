"""Options of the trackers, and the check before anything starts that their packages are installed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import ModelWrapValidatorHandler, field_validator, model_validator

from buffer_rl.options.checks import refuse
from buffer_rl.options.redaction import holds_credentials
from buffer_rl.options.section import Section, option
from buffer_rl.plugin.hookspecs import FlagMeaning, hookimpl

if TYPE_CHECKING:
    from buffer_rl.args import Args

PAGE = "plugins/buffer_rl_trackers/README.md"
KEYS = {
    "wandb-key": "WANDB_API_KEY",
    "wandb-api-key": "WANDB_API_KEY",
    "mlflow-tracking-token": "MLFLOW_TRACKING_TOKEN",
}
"""Flags of keys, none of which is an option, with the variables that the trackers read."""


class TrackerOptions(Section):
    """Weights & Biases, Trackio and MLflow. Keys are no options: the trackers read them from their own variables."""

    heading: ClassVar[str] = "Experiment trackers"

    use_wandb: bool = option(False, "log to Weights & Biases: adds wandb to --logger")
    wandb_project: str | None = option(None, "project; without it WANDB_PROJECT, or buffer-rl", metavar="NAME")
    wandb_team: str | None = option(None, "team or user that the run belongs to (entity)", metavar="NAME")
    wandb_group: str | None = option(None, "group of the run within the project", metavar="NAME")
    wandb_mode: Literal["online", "offline", "disabled"] | None = option(
        None, "whether anything is sent; without it WANDB_MODE, or online"
    )
    wandb_dir: str | None = option(
        None, "folder of local files; without it WANDB_DIR, or the run folder", metavar="PATH"
    )
    wandb_run_id: str | None = option(None, "run to continue, or the id of a new one", metavar="ID")
    wandb_host: str | None = option(None, "address of a server of your own", metavar="URL")
    trackio_project: str = option("buffer-rl", "project of --logger trackio", metavar="NAME")
    trackio_space_id: str | None = option(
        None, "Hugging Face Space that metrics are sent to; without it they stay on this machine", metavar="USER/NAME"
    )
    mlflow_tracking_uri: str | None = option(
        None, "server or store of --logger mlflow; without it MLFLOW_TRACKING_URI, or mlflow.db of the run folder",
        metavar="URI",
    )  # fmt: skip
    mlflow_experiment: str = option("buffer-rl", "experiment of --logger mlflow", metavar="NAME")

    @field_validator("wandb_host", "mlflow_tracking_uri")
    @classmethod
    def _has_no_credentials(cls, value: str | None) -> str | None:
        if value and holds_credentials(value):
            raise ValueError(
                "an address here has no credentials; set WANDB_API_KEY, or MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD"
            )
        return value

    @model_validator(mode="wrap")
    @classmethod
    def _use_wandb_is_a_logger(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        made = handler(values)
        loggers = getattr(made, "logger", None)  # a section alone has none
        if not made.use_wandb or loggers is None or "wandb" in loggers:
            return made
        return handler({**made.model_dump(), "logger": [*loggers, "wandb"]})

    @staticmethod
    def check(args: Any) -> None:
        """For a tracker of ``--logger`` whose packages are not installed."""
        for reference in args.logger:
            path = reference.replace(":", ".").removeprefix("buffer_rl_trackers.trackers.")
            name = path.removesuffix("Logger").lower()
            missing = next((package for package in packages_of(name, args) if not _is_installed(package)), "")
            what, hint = "the package {} is not installed", f"pip install 'buffer-rl[{name}]'"
            refuse(missing, f"--logger {reference}: {what}", hint)


if TYPE_CHECKING:

    class TrackerArgs(Args, TrackerOptions):
        """The options of a run with those of this plugin, for a type checker."""


@hookimpl
def buffer_rl_add_options() -> list[str]:
    """The section above, by reference."""
    return [f"{__name__}:TrackerOptions"]


@hookimpl
def buffer_rl_explain_flag(name: str, values: Sequence[str]) -> FlagMeaning | None:
    """Why there is no flag for a key, and which variable there is."""
    if name not in KEYS:
        return None
    reason = f"a key is never an option, as others can read it; set the variable {KEYS[name]}"
    return FlagMeaning(kind="refused", reason=reason, page=PAGE)


def packages_of(name: str, args: TrackerArgs) -> tuple[str, ...]:
    """The import names that the tracker ``name`` needs; none for loggers of others."""
    if name == "mlflow":
        uri = args.mlflow_tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:"
        return ("mlflow", "sqlalchemy", "alembic") if uri.startswith("sqlite:") else ("mlflow",)
    return (name,) if name in ("wandb", "trackio") else ()


def _is_installed(package: str) -> bool:
    spec = find_spec(package)
    return spec is not None and spec.origin is not None  # a mere folder of this name has no origin
