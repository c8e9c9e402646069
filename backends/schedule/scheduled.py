"""The timeline of a step: what each stream does when, what communication is exposed, and what decides the end."""

from collections.abc import Mapping, Sequence

from stablecast.backends.collectives import CollectiveModel
from stablecast.backends.device import System
from stablecast.backends.estimates import Estimates
from stablecast.backends.schedule.accounts import Accounts, account
from stablecast.backends.schedule.contended import Contended
from stablecast.backends.schedule.flat import MOVES, Flat, Flattener
from stablecast.backends.schedule.meeting import Meetings, RoleInput
from stablecast.backends.schedule.play import Played, play
from stablecast.backends.schedule.settings import Contention, ScheduleSettings
from stablecast.backends.schedule.timeline import Slice, Timeline
from stablecast.ir.device_program import P2P, Collective, DeviceProgram, Kernel
from stablecast.ir.errors import InputError
from stablecast.ir.scopes import parse_scope


def schedule(
    program: DeviceProgram,
    estimates: Estimates,
    system: System,
    loops: Mapping[str, int] | None = None,
    settings: ScheduleSettings | None = None,
) -> Timeline:
    """The step of `program` on streams. `loops`: trip counts that the program leaves open."""
    role = RoleInput(program.name, program, estimates)
    return schedule_roles([role], system, loops, settings)[role.name]


def schedule_roles(
    roles: Sequence[RoleInput],
    system: System,
    loops: Mapping[str, int] | None = None,
    settings: ScheduleSettings | None = None,
) -> dict[str, Timeline]:
    """The step of several roles at once, by name.

    A receive ends when the send of its peer has, and a collective begins when all roles in it have come to it. With one
    role, a receive takes the time of its message. Raises `InputError` for roles of the same name and for
    receives whose send never comes, naming role and node.
    """
    chosen = settings or ScheduleSettings()
    names = [role.name for role in roles]
    if len(set(names)) < len(names):
        raise InputError("two roles of a schedule have the same name")
    flats = [
        Flattener(role.estimates, system, loops or {}, chosen, role.speed, recorded=role.program.recorded).lay_out(
            role.program.body
        )
        for role in roles
    ]
    meet = Meetings(roles, flats)
    played = _play(roles, flats, [flat.time_s for flat in flats], meet)
    low = _play(roles, flats, [flat.low_s for flat in flats], meet)
    high = _play(roles, flats, [flat.high_s for flat in flats], meet)
    step = _last(played)
    ratio = 1.0
    if chosen.contention is not None:
        played = _contend(roles, flats, system, chosen.contention, meet)
        ratio = _last(played) / step if step else 1.0
        step = _last(played)
    bounds = (step, _last(low) * ratio, _last(high) * ratio)
    shared = critical_path(names, flats, played), chosen.assumptions(system.device)
    return {
        role.name: _timeline(role, flat, one, bounds, *shared)
        for role, flat, one in zip(roles, flats, played, strict=True)
    }


def _last(played: Sequence[Played]) -> float:
    return max((max(one.end_s, default=0.0) for one in played), default=0.0)


def _play(
    roles: Sequence[RoleInput],
    flats: Sequence[Flat],
    durations: Sequence[Sequence[float]],
    meet: Meetings,
) -> list[Played]:
    played, stuck = play(flats, durations, meet)
    if stuck is not None:
        role, index = stuck
        node = flats[role].nodes[index]
        raise InputError(
            f"role {roles[role].name}: {node.scope if node else ''} node {index} waits for a role that waits for it",
            "order sends, receives and collectives of the roles alike",
        )
    return played


def _contend(
    roles: Sequence[RoleInput],
    flats: Sequence[Flat],
    system: System,
    contention: Contention,
    meet: Meetings,
) -> list[Played]:
    cores = contention.of_cores(system.device)
    bounds = [list(map(str, role.estimates.bound)) for role in roles]

    def shares(role: int, index: int) -> tuple[float, float]:
        node = flats[role].nodes[index]
        assert isinstance(node, Collective | P2P)
        kind, nbytes = (node.direction, node.nbytes) if isinstance(node, P2P) else (node.kind, node.message_bytes)
        taken = contention.of_memory(kind, nbytes, flats[role].time_s[index], system.device)
        return (0.0 if kind in MOVES else cores), taken

    def bound(role: int, index: int) -> str:
        node = flats[role].nodes[index]
        assert isinstance(node, Kernel)
        return bounds[role][node.row]

    model = CollectiveModel(system)

    def links(role: int, index: int) -> tuple[str, ...]:
        node = flats[role].nodes[index]
        if not contention.share_links or node is None or isinstance(node, Kernel):
            return ()
        if isinstance(node, P2P) and node.direction in MOVES:
            return (f"{node.direction} {node.axis}",)
        return tuple(span.dim.name for span in model.covered(node))

    return Contended(flats, meet, shares, bound, links).run()


def _timeline(
    role: RoleInput,
    flat: Flat,
    played: Played,
    bounds: tuple[float, float, float],
    critical: Mapping[str, float],
    assumptions: tuple[str, ...],
) -> Timeline:
    found: Accounts = account(flat, played, role.estimates, role.speed, bounds[0])
    return Timeline(
        *bounds,
        found.compute_s,
        found.exposed_s,
        found.kernels,
        found.collectives,
        found.bound_s,
        found.exposed_by_axis_s,
        found.idle_s,
        critical,
        assumptions,
        lambda: _slices(role, flat, played),
    )


def critical_path(names: Sequence[str], flats: Sequence[Flat], played: Sequence[Played]) -> dict[str, float]:
    """Seconds by scope along the chain of nodes that ends last, across roles (`role: scope` where there are several).

    Trips left out count with the one that stands for them.
    """
    role = max(range(len(flats)), key=lambda number: max(played[number].end_s, default=0.0))
    path: dict[str, float] = {}
    index = max(range(len(flats[role])), key=lambda at: played[role].end_s[at], default=-1)
    while index >= 0:
        flat, one = flats[role], played[role]
        node, before = flat.nodes[index], one.cause_role[index]
        if node is not None and (before == role or isinstance(node, Collective)):
            label = parse_scope(node.scope).label if node.scope else _plain_name(node)
            scope = label if len(names) == 1 else f"{names[role]}: {label}"
            path[scope] = path.get(scope, 0.0) + (one.end_s[index] - one.begin_s[index]) * flat.weight[index]
        role, index = before, one.cause[index]
    return dict(sorted(path.items(), key=lambda item: -item[1]))


def _plain_name(node: Kernel | Collective | P2P) -> str:
    if isinstance(node, Kernel):
        return node.location.source or "kernels"
    return node.direction if isinstance(node, P2P) else node.kind


def _slices(role: RoleInput, flat: Flat, played: Played) -> list[Slice]:
    names = [_stream_name(key) for key in flat.streams]
    found: list[Slice] = []
    for index, node in enumerate(flat.nodes):
        if node is None or flat.weight[index] == 0.0:
            continue
        name, detail = _named(role, node)
        if node.location.source:
            detail["source"] = node.location.source
        begin_s, end_s = played.begin_s[index], played.end_s[index]
        stream = names[flat.stream[index]]
        found.append(Slice(role.name, stream, name, begin_s, end_s, node.scope, detail, flat.weight[index]))
    return found


def _named(role: RoleInput, node: Kernel | Collective | P2P) -> tuple[str, dict[str, str | int | float]]:
    """What a slice is called, and what is said of it."""
    if isinstance(node, P2P):
        return node.direction, {"bytes": node.nbytes, "axis": node.axis, "tag": node.tag}
    if isinstance(node, Collective):
        axes = ",".join(node.groups.axes)
        return node.kind, {"bytes": node.message_bytes, "devices": node.groups.size, "axes": axes}
    row = role.program.table.rows[node.row]
    nbytes, basis = row.bytes_read + row.bytes_written, str(role.estimates.source[node.row])
    return str(row.klass), {"shape": row.shape, "bytes": nbytes, "basis": basis}


def _stream_name(key: tuple[str, tuple[str, ...] | int]) -> str:
    kind, which = key
    if isinstance(which, int):
        return kind if which == 0 or (kind == "communication" and which == 1) else f"{kind} {which}"
    return f"{kind} {','.join(which)}".strip()
