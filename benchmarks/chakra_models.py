"""Training steps of transformers as device programs, written down by hand: what the emission benchmarks write.

A layer is its matrix products, a flash attention, norms and element-wise kernels; tensor parallelism adds two
all-reduces a layer and pass, expert parallelism two all-to-alls and, since each of its devices has tokens of its own,
an all-reduce of the attention's gradients, data parallelism one all-reduce a layer, and pipeline stages hand
activations on and gradients back. Sizes are those of one device.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from stablecast.ir.device_program import P2P, Buffers, Collective, DeviceProgram, Kernel, Node
from stablecast.ir.groups import over_axes
from stablecast.ir.kernels import FloatArray, KernelClass, KernelRow, KernelTable
from stablecast.ir.program import Mesh
from stablecast.ir.work import SymbolicWork, total
from stablecast.lowering.chakra import RolePart

HALF = 2


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder. `ffn`: its inner width (of one expert); `gated`: with a second product into it; `experts`: 0 dense."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    gated: bool = True
    experts: int = 0
    topk: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Degrees of parallelism; `micro`: micro-batches of a step, of `sequences` sequences each on one device."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    micro: int = 1
    sequences: int = 1

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp * self.ep

    @property
    def mesh(self) -> Mesh:
        """Major to minor: data, pipeline, expert, tensor; axes of one device are left out."""
        axes = (("dp", self.dp), ("pp", self.pp), ("ep", self.ep), ("tp", self.tp))
        return Mesh("mesh", tuple((name, size) for name, size in axes if size > 1) or (("dp", 1),))


LLAMA_32 = Model("llama, 32 layers", 32, 4096, 32, 8, 14336, 128256, 4096)
GPT3_175B = Model("GPT-3 175B", 96, 12288, 96, 96, 4 * 12288, 50257, 2048, gated=False)
MIXTRAL_8X7B = Model("Mixtral 8x7B", 32, 4096, 32, 8, 14336, 32000, 4096, experts=8, topk=2)


@dataclass
class _Stage:
    model: Model
    plan: Plan
    index: int
    nodes: list[Node] = field(default_factory=list[Node])
    rows: dict[KernelRow, int] = field(default_factory=dict[KernelRow, int])
    runs: dict[int, int] = field(default_factory=dict[int, int])
    last: int = -1

    def _append(self, node: Node, deps: Sequence[int] | None) -> int:
        before = ((self.last,) if self.last >= 0 else ()) if deps is None else tuple(deps)
        self.nodes.append(dataclasses.replace(node, deps=before))
        return len(self.nodes) - 1

    def kernel(self, row: KernelRow, scope: str) -> None:
        number = self.rows.setdefault(row, len(self.rows))
        self.runs[number] = self.runs.get(number, 0) + 1
        self.last = self._append(Kernel(number, scope=scope), None)

    def product(self, op: str, m: int, n: int, k: int, scope: str) -> None:
        read, written = float(HALF * (m * k + k * n)), float(HALF * m * n)
        self.kernel(
            KernelRow(
                KernelClass.MATMUL, "bf16", "bf16", "f32", "bf16", m=m, n=n, k=k, matmul_flops=2.0 * m * n * k,
                bytes_read=read, bytes_written=written, label=op,
            ),
            f"{scope}/{op}",
        )  # fmt: skip

    def pointwise(self, op: str, elements: int, inputs: int, scope: str) -> None:
        self.kernel(
            KernelRow(
                KernelClass.ELEMENTWISE, "vector", "bf16", "", "bf16", elems=elements, inputs=inputs,
                vector_flops=4.0 * elements, bytes_read=float(HALF * elements * inputs),
                bytes_written=float(HALF * elements), label=op,
            ),
            f"{scope}/{op}",
        )  # fmt: skip

    def attention(self, direction: str, scope: str) -> None:
        model, batch = self.model, self.plan.sequences
        heads, kv = self._share(model.heads), self._share(model.kv_heads)
        width, seq = model.width // model.heads, model.seq
        flops = 4.0 * batch * heads * seq * seq * width * (2.5 if direction == "bwd" else 1.0)
        moved = float(HALF * batch * seq * width * (2 * heads + 2 * kv))
        self.kernel(
            KernelRow(
                KernelClass.ATTENTION, "bf16", "bf16", "f32", "bf16", batch=batch, hq=heads, hkv=kv, sq=seq, skv=seq,
                d=width, causal=1, direction=direction, matmul_flops=flops, bytes_read=moved,
                bytes_written=moved / 4, label="attention",
            ),
            f"{scope}/attention",
        )  # fmt: skip

    def _share(self, amount: int) -> int:
        return max(1, amount // self.plan.tp)

    def collective(self, kind: str, axis: str, nbytes: int, scope: str, *, aside: bool = False) -> None:
        if not any(name == axis for name, _ in self.plan.mesh.axes):
            return
        groups = over_axes("mesh", self.plan.mesh.axes, [axis])
        made = self._append(Collective(kind, groups, nbytes, nbytes, "add", "bf16", scope=f"{scope}/{kind}"), None)
        self.last = self.last if aside else made

    def message(self, direction: str, shift: int, tag: int, scope: str) -> None:
        peer = self.index + shift
        if not 0 <= peer < self.plan.pp:
            return
        made = self._append(P2P(direction, "pp", shift, tag, HALF * self.tokens * self.model.width, scope=scope), None)
        if direction == "recv":
            self.nodes[made] = dataclasses.replace(self.nodes[made], deps=())
            self.last = self._joined(made)

    def _joined(self, made: int) -> int:
        """What comes next waits for the message and for what ran before it."""
        self.pointwise("unpack", self.tokens * self.model.width, 1, "pipeline")
        deps = sorted({made, *self.nodes[-1].deps})
        self.nodes[-1] = dataclasses.replace(self.nodes[-1], deps=tuple(deps))
        return len(self.nodes) - 1

    @property
    def tokens(self) -> int:
        return self.plan.sequences * self.model.seq

    def feed_forward(self, scope: str, tokens: int, backward: bool) -> None:
        model, times = self.model, 2 if backward else 1
        inner = self._share(model.ffn)
        for _ in range(times):
            self.product("up", tokens, inner * (2 if model.gated else 1), model.width, scope)
        self.pointwise("activation", tokens * inner, 2 if model.gated else 1, scope)
        for _ in range(times):
            self.product("down", tokens, model.width, inner, scope)

    def layer(self, number: int, *, backward: bool) -> None:
        model, tokens, times = self.model, self.tokens, 2 if backward else 1
        scope = f"layer{number}/{'backward' if backward else 'forward'}"
        heads = self._share(model.heads + 2 * model.kv_heads) * (model.width // model.heads)
        hidden = HALF * tokens * model.width
        self.pointwise("norm", tokens * model.width, 2, f"{scope}/attention")
        for _ in range(times):
            self.product("qkv", tokens, heads, model.width, f"{scope}/attention")
        self.pointwise("rope", tokens * heads, 2, f"{scope}/attention")
        if backward:
            self.pointwise("attention_delta", tokens * self._share(model.width), 2, f"{scope}/attention")
        self.attention("bwd" if backward else "fwd", f"{scope}/attention")
        for _ in range(times):
            self.product("out", tokens, model.width, self._share(model.width), f"{scope}/attention")
        self.collective("all_reduce", "tp", hidden, f"{scope}/attention")
        self.pointwise("residual_norm", tokens * model.width, 3, f"{scope}/mlp")
        if model.experts:
            routed = tokens * model.topk
            self.product("router", tokens, model.experts, model.width, f"{scope}/moe")
            self.collective("all_to_all", "ep", HALF * routed * model.width, f"{scope}/moe/dispatch")
            self.feed_forward(f"{scope}/moe", routed, backward)
            self.collective("all_to_all", "ep", HALF * routed * model.width, f"{scope}/moe/combine")
        else:
            self.feed_forward(f"{scope}/mlp", tokens, backward)
        self.collective("all_reduce", "tp", hidden, f"{scope}/mlp")
        self.pointwise("residual", tokens * model.width, 2, f"{scope}/mlp")
        if backward:
            for part in ("attention", "mlp"):
                self.pointwise("norm_weight", tokens * model.width, 2, f"{scope}/{part}")
            self.pointwise("accumulate", self.parameters(), 2, f"{scope}/gradient")

    def attention_parameters(self) -> int:
        """Parameters of one layer's attention on one device."""
        model = self.model
        heads = (model.heads + 2 * model.kv_heads) * (model.width // model.heads)
        return (heads * model.width + model.width**2) // self.plan.tp

    def parameters(self) -> int:
        """Parameters of one layer on one device."""
        model = self.model
        experts = max(1, model.experts // self.plan.ep) if model.experts else 1
        ffn = experts * model.ffn * model.width * (3 if model.gated else 2)
        return self.attention_parameters() + ffn // self.plan.tp

    def gradients(self, scope: str) -> None:
        """Sums over data-parallel devices; those of one expert group share all but the experts."""
        self.collective("all_reduce", "dp", HALF * self.parameters(), scope, aside=True)
        if self.model.experts:
            self.collective("all_reduce", "ep", HALF * self.attention_parameters(), scope, aside=True)

    def run(self) -> None:
        model, plan = self.model, self.plan
        first = self.index * (model.layers // plan.pp)
        layers = range(first, first + model.layers // plan.pp)
        for micro in range(plan.micro):
            self.message("recv", -1, 2 * micro, "pipeline")
            if self.index == 0:
                self.pointwise("embed", self.tokens * model.width, 1, "embed")
            for number in layers:
                self.layer(number, backward=False)
            self.message("send", 1, 2 * micro, "pipeline")
        for micro in range(plan.micro):
            self.message("recv", 1, 2 * micro + 1, "pipeline")
            if self.index == plan.pp - 1:
                for _ in range(3):
                    self.product("logits", self.tokens, self._share(model.vocab), model.width, "loss")
                self.pointwise("cross_entropy", self.tokens * self._share(model.vocab), 1, "loss")
            for number in reversed(layers):
                self.layer(number, backward=True)
                if micro == plan.micro - 1:
                    self.gradients(f"layer{number}/gradient")
            self.message("send", -1, 2 * micro + 1, "pipeline")
        for number in layers:
            self.pointwise("clip", self.parameters(), 1, f"optimizer/layer{number}")
            for part in ("attention", "mlp", "norms"):
                self.pointwise("adamw", self.parameters() // 3, 4, f"optimizer/layer{number}/{part}")


def stage_program(model: Model, plan: Plan, index: int) -> DeviceProgram:
    """The step of one pipeline stage."""
    stage = _Stage(model, plan, index)
    stage.run()
    rows = tuple(stage.rows)
    counts = np.array([stage.runs[number] for number in range(len(rows))], dtype=np.float64)
    held = HALF * stage.parameters() * (model.layers // plan.pp)
    return DeviceProgram(
        name=f"{model.name} stage {index}",
        body=tuple(stage.nodes),
        table=KernelTable(rows, counts),
        work=SymbolicWork({(): total(row.work * float(runs) for row, runs in zip(rows, counts, strict=True))}),
        num_devices=plan.ranks,
        meshes=(plan.mesh,),
        buffers=Buffers(argument_bytes=3 * held, output_bytes=3 * held, alias_bytes=3 * held),
    )


def stage_parts(model: Model, plan: Plan, durations: bool = True) -> list[RolePart]:
    """All pipeline stages as roles, kernels timed at 400 TFLOP/s and 2 TB/s."""
    parts: list[RolePart] = []
    for index in range(plan.pp):
        program = stage_program(model, plan, index)
        flops, moved = program.table.matmul_flops, program.table.bytes_read + program.table.bytes_written
        times: FloatArray = np.maximum(flops / 4e14, moved / 2e12) + 2e-6
        coords = {"pp": index} if plan.pp > 1 else {}
        parts.append(RolePart(f"stage{index}", program, times if durations else None, coords))
    return parts
