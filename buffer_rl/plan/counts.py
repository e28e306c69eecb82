"""How many processes each role has, and how many optimizer steps a rollout has, and of how many samples.

Numbers of processes follow from the options that count devices: ``--actor-num-nodes``, ``--rollout-num-gpus``,
``--resource`` and their like.

A rollout becomes mini-batches of whole prompt groups, and passes over them. With G groups of n samples a rollout,
``--global-batch-size`` N and ``--num-steps-per-rollout`` S: G x n = N x S. Either of N and S gives the other. Optimizer
steps are S x ``--num-passes-per-rollout``.

Without torch and Ray, so that options can be checked before either is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from buffer_rl.args import Args
from buffer_rl.options.checks import refuse
from buffer_rl.options.section import flag_of
from buffer_rl.plan.roles import ACTOR, CRITIC, PLACED

ENGINE = "engine"
"""The role of the engines, in a placement and in ``--resource``."""

ROLE_ALIASES = {"actor": ACTOR, "rollout": ENGINE, "reference": "ref", "genrm": "reward"}
"""Names of roles in ``--resource`` that Relax gives them, and the run's own. ``rollout`` are the engines there."""

FSDP = "fsdp"
"""Another name of the trainer backend ``torch``, whose default of ``--fsdp-size`` is all ranks."""


def replicas_of(args: Args) -> dict[str, tuple[int, int]]:
    """``--resource`` by the run's own names of roles: replicas, and devices of each.

    Raises ConfigError for an entry that is not two numbers or is there under both of its names."""
    counts: dict[str, tuple[int, int]] = {}
    for name, numbers in (args.resource or {}).items():
        bad, role = len(numbers) != 2 or numbers[0] < 1 or numbers[1] < 0, ROLE_ALIASES.get(name, name)
        expected = "[replicas, GPUs of each replica], for example [1, 8]; without GPUs [1, 0]"
        refuse(bad, f"--resource: {name!r} has {numbers}", expected=expected)
        refuse(role in counts, f"--resource: the role {role!r} is there under two names, one of them {name!r}")
        counts[role] = (numbers[0], numbers[1])
    return counts


def roles_in_resource(args: Args) -> dict[str, tuple[int, int]]:
    """The roles of ``--resource`` whose processes no option of this package counts: replicas, and devices of each."""
    counted = {ACTOR, CRITIC, ENGINE, *PLACED}
    return {role: count for role, count in replicas_of(args).items() if role not in counted}


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """A number of processes that follows from another option, ``option``; ``how``: the arithmetic, that flag first."""

    number: int
    option: str
    how: str


def with_counts(args: Args) -> Args:
    """The options of a run with those that follow from others: numbers of processes from numbers of devices, the
    engines of ``--rollout-external-engine-addrs``, what the backend ``fsdp`` is a name for, the engines' number format
    from ``--bf16``. ``args`` itself if nothing follows.

    Raises ConfigError where two options say different numbers, or one does not divide another."""
    external = getattr(args, "rollout_external_engine_addrs", [])
    changes: dict[str, Any] = {"rollout_engine": "external"} if external else {}
    if getattr(args, "train_backend", None) == FSDP:
        changes["train_backend"] = "torch"
        if "fsdp_size" not in args.model_fields_set:
            changes["fsdp_size"] = -1
    if getattr(args, "bf16", False) and "engine_dtype" not in args.model_fields_set:
        changes["engine_dtype"] = "bfloat16"  # two formats cost accuracy: the policy that samples is then another one
    engine = getattr(args, "rollout_engine", "external")
    what = f"the run would start engines of {engine!r}, and those at these addresses run already"
    both = external and engine != "external" and "rollout_engine" in args.model_fields_set
    refuse(both, f"--rollout-engine and --rollout-external-engine-addrs: {what}")
    for name, derived in derived_counts(args).items():
        number, flag, source = getattr(args, name), flag_of(name), flag_of(derived.option)
        what = f"{flag} and {source}: {flag} is {number}, and {derived.how} is {derived.number}"
        other = number != derived.number
        refuse(other and name in args.model_fields_set, what, f"without {flag} it follows from {source}")
        if other:
            changes[name] = derived.number
    return args.model_copy(update=changes) if changes else args


def derived_counts(args: Args) -> dict[str, Derived]:
    """The options that count processes, by name, where others say their number. Raises ConfigError as above."""
    found: dict[str, list[Derived | None]] = {"num_train_ranks": [_ranks(args), _one_device_each(args, ACTOR)]}
    found |= {row.workers: [_one_device_each(args, role)] for role, row in PLACED.items()}
    counts = {name: _agreed(candidates) for name, candidates in found.items()}
    ranks = counts["num_train_ranks"].number if counts["num_train_ranks"] else args.num_train_ranks
    counts["rollout_num_engines"] = _agreed([_external(args), _engines(args, ranks), _engines_of_resource(args)])
    critics = _one_device_each(args, CRITIC)
    what = f"--resource: the critic has {critics and critics.number} ranks, and the actor {ranks}"
    refuse(critics and critics.number != ranks, what, expected=f'"critic": [1, {ranks}]')
    return {name: derived for name, derived in counts.items() if derived is not None}


def _agreed(candidates: Sequence[Derived | None]) -> Derived | None:
    said = [derived for derived in candidates if derived is not None]
    for second in said[1:]:
        where = f"{flag_of(said[0].option)} and {flag_of(second.option)}"
        what = f"{said[0].how} is {said[0].number}, and {second.how} is {second.number}"
        refuse(second.number != said[0].number, f"{where}: {what}", "leave one of them out")
    return said[0] if said else None


def _ranks(args: Args) -> Derived | None:
    nodes, per_node, ranks = args.actor_num_nodes, args.actor_num_gpus_per_node, args.num_train_ranks
    if per_node is not None:
        product = f"--actor-num-gpus-per-node {per_node} x --actor-num-nodes {nodes or 1}"
        return Derived(number=(nodes or 1) * per_node, option="actor_num_gpus_per_node", how=product)
    what = f"{ranks} trainer ranks are not the same number on each of {nodes} nodes"
    hint, expected = "or --actor-num-gpus-per-node N, in place of --num-train-ranks", f"a multiple of {nodes}"
    refuse(nodes is not None and ranks % nodes, f"--num-train-ranks and --actor-num-nodes: {what}", hint, expected)
    return None


def _external(args: Args) -> Derived | None:
    count, option = len(args.rollout_external_engine_addrs), "rollout_external_engine_addrs"
    return Derived(number=count, option=option, how=f"{flag_of(option)} with {count} addresses") if count else None


def _engines(args: Args, ranks: int) -> Derived | None:
    gpus, per_engine = args.rollout_num_gpus, args.rollout_num_gpus_per_engine
    if gpus is not None:
        _require_whole_engines(gpus, per_engine, "--rollout-num-gpus")
        how = f"--rollout-num-gpus {gpus} / --rollout-num-gpus-per-engine {per_engine}"
        return Derived(number=gpus // per_engine, option="rollout_num_gpus", how=how)
    given = "rollout_num_engines" in args.model_fields_set or ENGINE in replicas_of(args)
    if not args.colocate or given or ranks % per_engine:
        return None
    how = f"--colocate with {ranks} ranks / --rollout-num-gpus-per-engine {per_engine}"
    return Derived(number=ranks // per_engine, option="colocate", how=how)


def _engines_of_resource(args: Args) -> Derived | None:
    replicas, per_engine = replicas_of(args), args.rollout_num_gpus_per_engine
    if ENGINE not in replicas:
        return None
    count, gpus = replicas[ENGINE]
    _require_whole_engines(gpus, per_engine, "--resource")
    how = f"--resource [{count}, {gpus}] of the engines / --rollout-num-gpus-per-engine {per_engine}"
    return Derived(number=count * max(gpus // per_engine, 1), option="resource", how=how)


def _require_whole_engines(gpus: int, per_engine: int, flag: str) -> None:
    whole = sorted({max(1, gpus // per_engine) * per_engine, (gpus // per_engine + 1) * per_engine})
    what = f"{flag} and --rollout-num-gpus-per-engine: {gpus} GPUs are not whole engines of {per_engine} GPUs"
    refuse(gpus % per_engine, what, expected=f"a multiple of {per_engine}, such as {' or '.join(map(str, whole))}")


def _one_device_each(args: Args, role: str) -> Derived | None:
    """The processes that ``--resource`` gives a role whose processes have one device each, or none."""
    replicas, asked_by = replicas_of(args), PLACED[role].asked_by if role in PLACED else ""
    if role not in replicas:
        return None
    absent, hint = asked_by and not getattr(args, asked_by), f"add {flag_of(asked_by)}"
    refuse(bool(absent), f"--resource: the role {role!r} is counted, and there is none", hint)
    count, devices = replicas[role]
    return Derived(number=count * max(devices, 1), option="resource", how=f"--resource [{count}, {devices}] of {role}")


def optimizer_steps(args: Args) -> int:
    """Optimizer steps on one rollout: one for each mini-batch and pass."""
    return int(args.num_steps_per_rollout) * int(args.num_passes_per_rollout)


def with_steps(args: Args) -> Args:
    """The options of a run, with the mini-batches that ``--global-batch-size`` means; ``args`` itself where they are
    given, or follow from nothing.

    Raises ConfigError if it fits neither the rollout nor a given ``--num-steps-per-rollout``, with what would."""
    size, groups, samples = args.global_batch_size, args.rollout_batch_size, args.n_samples_per_prompt
    if size is None:
        return args
    total = f"{groups * samples} samples a rollout (--rollout-batch-size {groups} x --n-samples-per-prompt {samples})"
    what = f"--global-batch-size: {total} cannot be cut into steps of {size} samples, each of whole prompt groups"
    fitting = [divisor * samples for divisor in range(1, groups + 1) if groups % divisor == 0]
    refuse(size % samples or groups % (size // samples), what, expected=f"one of {', '.join(map(str, fitting))}")
    steps, asked = groups * samples // size, args.num_steps_per_rollout
    if "num_steps_per_rollout" not in args.model_fields_set:
        return args.model_copy(update={"num_steps_per_rollout": steps})
    what = f"--global-batch-size and --num-steps-per-rollout: {asked} steps of {size} samples are not {total}"
    fits = f"--global-batch-size {groups // asked * samples}, or " if groups % asked == 0 else ""
    hint = "without --num-steps-per-rollout it follows from --global-batch-size"
    refuse(asked != steps, what, hint, f"{fits}--num-steps-per-rollout {steps}")
    return args
