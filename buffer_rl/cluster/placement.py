"""Where the members of each role run: devices, bundles of Ray's placement groups, and the ``.options`` of their actors.

``Placement.of`` computes it from the options and the nodes; as a context it reserves the devices. A run on one machine
without GPUs reserves nothing.
"""

from __future__ import annotations

import ipaddress
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, cast

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from buffer_rl.args import Args
from buffer_rl.cluster.devices import Device, DeviceKind, MemberDevices, Node
from buffer_rl.cluster.requirements import DevicePlan, plan_devices
from buffer_rl.errors import DeadlineError
from buffer_rl.plan.counts import ENGINE
from buffer_rl.plan.layout import grouping
from buffer_rl.plan.roles import ACTOR

NODE_LABEL = "ray.io/node-id"
NODE_POLL_S = 1.0
NO_DEVICE = {"num_cpus": 0, "num_gpus": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleGroup:
    """A placement group: the bundles of one kind of device that a run reserves on one node."""

    node: Node
    kind: DeviceKind
    bundles: list[int] = field(default_factory=list)
    """Devices of each bundle."""


class NodeGoneError(Exception):
    """Ray, which takes seconds to find a node gone, listed the node when devices were chosen; the text is its
    address."""


class Placement:
    """The devices of every member of every role.

    notices: lines for the user about what was chosen. groups: what is reserved; empty where nothing is.
    """

    def __init__(self, args: Args, nodes: Sequence[Node], chosen: DevicePlan) -> None:
        self.notices = chosen.notices
        self.groups: list[BundleGroup] = []
        self._args = args
        self._nodes = list(nodes)
        self._has_gpus = any(node.gpus for node in nodes)
        self._members = {
            (member.role, member.index): (kind, member)
            for kind, members in chosen.members.items()
            for member in members
        }
        self._bundle_of: dict[tuple[DeviceKind, Device], tuple[int, int]] = {}  # group and bundle of each device
        self._reserved: list[Any] = []
        self._gpu_ids: dict[Device, str] = {}
        self._make_groups()

    @classmethod
    def of(cls, args: Args, nodes: Sequence[Node], *, engines: bool = True) -> Placement:
        """The placement of a run.

        engines: whether the run generates. Raises ConfigError, with the arithmetic, where the options ask for more
        devices than ``nodes`` have."""
        return cls(args, nodes, plan_devices(args, nodes, engines=engines))

    def options(self, role: str, index: int) -> dict[str, Any]:
        """The ``.options`` of the actor of a member: its CPUs and GPUs, where Ray starts it, and what its environment
        has beside the run's (where there is something, Ray starts Python twice). Where Ray has found the member's node
        gone, it starts on any that has the devices."""
        chosen: dict[str, Any] = dict(NO_DEVICE)
        computes = role not in ("rollout", ENGINE)  # with torch, on ``--num-train-threads`` (see ``prepare_torch``)
        environment: dict[str, str] = dict(self._args.train_env_vars) if computes else {}
        if (found := self._members.get((role, index))) is not None:
            kind, member = found
            gone = bool(self._reserved) and is_node_gone(self._home(member).node_id)
            if self._reserved and not gone:
                chosen["scheduling_strategy"] = self._strategy(kind, member.devices[0])
            if len(member.devices) == 1 or member.share == 1.0:
                amount = "num_gpus" if kind is DeviceKind.GPU else "num_cpus"
                chosen[amount] = member.share if len(member.devices) == 1 else len(member.devices)
            elif not gone:  # Ray divides single devices only
                environment |= self._visible_devices(member)
        elif (node := self._near(role, index)) is not None:
            chosen |= near(node.node_id)
        if computes and not (chosen["num_gpus"] or "CUDA_VISIBLE_DEVICES" in environment) and self._has_gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ""  # Ray leaves all of them visible: "auto" would find one
        return {**chosen, "runtime_env": {"env_vars": environment}} if environment else chosen

    def node_of(self, role: str, index: int) -> Node | None:
        """The node of a member; None where Ray chooses it."""
        found = self._members.get((role, index))
        return None if found is None else self._home(found[1])

    def describe(self) -> str:
        """A table: role, members, devices of each, node; a line for each role and node."""
        rows = Counter[tuple[str, str, Node]]()
        for (role, _), (kind, member) in self._members.items():
            share = f" x {member.share:g}" if member.share < 1.0 else ""
            rows[role, f"{len(member.devices)} {kind}{share}", self._home(member)] += 1
        lines = [("role", "members", "devices each", "node")]
        lines += [(role, str(members), devices, node.address) for (role, devices, node), members in rows.items()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
        return "\n".join("  ".join(line).rstrip() for line in padded)

    # ------------------------------------------------------------------ reservation

    def __enter__(self) -> Placement:
        """Reserve the devices. Raises DeadlineError where they are not free within ``--placement-timeout-s``, and
        NodeGoneError."""
        deadline = time.monotonic() + self._args.placement_timeout_s
        try:
            for group in self.groups:
                bundles = [{group.kind.value: float(devices)} for devices in group.bundles]
                labels = [{NODE_LABEL: group.node.node_id}] * len(bundles)
                self._reserved.append(placement_group(bundles, strategy="STRICT_PACK", bundle_label_selector=labels))
            for group, reserved in zip(self.groups, self._reserved, strict=True):
                while not reserved.wait(min(NODE_POLL_S, max(0.0, deadline - time.monotonic()))):
                    if is_node_gone(group.node.node_id):
                        raise NodeGoneError(group.node.address)
                    if time.monotonic() >= deadline:
                        raise _not_free(group, self._args.placement_timeout_s)
            self._ask_gpu_ids()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        reserved, self._reserved = self._reserved, []
        for group in reserved:
            with suppress(Exception):  # fault boundary: Ray itself may be gone
                remove_placement_group(group)

    def _home(self, member: MemberDevices) -> Node:
        return self._nodes[member.devices[0].node]

    def _make_groups(self) -> None:
        """A bundle for each device, or for all devices of a member that has several to itself; a group for each node
        and kind of device."""
        at: dict[tuple[int, DeviceKind], int] = {}
        for kind, member in self._members.values():
            pieces = [member.devices] if member.share == 1.0 else [(device,) for device in member.devices]
            for devices in pieces:
                if (kind, devices[0]) in self._bundle_of:
                    continue
                where = (devices[0].node, kind)
                if where not in at:
                    at[where] = len(self.groups)
                    self.groups.append(BundleGroup(node=self._nodes[devices[0].node], kind=kind))
                bundles = self.groups[at[where]].bundles
                for device in devices:
                    self._bundle_of[kind, device] = (at[where], len(bundles))
                bundles.append(len(devices))

    def _ask_gpu_ids(self) -> None:
        """Learn the ids of the devices of members that share several, which Ray does not set for them."""
        asked = {
            device: self._strategy(kind, device)
            for kind, member in self._members.values()
            for device in member.devices
            if kind is DeviceKind.GPU and len(member.devices) > 1 and member.share < 1.0
        }
        ask = cast("Any", ray.remote)(num_cpus=0, num_gpus=1, max_retries=0)(_gpu_id)
        answers = [ask.options(scheduling_strategy=strategy).remote() for strategy in asked.values()]
        found = ray.get(answers, timeout=self._args.placement_timeout_s)
        self._gpu_ids = dict(zip(asked, found, strict=True))

    def _strategy(self, kind: DeviceKind, device: Device) -> PlacementGroupSchedulingStrategy:
        group, bundle = self._bundle_of[kind, device]
        return PlacementGroupSchedulingStrategy(self._reserved[group], placement_group_bundle_index=bundle)

    def _visible_devices(self, member: MemberDevices) -> dict[str, str]:
        ids = ",".join(self._gpu_ids[device] for device in member.devices if device in self._gpu_ids)
        return {"CUDA_VISIBLE_DEVICES": ids, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"} if ids else {}

    def _near(self, role: str, index: int) -> Node | None:
        """The node of a rollout worker: the one that ``--rollout-worker-nodes`` names, or where its rows are read, that
        of the trainer rank it belongs to when workers are dealt out to ranks."""
        if role != "rollout" or len(self._nodes) == 1:
            return None
        named = self._args.rollout_worker_nodes
        if chosen := [node for address in named for node in self._nodes if node.address == address]:
            return chosen[index % len(chosen)]
        ranks = grouping(self._args.num_rollout_workers, self._args.num_train_ranks)
        return next((self.node_of(ACTOR, rank) for rank, workers in ranks.items() if index in workers), None)


def _not_free(group: BundleGroup, timeout_s: float) -> DeadlineError:
    wanted = sum(group.bundles)
    devices, are = (f"{wanted} {group.kind}s", "are") if wanted > 1 else (f"1 {group.kind}", "is")
    what = f"{devices} of the node {group.node.address} {are} not free after {timeout_s:g} s"
    hint = "other jobs hold them: wait for these, or ask for fewer; --placement-timeout-s waits longer"
    return DeadlineError(what, where="the placement of the run", hint=hint)


def _gpu_id() -> str:
    """The id of the one GPU of this process."""
    return str(ray.get_runtime_context().get_accelerator_ids()["GPU"][0])


def cluster_nodes() -> list[Node]:
    """The nodes of the cluster that this process is connected to: its own first, then by address."""
    own = ray.get_runtime_context().get_node_id()
    nodes = [
        Node(
            node_id=found["NodeID"],
            address=found["NodeManagerAddress"],
            cpus=int(found["Resources"].get("CPU", 0)),
            gpus=int(found["Resources"].get("GPU", 0)),
        )
        for found in cast("Any", ray).nodes()
        if found["Alive"]
    ]
    return sorted(nodes, key=lambda node: (node.node_id != own, _numbers(node.address), node.node_id))


def near(node_id: str) -> dict[str, Any]:
    """The ``.options`` of an actor without devices that is to run on a node while that is there.

    It asks for a byte of memory: Ray chooses a random node for an actor that asks for nothing, whatever node it should
    preferably be on."""
    return {"memory": 1, "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=True)}


def is_node_gone(node_id: str) -> bool:
    """Whether Ray has found that the node is gone."""
    try:
        return any(node["NodeID"] == node_id and not node["Alive"] for node in cast("Any", ray).nodes())
    except Exception:  # fault boundary: the cluster itself may be gone
        return False


def _numbers(address: str) -> tuple[int, str]:
    """Addresses in numeric order, names after them."""
    try:
        return int(ipaddress.ip_address(address)), ""
    except ValueError:
        return 1 << 128, address


@contextmanager
def placed(args: Args, engines: bool, notice: Callable[[str], None]) -> Iterator[Placement]:
    """The placement of a run on the cluster that this process is connected to, its devices reserved for the length of
    the block; chosen again where a node is gone by then. Raises what ``Placement.of`` and entering it do."""
    with ExitStack() as stack:
        while True:
            placement = Placement.of(args, cluster_nodes(), engines=engines)
            for line in placement.notices:
                notice(line)
            try:
                stack.enter_context(placement)
                break
            except NodeGoneError as error:
                notice(f"the node {error} is gone: the devices of the run are chosen among the others")
        if placement.groups:
            for line in placement.describe().splitlines():
                notice(line)
        yield placement
