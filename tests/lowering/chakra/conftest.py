from collections.abc import Sequence

import numpy as np
import pytest

from stablecast.ir.device_program import P2P, Body, Buffers, Collective, DeviceProgram, Kernel, Loop, Node
from stablecast.ir.groups import over_axes
from stablecast.ir.kernels import FloatArray, KernelClass, KernelRow, KernelTable
from stablecast.ir.program import Mesh
from stablecast.ir.work import SymbolicWork, Work
from stablecast.lowering.chakra import RolePart

MATMUL = KernelRow(
    KernelClass.MATMUL, "bf16", "bf16", "f32", "bf16", m=4096, n=4096, k=1024, matmul_flops=2.0 * 4096 * 4096 * 1024,
    bytes_read=16e6, bytes_written=33554432, label="dot_general",
)  # fmt: skip
NORM = KernelRow(
    KernelClass.ELEMENTWISE,
    "vector",
    "bf16",
    "",
    "bf16",
    elems=4096,
    vector_flops=4096 * 5,
    bytes_read=8192,
    bytes_written=8192,
)
ROWS = (MATMUL, NORM)
DURATIONS = np.array([1.2345678e-4, 3e-7])


class Steps:
    """Small device programs over a mesh of named axes."""

    def __init__(self, **axes: int) -> None:
        self.mesh = Mesh("mesh", tuple(axes.items()))

    def reduce(
        self, axis: str, nbytes: int = 1 << 20, deps: Sequence[int] = (), kind: str = "all_reduce"
    ) -> Collective:
        groups = over_axes("mesh", self.mesh.axes, [axis])
        result = nbytes * groups.size if kind == "all_gather" else nbytes
        if kind == "reduce_scatter":
            result = nbytes // groups.size
        return Collective(kind, groups, nbytes, result, "add", "bf16", scope=f"sync/{kind}", deps=tuple(deps))

    def program(self, body: Body, name: str = "step") -> DeviceProgram:
        work = SymbolicWork({(): Work(matmul_flops=1e9, bytes_read=1e6)})
        buffers = Buffers(argument_bytes=1000, output_bytes=500, temp_bytes=100)
        return DeviceProgram(
            name, body, KernelTable.of(ROWS), work, self.mesh.size, (self.mesh,), platform="cuda", buffers=buffers
        )

    def layers(self, count: int = 3) -> DeviceProgram:
        """`count` layers of norm, product, all-reduce over tp; then an all-reduce over dp of each."""
        body: list[Node] = []
        for layer in range(count):
            before = (len(body) - 1,) if body else ()
            body.append(Kernel(1, scope=f"jit(step)/layer{layer}/norm/mul", deps=before))
            body.append(Kernel(0, scope=f"jit(step)/layer{layer}/mlp/dot_general", deps=(len(body) - 1,)))
            body.append(self.reduce("tp", deps=(len(body) - 1,)))
        body += [self.reduce("dp", 1 << 22, deps=(3 * layer + 1,)) for layer in range(count)]
        return self.program(tuple(body))

    def looped(self, count: int = 5) -> DeviceProgram:
        """The same layer in a loop."""
        inner = (
            Kernel(1, scope="layer/norm"),
            Kernel(0, scope="layer/mlp", deps=(0,)),
            self.reduce("tp", deps=(1,)),
        )
        return self.program(
            (Kernel(1, scope="embed"), Loop(inner, count, deps=(0,)), Kernel(1, scope="loss", deps=(1,)))
        )

    def stages(self) -> list[RolePart]:
        """Two pipeline stages over axis pp, which hand one message on and one back."""

        def part(stage: int) -> RolePart:
            there = P2P("send", "pp", 1, 7, 4096, deps=(1,)), P2P("recv", "pp", 1, 8, 2048)
            here = P2P("recv", "pp", -1, 7, 4096), P2P("send", "pp", -1, 8, 2048, deps=(2,))
            body: tuple[Node, ...]
            if stage == 0:
                body = (Kernel(1), Kernel(0, deps=(0,)), *there, Kernel(0, deps=(1, 3)), self.reduce("dp", deps=(4,)))
            else:
                body = (here[0], Kernel(0, deps=(0,)), Kernel(0, deps=(1,)), here[1], self.reduce("dp", deps=(2,)))
            return RolePart(f"stage{stage}", self.program(body, f"stage{stage}"), DURATIONS, {"pp": stage})

        return [part(0), part(1)]


@pytest.fixture
def steps() -> type[Steps]:
    """Makes small programs: `steps(dp=2, tp=4).layers()`."""
    return Steps


@pytest.fixture
def durations() -> FloatArray:
    """Seconds of the two kernels of `Steps`: a product and a norm."""
    return DURATIONS
