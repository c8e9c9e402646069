"""Asynchronous tensor parallelism of PyTorch: which gathers and scatters TorchInductor pipelines with their products.

`micro_pipeline_tp_pass` of torch 2.6 (`torch/_inductor/fx_passes/micro_pipeline_tp.py`): a gather is cut up with the
products that multiply its result from the left, a scatter with the product that alone makes its operand. Sums of
products (gradients of inputs that several layers read) are scattered as before, and so is what is gathered in 16 bits
and cast afterwards.
"""

from typing import Final

from stablecast.ir.device_program import Collective, DeviceProgram, Kernel, Node
from stablecast.ir.kernels import KernelClass

_GATHER: Final = "_c10d_functional.all_gather_into_tensor"
_SCATTER: Final = "_c10d_functional.reduce_scatter_tensor"
_LAYERS: Final = "/layers/"


def pipelined_share(program: DeviceProgram, cast_after: bool) -> float:
    """Share of what layers gather and scatter that is pipelined, by bytes. `cast_after`: gathers are cast to 8 bits."""
    read: set[int] = set()
    for node in program.body:
        if _klass(program, node) == KernelClass.MATMUL:
            read.update(source for dep in node.deps for source in (dep, *_through(program, dep)))
    total = done = 0
    for index, node in enumerate(program.body):
        if not isinstance(node, Collective) or _LAYERS not in node.scope:
            continue
        if node.scope.endswith(_GATHER):
            fused = not cast_after and index in read
        elif node.scope.endswith(_SCATTER):
            made = [source for dep in node.deps for source in (_through(program, dep) or (dep,))]
            fused = [_klass(program, program.body[source]) for source in made] == [KernelClass.MATMUL]
        else:
            continue
        total += node.message_bytes
        done += node.message_bytes if fused else 0
    return done / total if total else 0.0


def _klass(program: DeviceProgram, node: Node) -> str:
    return str(program.table.rows[node.row].klass) if isinstance(node, Kernel) else ""


def _through(program: DeviceProgram, node: int) -> tuple[int, ...]:
    """What a node that only copies has copied, nothing for others."""
    found = program.body[node]
    return found.deps if _klass(program, found) == KernelClass.COPY else ()
