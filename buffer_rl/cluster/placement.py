"""Where the members of each role run: devices, bundles of Ray's placement groups, and the ``.options`` of their actors.

``Placement`` computes it from the options and the nodes; as a context it reserves the devices. A run on one machine
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
from buffer_rl.cluster.requirements import counted, plan_devices
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

    engines: whether the run generates. notices: lines for the user about what was chosen. groups: what is reserved, by
    node and kind; empty where nothing is.

    Raises ConfigError, with the arithmetic, where the options ask for more devices than ``nodes`` have."""

    def __init__(self, args: Args, nodes: Sequence[Node], *, engines: bool = True) -> None:
        members, self.notices = plan_devices(args, nodes, engines=engines)
        self.groups: dict[tuple[int, DeviceKind], BundleGroup] = {}
        self._args = args
        self._nodes = list(nodes)
        self._has_gpus = any(node.gpus for node in nodes)
        self._members = {(member.role, member.index): member for member in members}
        self._bundle_of: dict[Device, int] = {}  # in its group
        self._reserved: dict[tuple[int, DeviceKind], Any] = {}
        self._gpu_ids: dict[Device, str] = {}
        self._make_groups()

    def options(self, role: str, index: int) -> dict[str, Any]:
        """The ``.options`` of the actor of a member: its CPUs and GPUs, where Ray starts it, and what its environment
        has beside the run's (where there is something, Ray starts Python twice). Where Ray has found the member's node
        gone, it starts on any that has the devices."""
        chosen: dict[str, Any] = dict(NO_DEVICE)
        computes = role not in ("rollout", ENGINE)  # with torch, on ``--num-train-threads`` (see ``prepare_torch``)
        environment: dict[str, str] = dict(self._args.train_env_vars) if computes else {}
        if (member := self._members.get((role, index))) is not None:
            gone = bool(self._reserved) and is_node_gone(self._home(member).node_id)
            if self._reserved and not gone:
                chosen["scheduling_strategy"] = self._strategy(member.devices[0])
            if len(member.devices) == 1 or member.share == 1.0:
                amount = "num_gpus" if member.kind is DeviceKind.GPU else "num_cpus"
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
        member = self._members.get((role, index))
        return None if member is None else self._home(member)

    def describe(self) -> str:
        """A table: role, members, devices of each, node; a line for each role and node."""
        rows = Counter[tuple[str, str, Node]]()
        for member in self._members.values():
            share = f" x {member.share:g}" if member.share < 1.0 else ""
            rows[member.role, f"{len(member.devices)} {member.kind}{share}", self._home(member)] += 1
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
            for place, group in self.groups.items():
                bundles = [{group.kind.value: float(devices)} for devices in group.bundles]
                labels = [{NODE_LABEL: group.node.node_id}] * len(bundles)
                reserved = placement_group(bundles, strategy="STRICT_PACK", bundle_label_selector=labels)
                self._reserved[place] = reserved
            for place, group in self.groups.items():
                while not self._reserved[place].wait(min(NODE_POLL_S, max(0.0, deadline - time.monotonic()))):
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
        reserved, self._reserved = self._reserved, {}
        for group in reserved.values():
            with suppress(Exception):  # fault boundary: Ray itself may be gone
                remove_placement_group(group)

    def _home(self, member: MemberDevices) -> Node:
        return self._nodes[member.devices[0].node]

    def _make_groups(self) -> None:
        """A bundle for each device, or for all devices of a member that has several to itself; a group for each node
        and kind of device."""
        for member in self._members.values():
            pieces = [member.devices] if member.share == 1.0 else [(device,) for device in member.devices]
            group = BundleGroup(node=self._home(member), kind=member.kind)
            for devices in pieces:
                if devices[0] not in self._bundle_of:
                    bundles = self.groups.setdefault((devices[0].node, member.kind), group).bundles
                    self._bundle_of.update(dict.fromkeys(devices, len(bundles)))
                    bundles.append(len(devices))

    def _ask_gpu_ids(self) -> None:
        """Learn the ids of the devices of members that share several, which Ray does not set for them."""
        asked = {
            device: self._strategy(device)
            for member in self._members.values()
            for device in member.devices
            if member.kind is DeviceKind.GPU and len(member.devices) > 1 and member.share < 1.0
        }
        ask = cast("Any", ray.remote)(num_cpus=0, num_gpus=1, max_retries=0)(_gpu_id)
        answers = [ask.options(scheduling_strategy=strategy).remote() for strategy in asked.values()]
        found = ray.get(answers, timeout=self._args.placement_timeout_s)
        self._gpu_ids = dict(zip(asked, found, strict=True))

    def _strategy(self, device: Device) -> PlacementGroupSchedulingStrategy:
        reserved, bundle = self._reserved[device.node, device.kind], self._bundle_of[device]
        return PlacementGroupSchedulingStrategy(reserved, placement_group_bundle_index=bundle)

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
    devices, are = counted(sum(group.bundles), group.kind), "is" if sum(group.bundles) == 1 else "are"
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
    the block; chosen again where a node is gone by then. Raises what ``Placement`` and entering it do."""
    with ExitStack() as stack:
        while True:
            placement = Placement(args, cluster_nodes(), engines=engines)
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
