"""Messages between ranks by axis and distance, so that the program of a rank is that of all ranks like it."""

from collections.abc import Callable
from dataclasses import replace

from stablecast.ir.device_program import P2P, Body, Branch, DeviceProgram, Loop, Node
from stablecast.ir.errors import InputError
from stablecast.ir.program import Mesh


def coordinates(mesh: Mesh, rank: int) -> dict[str, int]:
    """Where device `rank` lies on the axes of `mesh`."""
    found: dict[str, int] = {}
    for name, size in reversed(mesh.axes):
        rank, found[name] = divmod(rank, size)
    return found


def with_peers(program: DeviceProgram, rank: int) -> DeviceProgram:
    """`program` of device `rank`, whose messages name their peer by its rank, with axis and distance instead.

    Raises `InputError` for a peer that differs in several axes, or where the program has no mesh.
    """
    if not _unplaced(program.body):
        return program
    mesh = next((mesh for mesh in program.meshes if mesh.size == program.num_devices), None)
    if mesh is None:
        raise InputError(f"{program.name} sends to ranks, but has no mesh that says where they are")
    own = coordinates(mesh, rank)

    def placed(node: P2P) -> P2P:
        peer = coordinates(mesh, node.shift)
        apart = [axis for axis in own if peer[axis] != own[axis]]
        if len(apart) != 1:
            raise InputError(f"rank {rank} sends to rank {node.shift}, which is not beside it along one axis")
        return replace(node, axis=apart[0], shift=peer[apart[0]] - own[apart[0]])

    return replace(program, body=_changed(program.body, placed))


def _unplaced(body: Body) -> bool:
    return any(
        (isinstance(node, P2P) and not node.axis)
        or (isinstance(node, Loop) and _unplaced(node.body))
        or (isinstance(node, Branch) and any(map(_unplaced, node.bodies)))
        for node in body
    )


def _changed(body: Body, placed: Callable[[P2P], P2P]) -> Body:
    nodes: list[Node] = []
    for node in body:
        if isinstance(node, P2P) and not node.axis:
            nodes.append(placed(node))
        elif isinstance(node, Loop):
            nodes.append(replace(node, body=_changed(node.body, placed)))
        elif isinstance(node, Branch):
            nodes.append(replace(node, bodies=tuple(_changed(one, placed) for one in node.bodies)))
        else:
            nodes.append(node)
    return tuple(nodes)
