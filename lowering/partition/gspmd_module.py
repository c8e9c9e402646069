"""Rewrites modules with old-style shardings so that Shardy understands them."""

from collections.abc import Sequence
from typing import Any

from stablecast.ir import mlir
from stablecast.lowering.partition import gspmd
from stablecast.lowering.partition.gspmd import DeviceAxes, Tiling
from stablecast.lowering.partition.gspmd_manual import has_manual, open_dims, to_manual_computations

GSPMD_NOTE = (
    "the module has old-style (GSPMD) shardings: Shardy propagated them, XLA's own partitioner may choose otherwise"
)

_SHARDING = "mhlo.sharding"


def has_gspmd(module: Any) -> bool:
    """Whether the module has old-style shardings and no Shardy mesh."""
    if any(view.operation.name == "sdy.mesh" for view in module.body.operations):
        return False
    return bool(_texts(module))


def to_sdy(module: Any, entry: str) -> list[str]:
    """Rewrites the shardings of `module` in place to Shardy's, over one mesh; returns notes.

    Parts in one device's shapes (`shard_map` of old) become manual computations; for these, calls of `entry` are
    inlined. Raises `InputError` where no one mesh fits them all.
    """
    from jaxlib.mlir.dialects import sdy

    ir = mlir.bindings()
    if has_manual(module):
        mlir.inline_calls(module, entry)
    attributes = module.operation.attributes
    devices = int(attributes["mhlo.num_partitions"].value) if "mhlo.num_partitions" in attributes else 1
    tilings = {text: gspmd.parse(text, devices) for text in _texts(module)}
    mesh = gspmd.common_axes(tilings.values(), devices)
    with module.context, ir.Location.unknown():
        anchor = module.body.operations[0].operation
        with ir.InsertionPoint(anchor):
            sdy.MeshOp("mesh", ir.Attribute.parse(f"#sdy.mesh<[{gspmd.describe(mesh)}]>"))
        rewrite = _Rewrite(module, tilings, mesh)
        if has_manual(module):
            to_manual_computations(module, tilings, mesh, rewrite.attribute)
        rewrite.run()
    return [GSPMD_NOTE]


def _texts(module: Any) -> list[str]:
    """Every distinct old-style sharding in the module."""
    found: dict[str, None] = {}

    def note(holder: Any) -> None:
        if _SHARDING in holder:
            found.update(dict.fromkeys(gspmd.split_tuple(holder[_SHARDING].value)))

    for op in mlir.walk(module):
        if op.name == "func.func":
            for name in ("arg_attrs", "res_attrs"):
                for entry in op.attributes.get(name, ()):
                    note(entry)
        elif op.name != "builtin.module":
            note(op.attributes)
    return list(found)


class _Rewrite:
    def __init__(self, module: Any, tilings: dict[str, Tiling], mesh: DeviceAxes) -> None:
        self._ir = mlir.bindings()
        self._module = module
        self._tilings = tilings
        self._mesh = mesh

    def run(self) -> None:
        calls: list[Any] = []

        for op in mlir.walk(self._module):
            if op.name == "func.func":
                self._signature(op)
            elif _SHARDING in op.attributes:
                calls.append(op)
        for op in calls:
            self._op(op)

    def _signature(self, op: Any) -> None:
        ir = self._ir
        kind = ir.FunctionType(ir.TypeAttr(op.attributes["function_type"]).value)
        for name, types in (("arg_attrs", kind.inputs), ("res_attrs", kind.results)):
            if name not in op.attributes:
                continue
            entries: list[Any] = []
            for entry, value_type in zip(op.attributes[name], types, strict=True):
                items = {item.name: item.attr for item in entry}
                text = items.pop(_SHARDING, None)
                if text is not None:
                    items["sdy.sharding"] = self.attribute(text.value, value_type)
                entries.append(ir.DictAttr.get(items))
            op.attributes[name] = ir.ArrayAttr.get(entries)

    def _op(self, op: Any) -> None:
        ir = self._ir
        target = op.attributes["call_target_name"].value if op.name == "stablehlo.custom_call" else ""
        texts = gspmd.split_tuple(op.attributes[_SHARDING].value)
        if target == "Sharding":
            self._constraint(op, texts[0])
            return
        del op.attributes[_SHARDING]
        if len(texts) == len(op.results) and not any(self._tilings[text].manual for text in texts):
            shardings = [str(self.attribute(text, value.type)) for text, value in zip(texts, op.results, strict=True)]
            inner = ", ".join(text.removeprefix("#sdy.sharding") for text in shardings)
            op.attributes["sdy.sharding"] = ir.Attribute.parse(f"#sdy.sharding_per_value<[{inner}]>")

    def _constraint(self, op: Any, text: str) -> None:
        """A sharding constraint, unless `op` leaves all dimensions to the partitioner."""
        from jaxlib.mlir.dialects import sdy

        ir = self._ir
        value, free = op.results[0], open_dims(op)
        rank = ir.ShapedType(value.type).rank if isinstance(value.type, ir.RankedTensorType) else 0
        tiling = self._tilings[text]
        split = tiling.rank == rank and any(tile > 1 for tile in tiling.tiles)
        if tiling.manual or (not split and len(free) == rank):
            value.replace_all_uses_with(op.operands[0])
        else:
            with ir.InsertionPoint(op), op.location:
                constraint = sdy.ShardingConstraintOp(op.operands[0], self.attribute(text, value.type, free))
            value.replace_all_uses_with(constraint.result)
        op.erase()

    def attribute(self, text: str, value_type: Any, free: Sequence[int] = ()) -> Any:
        """The Shardy attribute for the old-style sharding `text`, whose dimensions in `free` are open."""
        ir = self._ir
        tiling = self._tilings[text]
        rank = ir.ShapedType(value_type).rank if isinstance(value_type, ir.RankedTensorType) else 0
        dims = gspmd.axes_of(tiling, self._mesh) if tiling.rank == rank else ((),) * rank
        return ir.Attribute.parse(gspmd.sharding_text(dims, free))
