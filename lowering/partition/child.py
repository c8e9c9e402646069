"""The child process that runs XLA's import and the Shardy passes, whose C++ checks may abort the process.

Reads one request from standard input (a JSON line, then a module) and writes the answer (a JSON line, then the
partitioned module as bytecode) to standard output; everything that C++ prints goes to standard error.
"""

import json
import os
import resource
import sys
from typing import Any

from stablecast.ir import mlir
from stablecast.ir.errors import StablecastError, ToolError
from stablecast.lowering.partition.conflicts import settle
from stablecast.lowering.partition.divisible import check_divisible
from stablecast.lowering.partition.gspmd_module import has_gspmd, to_sdy
from stablecast.lowering.partition.rules import teach

ROUND_TRIP_NOTE = "XLA could not import the module; Shardy ran on it as captured, in another order than XLA's"

_IMPORT = ("symbol-dce", "xla-sdy-round-trip-import-shardy-attrs")
_PROPAGATE = ("symbol-dce", "sdy-propagation-pipeline")
_EXPORT = ("sdy-export-pipeline{enable-insert-explicit-collectives=true}",)
_MANUAL = frozenset({"sdy.manual_computation"})
_LAYOUTS = frozenset({"result_layouts", "operand_layouts", "result_layout", "xla_shape"})
_LOOPS = frozenset({"stablehlo.while"})


def partition_module(data: bytes, source: str, route: str) -> tuple[dict[str, Any], bytes]:
    """The module in `data` with explicit Shardy collectives, as bytecode, and what a caller must know of it.

    `source` names it in messages. `route`: `hlo` (through HLO and back, XLA's order), `direct`, or `auto`.
    """
    module = mlir.parse(data, source)
    names = {op.name for op in mlir.walk(module)}
    header: dict[str, Any] = {"arguments": _arguments(module), "notes": []}
    header["order_matters"] = bool(names & _LOOPS and names & _MANUAL)
    header["partitions"] = _partitions(module)
    gspmd = has_gspmd(module)
    if gspmd:
        header["notes"] += to_sdy(module, entry_function(module).attributes["sym_name"].value)
    check_divisible(module, entry_function(module), [entry["name"] for entry in header["arguments"]])
    if gspmd:
        header["route"] = "gspmd"
    elif names & _MANUAL or route == "direct":
        header["route"] = "direct"
    else:
        module, header["route"] = _imported(data, module, header["notes"])
    mlir.inline_calls(module, entry_function(module).attributes["sym_name"].value)
    teach(module)
    mlir.run_passes(module, _PROPAGATE)
    settle(module)
    mlir.run_passes(module, _EXPORT)
    header["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return header, mlir.write_bytecode(module)


def _partitions(module: Any) -> int:
    attributes = module.operation.attributes
    return int(attributes["mhlo.num_partitions"].value) if "mhlo.num_partitions" in attributes else 1


def _imported(data: bytes, module: Any, notes: list[str]) -> tuple[Any, str]:
    plain = data.startswith(mlir.BYTECODE_MAGIC) and not mlir.is_artifact(data)
    try:
        imported = mlir.through_hlo(data if plain else mlir.write_bytecode(module), module.context)
        mlir.run_passes(imported, _IMPORT)
        constrain(imported)
        flatten_tuples(imported)
    except ToolError:
        notes.append(ROUND_TRIP_NOTE)
        return module, "direct"
    return imported, "hlo"


def constrain(module: Any) -> None:
    """Turns custom calls to `@Sharding` that carry a Shardy sharding into sharding constraints."""
    from jaxlib.mlir.dialects import sdy

    ir = mlir.bindings()
    calls = mlir.walk(module, "stablehlo.custom_call")
    found = [op for op in calls if op.attributes["call_target_name"].value == "Sharding"]
    for op in found:
        if "sdy.sharding" not in op.attributes:
            continue
        sharding = sdy.TensorShardingPerValueAttr(op.attributes["sdy.sharding"]).shardings[0]
        with ir.InsertionPoint(op), op.location:
            constraint = sdy.ShardingConstraintOp(op.operands[0], sharding)
        op.results[0].replace_all_uses_with(constraint.result)
        op.erase()


def flatten_tuples(module: Any) -> None:
    """Gives custom calls that return a tuple one result for each of its parts, as Shardy knows no tuples."""
    ir = mlir.bindings()
    for op in mlir.walk(module, "stablehlo.custom_call"):
        if len(op.results) != 1 or not isinstance(op.results[0].type, ir.TupleType):
            continue
        kind = op.results[0].type
        attributes = {name: op.attributes[name] for name in op.attributes if name not in _LAYOUTS}
        with ir.InsertionPoint(op):
            flat = ir.Operation.create(
                op.name,
                results=[kind.get_type(index) for index in range(kind.num_types)],
                operands=list(op.operands),
                attributes=attributes,
                loc=op.location,
            )
        parts = [use.owner for use in op.results[0].uses]
        if any(part.name != "stablehlo.get_tuple_element" for part in parts):
            raise ToolError("a custom call returns a tuple that is passed on whole")
        for part in parts:
            index = part.attributes["index"].value
            part.results[0].replace_all_uses_with(flat.results[index])
            part.operation.erase()
        op.erase()


def _arguments(module: Any) -> list[dict[str, Any]]:
    """Name, aliased result and donation of each argument of the entry, which XLA's import does not keep."""
    from stablecast.ir.reader.locations import LocationReader

    entry = entry_function(module)
    locate = LocationReader("the module to partition")
    attributes = entry.attributes
    given = list(attributes["arg_attrs"]) if "arg_attrs" in attributes else []
    described: list[dict[str, Any]] = []
    for index, value in enumerate(entry.regions[0].blocks[0].arguments):
        held = {item.name: item.attr for item in given[index]} if given else {}
        alias = held.get("tf.aliasing_output")
        described.append(
            {
                "name": locate(value.location).scope or f"arg{index}",
                "alias": int(alias.value) if alias is not None else None,
                "donated": "jax.buffer_donor" in held,
            }
        )
    return described


def entry_function(module: Any) -> Any:
    """The operation of `@main`, or of the first function."""
    functions = [view.operation for view in module.body.operations if view.operation.name == "func.func"]
    if not functions:
        raise ToolError("the module to partition holds no function")
    return next((op for op in functions if op.attributes["sym_name"].value == "main"), functions[0])


def main() -> None:
    """Answer the one request on standard input."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    request = json.loads(sys.stdin.buffer.readline())
    data = sys.stdin.buffer.read()
    try:
        header, body = partition_module(data, request["source"], request["route"])
    except StablecastError as error:
        header, body = {"error": error.message, "hint": error.hint, "kind": type(error).__name__}, b""
    out.write(json.dumps(header).encode() + b"\n" + body)
    out.flush()


if __name__ == "__main__":
    main()
