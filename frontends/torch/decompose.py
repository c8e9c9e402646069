"""Ops without an emitter in terms of simpler ones: torch's own decompositions, traced once for each signature."""

# pyright: reportUnknownLambdaType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Sequence
from typing import Any

from stablecast.frontends.torch import fbgemm
from stablecast.frontends.torch.graph import Graph, Node, Ref, Spec
from stablecast.frontends.torch.names import BACK
from stablecast.frontends.torch.private import FakeTensorMode, decompositions, torch
from stablecast.frontends.torch.record import Recorder
from stablecast.ir.dtypes import DTYPES


class Decomposer:
    """Callable as `emit.emitter.Decomposer`."""

    def __init__(self) -> None:
        self._known: dict[Any, Graph | str | None] = {}
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def __call__(self, node: Node, specs: Sequence[Spec]) -> Graph | str | None:
        try:
            key = (node.op, _key(node.args), _key(tuple(node.kwargs.items())), tuple(specs))
        except TypeError:
            return None
        if key not in self._known:
            self._known[key] = self._trace(node, specs)
        return self._known[key]

    def _trace(self, node: Node, specs: Sequence[Spec]) -> Graph | str | None:
        func = _function(node.op)
        rule = None if func is None else decompositions().get(func) or fbgemm.RULES.get(node.op)
        if func is None or (rule is None and not func._can_decompose()):
            return None
        recorder = Recorder(self._mode)
        with self._mode:
            tensors = [torch.empty(spec.shape, dtype=BACK[spec.dtype]) for spec in specs]
            for tensor, spec in zip(tensors, specs, strict=True):
                ref = recorder.graph.value(spec)
                recorder.graph.inputs.append(ref)
                recorder.fresh(tensor, ref)
            args = [_back(arg, tensors) for arg in node.args]
            kwargs = {name: _back(arg, tensors) for name, arg in node.kwargs.items() if arg is not None}
            try:
                with recorder, torch.no_grad():
                    made = rule(*args, **kwargs) if rule is not None else func.decompose(*args, **kwargs)
            except Exception as error:
                return f"taking it apart failed: {type(error).__name__}: {str(error)[:160]}"
            flat = [tensor for tensor in _flat(made) if isinstance(tensor, torch.Tensor)]
            if any(node_.op == node.op for node_ in recorder.graph.nodes):
                return None
            recorder.graph.outputs = [recorder.ref(tensor) for tensor in flat]
        if recorder.inputs:
            return None
        return recorder.graph


def _function(op: str) -> Any:
    namespace, name, overload = op.split(".", 2) if op.count(".") >= 2 else (*op.split(".", 1), "default")
    packet = getattr(getattr(torch.ops, namespace, None), name, None)
    if packet is None:
        return None
    known = packet.overloads()
    chosen = overload if overload in known else "default" if "default" in known else known[0]
    return getattr(packet, chosen)


def _back(arg: Any, tensors: Sequence[Any]) -> Any:
    if isinstance(arg, Ref):
        return tensors[arg]
    if isinstance(arg, list):
        return [_back(item, tensors) for item in arg]
    if isinstance(arg, str) and arg in DTYPES and arg in BACK:
        return BACK[arg]
    return arg


def _flat(made: Any) -> list[Any]:
    return [item for part in made for item in _flat(part)] if isinstance(made, (list, tuple)) else [made]


def _key(arg: Any) -> Any:
    if isinstance(arg, (list, tuple)):
        return tuple(_key(item) for item in arg)
    hash(arg)
    return (type(arg).__name__, arg)
