"""Where roles of a step wait for one another: receives for their sends, members of a collective for the last one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stablecast.backends.estimates import Estimates
from stablecast.backends.schedule.flat import Flat
from stablecast.ir.device_program import P2P, Collective, DeviceProgram
from stablecast.ir.errors import InputError
from stablecast.ir.groups import Groups

Place = tuple[int, int]
"""A role by number, and a node of its flat form."""


@dataclass(frozen=True, slots=True)
class RoleInput:
    """A role of a step: its program, its kernels' times, its coordinates on mesh axes, and how fast its devices are.

    `speed`: 0.5 for a straggler whose kernels take twice as long. Sends and receives of roles meet by coordinates.
    `ranks`: of the role, where they do not follow from coordinates.
    """

    name: str
    program: DeviceProgram
    estimates: Estimates
    coords: Mapping[str, int] = field(default_factory=dict[str, int])
    speed: float = 1.0
    ranks: tuple[int, ...] = ()


class Meetings:
    """Receives and the sends that they wait for: same axis and tag, coordinates a shift apart, in order; and
    collectives of several roles that are one: the same groups with members in both, in order."""

    def __init__(self, roles: Sequence[RoleInput], flats: Sequence[Flat]) -> None:
        self._roles = roles
        self._sends: dict[Place, Place] = {}
        self._joined: dict[Place, tuple[Place, ...]] = {}
        if len(roles) > 1:
            self._match(flats)
            self._join(flats)

    def send_of(self, role: int, node: int) -> Place | None:
        """The send that a receive waits for; None for any other node."""
        return self._sends.get((role, node))

    def joined(self, role: int, node: int) -> tuple[Place, ...]:
        """The same collective in other roles; it begins when all of them have come to it."""
        return self._joined.get((role, node), ())

    def __bool__(self) -> bool:
        return bool(self._sends or self._joined)

    def _match(self, flats: Sequence[Flat]) -> None:
        roles = self._roles
        sends: dict[tuple[int, str, int, int], list[int]] = {}
        for number, flat in enumerate(flats):
            for index, node in enumerate(flat.nodes):
                if isinstance(node, P2P) and node.direction == "send":
                    sends.setdefault((number, node.axis, node.shift, node.tag), []).append(index)
        places = {tuple(sorted(role.coords.items())): number for number, role in enumerate(roles)}
        for number, (role, flat) in enumerate(zip(roles, flats, strict=True)):
            seen: dict[tuple[int, str, int, int], int] = {}
            for index, node in enumerate(flat.nodes):
                if not isinstance(node, P2P) or node.direction != "recv":
                    continue
                coords = {**role.coords, node.axis: role.coords.get(node.axis, 0) + node.shift}
                peer = places.get(tuple(sorted(coords.items())))
                if peer is None:
                    continue
                key = (peer, node.axis, -node.shift, node.tag)
                turn = seen.get(key, 0)
                seen[key] = turn + 1
                found = sends.get(key, [])
                if turn >= len(found):
                    raise InputError(
                        f"role {role.name}: receive {turn} of tag {node.tag} along {node.axis} has no send",
                        f"role {roles[peer].name} sends {len(found)} of them",
                    )
                self._sends[(number, index)] = (peer, found[turn])

    def _join(self, flats: Sequence[Flat]) -> None:
        runs: dict[tuple[str, Groups], dict[int, list[int]]] = {}
        for number, flat in enumerate(flats):
            for index, node in enumerate(flat.nodes):
                if isinstance(node, Collective):
                    runs.setdefault((node.kind, node.groups), {}).setdefault(number, []).append(index)
        for (_, groups), by_role in runs.items():
            for first, places in by_role.items():
                others = [other for other in by_role if other != first and self._share(first, other, groups)]
                for turn, index in enumerate(places):
                    met = tuple((other, by_role[other][turn]) for other in others if turn < len(by_role[other]))
                    if met:
                        self._joined[(first, index)] = met

    def _share(self, one: int, other: int, groups: Groups) -> bool:
        """Whether some group has members of both roles."""
        left, right = self._roles[one], self._roles[other]
        if left.ranks and right.ranks:
            wanted = set(right.ranks)
            return any(not wanted.isdisjoint(groups.members(rank)) for rank in left.ranks)
        apart = {axis for axis in {*left.coords, *right.coords} if left.coords.get(axis) != right.coords.get(axis)}
        return apart <= set(groups.axes) if groups.axes else not apart
