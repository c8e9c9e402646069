"""Gradients put together into buckets that are reduced while the backward pass goes on, as DDP and FSDP do."""

from typing import Final

from stablecast.ir.device_program import Body, Collective, DeviceProgram
from stablecast.ir.errors import InputError
from stablecast.lowering.combine import merge_collectives
from stablecast.lowering.passes.body import asynchronous, each_body, reordered, with_body

_KINDS: Final = ("all_reduce", "reduce_scatter")
_MEGABYTE: Final = 2**20
DDP_MEGABYTES: Final = 25.0
"""`bucket_cap_mb` of PyTorch's DistributedDataParallel."""


class BucketGradients:
    """All-reduces and reduce-scatters go together in buckets of =N MB (25, as DDP), once the last part is there."""

    def __init__(self, value: str = "") -> None:
        try:
            size = float(value or DDP_MEGABYTES)
        except ValueError:
            size = 0.0
        if size <= 0.0:
            raise InputError(f"pass 'bucket-gradients' takes MB, not '{value}'", "write bucket-gradients=25")
        self._nbytes = size * _MEGABYTE

    def __call__(self, program: DeviceProgram) -> DeviceProgram:
        def change(body: Body) -> Body:
            return asynchronous(_early(merge_collectives(body, _buckets(body, self._nbytes))))

        return with_body(program, each_body(program.body, change))


def _early(body: Body) -> Body:
    """Reductions right behind the last kernel that they need, as hooks on gradients start them."""
    keys: list[tuple[int, int]] = []
    for index, node in enumerate(body):
        moved = isinstance(node, Collective) and node.kind in _KINDS
        latest = max((keys[dep][0] for dep in (*node.deps, *node.after)), default=-1) if moved else index
        keys.append((latest, index))
    return reordered(body, sorted(range(len(body)), key=keys.__getitem__))


def _buckets(body: Body, nbytes: float) -> list[list[int]]:
    """Collectives to merge, in order of issue; none that needs another of its bucket, and buckets do not cross."""
    filling: dict[tuple[object, ...], list[int]] = {}
    held: dict[tuple[object, ...], float] = {}
    done: list[list[int]] = []
    behind = [0] * len(body)
    bits: dict[int, int] = {}
    for index, node in enumerate(body):
        for dep in (*node.deps, *node.after):
            behind[index] |= behind[dep]
        if not isinstance(node, Collective) or node.kind not in _KINDS:
            continue
        full = [key for key, members in filling.items() if any(behind[index] & bits[one] for one in members)]
        done += [filling.pop(key) for key in full]
        bits[index] = 1 << len(bits)
        behind[index] |= bits[index]
        key = (node.kind, node.groups, node.dtype, node.reduce_op)
        members = filling.setdefault(key, [])
        held[key] = held[key] + node.message_bytes if members else float(node.message_bytes)
        members.append(index)
        if held[key] >= nbytes:
            done.append(filling.pop(key))
    return [members for members in [*done, *filling.values()] if len(members) > 1]
