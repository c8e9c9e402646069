"""A device program from a PyTorch execution trace alone: operators with shapes, no kernel and no time."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

from stablecast.backends.device import Device
from stablecast.frontends.traces.pytorch_et import EtOp, ExecutionTrace
from stablecast.ir.device_program import DeviceProgram
from stablecast.ir.errors import InputError
from stablecast.validation.collectives import shapes_of
from stablecast.validation.from_trace import ELEMENT_TYPES, Call, ProgramBuilder
from stablecast.validation.kernel_names import collective_kind
from stablecast.validation.linking.tensors import tensors
from stablecast.validation.operators import class_of_operator, launches_nothing, owns_launches
from stablecast.validation.steps import MARKS

_WRAPPERS: Final = re.compile(r"Backward\d+$|^(autograd|torch|c10d|nccl|gloo|_c10d_functional)::|^(?!\w+::)")
"""Names of what only calls operators: nodes of autograd, annotations, and what runs collectives."""

_COMMS: Final = "record_param_comms"
_TF32: Final = False
_STEPS: Final = 3


def et_program(trace: ExecutionTrace, device: Device, world: int = 0) -> DeviceProgram:
    """The program of all operators of `trace` that launch work on a device, for pricing on `device`.

    `world`: ranks of the run, where the trace's process groups do not say. f32 products multiply as FP32: a host trace
    does not say what the kernels did. Raises `InputError` where no operator works on a device.
    """
    build = ProgramBuilder(device, _TF32)
    calls = _Calls(trace)
    sizes = [size for op in trace.ops if (size := _group_size(op))]
    largest = max([world, *sizes], default=1) or 1
    found = 0
    for op in calls:
        found += 1
        if op.name == _COMMS:
            kind, nbytes = _spoken(op)
            build.collective(kind, nbytes, _group_size(op) or largest, largest)
        else:
            for way in _ways(op):
                build.call(replace(_call(op, calls.path(op)), way=way))
    if not found:
        raise InputError(f"{trace.source} holds no operator that works on a device", "profile a run on a device")
    return build.program(trace.source, largest)


class _Calls:
    """The operators that launch work, in the order of their calls."""

    def __init__(self, trace: ExecutionTrace) -> None:
        self._ops = {op.id: op for op in trace.ops}
        self._children: Mapping[int, list[EtOp]] = trace.children()
        self._trace = trace
        self._known: dict[int, bool] = {}
        self._inside: dict[int, bool] = {}

    def __iter__(self) -> Iterator[EtOp]:
        for op in _one_step(self._trace.ops):
            if self._owned(op):
                continue
            if owns_launches(op.name):
                yield op
            elif op.name == _COMMS:
                if _spoken(op)[0]:
                    yield op
            elif self._launches(op) and not self._below(op):
                yield op

    def _owned(self, op: EtOp) -> bool:
        """Whether an operator around it owns what it launches."""
        known = self._inside.get(op.id)
        if known is None:
            above = self._ops.get(op.parent)
            known = above is not None and above.id != op.id and (owns_launches(above.name) or self._owned(above))
            self._inside[op.id] = known
        return known

    def path(self, op: EtOp) -> str:
        """The annotations around an operator, outermost first."""
        found: list[str] = []
        above = self._ops.get(op.parent)
        while above is not None and above.parent != above.id:
            if above.name.startswith("## ") and above.name.endswith(" ##"):
                found.append(above.name.strip("# "))
            above = self._ops.get(above.parent)
        return "/".join(reversed(found))

    def _launches(self, op: EtOp) -> bool:
        """Whether the operator, taken by itself, is one that launches work."""
        if launches_nothing(op.name) or _WRAPPERS.search(op.name) or self._in_collective(op):
            return False
        return any(device.startswith(("cuda", "hip", "xpu")) for *_, device in tensors([*op.values, *op.out_values]))

    def _in_collective(self, op: EtOp) -> bool:
        above = self._ops.get(op.parent)
        return above is not None and above.name == _COMMS

    def _below(self, op: EtOp) -> bool:
        """Whether what it calls launches work, so that it does not itself."""
        known = self._known.get(op.id)
        if known is None:
            children = self._children.get(op.id, ())
            known = any(child.id != op.id and (self._launches(child) or self._below(child)) for child in children)
            self._known[op.id] = known
        return known


def _one_step(ops: Sequence[EtOp]) -> Sequence[EtOp]:
    """The operators of the step in the middle, where marks show several; else all."""
    for mark in MARKS:
        places = [at for at, op in enumerate(ops) if mark.match(op.name)]
        if len(places) >= _STEPS:
            middle = len(places) // 2
            return ops[places[middle - 1] : places[middle]]
    return ops


def _call(op: EtOp, scope: str) -> Call:
    shapes = shapes_of({"Input Dims": [*_flat(op.shapes), *_flat(op.out_shapes)]}) if _wide(op) else _inputs(op)
    return Call(
        op.name, class_of_operator(op.name), shapes, _element(op), 0.0, scope, [str(value) for value in op.values]
    )


def _ways(op: EtOp) -> tuple[str, ...]:
    """What a call computes: of the gradients of a convolution, those that its mask asks for."""
    if not op.name.endswith("convolution_backward"):
        return ("",)
    lists = [cast("list[Any]", value) for value in op.values if isinstance(value, list)]
    mask = next((held for held in lists[::-1] if held and all(isinstance(flag, bool) for flag in held)), [True, True])
    return tuple(way for way, wanted in zip(("dgrad", "wgrad"), mask, strict=False) if wanted)


def _inputs(op: EtOp) -> list[tuple[int, ...]]:
    shapes = zip(op.shapes, op.types, strict=False)
    return shapes_of(
        {"Input Dims": _flat([[1] if shape == [] and kind.startswith("Tensor") else shape for shape, kind in shapes])}
    )


def _wide(op: EtOp) -> bool:
    """Whether only the result says the size, as of what is made or joined."""
    return not _inputs(op) or op.name in ("aten::cat", "aten::stack")


def _flat(shapes: Sequence[Any]) -> list[Any]:
    """Shapes of tensors in lists, put beside the others."""
    found: list[Any] = []
    for shape in shapes:
        parts = cast("list[Any]", shape) if isinstance(shape, list) else []
        found += parts if parts and all(isinstance(part, list) for part in parts) else [shape]
    return found


def _element(op: EtOp) -> str:
    for text in (*op.types, *op.out_types):
        inner = text[text.find("Tensor(") + 7 :].split(")")[0].lower() if "Tensor(" in text else ""
        if inner in ELEMENT_TYPES:
            return ELEMENT_TYPES[inner]
    return "f32"


def _spoken(op: EtOp) -> tuple[str, float]:
    """Kind and bytes of a collective; no kind where the operator only waits for one."""
    texts = [value for value in op.values if isinstance(value, str)]
    if "wait" in texts:
        return "", 0.0
    kind = next((kind for text in texts if (kind := collective_kind(text))), "")
    sizes = [size for *_, size, device in tensors(op.values) if device != "cpu"]
    nbytes = float(sum(sizes))
    if kind == "all_gather":
        nbytes = float(sum(size for *_, size, _ in tensors(op.out_values))) or nbytes
    return (kind, nbytes) if nbytes else ("", 0.0)


def _group_size(op: EtOp) -> int:
    """Ranks of the group that an operator names: by its list of shares, or as it sets the groups up."""
    if op.name == "## process_group:init ##":
        found = re.findall(r'"group_size": (\d+)', str(op.values))
        return max(map(int, found), default=0)
    if op.name != _COMMS:
        return 0
    lists = [cast("list[Any]", value) for value in op.values if isinstance(value, list)]
    return max(
        (len(held) for held in lists if held and all(isinstance(n, int) for n in held) and len(held) > 1), default=0
    )
