"""What lowering adds to the allocations of a capture: state, temporaries of kernels, workspaces, and the peak."""

from stablecast.ir.allocations import Allocations
from stablecast.ir.dtypes import dtype
from stablecast.ir.program import Argument, ArgumentKind
from stablecast.ir.schedule import Launch, LaunchTable
from stablecast.ir.types import TensorType
from stablecast.lowering.allocations import peak, step_allocations, temporaries, until_last_use


def argument(name: str, elements: int, kind: ArgumentKind) -> Argument:
    return Argument(name, TensorType((elements,), dtype("f32")), kind=kind)


def flash(heads: int, kv_heads: int) -> Launch:
    q, k = (2, heads, 100, 40), (2, kv_heads, 100, 40)
    name = "aten._scaled_dot_product_flash_attention_backward.default"
    return Launch(name, (q, q, k, k), ("bf16",) * 4, module_path="backward/Model")


def test_flash_attention_backwards_sums_in_float32() -> None:
    rows = 2 * 8 * 128 * 4  # of 100 rows, in blocks of 128; heads of 40 count as 64
    assert temporaries(flash(8, 8)) == (rows, rows * 64)
    spread = 2 * 100 * 8 * 40 * 2
    assert temporaries(flash(8, 2)) == (rows, rows * 64, spread, spread)
    assert temporaries(Launch("aten.mm.default", ((4, 4), (4, 4)), ("f32", "f32"))) == ()


def test_state_is_laid_down_where_the_optimiser_first_runs() -> None:
    calls = LaunchTable(
        (
            Launch("aten.mm.default", ((4, 4), (4, 4)), ("f32", "f32"), module_path="forward/Model/a"),
            flash(8, 8),
            Launch("aten.addmm.default", (), (), module_path="backward/Model/a"),
            Launch("aten._fused_adamw_.default", (), (), module_path="optimizer"),
            Launch("aten.add.Tensor", (), (), module_path="optimizer"),
        )
    )
    recorded = Allocations((2000, 700, 64), (0, 0, 0), (1, 2, 5), (0, 1, ~0, 2, ~2), (2, 2, 5))
    given = [argument("w", 1000, ArgumentKind.PARAM), argument("w.exp_avg", 900, ArgumentKind.OPT_STATE)]
    made = step_allocations(recorded, given, calls)
    assert (made.held, made.late, made.threads) == ((4000,), (3600,), 2)
    # the two buffers of attention come behind its result and end before the first result does
    assert made.order == (0, 1, 3, 4, ~3, ~4, ~0, 2, ~2)
    assert made.nbytes[3:] == (2 * 8 * 128 * 4, 2 * 8 * 128 * 64 * 4)
    assert made.late_at == 7
    found = peak(made, calls)
    sums = 2 * 8 * 128 * 4
    assert found.nbytes == 4096 + 4096 + 2048 + 1024 + sums * 65  # every block in multiples of 512 bytes
    assert dict(found.by_scope) == {"backward/Model": 1024 + sums * 65, "forward/Model/a (saved)": 2048}


def test_no_optimiser_no_late_state() -> None:
    calls = LaunchTable((Launch("aten.relu.default", ((4,),), ("f32",), module_path="forward"),))
    made = step_allocations(Allocations((16,), (0,), (1,), (0,), (0,)), [argument("w", 4, ArgumentKind.PARAM)], calls)
    assert (made.held, made.late, made.late_at, made.threads) == ((16,), (), 1, 0)


def test_compiled_calls_let_go_behind_the_last_reader() -> None:
    calls = LaunchTable(
        tuple(Launch("aten.add.Tensor", (), (), module_path=path) for path in ("forward/M/layers/0", "forward/M", "x"))
    )
    # 0 is made in the layer and read by the second call, 1 is made outside, 2 is made by the third call
    recorded = Allocations((8, 8, 8), (0, 0, 0), (1, 2, 3), (0, 1, 2, ~2, ~1, ~0), (2, 2, 0))
    made = until_last_use(recorded, calls, lambda call: "/layers/" in call.module_path)
    assert made.order == (0, 1, ~0, 2, ~2, ~1)
    assert until_last_use(recorded, calls, lambda call: False) == recorded
    early = Allocations((8, 8), (0, 0), (1, 2), (0, ~0, 1), (1, 2))
    assert until_last_use(early, calls, lambda call: True) == early  # nothing lives longer than it did
