"""Halo exchange: what a device needs of its neighbours' shards when windows cross the cut.

The rule is XLA's: device k makes results from the inputs `[first(k), last(k))`; of those it holds
`[k * size, (k + 1) * size)`. What lies to the left and right of that, at most over all devices, is sent by one
collective-permute each.
"""

from collections.abc import Callable
from dataclasses import dataclass

from stablecast.ir.attributes import Shift
from stablecast.ir.program import Axis, Op
from stablecast.ir.types import TensorType, ValueType, as_tensor
from stablecast.lowering.partition.site import Site

FAR_NOTE = "a slice or pad of a sharded dimension moves rows farther than to the next shard: modelled, not XLA's exact steps"


@dataclass(frozen=True, slots=True)
class Halo:
    """Elements of one dimension that come from the left and from the right."""

    left: int
    right: int

    @property
    def empty(self) -> bool:
        return self.left <= 0 and self.right <= 0


def halo(parts: int, size: int, first: Callable[[int], int], last: Callable[[int], int]) -> Halo:
    """The halo of a dimension cut into `parts` shards of `size`; `first`, `last` are monotonic in the shard."""
    inner = (1, parts - 1), (0, parts - 2)
    left = max(k * size - first(k) for k in inner[0])
    right = max(last(k) - (k + 1) * size for k in inner[1])
    return Halo(max(left, 0), max(right, 0))


@dataclass(slots=True)
class Exchange:
    """Builds the ops that widen one operand; `value`, `kind` are what it has become."""

    site: Site
    value: int
    kind: TensorType
    ops: list[Op]

    @staticmethod
    def of(site: Site, operand: int) -> "Exchange":
        return Exchange(site, site.operands[operand], as_tensor(site.local[operand]), [])

    def widen(self, dim: int, axes: tuple[Axis, ...], mesh: str, around: Halo) -> None:
        """Receive `around` from both neighbours along `dim` and put it beside the own shard."""
        if around.empty:
            return
        pieces, types = [self.value], [self.kind]
        for amount, step in ((around.left, 1), (around.right, -1)):
            if amount > 0:
                piece = self.permuted(dim, axes, mesh, amount, step)
                pieces.insert(0 if step == 1 else len(pieces), piece.result)
                types.insert(0 if step == 1 else len(types), as_tensor(piece.result_type))
        wide = _with_size(self.kind, dim, sum(kind.shape[dim] for kind in types))
        self._append("stablehlo.concatenate", pieces, types, wide, {"dimension": dim})

    def permuted(self, dim: int, axes: tuple[Axis, ...], mesh: str, amount: int, step: int) -> Op:
        """`amount` elements of the own shard along `dim` sent `step` places on."""
        site = self.site
        part = _with_size(self.kind, dim, amount)
        source = self.value
        if part != self.kind:
            attrs = {
                "start_indices": (0,) * part.rank,
                "limit_indices": part.shape,
                "strides": (1,) * part.rank,
            }
            cut = site.builder.op("stablehlo.slice", (source,), (self.kind,), (part,), attrs, location=site.op.location)
            self.ops.append(cut)
            source = cut.result
        groups = site.layout.groups(mesh, axes)
        shift = {"shift": Shift(axes[0].name, step, cyclic=False)} if len(axes) == 1 else {}
        op = site.builder.collective("collective_permute", source, part, part, groups, site.op.location, **shift)
        self.ops.append(op)
        return op

    def gather(self, dim: int, axes: tuple[Axis, ...], mesh: str) -> None:
        """Gather the whole dimension on every device."""
        whole = self.site.op.operand_types[0]
        full = _with_size(self.kind, dim, as_tensor(whole).shape[dim])
        groups = self.site.layout.groups(mesh, axes)
        op = self.site.builder.collective(
            "all_gather", self.value, self.kind, full, groups, self.site.op.location, all_gather_dim=dim
        )
        self.ops.append(op)
        self.value, self.kind = op.result, full

    def _append(
        self, name: str, values: list[int], types: list[TensorType], result: TensorType, attrs: dict[str, object]
    ) -> None:
        op = self.site.builder.op(name, values, types, (result,), attrs, location=self.site.op.location)
        self.ops.append(op)
        self.value, self.kind = op.result, result


def _with_size(kind: TensorType, dim: int, size: int) -> TensorType:
    return TensorType((*kind.shape[:dim], size, *kind.shape[dim + 1 :]), kind.dtype)


def final(site: Site, operands: list[int], types: list[ValueType], attrs: dict[str, object] | None = None) -> Op:
    """The op itself on other operands, with its own results."""
    op = site.op
    return site.builder.op(
        op.name,
        operands,
        types,
        site.result_local,
        op.attrs if attrs is None else attrs,
        results=op.results,
        regions=op.regions,
        location=op.location,
    )
