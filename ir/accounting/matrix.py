"""The support matrix: every op and target that is known, how its work is found, and how well."""

from collections.abc import Iterable
from dataclasses import dataclass

from stablecast.ir.accounting.registry import OPS, TARGETS, Entry, Kind

_WORK = {
    Kind.RULE: "rule",
    Kind.STRUCTURE: "its parts",
    Kind.PART: "none of its own",
    Kind.REFUSED: "refused",
}
_HEADER = """# Supported ops

Generated from the work rules; do not edit. `python -m stablecast.ir.accounting docs/ops.md` writes it anew.

1 multiply-add = 2 FLOP. Matrix FLOPs are those of products, convolutions and factorisations; vector FLOPs everything
else; transcendentals stand apart. Unless a row says otherwise, an op reads its operands and writes its results once,
sub-byte types packed. An `mhlo` op of the same name has the same rule. Arithmetic on rank-0 integers and booleans is
loop and address control: 0 FLOP, 0 B.

Basis: `exact` counts, `formula` estimates by the formula given, `opaque` knows only the bytes and marks the total
incomplete. An op that is not listed is opaque.
"""


@dataclass(frozen=True, slots=True)
class Support:
    """One row: `op` is an op's full name, or a target with `@` before it. `klass` is empty where parts decide."""

    op: str
    work: str
    klass: str
    basis: str
    notes: str

    def to_dict(self) -> dict[str, str]:
        return {"op": self.op, "work": self.work, "class": self.klass, "basis": self.basis, "notes": self.notes}


def support_matrix() -> list[Support]:
    """Every op, then every custom-call target and composite, by name."""
    ops = [_row(entry, entry.name) for entry in sorted(OPS, key=lambda entry: entry.name)]
    return ops + [_row(entry, f"@{entry.name}") for entry in sorted(TARGETS, key=lambda entry: entry.name)]


def _row(entry: Entry, name: str) -> Support:
    has_rule = entry.kind is Kind.RULE
    klass = str(entry.klass) if has_rule and entry.klass else ""
    basis = str(entry.basis) if has_rule or entry.kind is Kind.REFUSED else ""
    return Support(name, _WORK[entry.kind], klass, basis, entry.notes)


def markdown() -> str:
    """The matrix as the page `docs/ops.md`, ops and targets of one rule on one line."""
    rows = support_matrix()
    titles = {
        "StableHLO and MHLO": ("stablehlo", "mhlo"),
        "CHLO": ("chlo",),
        "Shardy": ("sdy",),
        "Others": (),
    }
    known = {dialect for dialects in titles.values() for dialect in dialects}
    text = [_HEADER]
    for title, dialects in titles.items():
        chosen = [row for row in rows if _title_dialect(row, known) in (dialects or ("",))]
        text.append(f"\n## {title}\n\n{_grouped(chosen)}")
    text.append(f"\n## Custom-call targets\n\n{_grouped([row for row in rows if row.op.startswith('@')])}")
    return "".join(text)


def _title_dialect(row: Support, known: set[str]) -> str:
    """The dialect that a table is for, empty for other ops, `@` for targets."""
    dialect = row.op.partition(".")[0]
    if row.op.startswith("@"):
        return "@"
    return dialect if dialect in known else ""


def _grouped(rows: Iterable[Support]) -> str:
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for row in rows:
        groups.setdefault((row.work, row.klass, row.basis, row.notes), []).append(row.op)
    lines = ["| op | work | class | basis | notes |", "|---|---|---|---|---|"]
    for (work, klass, basis, notes), names in groups.items():
        listed = ", ".join(f"`{name.removeprefix('@')}`" for name in _merged(names))
        lines.append(f"| {listed} | {work} | {klass} | {basis} | {notes.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def _merged(names: list[str]) -> list[str]:
    """Leaves out an `mhlo` op beside the `stablehlo` op of the same name."""
    return [name for name in names if name.replace("mhlo.", "stablehlo.", 1) == name or _twin(name) not in names]


def _twin(name: str) -> str:
    return name.replace("mhlo.", "stablehlo.", 1) if name.startswith("mhlo.") else name
