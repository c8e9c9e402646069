"""Text and JSON of a program without a device: its work and its kernels."""

from collections.abc import Mapping, Sequence
from typing import Any

from stablecast.backends.prediction import unmodelled_dict
from stablecast.ir.device_program import DeviceProgram
from stablecast.ir.scopes import parse_scope
from stablecast.ir.text import count, percent, quantity, table

_LARGEST = 12


def program_dict(program: DeviceProgram, name: str) -> dict[str, Any]:
    """Work and kernels as JSON."""
    total, exact = program.work.evaluate()
    rows = zip(program.table.rows, program.table.count, strict=True)
    return {
        "schema": 1,
        "workload": name,
        "devices": program.num_devices,
        "exec": program.exec_model,
        "platform": program.platform,
        "complete": program.complete and exact,
        "unmodelled": [unmodelled_dict(entry) for entry in program.unmodelled],
        "peak_memory_bytes": program.buffers.peak_bytes if program.buffers else 0,
        "work": total.to_dict(),
        "kernels": [
            {
                "class": str(row.klass),
                "shape": row.shape,
                "count": float(runs),
                "matmul_flops": row.matmul_flops,
                "bytes": row.bytes_read + row.bytes_written,
            }
            for row, runs in rows
        ],
        "collectives": [
            {
                "kind": node.kind,
                "axes": list(node.groups.axes),
                "group_size": node.groups.size,
                "bytes": node.message_bytes,
                "count": runs if isinstance(runs, int) else str(runs),
            }
            for node, runs in program.collectives()
        ],
    }


def program_text(program: DeviceProgram, name: str) -> str:
    """Work, kernels by class, and the kernels that move most."""
    total, _ = program.work.evaluate()
    launches = float(program.table.count.sum())
    lines = [
        name,
        f"  one device of {program.num_devices}: {quantity(total.matmul_flops, 'FLOP')} matrix, "
        f"{quantity(total.vector_flops, 'FLOP')} vector, {quantity(total.nbytes, 'B')} moved, "
        f"{count(launches)} kernels",
        "  give --on DEVICE for a time",
        "",
    ]
    moved = [
        (row.bytes_read + row.bytes_written) * float(runs)
        for row, runs in zip(program.table.rows, program.table.count, strict=True)
    ]
    order = sorted(range(len(moved)), key=lambda index: -moved[index])
    scopes = _scopes(program)
    rows: list[tuple[str, ...]] = [("bytes", "share", "FLOP", "runs", "kernel", "shape", "scope")]
    for index in order[:_LARGEST]:
        row, runs = program.table.rows[index], float(program.table.count[index])
        share = percent(moved[index] / max(1.0, total.nbytes))
        cells = (quantity(moved[index], "B"), share, quantity(row.matmul_flops * runs, ""), count(runs))
        rows.append((*cells, str(row.klass), row.shape, scopes.get(index, "")))
    return "\n".join([*lines, *table(rows, right=(0, 1, 2, 3), indent="  ")])


def _scopes(program: DeviceProgram) -> dict[int, str]:
    from stablecast.ir.device_program import Kernel

    return {node.row: parse_scope(node.scope).label for node in reversed(program.body) if isinstance(node, Kernel)}


def work_text(counted: Mapping[str, Any], name: str) -> str:
    """The work object as lines; the conventions last."""
    lines = [name]
    units = {
        "bytes_read": "B",
        "bytes_written": "B",
        "transcendentals": "",
        "matmul_flops": "FLOP",
        "vector_flops": "FLOP",
    }
    lines += [
        f"  {key.replace('_', ' '):16} {quantity(counted[key], unit):>14}   {counted[key]:,}"
        for key, unit in units.items()
    ]
    lines.append(f"  {'complete' if counted['complete'] else 'INCOMPLETE: a lower bound'}")
    for entry in counted.get("unmodelled", ()):
        lines.append(f"  not modelled: {entry['op']} x {entry['count']}, {percent(entry['share'])} of the bytes")
    conventions = counted.get("conventions", {})
    lines.append(
        "  counted with " + ", ".join(f"{key}={value}" for key, value in conventions.items() if value not in ({}, ""))
    )
    return "\n".join(lines)


def ops_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """The support matrix as a table."""
    head = tuple(rows[0])
    return "\n".join(table([head, *(tuple(str(row[name]) for name in head) for row in rows)]))
