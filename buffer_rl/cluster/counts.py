"""How many processes each role has, from the options that count devices: ``--actor-num-nodes``, ``--rollout-num-gpus``,
``--resource`` and their like.

Without torch and Ray, so that options can be checked before either is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from buffer_rl.config import Section, flag_of
from buffer_rl.errors import ConfigError
from buffer_rl.roles import ACTOR, CRITIC, DEDICATED

Run = TypeVar("Run", bound=Section)

ENGINE = "engine"
"""The role of the engines, in a placement and in ``--resource``."""

ROLE_ALIASES = {"actor": ACTOR, "rollout": ENGINE, "reference": "ref", "genrm": "reward"}
"""Names of roles in ``--resource`` that Relax gives them, and the run's own. ``rollout`` are the engines there."""


def replicas_of(args: Any) -> dict[str, tuple[int, int]]:
    """``--resource`` by the run's own names of roles: replicas, and devices of each.

    Raises ConfigError for an entry that is not two numbers or is there under both of its names."""
    counts: dict[str, tuple[int, int]] = {}
    for name, numbers in (args.resource or {}).items():
        role = ROLE_ALIASES.get(name, name)
        if len(numbers) != 2 or numbers[0] < 1 or numbers[1] < 0:
            raise ConfigError(
                f"{name!r} has {numbers}",
                where="--resource",
                expected="[replicas, GPUs of each replica], for example [1, 8]; without GPUs [1, 0]",
            )
        if role in counts:
            raise ConfigError(f"the role {role!r} is there under two names, one of them {name!r}", where="--resource")
        counts[role] = (numbers[0], numbers[1])
    return counts


def own_roles(args: Any) -> dict[str, tuple[int, int]]:
    """The roles of ``--resource`` whose processes no option of this package counts: replicas, and devices of each."""
    counted = {ACTOR, CRITIC, ENGINE, *DEDICATED}
    return {role: count for role, count in replicas_of(args).items() if role not in counted}


def with_counts(args: Run) -> Run:
    """The options of a run, with the numbers of processes that follow from its numbers of devices; ``args`` itself
    where none does.

    Raises ConfigError where two options say different numbers, or one does not divide another."""
    wanted = derived_counts(args)
    for name, (number, reason) in wanted.items():
        given = getattr(args, name)
        if name in args.model_fields_set and given != number:
            raise ConfigError(
                f"{flag_of(name)} is {given}, and {reason} is {number}",
                where=f"{flag_of(name)} and {reason.split()[0]}",
                hint=f"leave one of them out: {flag_of(name)} follows from {reason.split()[0]}",
            )
    changes = {name: number for name, (number, _) in wanted.items() if getattr(args, name) != number}
    return args.model_copy(update=changes) if changes else args


def derived_counts(args: Any) -> dict[str, tuple[int, str]]:
    """By option, the number of processes that other options mean, and the arithmetic behind it, their flag first."""
    replicas = replicas_of(args)
    wanted: dict[str, tuple[int, str]] = {}
    _derive(wanted, "num_train_ranks", _ranks(args), _replicas(replicas, ACTOR))
    _derive(wanted, "rollout_num_engines", _engines(args, wanted), _replica_engines(args, replicas))
    for role, row in DEDICATED.items():
        _derive(wanted, row.workers, None, _replicas(replicas, role))
    ranks = wanted.get("num_train_ranks", (args.num_train_ranks,))[0]
    if CRITIC in replicas and (critics := _replicas(replicas, CRITIC)) is not None and critics[0] != ranks:
        raise ConfigError(
            f"the critic has {critics[0]} ranks, and the actor {ranks}",
            where="--resource",
            expected=f'"critic": [1, {ranks}]; a critic has as many ranks as the policy',
        )
    return wanted


def _derive(
    wanted: dict[str, tuple[int, str]], name: str, by_flags: tuple[int, str] | None, by_role: tuple[int, str] | None
) -> None:
    if by_flags is not None and by_role is not None and by_flags[0] != by_role[0]:
        raise ConfigError(
            f"{by_flags[1]} is {by_flags[0]}, and {by_role[1]} is {by_role[0]}",
            where=f"{by_flags[1].split()[0]} and --resource",
            hint="leave one of them out",
        )
    if (found := by_flags or by_role) is not None:
        wanted[name] = found


def _ranks(args: Any) -> tuple[int, str] | None:
    nodes, per_node, ranks = args.actor_num_nodes, args.actor_num_gpus_per_node, args.num_train_ranks
    if nodes is None and per_node is None:
        return None
    if per_node is None and "num_train_ranks" in args.model_fields_set:
        if ranks % nodes:
            raise ConfigError(
                f"{ranks} trainer ranks are not the same number on each of {nodes} nodes",
                where="--num-train-ranks and --actor-num-nodes",
                expected=f"a multiple of {nodes}",
            )
        return None
    if per_node is None:
        raise ConfigError(
            "the number of ranks on each node is not given",
            where="--actor-num-nodes",
            hint="add --actor-num-gpus-per-node N",
        )
    return (nodes or 1) * per_node, f"--actor-num-gpus-per-node {per_node} x {nodes or 1} nodes"


def _engines(args: Any, wanted: Mapping[str, tuple[int, str]]) -> tuple[int, str] | None:
    gpus, per_engine = args.rollout_num_gpus, args.rollout_num_gpus_per_engine
    if gpus is None:
        ranks = wanted.get("num_train_ranks", (args.num_train_ranks,))[0]
        if not args.colocate or "rollout_num_engines" in args.model_fields_set or ranks % per_engine or args.resource:
            return None
        return ranks // per_engine, f"--colocate with {ranks} trainer ranks and {per_engine} GPUs an engine"
    if gpus % per_engine:
        raise ConfigError(
            f"{gpus} GPUs are not whole engines of {per_engine} GPUs",
            where="--rollout-num-gpus and --rollout-num-gpus-per-engine",
            expected=f"a multiple of {per_engine}, such as {max(1, gpus // per_engine) * per_engine}",
        )
    return gpus // per_engine, f"--rollout-num-gpus {gpus} with {per_engine} GPUs an engine"


def _replicas(replicas: Mapping[str, tuple[int, int]], role: str) -> tuple[int, str] | None:
    """Processes of a role whose processes have one device each, or none."""
    if role not in replicas:
        return None
    count, devices = replicas[role]
    return count * max(devices, 1), f"--resource [{count}, {devices}] of {role!r}"


def _replica_engines(args: Any, replicas: Mapping[str, tuple[int, int]]) -> tuple[int, str] | None:
    if ENGINE not in replicas:
        return None
    (count, devices), per_engine = replicas[ENGINE], args.rollout_num_gpus_per_engine
    if devices % per_engine:
        raise ConfigError(
            f"{devices} GPUs are not whole engines of {per_engine} GPUs",
            where="--resource and --rollout-num-gpus-per-engine",
            expected=f"a multiple of {per_engine}",
        )
    return count * max(devices // per_engine, 1), f"--resource [{count}, {devices}] of 'rollout'"
