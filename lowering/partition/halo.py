"""Halo exchange: what a device needs of its neighbours' shards when windows cross the cut.

The rule is XLA's: device k makes results from the inputs `[first(k), last(k))`; of those it holds
`[k * size, (k + 1) * size)`. What lies to the left and right of that, at most over all devices, is sent by one
collective-permute each.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stablecast.ir.attributes import Shift
from stablecast.ir.program import Axis, Op
from stablecast.ir.types import TensorType, ValueType, as_tensor
from stablecast.lowering.partition.site import Site

FAR_NOTE = "a slice or pad of a sharded dimension fetches rows from beyond the next shard: modelled on XLA's rounds"


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


def rounds(
    parts: int, size: int, first: Callable[[int], int], last: Callable[[int], int], whole: int
) -> list[tuple[int, int]]:
    """The permutations by which devices fetch `[first(k), last(k))` from anywhere, as ranges of the own shard.

    XLA's greedy order: targets ascending, their sources ascending; each pair joins the first permutation in which
    neither takes part, and a permutation sends the range that covers all its pairs. Long meshes are taken at their
    ends, as what lies between repeats.
    """
    taken: list[tuple[set[int], set[int]]] = []
    spans: list[tuple[int, int]] = []
    near = range(parts) if parts <= 2 * _EXACT else (*range(_EXACT), *range(parts - _EXACT, parts))
    for target in near:
        low, high = max(first(target), 0), min(last(target), whole)
        for source in range(low // size, -(-high // size)) if high > low else ():
            if source == target:
                continue
            cut = max(low - source * size, 0), min(high - source * size, size)
            place = next(
                (i for i, (froms, to) in enumerate(taken) if source not in froms and target not in to), len(taken)
            )
            if place == len(taken):
                taken.append((set(), set()))
                spans.append(cut)
            taken[place][0].add(source)
            taken[place][1].add(target)
            spans[place] = min(spans[place][0], cut[0]), max(spans[place][1], cut[1])
    return spans


_EXACT = 256


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
        self.append("stablehlo.concatenate", pieces, types, wide, {"dimension": dim})

    def fetch(self, dim: int, axes: tuple[Axis, ...], mesh: str, spans: list[tuple[int, int]]) -> None:
        """Receive ranges of other shards, one permutation each, and put them beside the own shard."""
        pieces = [self.permuted(dim, axes, mesh, high - low, 1) for low, high in spans]
        if pieces:
            types = [self.kind, *(as_tensor(piece.result_type) for piece in pieces)]
            wide = _with_size(self.kind, dim, sum(kind.shape[dim] for kind in types))
            values = [self.value, *(piece.result for piece in pieces)]
            self.append("stablehlo.concatenate", values, types, wide, {"dimension": dim})

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
        op = site.builder.collective("collective_permute", source, part, part, groups, site.op.location, attrs=shift)
        self.ops.append(op)
        return op

    def gather(self, dim: int, axes: tuple[Axis, ...], mesh: str) -> None:
        """Gather the whole dimension on every device."""
        self.gather_to(dim, axes, mesh, as_tensor(self.site.op.operand_types[0]).shape[dim])

    def gather_to(self, dim: int, axes: tuple[Axis, ...], mesh: str, size: int) -> None:
        """Gather `dim` over `axes`, which makes it `size` long."""
        full = _with_size(self.kind, dim, size)
        groups = self.site.layout.groups(mesh, axes)
        op = self.site.builder.collective(
            "all_gather", self.value, self.kind, full, groups, self.site.op.location, attrs={"all_gather_dim": dim}
        )
        self.ops.append(op)
        self.value, self.kind = op.result, full

    def append(
        self, name: str, values: list[int], types: list[TensorType], result: TensorType, attrs: Mapping[str, Any]
    ) -> None:
        """One more op of this operand; it then is the op's result."""
        op = self.site.builder.op(name, values, types, (result,), attrs, location=self.site.op.location)
        self.ops.append(op)
        self.value, self.kind = op.result, result


def _with_size(kind: TensorType, dim: int, size: int) -> TensorType:
    return TensorType((*kind.shape[:dim], size, *kind.shape[dim + 1 :]), kind.dtype)


def final(site: Site, operands: list[int], types: list[ValueType], attrs: Mapping[str, Any] | None = None) -> Op:
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
