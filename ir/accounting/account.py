"""The work of a whole program as captured, before fusion."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stablecast.ir.accounting.context import Context, label_of
from stablecast.ir.accounting.masks import masked_shares
from stablecast.ir.accounting.tally import Tally, weigh
from stablecast.ir.accounting.values import Conventions, OpWork
from stablecast.ir.accounting.walk import Walker
from stablecast.ir.device_program import Unmodelled
from stablecast.ir.errors import InputError, near_names
from stablecast.ir.program import Op, Program
from stablecast.ir.reader.dynamic import dynamic_dimensions, unbound
from stablecast.ir.types import Symbol, TensorType
from stablecast.ir.work import Key, SymbolicWork, Work

_RAGGED = frozenset({"chlo.ragged_dot", "mhlo.ragged_dot"})
Entries = list[tuple[Op, OpWork]]


@dataclass(frozen=True, slots=True, repr=False)
class Account:
    """What a program does, op by op as captured: every op reads its operands and writes its results.

    `total`: by the symbols of unknown loops, under `conventions`; `work` puts numbers in. `low`, `high`: branches at
    their cheapest and dearest. `padded_flops`: matrix FLOPs on zeros of padding or dilation, of which `dilation_flops`
    are never in the totals. `matmul_by_dtype`: matrix FLOPs by the type of the left factor. `exact_loops`: every trip
    count is known or given, else the totals are a lower bound. `unmodelled`: ops without a rule that knows them.
    """

    name: str
    platform: str
    conventions: Conventions
    total: SymbolicWork
    low: Work
    high: Work
    exact_loops: bool
    unmodelled: tuple[Unmodelled, ...] = ()
    padded_flops: float = 0
    dilation_flops: float = 0
    matmul_by_dtype: Mapping[str, float] = field(default_factory=dict[str, float])
    notes: tuple[str, ...] = ()

    @property
    def work(self) -> Work:
        """The total, unknown loops at their given, default or least count."""
        return self.total.evaluate(self.conventions.loops)[0]

    @property
    def complete(self) -> bool:
        """Whether every op has a rule and every trip count is known."""
        return self.exact_loops and not self.unmodelled

    @property
    def symbols(self) -> tuple[Symbol, ...]:
        return self.total.symbols

    def to_dict(self) -> dict[str, Any]:
        """The `work` object of the command line: FLOP and bytes of one step, and how they were counted."""
        return {
            **self.work.to_dict(),
            "complete": self.complete,
            "lower_bound": not self.exact_loops,
            "low": self.low.to_dict(),
            "high": self.high.to_dict(),
            "padded_flops": _number(self.padded_flops),
            "dilation_flops": _number(self.dilation_flops),
            "matmul_flops_by_dtype": {name: _number(flops) for name, flops in self.matmul_by_dtype.items()},
            "symbols": [self._symbol(symbol) for symbol in self.symbols],
            "terms": [
                {"times": [symbol.name for symbol in key], **work.to_dict()} for key, work in self.total.terms.items()
            ],
            "unmodelled": [
                {"op": item.op, "count": _number(item.count), "bytes": _number(item.nbytes), "share": item.share}
                for item in self.unmodelled
            ],
            "conventions": self.conventions.to_dict(),
            "platform": self.platform,
            "notes": list(self.notes),
        }

    def __repr__(self) -> str:
        """The totals, the conventions, and what is missing, a line each."""
        work = self.work
        chosen = (
            f"padding {self.conventions.padding}, causal {self.conventions.causal}, branch {self.conventions.branch}"
        )
        lines = [
            f"work of {self.name}, before fusion ({chosen})",
            f"  matrix FLOP       {work.matmul_flops:>26,.0f}",
            f"  vector FLOP       {work.vector_flops:>26,.0f}",
            f"  transcendentals   {work.transcendentals:>26,.0f}",
            f"  bytes read        {work.bytes_read:>26,.0f}",
            f"  bytes written     {work.bytes_written:>26,.0f}",
        ]
        if not self.exact_loops:
            names = ", ".join(symbol.name for symbol in self.symbols)
            lines.append(f"  a lower bound: the trips of these loops are not known: {names}")
        lines += [
            f"  not modelled: {item.op}, {item.count:,.0f} times, {item.share:.1%} of the bytes"
            for item in self.unmodelled
        ]
        return "\n".join(lines)

    def _symbol(self, symbol: Symbol) -> dict[str, Any]:
        value = self.conventions.loops.get(symbol.name, symbol.default)
        return {"name": symbol.name, "low": symbol.low, "high": symbol.high, "value": value}


def _number(value: float) -> float:
    return int(value) if float(value).is_integer() else value


def account(program: Program, conventions: Conventions | None = None) -> Account:
    """The work of one call of `program`'s entry function.

    Raises `InputError` for a dynamic dimension that is not bound and for the name of a loop that the program has not.
    """
    chosen = conventions or Conventions()
    _check_loops(program, chosen)
    if open_dimensions := dynamic_dimensions(program):
        raise unbound(program.name, list(dict.fromkeys(item.name for item in open_dimensions)))
    context = Context(program, chosen)
    masked = masked_shares(program) if chosen.causal == "exact" else {}
    walker = Walker(context, chosen.branch, masked)
    tally = walker.entry()
    low, high = _extremes(walker, tally)
    padding = chosen.padding
    total = _symbolic(walker.entries, tally, padding)
    work, exact = total.evaluate(chosen.loops)
    return Account(
        name=program.name,
        platform=program.platform,
        conventions=chosen,
        total=total,
        low=low,
        high=high,
        exact_loops=exact,
        unmodelled=_unmodelled(walker.entries, tally, chosen, work.nbytes),
        padded_flops=weigh(tally.flops, chosen.loops, lambda number: walker.entries[number][1].padded_flops),
        dilation_flops=weigh(tally.flops, chosen.loops, lambda number: walker.entries[number][1].dilation_flops),
        matmul_by_dtype=_by_dtype(walker.entries, tally, chosen),
        notes=(*_whole_mesh(program), *_dense_ragged(program), *_notes(walker.entries)),
    )


def _check_loops(program: Program, conventions: Conventions) -> None:
    known = [symbol.name for symbol in program.symbols]
    for name in conventions.loops:
        if name not in known:
            hint = near_names(name, known) if known else "all its trip counts are known"
            raise InputError(f"the program has no loop count '{name}'", hint)


def _extremes(walker: Walker, tally: Tally) -> tuple[Work, Work]:
    """The totals with every branch at its cheapest and its dearest."""
    conventions = walker.context.conventions
    found: list[Work] = []
    for branch in ("min", "max"):
        runs, entries = tally, walker.entries
        if walker.branched and walker.branch != branch:
            other = Walker(walker.context, branch, walker.masked)
            runs, entries = other.entry(), other.entries
        found.append(_symbolic(entries, runs, conventions.padding).evaluate(conventions.loops)[0])
    return found[0], found[1]


def _symbolic(entries: Entries, tally: Tally, padding: str) -> SymbolicWork:
    terms: dict[Key, Work] = {(): Work()}
    counted = [work.counted(padding) for _, work in entries]
    for key, runs in tally.flops.items():
        parts = [0.0, 0.0, 0.0]
        for number, times in runs.items():
            work = counted[number]
            parts[0] += times * work.matmul_flops
            parts[1] += times * work.vector_flops
            parts[2] += times * work.transcendentals
        terms[key] = terms.get(key, Work()) + Work(*parts)
    for key, runs in tally.nbytes.items():
        read = sum(times * counted[number].bytes_read for number, times in runs.items())
        written = sum(times * counted[number].bytes_written for number, times in runs.items())
        terms[key] = terms.get(key, Work()) + Work(bytes_read=read, bytes_written=written)
    return SymbolicWork({key: work for key, work in terms.items() if not key or any(work.parts)})


def _unmodelled(entries: Entries, tally: Tally, conventions: Conventions, total: float) -> tuple[Unmodelled, ...]:
    groups: dict[str, list[int]] = {}
    for number, (op, work) in enumerate(entries):
        if not work.modelled:
            groups.setdefault(label_of(op), []).append(number)
    found: list[Unmodelled] = []
    for label, numbers in groups.items():
        members = frozenset(numbers)
        count = weigh(tally.nbytes, conventions.loops, lambda number, m=members: float(number in m))
        nbytes = weigh(
            tally.nbytes, conventions.loops, lambda number, m=members: entries[number][1].nbytes if number in m else 0
        )
        if count:
            reason = entries[numbers[0]][1].note
            found.append(Unmodelled(label, count, nbytes, nbytes / total if total else 0.0, reason))
    return tuple(sorted(found, key=lambda item: -item.nbytes))


def _by_dtype(entries: Entries, tally: Tally, conventions: Conventions) -> Mapping[str, float]:
    names: dict[str, list[int]] = {}
    for number, (op, work) in enumerate(entries):
        if work.matmul_flops:
            kind = op.operand_types[0]
            names.setdefault(kind.dtype.name if isinstance(kind, TensorType) else "tuple", []).append(number)
    padding = conventions.padding
    found: dict[str, float] = {}
    for name, numbers in names.items():
        members = frozenset(numbers)
        found[name] = weigh(
            tally.flops,
            conventions.loops,
            lambda number, m=members: entries[number][1].counted(padding).matmul_flops if number in m else 0,
        )
    return found


def _whole_mesh(program: Program) -> tuple[str, ...]:
    if not program.stage.is_global:
        return ()
    return (f"the program is not partitioned: its work is that of all {program.num_devices} devices together",)


def _dense_ragged(program: Program) -> tuple[str, ...]:
    """JAX lowers ragged products to dense ones where a platform has none; the scope still ends in their name."""
    for op in program.walk():
        if op.location.scope.endswith("/ragged_dot_general") and op.name not in _RAGGED:
            return ("a ragged dot was lowered to a dense product over all groups, which is what runs here",)
    return ()


def _notes(entries: Entries) -> tuple[str, ...]:
    return tuple(dict.fromkeys(f"{label_of(op)}: {work.note}" for op, work in entries if work.note and work.modelled))
