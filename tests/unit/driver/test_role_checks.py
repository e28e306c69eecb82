"""Roles without work, and gradients that cannot be streamed, are refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from buffer_rl.config import compose
from buffer_rl.driver.role_checks import check_role_options, check_roles, needs_old_log_probs
from buffer_rl.driver.roles import role_plan
from buffer_rl.errors import ConfigError
from buffer_rl.options import CORE_SECTIONS
from buffer_rl.plugins import PluginRegistry

STREAM: dict[str, Any] = {"stream_gradients": True, "schedule": "pipelined"}

PLUGINS = """
from buffer_rl.scope import scoped
from buffer_rl.train.torch_trainer import TorchTrainer


def over_the_rollout(args, batch): ...


@scoped("group")
def over_a_group(args, batch): ...


def undeclared_loss(args, inputs): ...


@scoped("group")
def declared_loss(args, inputs): ...


def quiet(args, rollout_id, buffer, evaluation=False): ...


quiet.uses_engine = False


class Waiting:
    \"\"\"A trainer that has all that is required, and cannot accumulate.\"\"\"

    def __init__(self, args, rank, world_size): ...


for name in (
    "log_probs compute_advantages forward_backward optimizer_step export_buckets save_hf save load sleep wake_up"
).split():
    setattr(Waiting, name, getattr(TorchTrainer, name))
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    """The file of a user's plugins, to be followed by a name."""
    (tmp_path / "mine.py").write_text(PLUGINS)
    return f"{tmp_path / 'mine.py'}:"


def check(**options: Any) -> None:
    args = compose(CORE_SECTIONS).model_validate(options)
    check_role_options(args)
    check_roles(args, PluginRegistry.from_flags([]))


def test_everything_built_in_can_be_streamed(mine: str) -> None:
    for options in (
        {},
        {**STREAM, "use_kl_loss": True, "num_ref_workers": 1, "num_advantage_workers": 1},
        {**STREAM, "loss_agg_mode": "seq-mean-token-mean"},
        {"num_actor_fwd_workers": 1, "schedule": "pipelined"},
        {"num_actor_fwd_workers": 1, "rollout_function_path": f"{mine}quiet", "num_steps_per_rollout": 2},
    ):
        check(**options)


def test_what_declares_scope_group_can_be_streamed(mine: str) -> None:
    own = {"custom_loss_function_path": f"{mine}declared_loss", "custom_advantage_function_path": f"{mine}over_a_group"}
    check(**STREAM, **own)
    check(**STREAM, **own, num_advantage_workers=1)
    check(num_advantage_workers=1, custom_advantage_function_path=f"{mine}over_a_group")


def test_the_supervised_loss_is_streamed_whatever_the_estimator_is(mine: str) -> None:
    check(**STREAM, loss_type="sft_loss", custom_advantage_function_path=f"{mine}over_the_rollout")


@pytest.mark.parametrize(
    ("options", "where", "words"),
    [
        (
            {**STREAM, "custom_loss_function_path": "undeclared_loss"},
            "--stream-gradients and --custom-loss-function-path",
            ["undeclared_loss' has scope 'rollout'", "--loss-agg-mode names", "scoped('group')"],
        ),
        (
            {**STREAM, "custom_advantage_function_path": "over_the_rollout"},
            "--stream-gradients and --custom-advantage-function-path",
            ["over_the_rollout' has scope 'rollout'", "the rows of one prompt declare it"],
        ),
        (
            {"num_advantage_workers": 1, "custom_advantage_function_path": "over_the_rollout"},
            "--num-advantage-workers and --custom-advantage-function-path",
            ["over_the_rollout' has scope 'rollout'"],
        ),
        (
            {**STREAM, "train_backend": "Waiting"},
            "--stream-gradients and --train-backend",
            ["it has no accumulate and no finish_accumulation", "buffer_rl.contracts.Trainer"],
        ),
        (
            {**STREAM, "num_actor_fwd_workers": 1},
            "--num-actor-fwd-workers",
            ["no old log-probabilities are needed: with --stream-gradients, each group has one forward pass"],
        ),
        (
            {"use_rollout_logprobs": True, "num_actor_fwd_workers": 1},
            "--num-actor-fwd-workers",
            ["--use-rollout-logprobs takes the engine's"],
        ),
        (
            {"rollout_function_path": "quiet", "num_actor_fwd_workers": 1},
            "--num-actor-fwd-workers",
            ["never asks the engine, and there is one optimizer step"],
        ),
    ],
)
def test_what_the_plugins_rule_out_is_named(mine: str, options: dict[str, Any], where: str, words: list[str]) -> None:
    own = {"custom_loss_function_path", "custom_advantage_function_path", "train_backend", "rollout_function_path"}
    with pytest.raises(ConfigError) as caught:
        check(**{name: f"{mine}{value}" if name in own else value for name, value in options.items()})
    assert caught.value.where == where
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("options", "own", "models"),
    [
        ({}, (), ("actor",)),
        ({"use_kl_loss": True}, (), ("ref", "actor")),
        ({"use_kl_loss": True, "num_ref_workers": 2}, ("ref",), ("actor",)),
        ({"num_actor_fwd_workers": 1, "num_advantage_workers": 1}, ("actor_fwd", "advantages"), ()),
        ({"use_kl_loss": True, "use_rollout_logprobs": True}, (), ("ref",)),
        ({**STREAM, "use_kl_loss": True}, (), ("ref",)),
    ],
)
def test_the_trainer_computes_what_no_role_does(
    options: dict[str, Any], own: tuple[str, ...], models: tuple[str, ...]
) -> None:
    args: Any = compose(CORE_SECTIONS).model_validate(options)
    plan = role_plan(args, rollouts_use_engine=True)
    assert (plan.own, plan.trainer_models) == (own, models)
    assert needs_old_log_probs(args, True) == ("actor" in models or "actor_fwd" in own)
