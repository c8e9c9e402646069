"""What the operators of an execution trace say of tensors and of collectives."""

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final, cast

from stablecast.frontends.traces.pytorch_et import EtOp

_TENSOR_NUMBERS: Final = 5
_LOOKUPS: Final = re.compile(r"lookup|embedding|index_select|gather", re.IGNORECASE)
_COMMS: Final = "record_param_comms"


def tensors(values: Any) -> Iterator[tuple[int, int, int, str]]:
    """(id, storage, bytes, device) of every tensor in `values`, those within lists too."""
    if not isinstance(values, list | tuple):
        return
    listed = cast("list[Any]", values)
    if len(listed) == _TENSOR_NUMBERS + 1 and isinstance(listed[-1], str) and _numbers(listed[:-1]):
        number, storage, _, elements, width, device = listed
        yield int(number), int(storage), int(elements) * int(width), str(device)
        return
    for value in listed:
        yield from tensors(value)


def _numbers(values: list[Any]) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) for value in values)


def moved_bytes(op: EtOp) -> int:
    """Bytes of the operator's tensors, inputs and outputs, each once; of a look-up not the table."""
    sizes = {number: size for number, _, size, _ in tensors([*op.values, *op.out_values])}
    table = max(sizes.values(), default=0) if _LOOKUPS.search(op.name) and len(sizes) > 1 else 0
    return sum(sizes.values()) - table


def read_storages(ops: Iterable[EtOp]) -> set[int]:
    """Storages on a device that the operators read."""
    return {storage for op in ops for _, storage, _, device in tensors(op.values) if device != "cpu"}


def written_storages(ops: Iterable[EtOp]) -> set[int]:
    """Storages on a device that the operators write: their results, and the first operand of those that end in `_`."""
    found: set[int] = set()
    for op in ops:
        written = [*op.out_values, *(op.values[:1] if op.name.endswith("_") else ())]
        found.update(storage for _, storage, _, device in tensors(written) if device != "cpu")
    return found


def waited_for(op: EtOp) -> int | None:
    """The sequence number of the collective that the operator waits for, None where it waits for none."""
    if op.name != _COMMS or "wait" not in op.values:
        return None
    return next((value for value in op.values if isinstance(value, int)), None)


def sequence_of(op: EtOp) -> int | None:
    """The sequence number of the collective that the operator issues, None where it issues none."""
    if op.name != _COMMS or "wait" in op.values:
        return None
    return next((value for value in op.values if isinstance(value, int) and not isinstance(value, bool)), None)


def operations(op: EtOp) -> int:
    """FLOP of a product or convolution, else one operation an element of the largest tensor."""
    shapes = [shape for shape in op.shapes if _is_shape(shape)]
    out = next((shape for shape in op.out_shapes if _is_shape(shape)), None)
    kind = op.name.removeprefix("aten::")
    matrices = [shape for shape in shapes if len(shape) >= 2]
    if kind in ("mm", "bmm", "addmm", "baddbmm", "linear", "matmul") and len(matrices) >= 2 and out:
        return 2 * math.prod(out) * int(matrices[-2][-1])
    if "conv" in kind and len(matrices) >= 2:
        weight = next((shape for shape in matrices[::-1] if len(shape) == len(matrices[0])), matrices[-1])
        image = out if out and "backward" not in kind else matrices[0]
        return 2 * math.prod(image) * math.prod(weight[1:]) * (2 if "backward" in kind else 1)
    return max((math.prod(shape) for shape in (*shapes, *(op.out_shapes or ())) if _is_shape(shape)), default=1)


def _is_shape(shape: Any) -> bool:
    sizes = cast("list[Any]", shape) if isinstance(shape, list) else []
    return bool(sizes) and all(isinstance(size, int) for size in sizes)
