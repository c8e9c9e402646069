"""Ops that Shardy has no sharding rule for, handed to it in a form that it knows.

Elementwise ops of CHLO and MHLO go as elementwise ops of StableHLO that carry their name; others as custom calls with a
rule, which Shardy propagates through but does not reshard. Runs in the child, before propagation; `local.py` turns them
back into the ops they stand for.
"""

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stablecast.ir import mlir
from stablecast.ir.attributes import RaggedDotDims
from stablecast.ir.reader.text_attributes import ragged_dot_dims

PREFIX = "stablecast."
"""Custom-call targets start with it; the rest is the name of the op."""
STANDS_FOR = "stablecast.stands_for"
"""Attribute of an elementwise op that stands for another: the name of that."""

Factors = Sequence[Sequence[str]]


def teach(module: Any) -> None:
    """Replaces such ops in `module`; squares become products, as in XLA."""
    for op in mlir.walk(module):
        if not op.name.startswith(_DIALECTS):
            continue
        if op.name == "chlo.square":
            _multiply(op)
        elif op.name in _RULES:
            _replace(op, _RULES[op.name](op))
        elif op.name not in _KNOWN and _stand_in(op):
            _rename(op, _stand_in(op))


def _multiply(op: Any) -> None:
    from jaxlib.mlir.dialects import stablehlo

    ir = mlir.bindings()
    with op.context, ir.InsertionPoint(op), op.location:
        product = stablehlo.MulOp(op.operands[0], op.operands[0])
    if "sdy.sharding" in op.attributes:
        product.operation.attributes["sdy.sharding"] = op.attributes["sdy.sharding"]
    op.results[0].replace_all_uses_with(product.result)
    op.erase()


def _stand_in(op: Any) -> str:
    """An elementwise op of StableHLO, with no folder, of as many operands as `op`; empty if `op` is not elementwise."""
    ir = mlir.bindings()
    kinds = [value.type for value in (*op.operands, *op.results)]
    if len(op.results) != 1 or len(op.regions) or not all(isinstance(kind, ir.RankedTensorType) for kind in kinds):
        return ""
    if len({tuple(ir.ShapedType(kind).shape) for kind in kinds}) > 1:
        return ""
    changed = len(set(map(str, kinds))) > 1
    return {1: "stablehlo.is_finite" if changed else "stablehlo.cosine", 2: "stablehlo.atan2"}.get(len(op.operands), "")


def _rename(op: Any, name: str) -> None:
    ir = mlir.bindings()
    with op.context, ir.InsertionPoint(op):
        kept = {label: op.attributes[label] for label in op.attributes}
        other = ir.Operation.create(
            name,
            results=[op.results[0].type],
            operands=list(op.operands),
            attributes={**kept, STANDS_FOR: ir.StringAttr.get(op.name)},
            loc=op.location,
        )
    op.results[0].replace_all_uses_with(other.results[0])
    op.erase()


def _replace(op: Any, rule: str) -> None:
    from jaxlib.mlir.dialects import stablehlo

    ir = mlir.bindings()
    with op.context, ir.InsertionPoint(op), op.location:
        call = stablehlo.CustomCallOp(
            [value.type for value in op.results],
            list(op.operands),
            ir.StringAttr.get(PREFIX + op.name),
            has_side_effect=ir.BoolAttr.get(False),
        )
        for name in op.attributes:
            call.attributes[name] = op.attributes[name]
        call.attributes["sdy.sharding_rule"] = ir.Attribute.parse(rule)
    for place, old in enumerate(op.results):
        old.replace_all_uses_with(call.operation.results[place])
    op.erase()


def rule_text(
    operands: Factors, results: Factors, sizes: Mapping[str, int], *, reduced: str = "", replicated: str = ""
) -> str:
    """An `#sdy.op_sharding_rule`: which factor each dimension is, and which factors sum or must be whole."""
    letters = {name: string.ascii_lowercase[8:][index] for index, name in enumerate(sizes)}

    def tensor(factors: Sequence[str]) -> str:
        return "[" + ", ".join(letters[name] for name in factors) + "]"

    shapes = ", ".join(f"{letters[name]}={size}" for name, size in sizes.items())
    sides = ", ".join(map(tensor, operands)), ", ".join(map(tensor, results))
    text = f"#sdy.op_sharding_rule<({sides[0]})->({sides[1]}) {{{shapes}}}"
    order = list(sizes)
    for label, names in (("reduction", reduced), ("need_replication", replicated)):
        chosen = sorted((name for name in names.split() if name in sizes), key=order.index)
        if chosen:
            text += f" {label}={{{', '.join(letters[name] for name in chosen)}}}"
    return text + ", custom>"


def _ragged_dot(op: Any) -> str:
    """Rows that differ by group: `m` rows, `k` contracted, `n` columns, `g` groups, `b` batch."""
    dims: RaggedDotDims = ragged_dot_dims(str(op.attributes["ragged_dot_dimension_numbers"]))
    shapes = [tuple(mlir.bindings().ShapedType(value.type).shape) for value in op.operands]
    lhs, rhs = [""] * len(shapes[0]), [""] * len(shapes[1])
    dot = dims.dot
    for index, (left, right) in enumerate(zip(dot.lhs_batch, dot.rhs_batch, strict=True)):
        lhs[left] = rhs[right] = f"b{index}"
    for index, (left, right) in enumerate(zip(dot.lhs_contracting, dot.rhs_contracting, strict=True)):
        lhs[left] = rhs[right] = f"k{index}"
    for dim in dims.rhs_group:
        rhs[dim] = "g"
    lhs = [name or f"m{dim}" for dim, name in enumerate(lhs)]
    rhs = [name or f"n{dim}" for dim, name in enumerate(rhs)]
    batch = [name for name in lhs if name.startswith("b")]
    free = [name for name in lhs if name.startswith("m")] + [name for name in rhs if name.startswith("n")]
    ragged_rows = bool(dims.rhs_group)
    result = (
        [*batch, *free]
        if ragged_rows or any(lhs[dim].startswith("b") for dim in dims.lhs_ragged)
        else ["g", *batch, *free]
    )
    sizes: dict[str, int] = {}
    groups = ["g"] if len(shapes[2]) == 1 else ["", "g"]
    for names, shape in ((lhs, shapes[0]), (rhs, shapes[1]), (groups, shapes[2])):
        sizes |= {name: size for name, size in zip(names, shape, strict=False) if name}
    contracted = " ".join(name for name in lhs if name.startswith("k"))
    sizes_factors = (
        groups if len(groups) == len(shapes[2]) and all(groups) else [f"s{i}" for i in range(len(shapes[2]))]
    )
    sizes |= dict(zip(sizes_factors, shapes[2], strict=True))
    return rule_text([lhs, rhs, sizes_factors], [result], sizes, reduced=contracted + (" g" if ragged_rows else ""))


def _top_k(op: Any) -> str:
    """All but the last dimension pass through; the last must be whole."""
    ir = mlir.bindings()
    shape, results = ir.ShapedType(op.operands[0].type).shape, [ir.ShapedType(value.type).shape for value in op.results]
    passing = [f"p{dim}" for dim in range(len(shape) - 1)]
    sizes = dict(zip(passing, shape, strict=False)) | {"last": shape[-1], "k": results[0][-1]}
    return rule_text([[*passing, "last"]], [[*passing, "k"]] * len(results), sizes, replicated="last k")


_RULES: Mapping[str, Callable[[Any], str]] = {
    "chlo.ragged_dot": _ragged_dot,
    "chlo.top_k": _top_k,
    "mhlo.ragged_dot": _ragged_dot,
    "mhlo.topk": _top_k,
}

_DIALECTS = ("chlo.", "mhlo.")
_KNOWN = frozenset({"mhlo.copy", "mhlo.bitcast", "mhlo.add_dependency", "mhlo.domain"})
