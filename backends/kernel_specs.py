"""Kernel rows from sizes: what `stablecast kernel` prices, and what measured kernel tables are turned into.

Bytes are those of the boundary operands and results, once each. Counts of vector operations are one per element and
arithmetic operation.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Final

from stablecast.backends.arithmetic import arithmetic_of
from stablecast.backends.device import Device
from stablecast.ir.dtypes import dtype
from stablecast.ir.errors import InputError, near_names
from stablecast.ir.kernels import KernelClass, KernelRow
from stablecast.lowering import products
from stablecast.lowering.attention_shape import AttentionShape, attention_row

PRECISIONS: Final = ("default", "high", "highest")
_SOFTMAX_OPERATIONS: Final = 4
_LAYERNORM_OPERATIONS: Final = 8


def math_mode(element: str, device: Device, precision: str = "default") -> str:
    """What a product of matrices of StableHLO element type `element` multiplies with under JAX on `device`.

    NVIDIA from Ampere on multiplies f32 as TF32 (`precision` "highest": as FP32). A TPU multiplies f32 and f16 in
    passes of bf16: one by default, three at "high", six at "highest". A type that the matrix units lack and XLA widens
    (bf16 before Ampere) is `fp32`. Raises `InputError` for another `precision` or an unknown type.
    """
    if precision not in PRECISIONS:
        raise InputError(f"unknown precision '{precision}'", "known: " + ", ".join(PRECISIONS))
    return products.math_mode(dtype(element), precision, arithmetic_of(device))


def matmul(device: Device, element: str, m: int, n: int, k: int, batch: int = 1, out: str = "") -> KernelRow:
    """`batch` products [m, k] x [k, n] -> [m, n]; `out`: element type of the result, by default that of the inputs."""
    kind, result = dtype(element), dtype(out or element)
    return KernelRow(
        klass=KernelClass.MATMUL,
        math=math_mode(element, device),
        in_dtype=kind.name,
        out_dtype=result.name,
        batch=batch,
        m=m,
        n=n,
        k=k,
        inputs=2,
        elems=batch * m * n,
        matmul_flops=2.0 * batch * m * n * k,
        bytes_read=float(kind.nbytes(batch * (m * k + k * n))),
        bytes_written=float(result.nbytes(batch * m * n)),
    )


def conv2d(
    device: Device,
    element: str,
    n: int,
    h: int,
    w: int,
    c: int,
    co: int,
    r: int,
    s: int,
    stride: int = 1,
    pad: int = 0,
    groups: int = 1,
    direction: str = "fwd",
) -> KernelRow:
    """A convolution of [n, h, w, c] with [r, s, c / groups, co], or its gradients.

    `direction`: `fwd`; `dgrad` (to the input, over the output's gradient dilated by `stride`, its zeros in
    `dilation_flops`); `wgrad` (to the weights). Raises `InputError` where no output position is left.
    """
    ho, wo = (h + 2 * pad - r) // stride + 1, (w + 2 * pad - s) // stride + 1
    if ho < 1 or wo < 1:
        raise InputError(f"a {r}x{s} window does not fit an image of {h}x{w} with padding {pad}")
    kind = dtype(element)
    ci, cg = c // groups, co // groups
    inputs, weights, outputs = n * h * w * c, r * s * ci * co, n * ho * wo * co
    useful = 2.0 * n * ho * wo * cg * ci * r * s * groups
    shapes = {
        "fwd": (n * ho * wo, cg, r * s * ci, (inputs, weights, outputs), (n, h, w, c, co, r, s)),
        "dgrad": (n * h * w, ci, r * s * cg, (outputs, weights, inputs), (n, ho, wo, co, c, r, s)),
        "wgrad": (r * s * ci, cg, n * ho * wo, (inputs, outputs, weights), (c, h, w, n, co, ho, wo)),
    }
    if direction not in shapes:
        raise InputError(f"unknown direction '{direction}'", "known: " + ", ".join(shapes))
    rows, columns, inner, (first, second, result), conv = shapes[direction]
    dense = 2.0 * groups * rows * columns * inner
    zeros = max(dense - useful, 0.0) if direction == "dgrad" and stride > 1 else 0.0
    return KernelRow(
        klass=KernelClass.CONVOLUTION,
        math=math_mode(element, device),
        in_dtype=kind.name,
        out_dtype=kind.name,
        batch=groups,
        m=rows,
        n=columns,
        k=inner,
        **dict(zip(("cn", "ch", "cw", "cc", "co", "cr", "cs"), conv, strict=True)),
        stride=1 if direction != "fwd" else stride,
        pad=pad,
        lhs_dilation=stride if direction == "dgrad" else 1,
        rhs_dilation=stride if direction == "wgrad" else 1,
        groups=groups,
        direction="fwd" if direction == "fwd" else "bwd",
        inputs=2,
        elems=result,
        matmul_flops=dense - zeros,
        dilation_flops=zeros,
        bytes_read=float(kind.nbytes(first + second)),
        bytes_written=float(kind.nbytes(result)),
    )


def elementwise(
    device: Device, element: str, m: int, n: int = 1, inputs: int = 2, transcendental: int = 0
) -> KernelRow:
    """One operation on each of m x n elements of `inputs` operands; `transcendental`: evaluations an element."""
    kind = dtype(element)
    elems = m * n
    return KernelRow(
        klass=KernelClass.ELEMENTWISE,
        in_dtype=kind.name,
        out_dtype=kind.name,
        elems=elems,
        inputs=inputs,
        vector_flops=float(elems),
        transcendentals=float(transcendental * elems),
        bytes_read=float(kind.nbytes(inputs * elems)),
        bytes_written=float(kind.nbytes(elems)),
    )


def reduce(device: Device, element: str, m: int, n: int) -> KernelRow:
    """The sum of each of m rows of n elements."""
    return _by_rows(element, m, n, 1, 0, m)


def softmax(device: Device, element: str, m: int, n: int) -> KernelRow:
    """Softmax over each of m rows of n elements, in one kernel."""
    return _by_rows(element, m, n, _SOFTMAX_OPERATIONS, 1, m * n)


def layernorm(device: Device, element: str, m: int, n: int) -> KernelRow:
    """Layer norm of each of m rows of n elements, in one kernel."""
    return _by_rows(element, m, n, _LAYERNORM_OPERATIONS, 0, m * n)


def _by_rows(element: str, m: int, n: int, operations: int, transcendentals: int, results: int) -> KernelRow:
    kind = dtype(element)
    return KernelRow(
        klass=KernelClass.REDUCTION,
        in_dtype=kind.name,
        out_dtype=kind.name,
        m=0,
        elems=results,
        reduced=n,
        inputs=1,
        vector_flops=float(operations * m * n),
        transcendentals=float(transcendentals * m * n),
        bytes_read=float(kind.nbytes(m * n)),
        bytes_written=float(kind.nbytes(results)),
    )


def attention(
    device: Device,
    element: str,
    batch: int,
    hq: int,
    sq: int,
    skv: int,
    d: int,
    hkv: int = 0,
    causal: int = 0,
    window: int = 0,
    direction: str = "fwd",
) -> KernelRow:
    """Flash attention of `batch` x `hq` heads, `sq` queries on `skv` keys of size `d`; `hkv` key heads (0: `hq`).

    Causal: query i of the last `sq` positions sees the keys up to its own; what is masked is in `padded_flops`. The
    backward pass multiplies five times where the forward pass does twice.
    """
    kind = dtype(element)
    shape = AttentionShape(batch, hq, hkv or hq, sq, skv, d, causal, window, direction)
    queries, cache = batch * hq * sq * d, 2 * batch * shape.hkv * skv * d
    backward = direction == "bwd"
    return attention_row(
        shape,
        math_mode(element, device),
        in_dtype=kind.name,
        out_dtype=kind.name,
        inputs=5 if backward else 3,
        transcendentals=float(batch * hq * shape.pairs),
        bytes_read=float(kind.nbytes((3 if backward else 1) * queries + cache)),
        bytes_written=float(kind.nbytes(queries + (cache if backward else 0))),
    )


def moe(
    device: Device,
    element: str,
    tokens: int,
    hidden: int,
    inter: int,
    experts: int,
    topk: int,
    tp: int = 1,
    ep: int = 1,
    routing: str = "",
) -> KernelRow:
    """A fused layer of gated experts on one device: three products for each of `topk` experts a token.

    `tp`, `ep`: degrees that cut the experts' inner size, and the experts. `routing`: how tokens spread over experts
    (`balanced`, `power_law_1.01`, ...), empty where unknown; bytes are those of the experts that a balanced spread
    reaches.
    """
    kind = dtype(element)
    local, width = max(experts // ep, 1), max(inter // tp, 1)
    visits = max(tokens * topk // ep, 1)
    reached = min(local, visits)
    each = -(-visits // reached)
    flops = 2.0 * visits * 3 * hidden * width
    return KernelRow(
        klass=KernelClass.MOE,
        math=math_mode(element, device),
        in_dtype=kind.name,
        out_dtype=kind.name,
        batch=reached,
        m=each,
        n=3 * width,
        k=hidden,
        epilogue=routing,
        experts=local,
        topk=topk,
        inputs=2,
        elems=tokens * hidden,
        matmul_flops=flops,
        bytes_read=float(kind.nbytes(tokens * hidden + reached * 3 * hidden * width)),
        bytes_written=float(kind.nbytes(tokens * hidden)),
    )


def grouped(device: Device, element: str, groups: int, m: int, n: int, k: int) -> KernelRow:
    """Products of `groups` groups of rows, m rows in all, each group's with a k x n matrix of its own."""
    kind = dtype(element)
    return KernelRow(
        klass=KernelClass.MOE,
        math=math_mode(element, device),
        in_dtype=kind.name,
        out_dtype=kind.name,
        batch=1,
        m=m,
        n=n,
        k=k,
        experts=groups,
        inputs=2,
        elems=m * n,
        matmul_flops=2.0 * m * n * k,
        bytes_read=float(kind.nbytes(m * k + groups * n * k)),
        bytes_written=float(kind.nbytes(m * n)),
    )


def embedding(device: Device, element: str, m: int, n: int) -> KernelRow:
    """Rows of n elements of a table, one for each of m tokens; a gather reads the rows that it wants only."""
    kind = dtype(element)
    return KernelRow(
        klass=KernelClass.GATHER,
        in_dtype=kind.name,
        out_dtype=kind.name,
        elems=m * n,
        reduced=n,
        inputs=2,
        bytes_read=float(kind.nbytes(m * n) + 8 * m),
        bytes_written=float(kind.nbytes(m * n)),
    )


def copy(device: Device, element: str, m: int, n: int = 1) -> KernelRow:
    """A copy of m x n elements."""
    kind = dtype(element)
    nbytes = float(kind.nbytes(m * n))
    return KernelRow(
        klass=KernelClass.COPY,
        in_dtype=kind.name,
        out_dtype=kind.name,
        elems=m * n,
        inputs=1,
        bytes_read=nbytes,
        bytes_written=nbytes,
    )


BUILDERS: Final[Mapping[str, Callable[..., KernelRow]]] = {
    "matmul": matmul,
    "conv2d": conv2d,
    "elementwise": elementwise,
    "reduce": reduce,
    "softmax": softmax,
    "layernorm": layernorm,
    "attention": attention,
    "moe": moe,
    "embedding": embedding,
    "copy": copy,
}
"""Every kind of kernel that can be asked for by its sizes."""


@cache
def size_names(kind: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Sizes that a kernel of `kind` needs, and all that it takes. Raises `InputError` for an unknown kind."""
    parameters = list(inspect.signature(_builder(kind)).parameters.values())[2:]
    needed = tuple(p.name for p in parameters if p.default is inspect.Parameter.empty)
    return needed, tuple(p.name for p in parameters)


def kernel_row(kind: str, device: Device, dtype: str, **sizes: int | str) -> KernelRow:
    """The row of a kernel of `kind` (a key of `BUILDERS`) with element type `dtype` and the builder's own sizes.

    Raises `InputError` for an unknown kind, and for sizes that are missing, unknown or not positive, naming them.
    """
    builder = _builder(kind)
    required, known = size_names(kind)
    missing, unknown = [name for name in required if name not in sizes], [name for name in sizes if name not in known]
    if missing or unknown:
        text = f"needs {', '.join(missing)}" if missing else f"has no size {', '.join(unknown)}"
        raise InputError(f"kernel {kind} {text}", "its sizes are " + ", ".join(known))
    for name, size in sizes.items():
        if isinstance(size, int) and size < (1 if name in required else 0):
            raise InputError(f"size {name} of kernel {kind} is {size}", "sizes are whole numbers from 1 up")
    return builder(device, dtype, **sizes)


def _builder(kind: str) -> Callable[..., KernelRow]:
    if kind not in BUILDERS:
        raise InputError(f"unknown kernel '{kind}'", near_names(kind, BUILDERS) or "known: " + ", ".join(BUILDERS))
    return BUILDERS[kind]
