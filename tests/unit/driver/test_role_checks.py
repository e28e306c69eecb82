"""Roles without work, and gradients that cannot be streamed, are refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.driver.role_checks import check_roles
from buffer_rl.errors import ConfigError, PluginError
from buffer_rl.kinds.marks import Scope, declared_scope, scope_of, scoped
from buffer_rl.options.section import compose
from buffer_rl.plan.algorithm import old_log_probs_pass, own_roles
from buffer_rl.plan.counts import with_steps
from buffer_rl.plan.schedule import role_plan
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.train.options import check_role_options

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
STREAM: dict[str, Any] = {"stream_gradients": True, "schedule": "pipelined"}

OPD: dict[str, Any] = {"use_opd": True, "opd_teacher_load": "teacher"}

PLUGINS = """
from buffer_rl.kinds.marks import loss_unit, scoped


def over_the_rollout(args, batch): ...


@scoped("group")
def over_a_group(args, batch): ...


@scoped("row")
def over_a_row(args, batch): ...


@scoped("group", needs=("ref_log_probs",))
def reads_ref(args, batch): ...


@scoped("row", needs="old_log_probs")
def reads_old(args, batch): ...


@scoped("row", needs="values")
def reads_values(args, batch): ...


@scoped("row", needs=("values", "ref_log_probs"))
def reads_values_and_ref(args, batch): ...


@scoped("group", needs=["rollout_log_probs"])
def reads_rollout(args, batch): ...


def undeclared_loss(args, inputs): ...


@loss_unit("group")
def compares_rows(args, inputs): ...


@loss_unit("token", needs="ref_log_probs")
def loss_that_reads_ref(args, inputs): ...


def quiet(args, rollout_id, buffer, evaluation=False): ...


quiet.uses_engine = False


@scoped("rollout")
def whiten(args, samples): ...


@scoped("group")
def centre(args, samples): ...


def plain(args, samples): ...


plain.scope = object()  # of another library, say
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
        {"num_actor_fwd_workers": 1, "rollout_function_path": f"{mine}quiet"},
    ):
        check(**options)


def test_a_trainer_that_holds_the_reference_must_be_able_to_load_it_again(mine: str) -> None:
    kl = {"use_kl_loss": True, "ref_update_interval": 2}
    in_step = {"train_backend": f"{EXAMPLES / 'trainer_backends' / 'in_step.py'}:InStepTrainer"}
    check(**kl)
    check(**kl, **in_step, num_ref_workers=1)
    with pytest.raises(ConfigError, match=r"--ref-update-interval and --train-backend: .*no method load_ref"):
        check(**kl, **in_step)
    with pytest.raises(ConfigError, match=r"--ref-update-interval: there is no reference model"):
        check(ref_update_interval=2)
    check(offload_train=True)
    with pytest.raises(ConfigError, match=r"--offload-train and --train-backend: .*cannot give its memory.*sleep"):
        check(offload_train=True, **in_step)
    check(advantage_estimator="ppo")
    with pytest.raises(ConfigError, match=r"--advantage-estimator and --train-backend: .*has no value model"):
        check(advantage_estimator="ppo", **in_step)


def test_what_declares_scope_group_can_be_streamed_and_any_loss(mine: str) -> None:
    own = {"custom_loss_function_path": f"{mine}compares_rows", "custom_advantage_function_path": f"{mine}over_a_group"}
    check(**STREAM, **own)
    check(**STREAM, custom_loss_function_path=f"{mine}undeclared_loss")
    check(**STREAM, **own, num_advantage_workers=1)
    check(num_advantage_workers=1, custom_advantage_function_path=f"{mine}over_a_group")


def test_an_estimator_gets_all_that_it_declares(mine: str) -> None:
    group, row, ref, old, values = (
        {"custom_advantage_function_path": f"{mine}{name}"}
        for name in ("over_a_group", "over_a_row", "reads_ref", "reads_old", "reads_values")
    )
    values["use_critic"] = True
    ref_too = {"custom_advantage_function_path": f"{mine}reads_values_and_ref"}
    pipelined, kl = {"schedule": "pipelined"}, {"use_kl_loss": True}
    few_groups = {"num_train_ranks": 4, "rollout_batch_size": 3}
    for options in (
        {**group, **few_groups},
        {"custom_advantage_function_path": f"{mine}reads_rollout"},
        {**group, **few_groups, "num_advantage_workers": 1},
        {**group, **few_groups, **STREAM},
        {**row, **few_groups},
        few_groups,
        {**STREAM, **row},
        {**ref, **kl},
        {**ref, **kl, **STREAM},
        {**ref, **kl, **pipelined, "num_advantage_workers": 1},
        {**ref, **kl, "num_advantage_workers": 1, "num_ref_workers": 1},
        {**ref, **kl, **STREAM, "num_advantage_workers": 1, "num_ref_workers": 1},
        {**ref, "custom_convert_samples_to_train_data_path": f"{mine}over_a_group"},
        {**old, **pipelined, "num_advantage_workers": 1},
        {**values, **pipelined, "num_advantage_workers": 1},
        {**values, **STREAM},
        {**values, **STREAM, **kl, "num_ref_workers": 1, **ref_too},
        {**old, "num_advantage_workers": 1, "num_actor_fwd_workers": 1},
        OPD,
        {**OPD, **STREAM},
        {**OPD, **pipelined, "num_advantage_workers": 1},
        {**OPD, **STREAM, "num_advantage_workers": 1, "num_teacher_workers": 1},
        {**OPD, "num_advantage_workers": 1, "num_teacher_workers": 1, "num_actor_fwd_workers": 1},
        {**OPD, "rollout_function_path": f"{mine}quiet"},
        {"rollout_function_path": f"{mine}quiet", "advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.1},
        {"use_opd": True, **STREAM, "num_advantage_workers": 1},  # the rollout gives the teacher's
    ):
        check(**options)


def test_what_declares_nothing_is_taken_for_any_number_of_ranks_and_steps(mine: str) -> None:
    own = {"custom_advantage_function_path": f"{mine}over_the_rollout"}
    check(**own)
    check(**own, num_train_ranks=2, num_steps_per_rollout=3)
    check(**own, loss_type="sft_loss", num_train_ranks=2)


def test_the_supervised_loss_is_streamed_whatever_the_estimator_is(mine: str) -> None:
    check(**STREAM, loss_type="sft_loss", custom_advantage_function_path=f"{mine}over_the_rollout")


@pytest.mark.parametrize(
    ("options", "where", "words"),
    [
        (
            {**STREAM, "normalize_advantages": True},
            "--stream-gradients and --normalize-advantages",
            ["normalised over a whole rollout"],
        ),
        (
            {"num_advantage_workers": 1, "normalize_advantages": True},
            "--num-advantage-workers and --normalize-advantages",
            ["take one of them out"],
        ),
        (
            {"custom_loss_function_path": "loss_that_reads_ref"},
            "--custom-loss-function-path",
            ["needs 'ref_log_probs', and without --use-kl-loss there is no reference", "--kl-loss-coef 0"],
        ),
        (
            {**STREAM, "custom_advantage_function_path": "over_the_rollout"},
            "--stream-gradients and --custom-advantage-function-path",
            ["over_the_rollout' has scope 'rollout'", "the rows of one prompt, declare it"],
        ),
        (
            {"num_advantage_workers": 1, "custom_advantage_function_path": "over_the_rollout"},
            "--num-advantage-workers and --custom-advantage-function-path",
            ["over_the_rollout' has scope 'rollout'"],
        ),
        (
            {"custom_advantage_function_path": "reads_ref"},
            "--custom-advantage-function-path",
            ["needs 'ref_log_probs', which nothing computes: without --use-kl-loss", "--kl-loss-coef 0"],
        ),
        (
            {**STREAM, "custom_advantage_function_path": "reads_old"},
            "--custom-advantage-function-path",
            ["'old_log_probs', which nothing computes: with --stream-gradients", "take --stream-gradients out"],
        ),
        (
            {"use_rollout_logprobs": True, "custom_advantage_function_path": "reads_old"},
            "--custom-advantage-function-path",
            ["which nothing computes: --use-rollout-logprobs takes the engine's"],
        ),
        (
            {
                **STREAM,
                "use_kl_loss": True,
                "num_advantage_workers": 1,
                "custom_advantage_function_path": "reads_ref",
            },
            "--num-advantage-workers and --custom-advantage-function-path",
            ["which the trainer computes, which waits for the advantages", "add --num-ref-workers 1, or"],
        ),
        (
            {"num_advantage_workers": 1, "custom_advantage_function_path": "reads_old"},
            "--num-advantage-workers and --custom-advantage-function-path",
            ["the trainer computes after the advantages under --schedule lockstep", "add --num-actor-fwd-workers 1 or"],
        ),
        (
            {"custom_advantage_function_path": "reads_values"},
            "--custom-advantage-function-path",
            ["needs 'values', which nothing computes: there is no critic", "add --use-critic"],
        ),
        (
            {"use_critic": True, "custom_advantage_function_path": "reads_values", "num_advantage_workers": 1},
            "--num-advantage-workers and --custom-advantage-function-path",
            [
                "the trainer computes after the advantages under --schedule lockstep",
                "add --schedule pipelined, or take",
            ],
        ),
        (
            {
                **STREAM,
                "use_critic": True,
                "use_kl_loss": True,
                "custom_advantage_function_path": "reads_values_and_ref",
            },
            "--stream-gradients and --custom-advantage-function-path",
            ["for the advantages of the critic, which has not the model 'ref'", "add --num-ref-workers 1, or"],
        ),
        (
            {**OPD, **STREAM, "num_advantage_workers": 1},
            "--num-advantage-workers and --use-opd",
            ["'teacher_log_probs', which the trainer computes, which waits", "add --num-teacher-workers 1, or"],
        ),
        (
            {**OPD, "num_advantage_workers": 1, "num_actor_fwd_workers": 1},
            "--num-advantage-workers and --use-opd",
            ["'teacher_log_probs', which the trainer computes after the advantages under --schedule lockstep"],
        ),
        (
            {**STREAM, "num_actor_fwd_workers": 1},
            "--num-actor-fwd-workers",
            ["no old log-probabilities are needed: with --stream-gradients, each group has one forward pass"],
        ),
        (
            {"loss_type": "sft_loss", "num_actor_fwd_workers": 1},
            "--num-actor-fwd-workers",
            ["no old log-probabilities are needed: the supervised loss has no ratio"],
        ),
        (
            {"use_rollout_logprobs": True, "num_actor_fwd_workers": 1},
            "--num-actor-fwd-workers",
            ["--use-rollout-logprobs takes the engine's"],
        ),
    ],
)
def test_what_the_plugins_rule_out_is_named(mine: str, options: dict[str, Any], where: str, words: list[str]) -> None:
    own = {"custom_loss_function_path", "custom_advantage_function_path", "rollout_function_path"}
    with pytest.raises(ConfigError) as caught:
        check(**{name: f"{mine}{value}" if name in own else value for name, value in options.items()})
    assert caught.value.where == where
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("flag", ["--custom-reward-post-process-path", "--custom-convert-samples-to-train-data-path"])
def test_a_function_that_gets_one_group_and_declares_to_need_the_rollout_is_refused(mine: str, flag: str) -> None:
    name = flag.removeprefix("--").replace("-", "_")
    for accepted in ("centre", "plain"):
        check(**{name: f"{mine}{accepted}"})
        check(**STREAM, **{name: f"{mine}{accepted}"})
    for options in ({}, STREAM):
        with pytest.raises(ConfigError, match="whiten' declares the scope 'rollout', and this function gets one") as e:
            check(**options, **{name: f"{mine}whiten"})
        assert e.value.where == flag


@pytest.mark.parametrize("other", ["session", 3, object(), None, ["group"]])
def test_an_attribute_scope_that_means_something_else_declares_nothing(other: object) -> None:
    def function() -> None: ...

    function.scope = other  # type: ignore[attr-defined]
    assert declared_scope(function) is None
    assert scope_of(function) is Scope.ROLLOUT
    function.scope = "group"  # type: ignore[attr-defined]
    assert declared_scope(function) is scope_of(function) is Scope.GROUP


@scoped("row")
def by_row(args: Any, batch: Any) -> None: ...


@scoped("rollout", needs=("old_log_probs",))
def reads_old(args: Any, batch: Any) -> None: ...


def undeclared(args: Any, batch: Any) -> None: ...


TWO_STEPS: dict[str, Any] = {"num_steps_per_rollout": 2}


@pytest.mark.parametrize(
    ("options", "own", "models"),
    [
        ({}, (), ()),
        ({"use_kl_loss": True}, (), ("ref",)),
        ({"use_kl_loss": True, **TWO_STEPS}, (), ("ref", "actor")),
        ({"use_kl_loss": True, "num_ref_workers": 2, **TWO_STEPS}, ("ref",), ("actor",)),
        ({"kl_coef": 0.1, "advantage_estimator": "gae"}, (), ("ref", "actor")),
        ({"num_actor_fwd_workers": 1, "num_advantage_workers": 1}, ("actor_fwd", "advantages"), ()),
        ({"num_actor_fwd_workers": 1, **TWO_STEPS}, ("actor_fwd",), ()),
        ({"use_kl_loss": True, "use_rollout_logprobs": True, **TWO_STEPS}, (), ("ref",)),
        ({**STREAM, "use_kl_loss": True}, (), ("ref",)),
        ({"rm_model": "classifier", "num_reward_workers": 2}, (), ()),  # which rollout workers call
    ],
)
def test_the_trainer_computes_what_no_role_does(
    options: dict[str, Any], own: tuple[str, ...], models: tuple[str, ...]
) -> None:
    args: Any = compose(CORE_SECTIONS).model_validate(options)
    plan = role_plan(args, by_row)
    assert (plan.dedicated_roles, plan.passes) == (own, tuple(("train", model) for model in models))


@pytest.mark.parametrize(
    ("options", "estimator", "reason"),
    [
        ({}, by_row, ""),
        ({"schedule": "pipelined", "use_kl_loss": True, "use_tis": True, "tis_mode": "sequence"}, by_row, ""),
        ({"num_actor_fwd_workers": 1}, by_row, "--num-actor-fwd-workers"),
        ({"num_actor_fwd_workers": 1, "loss_type": "sft_loss"}, by_row, "--num-actor-fwd-workers"),
        ({"num_steps_per_rollout": 2}, by_row, "several optimizer steps on a rollout"),
        ({"num_passes_per_rollout": 2}, by_row, "several optimizer steps on a rollout"),
        ({"global_batch_size": 64}, by_row, "several optimizer steps on a rollout"),
        ({"num_passes_per_rollout": 2, "loss_type": "sft_loss"}, by_row, ""),
        ({"num_passes_per_rollout": 2, "use_rollout_logprobs": True}, by_row, ""),
        ({}, reads_old, "an advantage estimator that needs old_log_probs"),
        (OPD, by_row, "an advantage estimator that needs old_log_probs"),
        ({**OPD, "use_rollout_logprobs": True}, by_row, ""),
        ({**OPD, **STREAM}, by_row, ""),
        ({"advantage_estimator": "gae", "kl_coef": 0.1}, by_row, "an advantage estimator that needs old_log_probs"),
        ({"advantage_estimator": "grpo", "kl_coef": 0.1}, by_row, ""),  # which has no token rewards
        ({}, undeclared, "an advantage estimator that does not declare what it reads"),
        ({"loss_type": "sft_loss"}, undeclared, ""),
    ],
)
def test_old_log_probs_have_a_pass_of_their_own_where_something_asks_for_them_before_the_first_step(
    options: dict[str, Any], estimator: object, reason: str
) -> None:
    args: Any = with_steps(compose(CORE_SECTIONS).model_validate(options))
    assert old_log_probs_pass(args, estimator) == reason


def test_a_trainer_backend_that_is_not_the_default_one_reads_old_log_probs_unless_it_says_that_it_does_not() -> None:
    class Reads:
        pass

    class Leaves:
        reads_old_log_probs = False

    args: Any = compose(CORE_SECTIONS).model_validate({"train_backend": "mine"})
    assert old_log_probs_pass(args, by_row, Reads) == "a trainer backend that may read the column"
    assert old_log_probs_pass(args, by_row, Leaves) == ""
    assert old_log_probs_pass(compose(CORE_SECTIONS).model_validate(STREAM), by_row, Reads) == ""
    assert role_plan(args, by_row, backend=Reads).passes == (("train", "actor"),)
    assert role_plan(args, by_row, backend=Leaves).passes == ()


@pytest.mark.parametrize(
    ("options", "scope", "estimates"),
    [
        ({}, Scope.ROW, False),
        ({}, Scope.GROUP, True),
        ({"num_train_ranks": 2, "num_steps_per_rollout": 2}, Scope.ROLLOUT, True),
        ({"num_advantage_workers": 1}, Scope.GROUP, False),
        (STREAM, Scope.GROUP, False),
        ({"loss_type": "sft_loss"}, Scope.ROLLOUT, False),
    ],
)
def test_an_estimator_that_compares_rows_is_called_once_on_all_of_them(
    options: dict[str, Any], scope: Scope, estimates: bool
) -> None:
    args: Any = compose(CORE_SECTIONS).model_validate(options)
    assert role_plan(args, scoped(scope)(lambda args, batch: None)).estimates is estimates


def test_a_critic_is_trained_beside_the_policy_and_computes_its_values_itself() -> None:
    args = compose(CORE_SECTIONS)(advantage_estimator="ppo", num_critic_only_steps=1, num_freeze_actor_steps=2)
    plan = role_plan(args, by_row)
    assert (plan.trained, plan.passes) == (("train", "critic"), (("critic", "critic"),))
    # Advantages need the values of all rows, which the policy's ranks do not have.
    assert plan.estimates
    assert [plan.steps_on(rollout_id) for rollout_id in range(3)] == [["critic"], ["critic"], ["train", "critic"]]
    assert [plan.num_updates(role, num_rollouts) for role in plan.trained for num_rollouts in (1, 5)] == [0, 3, 1, 5]


def test_with_streamed_gradients_the_policy_waits_for_the_critic_and_the_critic_for_no_one_but_the_reference() -> None:
    args = compose(CORE_SECTIONS)(advantage_estimator="ppo", use_kl_loss=True, num_ref_workers=1, **STREAM)
    plan = role_plan(args, by_row)
    assert plan.awaited_by("critic") == ["ref_log_probs"]
    assert plan.awaited_by("train") == ["advantages", "ref_log_probs", "returns", "values"]
    assert not plan.estimates


OWN_ROLES = """
from buffer_rl.plan.roles import Restart, Role
from buffer_rl.kinds.marks import scoped


def role(name, fields, needs=(), restart="in_place"):
    class Own:
        role = Role(name=name, fields=fields, needs=needs, restart=Restart(restart))
        def __init__(self, args): ...
        def compute(self, batch): ...
    return Own


First = role("first", ("a",))
Second = role("second", ("b",), ("a", "ref_log_probs"))
Circle = role("circle", ("c",), ("d",))
Round = role("round", ("d",), ("c",))
Ref = role("ref", ("e",))
Again = role("again", ("a",))
Buffer = role("buffer", ("e",))
Reference = role("reference", ("e",))
Critic = role("values", ("e",))
Judge = role("judge", ("g",), restart="global")
Late = role("late", ("read_by_advantages",), ("advantages",))
Early = role("early", ("read_by_advantages",))
After = role("after", ("f",), ("advantages",))


class NoProcess(Early):
    role = Role(name="early", fields=("read_by_advantages",), processes=0)


@scoped("group", needs=("read_by_advantages",))
def reads_own(args, batch): ...


Advantages = role("mine", ("advantages",))
Empty = role("empty", ())
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN_ROLES)
    return f"{tmp_path / 'own.py'}:"


def test_own_roles_that_wait_for_fields_before_theirs_are_accepted_and_planned_after_the_built_in_ones(
    own: str,
) -> None:
    paths = [own + name for name in ("Second", "First", "Judge")]
    options: dict[str, Any] = {"role_path": paths, "use_kl_loss": True, "num_ref_workers": 1}
    check(**options)
    check(**options, resource={"first": [2, 0], "critic": [1, 1]}, use_critic=True)
    check(**{**options, "num_ref_workers": 0, "schedule": "pipelined"})  # the trainer computes them meanwhile
    estimator = {"num_advantage_workers": 1, "custom_advantage_function_path": own + "reads_own"}
    check(role_path=[own + "After", own + "Early"], **estimator)
    args = compose(CORE_SECTIONS).model_validate(options)
    rows = [row for _, row in own_roles(args, PluginRegistry.from_flags([])).values()]
    plan = role_plan(args, by_row, rows)
    assert plan.dedicated_roles == ("ref", "second", "first", "judge")
    assert plan.external_fields == ("ref_log_probs", "b", "a", "g")
    assert plan.restarted_globally == ("judge",)


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["First", "Second"], {"use_kl_loss": True}, r"needs \['ref_log_probs'\]"),
        (["Second"], {"use_kl_loss": True, "num_ref_workers": 1}, r"needs \['a'\]"),
        (["Circle", "Round"], {}, r"Circle' needs \['d'\]"),
        (["Late"], {"num_advantage_workers": 1, "custom_advantage_function_path": "reads_own"}, r"Late' needs \['adv"),
        (["Ref"], {}, "is named 'ref'"),
        (["Buffer"], {}, "is named 'buffer'"),
        (["Reference"], {}, "is named 'reference'"),
        (["Critic"], {}, "is named 'values'"),
        (["NoProcess"], {}, "has 0 processes"),
        (["First", "First"], {}, "is named 'first'"),
        (["First", "Again"], {}, r"adds \['a'\]"),
        (["Advantages"], {}, r"adds \['advantages'\]"),
        (["First"], {"debug_rollout_only": True}, "no trainer reads"),
        (["First"], {"resource": {"frist": [1, 1]}}, r"--resource: there is no role 'frist'\n.* reward, .* first\n"),
        ([], {"resource": {"critic": [1, 1]}}, "'critic' is counted, and there is none\n.* --use-critic"),
        (["First"], {"fuse_roles": ["first+ref"]}, "'ref' has no processes of its own"),
        (["First"], {"fuse_roles": ["first+first"]}, "'first' stands twice"),
        (["First"], {"fuse_roles": ["first+ref"], "use_kl_loss": True, "num_ref_workers": 2}, "first 1, ref 2"),
    ],
)
def test_own_roles_that_could_not_work_are_refused(
    own: str, names: list[str], options: dict[str, Any], message: str
) -> None:
    if estimator := options.get("custom_advantage_function_path"):
        options = {**options, "custom_advantage_function_path": own + estimator}
    with pytest.raises(ConfigError, match=message):
        check(role_path=[own + name for name in names], **options)


def test_a_role_without_a_row_or_without_fields_is_refused(own: str, mine: str) -> None:
    for reference in (own + "Empty", mine + "whiten"):
        with pytest.raises(PluginError):
            check(role_path=[reference])
