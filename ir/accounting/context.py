"""Where rules are looked up and their answers kept."""

from dataclasses import dataclass, field, replace

from stablecast.ir.accounting.registry import OPS, TARGETS, Entry, Kind
from stablecast.ir.accounting.values import Basis, Conventions, OpWork
from stablecast.ir.attributes import CustomCall
from stablecast.ir.dtypes import DTypeKind
from stablecast.ir.errors import InputError
from stablecast.ir.kernels import KernelClass
from stablecast.ir.program import Block, Op, Program
from stablecast.ir.types import TensorType, ValueType

_CONTROL_KINDS = frozenset({DTypeKind.INT, DTypeKind.UINT, DTypeKind.BOOL})
_COMPOSITES = frozenset({"stablehlo.composite", "mhlo.composite"})
_CUSTOM_CALLS = frozenset({"stablehlo.custom_call", "mhlo.custom_call"})


@dataclass(frozen=True, slots=True)
class BodyCost:
    """What one application of a scalar body costs: vector FLOPs and transcendentals."""

    flops: float = 0
    transcendentals: float = 0


@dataclass(slots=True)
class Context:
    """A program and what has been worked out for its ops.

    `work(op)` is the work of an op that is not control flow; equal ops (by signature) are worked out once.
    """

    program: Program
    conventions: Conventions = field(default_factory=Conventions)
    memo: dict[tuple[int, bool], OpWork] = field(default_factory=dict[tuple[int, bool], OpWork])

    def work(self, op: Op, in_place: bool = False) -> OpWork:
        """The work of `op` run once.

        `in_place`: the op may write into the buffer of its first operand (which is donated or dead afterwards); it
        then touches only the slice it changes. Raises `InputError` for control flow and for dynamic shapes.
        """
        key = (op.signature, in_place)
        found = self.memo.get(key)
        if found is None or op.signature < 0:
            found = self._work(op, in_place)
            self.memo[key] = found
        return found

    def entry(self, op: Op) -> Entry | None:
        """What the registries know of `op`: its target's entry for custom calls and composites that have one."""
        if op.name in _CUSTOM_CALLS or op.name in _COMPOSITES:
            return TARGETS.get(target_of(op)) or OPS.get(op.name)
        return OPS.get(op.name)

    def has_own_rule(self, op: Op) -> bool:
        """Whether a rule gives the work of `op` as a whole, so that its callee or regions need no visit."""
        entry = self.entry(op)
        return entry is None or entry.kind is not Kind.STRUCTURE

    def _work(self, op: Op, in_place: bool) -> OpWork:
        check_static(op)
        entry = self.entry(op)
        if entry is None:
            return opaque(op, f"no rule for {op.name}")
        if entry.kind is Kind.REFUSED:
            return opaque(op, entry.notes)
        if entry.kind is Kind.STRUCTURE:
            raise InputError(f"{op.name} is control flow: the work of its parts is asked for one by one")
        if entry.rule is None or (entry.control and is_control(op)):
            return OpWork(reads=(0,) * len(op.operands), writes=(0,) * len(op.results))
        work = entry.rule(op, self)
        if not work.reads and not work.writes and op.name in (_CUSTOM_CALLS | _COMPOSITES):
            work = replace(work, reads=reads_of(op), writes=writes_of(op))
        if entry.in_place and not in_place:
            return with_copy(op, work)
        return work

    def scalar_scan(self, op: Op, trips: int) -> OpWork:
        """A scan whose body takes scalars: a running reduction of `trips` elements."""
        cost = self.body_cost(op.regions[0])
        return OpWork(
            vector_flops=trips * cost.flops,
            transcendentals=trips * cost.transcendentals,
            reads=reads_of(op),
            writes=writes_of(op),
            klass=KernelClass.REDUCTION,
        )

    def body_cost(self, block: Block) -> BodyCost:
        """One application of the scalar body of a reduction, sort, map or scatter."""
        flops = transcendentals = 0.0
        for op in block.ops:
            entry = OPS.get(op.name)
            if entry is not None and entry.rule is not None:
                work = entry.rule(op, self)
                flops += work.vector_flops
                transcendentals += work.transcendentals
            elif op.callee in self.program.functions:
                inner = self.body_cost(self.program.functions[op.callee].body)
                flops, transcendentals = flops + inner.flops, transcendentals + inner.transcendentals
        return BodyCost(flops, transcendentals)


def work_of(op: Op, context: Context) -> OpWork:
    """The work of `op` run once, not in place; see `Context.work`."""
    return context.work(op)


def target_of(op: Op) -> str:
    """The target of a custom call, or the name of a composite; empty for other ops."""
    if op.name in _COMPOSITES:
        return str(op.attrs.get("name", ""))
    target = op.attrs.get("call_target_name", "")
    return target.target if isinstance(target, CustomCall) else str(target)


def label_of(op: Op) -> str:
    """The op's name, with its target where it has one."""
    target = target_of(op) if op.name in _CUSTOM_CALLS or op.name in _COMPOSITES else ""
    return f"{op.name} @{target}" if target else op.name


def is_control(op: Op) -> bool:
    """Whether `op` works on rank-0 integers or booleans only: loop counters, slice starts, branch indices."""
    return all(
        isinstance(kind, TensorType) and not kind.shape and kind.dtype.kind in _CONTROL_KINDS
        for kind in op.result_types
    )


def check_static(op: Op) -> None:
    """Raises `InputError` where a shape that `op` touches is not fixed."""
    for kind in (*op.operand_types, *op.result_types):
        if kind.is_dynamic:
            where = f" at {op.location.source}" if op.location.source else ""
            raise InputError(f"{op.name}{where} has the dynamic shape {kind}", "export it with fixed shapes")


def tensor(kind: ValueType) -> TensorType:
    """`kind` as a tensor; raises `InputError` for a tuple."""
    if isinstance(kind, TensorType):
        return kind
    raise InputError(f"a tensor was expected, not {kind}")


def reads_of(op: Op) -> tuple[float, ...]:
    """Every operand once."""
    return tuple(kind.nbytes for kind in op.operand_types)


def writes_of(op: Op) -> tuple[float, ...]:
    """Every result once."""
    return tuple(kind.nbytes for kind in op.result_types)


def opaque(op: Op, note: str) -> OpWork:
    """An op of which only the bytes at its boundary are known."""
    return OpWork(reads=reads_of(op), writes=writes_of(op), klass=KernelClass.CUSTOM, basis=Basis.OPAQUE, note=note)


def with_copy(op: Op, work: OpWork) -> OpWork:
    """An in-place update whose buffer must be kept: the first operands are copied, then updated.

    As many operands are copied as there are results (a variadic scatter updates several).
    """
    count = len(op.results)
    whole = [kind.nbytes for kind in op.operand_types[:count]]
    reads = tuple(full + part for full, part in zip(whole, work.reads[:count], strict=True)) + work.reads[count:]
    writes = tuple(full + part for full, part in zip(whole, work.writes, strict=True))
    return replace(work, reads=reads, writes=writes, note="copies its operand, which is needed later or not donated")
