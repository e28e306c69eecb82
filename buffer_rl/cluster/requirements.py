"""The devices that the roles of a run need, which of them share, and what is said where a cluster has too few.

Pure: from the options and the nodes, without Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from buffer_rl.args import Args
from buffer_rl.cluster.devices import DeviceKind, DeviceRequest, MemberDevices, Node, NoRoomError, all_devices, allocate
from buffer_rl.errors import ConfigError
from buffer_rl.options.checks import refuse
from buffer_rl.options.section import flag_of
from buffer_rl.plan.algorithm import uses_critic
from buffer_rl.plan.counts import ENGINE, replicas_of, roles_in_resource
from buffer_rl.plan.roles import ACTOR, CRITIC, DEDICATED, PLACED, worker_counts
from buffer_rl.plan.schedule import train_only

WITH_ACTOR = ("ref", "actor_fwd")
"""Roles that ``--colocate-actor-ref`` puts on the devices of the trainer."""

WITH_CRITIC = ("reward",)
"""Roles that ``--colocate-critic-reward`` puts on the devices of the critic."""


def plan_devices(args: Args, nodes: Sequence[Node], *, engines: bool) -> tuple[list[MemberDevices], list[str]]:
    """Which devices of ``nodes`` each member of each role gets, and lines for the user about what was chosen.

    GPUs first: ranks have one each where ``--train-device`` allows it and there are enough, and so do the workers of
    roles with a model; engines have theirs where the options count them or some are left. What computes on the CPU is
    placed where there are several nodes.

    engines: whether the run generates, with its own engines unless ``--engine-urls`` names others. Raises ConfigError,
    with the arithmetic, where devices that the options ask for are not there, and where a named node is not.
    """
    named, there = args.rollout_worker_nodes, [node.address for node in nodes]
    missing = [address for address in named if address not in there]
    if missing and len(missing) == len(named):
        what = f"no node of the cluster has the address {missing[0]!r}"
        raise ConfigError(what, where="--rollout-worker-nodes", expected=f"some of {', '.join(there)}")
    if (most := args.num_gpus_per_node) is not None:
        nodes = [replace(node, gpus=min(node.gpus, most)) for node in nodes]
    gpus = sum(node.gpus for node in nodes)
    trainers = _trainer_requests(args)
    notices = [f"--rollout-worker-nodes: there is no node {address} (any more)" for address in missing]
    kind = DeviceKind.GPU if _trains_on_gpu(args, gpus, trainers, notices) else DeviceKind.CPU
    requests: dict[DeviceKind, list[DeviceRequest]] = {DeviceKind.GPU: [], DeviceKind.CPU: []}
    requests[kind] += [*trainers, *_role_requests(args)]
    if engines and not args.engine_urls:
        of_engines = DeviceKind.CPU if args.engine_device == "cpu" or not gpus else DeviceKind.GPU
        requests[of_engines].append(_engine_request(args, of_engines))
    members = _place_on_gpus(args, nodes, requests[DeviceKind.GPU])
    if len(nodes) > 1:
        members += _place_on_cpus(args, nodes, requests[DeviceKind.CPU], notices)
    return members, notices


def check_devices(args: Args) -> None:
    """Raises ConfigError if CUDA, or a number of GPUs, is asked for on this machine and is not there.

    Trainer ranks and engines of a cluster that is joined run on its nodes.
    """
    asked = []
    if args.engine_device == "cuda" and args.router_url is None:
        asked.append("--engine-device cuda")
    if args.train_device == "cuda":
        asked.append("--train-device cuda")
    if args.ray_address is not None or not (asked or counts_devices(args)):
        return
    import torch  # takes seconds, so only where a GPU is requested

    absent, what = asked and not torch.cuda.is_available(), "there is no CUDA device, or torch is a build without CUDA"
    refuse(absent, f"{' and '.join(asked)}: {what}", "nvidia-smi shows the devices; 'auto' takes one if there is one")
    here = Node(node_id="", address="127.0.0.1", gpus=torch.cuda.device_count())
    plan_devices(args, [here], engines=not train_only(args))


def counts_devices(args: Args) -> bool:
    """Whether options ask for devices by number: too few are an error then."""
    asked = (args.actor_num_nodes, args.actor_num_gpus_per_node, args.rollout_num_gpus, args.resource)
    return any(value is not None for value in asked)


def _trainer_requests(args: Args) -> list[DeviceRequest]:
    if args.debug_rollout_only:
        return []
    ranks, together = args.num_train_ranks, 1
    if args.actor_num_nodes is not None or args.actor_num_gpus_per_node is not None:
        together = ranks // (args.actor_num_nodes or 1)
    roles = [ACTOR, CRITIC] if uses_critic(args) and args.num_rollout != 0 else [ACTOR]
    return [DeviceRequest(role=role, members=ranks, together=together) for role in roles]


def _role_requests(args: Args) -> list[DeviceRequest]:
    """Of the workers of roles with a model, and of the roles of ``--resource`` that have devices."""
    trains = not args.debug_rollout_only and args.num_rollout != 0
    counts = {
        role: count
        for role, count in worker_counts(args).items()
        if count and PLACED[role].model and (trains or PLACED[role].called_by)
    }
    replicas = replicas_of(args)
    requests = [DeviceRequest(role=role, members=n) for role, n in counts.items() if replicas.get(role, (1, 1))[1]]
    requests += [
        DeviceRequest(role=role, members=members, each=each)
        for role, (members, each) in roles_in_resource(args).items()
        if each and trains
    ]
    for fused in (text.split("+") for text in args.fuse_roles):  # of one process: the largest request is that of all
        together = [request for request in requests if request.role in fused]
        largest = max(together, key=lambda request: request.each, default=None)
        requests = [request for request in requests if request.role not in fused or request is largest]
    return requests


def _engine_request(args: Args, kind: DeviceKind) -> DeviceRequest:
    each = args.rollout_num_gpus_per_engine if kind is DeviceKind.GPU else 1
    what = f"--rollout-num-gpus-per-engine: the embedded engine computes on one GPU, and {each} are asked for"
    refuse(each > 1 and args.rollout_engine == "embedded", what, expected="1, or another --rollout-engine")
    return DeviceRequest(role=ENGINE, members=args.rollout_num_engines, each=each)


def _trains_on_gpu(args: Args, gpus: int, trainers: Sequence[DeviceRequest], notices: list[str]) -> bool:
    if args.train_device != "auto" or not trainers:
        return bool(args.train_device == "cuda" or (gpus and args.train_device != "cpu"))
    members = [request.members for request in trainers]
    wanted = max(members) if args.colocate else sum(members)
    if gpus and (gpus >= wanted or _share_the_only_one(trainers, gpus) or counts_devices(args)):
        return True
    if gpus or counts_devices(args):
        there = f"there {'is' if gpus == 1 else 'are'} {counted(gpus, 'GPU')}" if gpus else "there is no GPU"
        text = _joined([request_text(args, request, DeviceKind.GPU) for request in trainers])
        notices.append(f"{there} for {text}: they compute on the CPU (--train-device auto)")
    return False


def _share_the_only_one(trainers: Sequence[DeviceRequest], gpus: int) -> bool:
    """Whether a policy and a critic of one rank each share the only GPU. With more ranks, two of a role could meet on
    it, which the collectives between them do not allow."""
    return gpus == 1 and all(request.members == 1 for request in trainers)


def _place_on_gpus(args: Args, nodes: Sequence[Node], requests: Sequence[DeviceRequest]) -> list[MemberDevices]:
    devices = all_devices(nodes, DeviceKind.GPU)
    groups = _groups(args, requests, len(devices))
    engines_counted = args.rollout_num_gpus is not None or ENGINE in replicas_of(args) or args.colocate
    if not engines_counted:
        try:
            return allocate(groups, devices)
        except NoRoomError:  # engines share what is there, as far as Ray knows
            groups = [group for group in groups if group[0].role != ENGINE]
    try:
        return allocate(groups, devices)
    except NoRoomError as error:
        raise too_few(args, nodes, groups, error, DeviceKind.GPU) from error


def _place_on_cpus(
    args: Args, nodes: Sequence[Node], requests: Sequence[DeviceRequest], notices: list[str]
) -> list[MemberDevices]:
    """On the CPUs of several nodes: ranks together, others where the fewest are."""
    spread = [
        each if each.role in (ACTOR, CRITIC) else replace(each, each=1, together=1, spread=True) for each in requests
    ]
    groups = _groups(args, spread, 0)
    try:
        return allocate(groups, all_devices(nodes, DeviceKind.CPU))
    except NoRoomError as error:
        lack = too_few(args, nodes, groups, error, DeviceKind.CPU)
        if counts_devices(args):
            raise lack from error
        notices.append(f"{lack.what}: Ray chooses the nodes of the processes")
        return []


def _groups(args: Args, requests: Sequence[DeviceRequest], gpus: int) -> list[list[DeviceRequest]]:
    """The requests, those that share devices in one list."""
    if args.colocate:
        return [list(requests)] if requests else []
    leader: dict[str, str] = {}
    if args.colocate_actor_ref:
        leader |= dict.fromkeys(WITH_ACTOR, ACTOR)
    if args.colocate_critic_reward:
        leader |= dict.fromkeys(WITH_CRITIC, CRITIC)
    trainers = [request for request in requests if request.role in (ACTOR, CRITIC)]
    if len(trainers) == 2 and _share_the_only_one(trainers, gpus):
        leader[CRITIC] = ACTOR
    groups: dict[str, list[DeviceRequest]] = {}
    for request in requests:
        groups.setdefault(leader.get(request.role, request.role), []).append(request)
    return list(groups.values())


# ------------------------------------------------------------------ what is said


def too_few(
    args: Args, nodes: Sequence[Node], groups: Sequence[Sequence[DeviceRequest]], error: NoRoomError, kind: DeviceKind
) -> ConfigError:
    """The error for requests without room, with the arithmetic."""
    wanted = sum(max(request.devices for request in group) for group in groups)
    texts = [[request_text(args, request, kind) for request in group] for group in groups]
    needs = _joined([" together with ".join(of_group) for of_group in texts])
    verb = "needs" if len(groups) == 1 and sum(request.members for request in groups[0]) == 1 else "need"
    there, found = _found(args, nodes, kind)
    what = f"{needs} {verb} {counted(wanted, kind)}; {there}"
    if wanted <= found:
        piece, one = request_text(args, error.request, kind), "needs" if error.request.members == 1 else "need"
        what += f", of which {piece} {one} {error.on_one_node} on one node, and at most {error.free} are left on one"
    flags = dict.fromkeys(flag for group in groups for request in group for flag in _flags(args, request.role))
    of_role = any(flag_of(row.workers) in flags for row in DEDICATED.values())
    lower = "lower them (without processes of its own, a role's work is the trainer's)" if of_role else "lower them"
    share = ", or share with --colocate"
    if kind is DeviceKind.GPU:
        share = ", share with --colocate, or compute on the CPU with --train-device cpu"
    return ConfigError(what, where=", ".join(flags), hint=lower + share)


def request_text(args: Args, request: DeviceRequest, kind: DeviceKind) -> str:
    """``8 trainer ranks (1 node x 8 GPUs)``, ``2 engines x 4 GPUs``, ``1 process of ref``."""
    members = request.members
    if request.role in (ACTOR, CRITIC):
        ranks = counted(members, "trainer rank" if request.role == ACTOR else "critic rank")
        if request.together == 1 and not args.actor_num_nodes:
            return ranks
        return f"{ranks} ({counted(members // request.together, 'node')} x {counted(request.together, kind.value)})"
    what = counted(members, "engine") if request.role == ENGINE else f"{counted(members, 'process')} of {request.role}"
    return what if request.each == 1 else f"{what} x {counted(request.each, kind.value)}"


def _found(args: Args, nodes: Sequence[Node], kind: DeviceKind) -> tuple[str, int]:
    """What the cluster has, in words, and the sum."""
    counts = [node.count(kind) for node in nodes if node.count(kind)]
    total = sum(counts)
    if not counts or args.ray_address is None:
        here = "this machine" if args.ray_address is None else "the cluster"
        there = f"{here} has {counted(total, kind.value) if total else f'no {kind}'}"
    elif len(counts) == 1:
        there = f"the cluster has 1 node with {counted(total, kind.value)}"
    elif len(set(counts)) == 1:
        there = f"the cluster has {len(counts)} nodes with {counted(counts[0], kind.value)} each = {total}"
    else:
        there = f"the cluster has {len(counts)} nodes with {' + '.join(map(str, counts))} = {total} {kind}s"
    if kind is DeviceKind.GPU and args.num_gpus_per_node is not None:
        there += f" (--num-gpus-per-node {args.num_gpus_per_node})"
    return there, total


def _flags(args: Args, role: str) -> list[str]:
    if role in replicas_of(args):
        return ["--resource"]
    if role in (ACTOR, CRITIC):
        names = [name for name in ("actor_num_nodes", "actor_num_gpus_per_node") if getattr(args, name) is not None]
        names = names or ["num_train_ranks"]
    elif role == ENGINE:
        names = ["rollout_num_gpus" if args.rollout_num_gpus is not None else "rollout_num_engines"]
    else:
        names = [PLACED[role].workers] if role in PLACED else []
    return [flag_of(name) for name in names]


def counted(number: int, noun: str) -> str:
    """``1 GPU``, ``2 GPUs``."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def _joined(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
