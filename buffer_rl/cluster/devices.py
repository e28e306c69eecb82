"""Which devices of a cluster each process of a run gets: pure data, without Ray.

A device is a GPU, or one CPU of a cluster of several nodes without GPUs. Groups of roles get devices of their own one
after another; the roles of one group share theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

SHARE_STEPS = 10_000
"""Ray counts parts of a device in steps of 1 / 10,000. Equal shares of its processes are rounded down to one, so that
all of them fit."""


class DeviceKind(StrEnum):
    """Kind of device, by Ray's name of the resource."""

    GPU = "GPU"
    CPU = "CPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine of the cluster: Ray's id of it, its address, and the CPUs and GPUs that Ray counts there."""

    node_id: str
    address: str
    cpus: int = 0
    gpus: int = 0

    def count(self, kind: DeviceKind) -> int:
        """Devices of the kind."""
        return self.gpus if kind is DeviceKind.GPU else self.cpus


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Device:
    """Device ``slot`` of its kind, of the node at position ``node`` of the list of nodes."""

    kind: DeviceKind
    node: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRequest:
    """The devices that a role requires.

    each: devices of one member, all on one node. together: consecutive members that must be on one node, as the ranks
    of one ``--actor-num-nodes``; divides ``members``. spread: members go to the nodes with the fewest others, in place
    of filling one node after another.
    """

    role: str
    members: int
    each: int = 1
    together: int = 1
    spread: bool = False

    @property
    def devices(self) -> int:
        """Devices of all members."""
        return self.members * self.each


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberDevices:
    """The devices of member ``index`` of a role, all on one node, and its share of each: 1.0 if it has them to
    itself."""

    role: str
    index: int
    devices: tuple[Device, ...]
    share: float = 1.0

    @property
    def kind(self) -> DeviceKind:
        """Of all its devices."""
        return self.devices[0].kind


class NoRoomError(Exception):
    """A group of requests does not fit. Of the first request without room: its role, the devices that must be on one
    node, and the largest number that is free on one."""

    def __init__(self, request: DeviceRequest, free: int) -> None:
        super().__init__(f"{request.role}: {request.each * request.together} on one node, {free} free")
        self.request = request
        self.on_one_node = request.each * request.together
        self.free = free


def all_devices(nodes: Sequence[Node], kind: DeviceKind) -> list[Device]:
    """Every device of the kind, in the order of the nodes."""
    places = [(at, slot) for at, node in enumerate(nodes) for slot in range(node.count(kind))]
    return [Device(kind=kind, node=at, slot=slot) for at, slot in places]


def allocate(groups: Sequence[Sequence[DeviceRequest]], devices: Sequence[Device]) -> list[MemberDevices]:
    """The devices of every member.

    groups: the requests of a group share devices, and no two groups do. Groups are served in their order, or where that
    leaves none with enough devices on one node, the largest pieces first. Raises NoRoomError.
    """
    try:
        return _allocate_in_order(groups, devices)
    except NoRoomError:
        by_size = sorted(groups, key=lambda group: -max(request.each * request.together for request in group))
        return _allocate_in_order(by_size, devices)


def _allocate_in_order(groups: Sequence[Sequence[DeviceRequest]], devices: Sequence[Device]) -> list[MemberDevices]:
    free, on_node = list(devices), Counter[int]()
    placed: list[MemberDevices] = []
    for group in groups:
        widest = max(group, key=lambda request: (request.devices, request.each * request.together))
        load = Counter[Device]()  # processes on each device of the group
        held: dict[str, list[tuple[Device, ...]]] = {}
        for request in (widest, *(request for request in group if request is not widest)):
            held[request.role] = _place(request, sorted(load) or free, load, on_node)
            load.update(device for member in held[request.role] for device in member)
        for request in group:
            for index, own in enumerate(held[request.role]):
                share = SHARE_STEPS // max(load[device] for device in own) / SHARE_STEPS
                placed.append(MemberDevices(role=request.role, index=index, devices=own, share=share))
        free = [device for device in free if device not in load]
        on_node.update(device.node for device in load)
    return placed


def _place(
    request: DeviceRequest, devices: Sequence[Device], load: Mapping[Device, int], on_node: Mapping[int, int]
) -> list[tuple[Device, ...]]:
    """The devices of each member: on the first node with room for those that belong together, or on that with the
    fewest devices in use (``on_node``), and there on the devices with the fewest processes (``load``)."""
    needed, used, in_use = request.each * request.together, set[Device](), Counter(on_node)
    members: list[tuple[Device, ...]] = []
    for _ in range(request.members // request.together):
        rooms: dict[int, list[Device]] = {}
        for device in devices:
            if device not in used:
                rooms.setdefault(device.node, []).append(device)
        fitting = [node for node, room in rooms.items() if len(room) >= needed]
        if not fitting:
            raise NoRoomError(request, max(map(len, rooms.values()), default=0))
        evens = request.spread or request.together > 1
        node = min(fitting, key=lambda node: (in_use[node] if evens else 0, node))
        chosen = sorted(sorted(rooms[node], key=lambda device: (load.get(device, 0), device))[:needed])
        used.update(chosen)
        in_use[node] += needed
        members += [tuple(chosen[at : at + request.each]) for at in range(0, needed, request.each)]
    return members
