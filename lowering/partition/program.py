"""`partition`: the entry point."""

from dataclasses import replace
from typing import Any

from stablecast.ir.pause import paused_gc
from stablecast.ir.program import Argument, Function, Program
from stablecast.ir.reader import read
from stablecast.ir.types import ValueType
from stablecast.lowering.partition.layout import Layout
from stablecast.lowering.partition.local import Localiser
from stablecast.lowering.partition.rewrite import count_ops, drop_dead, share_reshards, to_reduce_scatter
from stablecast.lowering.partition.shardy import TIMEOUT_S, Worker, run_shardy

ORDER_NOTE = (
    "loops and shard_map together: Shardy ran on the module as captured, where XLA, which imports it first, is known "
    "to choose other shardings for values saved across a loop (FSDP)"
)

SCATTER_NOTE = (
    "sums of which each device keeps its part are taken as reduce-scatters; XLA for TPU makes such fusions of them, or "
    "loops of permutations beside the product"
)
_KEEPS_SUMS = frozenset({"cpu"})
"""Platforms for which XLA leaves such a sum whole, and slices."""


def partition(
    data: bytes,
    source: str = "module",
    *,
    route: str = "auto",
    timeout_s: float = TIMEOUT_S,
    worker: Worker | None = None,
    platform: str = "",
) -> Program:
    """The program of one device of the global module in `data` (MLIR text, bytecode or portable artifact).

    Shardy propagates the shardings and makes collectives explicit, in a child process; local shapes, groups over mesh
    axes and what Shardy leaves out are worked out here. `route`: `auto` takes XLA's import order where that works;
    `direct` leaves it out. `worker`: a child started earlier by `start_worker`. `platform`: whose compiler decides what
    becomes of sums of which each device keeps its part; reduce-scatters on all but `cpu`. The cost does not depend on
    the number of devices. `Program.notes` says what was assumed.

    Raises `InputError` for a module that cannot be read or whose arguments the mesh does not divide, `ToolError` where
    XLA or Shardy fails, dies or takes longer than `timeout_s`.
    """
    done = run_shardy(data, source, route=route, timeout_s=timeout_s, worker=worker)
    notes: list[str] = list(done.header["notes"])
    if done.header["order_matters"]:
        notes.append(ORDER_NOTE)
    with paused_gc():
        return _one_device(done, read(done.module, source), notes, platform)


def _one_device(done: Any, given: Program, notes: list[str], platform: str) -> Program:
    """The program of one device of what Shardy made of a module."""
    partitions = max(done.header["partitions"], given.num_partitions)
    given = replace(given, num_partitions=partitions, notes=(*given.notes, *notes))
    scatter = platform not in _KEEPS_SUMS
    program = Localiser(given, scatter=scatter).run()
    function = _described(program.main, done.header["arguments"])
    written = count_ops(given.main.body, "stablehlo.reduce_scatter")
    body = share_reshards(function.body)
    body = drop_dead(to_reduce_scatter(body, Layout(given.meshes), scatter=scatter))
    made = count_ops(body, "stablehlo.reduce_scatter") - written
    if made > 0 and platform == "tpu":
        program = replace(program, notes=(*program.notes, f"{SCATTER_NOTE} ({made} ops)"))
    return replace(program, functions={**program.functions, program.entry: replace(function, body=body)})


def _described(function: Function, held: list[dict[str, Any]]) -> Function:
    """Names and donation, which the way through HLO loses; donated buffers go to results of their type in order."""
    results = list(function.result_types)
    taken = {entry["alias"] for entry in held if entry["alias"] is not None}
    free: dict[ValueType, list[int]] = {}
    for index, kind in enumerate(results):
        if index not in taken:
            free.setdefault(kind, []).append(index)
    arguments: list[Argument] = []
    for argument, entry in zip(function.arguments, held, strict=True):
        alias = entry["alias"]
        if alias is None and entry["donated"] and free.get(argument.type):
            alias = free[argument.type].pop(0)
        arguments.append(replace(argument, name=entry["name"], aliases_output=alias))
    return replace(function, arguments=tuple(arguments))
