"""The walk over a program that counts how often each distinct op runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from stablecast.ir.accounting.buffers import Buffers, updating_functions
from stablecast.ir.accounting.context import Context, opaque
from stablecast.ir.accounting.registry import Kind
from stablecast.ir.accounting.tally import Runs, Tally, weigh
from stablecast.ir.accounting.values import OpWork
from stablecast.ir.program import Block, Op
from stablecast.ir.types import TensorType

_UNSEEN, _STRUCTURE, _IN_PLACE, _MASKABLE = -1, -2, -3, -4
_LOOPS = frozenset({"stablehlo.while", "mhlo.while"})
_BRANCHES = frozenset({"stablehlo.case", "stablehlo.if", "mhlo.case", "mhlo.if"})
_SCANS = frozenset({"chlo.scan", "mhlo.scan"})
_NONE: Mapping[tuple[tuple[int, ...], int], float] = {}


@dataclass(slots=True)
class Walker:
    """Counts the runs of every distinct op of a program under one convention for branches.

    `entries`: the distinct ops, by number, with their work. `branched`: whether a branch was met. `masked`: share of a
    product that a causal mask lets through, by path of calls and result.
    """

    context: Context
    branch: str | float = "max"
    masked: Mapping[tuple[tuple[int, ...], int], float] = field(default_factory=lambda: _NONE)
    entries: list[tuple[Op, OpWork]] = field(default_factory=list[tuple[Op, OpWork]])
    branched: bool = False
    _numbers: dict[int, int] = field(default_factory=dict[int, int])
    _variants: dict[tuple[int, object], int] = field(default_factory=dict[tuple[int, object], int])
    _functions: dict[tuple[str, tuple[bool, ...]], Tally] = field(
        default_factory=dict[tuple[str, tuple[bool, ...]], Tally]
    )
    _updating: frozenset[str] = frozenset()
    _path: tuple[int, ...] = ()

    def entry(self) -> Tally:
        """The runs of one call of the program's entry function."""
        main = self.context.program.main
        self._updating = updating_functions(self.context.program)
        donated = {
            value
            for value, argument in zip(main.body.args, main.arguments, strict=False)
            if argument.aliases_output is not None
        }
        return self.block(main.body, donated)

    def block(self, block: Block, owned: set[int]) -> Tally:
        """The runs of one pass through `block`; `owned`: arguments whose buffers it may overwrite."""
        runs: Runs = {}
        numbers = self._numbers
        parts: list[Tally] = []
        buffers = Buffers(block, owned)
        for position, op in enumerate(block.ops):
            number = numbers.get(op.signature, _UNSEEN)
            if number < 0:
                found = self._special(op, number, position, buffers)
                if isinstance(found, Tally):
                    parts.append(found)
                    continue
                number = found
            runs[number] = runs.get(number, 0) + 1
        tally = Tally.of(runs)
        for part in parts:
            tally = tally.add(part)
        return tally

    def _special(self, op: Op, number: int, position: int, buffers: Buffers) -> Tally | int:
        """The number of an op met for the first time or whose work depends on its place, or the runs inside it."""
        if number == _UNSEEN:
            number = self._classify(op)
            if op.signature >= 0:
                self._numbers[op.signature] = number
        if number == _IN_PLACE:
            reuses = buffers.may_reuse(op.operands[0], position)
            return self._variant(op, reuses, self.context.work(op, in_place=reuses))
        if number == _MASKABLE:
            return self._product(op)
        return self._inside(op, position, buffers) if number == _STRUCTURE else number

    def _classify(self, op: Op) -> int:
        entry = self.context.entry(op)
        if entry is not None and entry.kind is Kind.STRUCTURE:
            return _STRUCTURE
        if entry is not None and entry.in_place:
            return _IN_PLACE
        if self.masked and op.name in ("stablehlo.dot_general", "mhlo.dot_general"):
            return _MASKABLE
        return self._append(op, self.context.work(op))

    def _append(self, op: Op, work: OpWork) -> int:
        self.entries.append((op, work))
        return len(self.entries) - 1

    def _variant(self, op: Op, variant: object, work: OpWork) -> int:
        if op.signature < 0:
            return self._append(op, work)
        key = (op.signature, variant)
        if key not in self._variants:
            self._variants[key] = self._append(op, work)
        return self._variants[key]

    def _product(self, op: Op) -> int:
        work = self.context.work(op)
        share = self.masked.get((self._path, op.result), 1.0)
        return self._variant(op, share, scaled_products(work, share))

    def _inside(self, op: Op, position: int, buffers: Buffers) -> Tally:
        if op.name in _LOOPS:
            return self._loop(op)
        if op.name in _BRANCHES:
            return self._branch(op, position, buffers)
        if op.name in _SCANS:
            return self._scan(op)
        if op.name == "sdy.manual_computation":
            return self.block(op.regions[0], set()).times(self._manual_devices(op))
        if op.callee in self.context.program.functions:
            return self._call(op, position, buffers)
        if op.regions and op.regions[0].ops:
            return self.block(op.regions[0], set())
        return Tally.of({self._append(op, opaque(op, f"its function @{op.callee} is not in the program")): 1})

    def _loop(self, op: Op) -> Tally:
        """A loop that never runs still evaluates its condition, of which only tensor ops count."""
        cond, body = op.regions
        inner = self.block(body, set(body.args)).times(op.count)
        test = self.block(cond, set())
        if isinstance(op.count, int):
            return inner.add(test.times(op.count + 1))
        return inner.add(test.times(op.count)).add(test)

    def _branch(self, op: Op, position: int, buffers: Buffers) -> Tally:
        self.branched = True
        dead = buffers.dead_after(position)
        tallies = [self.block(region, dead) for region in op.regions]
        if not tallies:
            return Tally()
        if isinstance(self.branch, float) and len(tallies) == 2:
            yes, no = tallies if op.name.endswith("if") else tallies[::-1]
            return yes.times(self.branch).add(no.times(1 - self.branch))
        if isinstance(self.branch, float):
            return self._dearest(tallies, 1).times(self.branch).add(self._dearest(tallies, -1).times(1 - self.branch))
        return self._dearest(tallies, 1 if self.branch == "max" else -1)

    def _dearest(self, tallies: Sequence[Tally], sign: int) -> Tally:
        """The branch with most FLOPs and, apart from it, the one with most bytes; least where `sign` is -1."""
        by_flops = max(tallies, key=lambda tally: sign * self._flops(tally))
        by_bytes = max(tallies, key=lambda tally: sign * self._bytes(tally))
        return by_flops if by_flops is by_bytes else Tally(by_flops.flops, by_bytes.nbytes)

    def _flops(self, tally: Tally) -> float:
        padding = self.context.conventions.padding
        return weigh(tally.flops, self._values, lambda number: self.entries[number][1].counted(padding).flops)

    def _bytes(self, tally: Tally) -> float:
        return weigh(tally.nbytes, self._values, lambda number: self.entries[number][1].nbytes)

    @property
    def _values(self) -> Mapping[str, int]:
        return self.context.conventions.loops

    def _scan(self, op: Op) -> Tally:
        """Its body runs once for each slice along `dimension` of its inputs; a scalar body is no loop control."""
        first = op.operand_types[0]
        axis = int(op.attrs.get("dimension", 0))
        trips = first.shape[axis] if isinstance(first, TensorType) and first.shape else 1
        body = op.regions[0]
        if all(not kind.shape for kind in body.arg_types if isinstance(kind, TensorType)):
            return Tally.of({self._variant(op, "scan", self.context.scalar_scan(op, trips)): 1})
        return self.block(body, set(body.args)).times(trips)

    def _manual_devices(self, op: Op) -> int:
        program = self.context.program
        if not program.stage.is_global:
            return 1
        axes = {name: size for mesh in program.meshes for name, size in mesh.axes}
        devices = 1
        for name in op.attrs.get("manual_axes", ()):
            devices *= axes.get(name, 1)
        return devices

    def _call(self, op: Op, position: int, buffers: Buffers) -> Tally:
        function = self.context.program.functions[op.callee]
        gives: tuple[bool, ...] = ()
        if op.callee in self._updating:
            gives = tuple(buffers.may_reuse(value, position) for value in op.operands)
        owned = {value for value, given in zip(function.body.args, gives, strict=False) if given}
        if self.masked:
            outer, self._path = self._path, (*self._path, op.result if op.results else -1)
            tally = self.block(function.body, owned)
            self._path = outer
            return tally
        key = (op.callee, gives)
        if key not in self._functions:
            self._functions[key] = self.block(function.body, owned)
        return self._functions[key]


def scaled_products(work: OpWork, share: float) -> OpWork:
    """`work` with only a share of its products."""
    if share == 1:
        return work
    return replace(work, matmul_flops=work.matmul_flops * share, note="only the pairs that the mask lets through")
