"""The two views of one capture: each ATen call as dispatched, and the StableHLO ops that it became."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is an optional extra")

from stablecast.frontends.torch import capture_torch  # noqa: E402
from stablecast.ir import capture_file  # noqa: E402
from stablecast.ir.reader import read  # noqa: E402

UNLINKED = {
    "aten.clone.default",
    "aten.copy_.default",
    "aten._foreach_copy_.default",
    "fsdp.split_with_sizes_copy.default",
}


def mlp(example: Callable[[str], Any]) -> Any:
    module = example("torch_mlp")
    return capture_torch(lambda: module.build(hidden=64), module.step, module.inputs(8))


def recomputed(example: Callable[[str], Any]) -> Any:
    module = example("torch_llama")
    config = module.Config(layers=1, kv_heads=2, recompute=True)
    return capture_torch(lambda: module.build(config, "bfloat16", fused=False), module.step, module.inputs(2, 32))


def unet(example: Callable[[str], Any]) -> Any:
    module = example("torch_unet")
    return capture_torch(lambda: module.build(widths=(16, 32)), module.step, module.inputs(2, 16))


def resnet(example: Callable[[str], Any]) -> Any:
    module = example("torch_resnet")
    build = lambda: module.build(stages=((8, 2), (16, 1)), classes=10)  # noqa: E731
    return capture_torch(build, module.step, module.inputs(4, 32, 10))


def sharded(example: Callable[[str], Any]) -> Any:
    module = example("torch_llama")
    return capture_torch(
        lambda mesh: module.build_parallel(mesh), module.step, module.inputs(2, 32), mesh={"dp": 2, "tp": 4}
    )


CASES = (mlp, recomputed, unet, resnet, sharded)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_every_op_belongs_to_the_call_that_made_it(
    case: Callable[..., Any], example: Callable[[str], Any], tmp_path: Path
) -> None:
    workload = case(example)
    ops = read(workload.modules[0].data).main.body.ops
    launches = workload.launches.launches
    assert workload.launches.launch_of_op().keys() == set(range(len(ops)))
    linked = [number for launch in launches for number in launch.ops]
    assert linked == sorted(set(linked))
    for launch in launches:
        assert set(launch.view_ops) <= set(launch.ops)
        assert len(launch.result_shapes) == len(launch.result_dtypes)
        assert len(launch.shapes) == len(launch.dtypes)
        assert launch.source
        assert launch.module_path.partition("/")[0] in ("forward", "backward", "optimizer", "step")
        for number in launch.ops:
            scope, _, name = ops[number].location.scope.rpartition("/")
            assert (scope, ops[number].location.source) == (launch.module_path, launch.source)
            assert name == launch.op.rpartition(".")[0].removesuffix("_") or launch.op.startswith("c10d.")
    capture_file.write(workload, tmp_path / "step.capture")
    kept = capture_file.read(tmp_path / "step.capture")
    assert kept.launches == workload.launches
    assert kept.schedule == workload.schedule


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_kernel_without_ops_only_moves_data(case: Callable[..., Any], example: Callable[[str], Any]) -> None:
    launches = case(example).launches.launches
    bare = {launch.op for launch in launches if not launch.is_view and set(launch.ops) == set(launch.view_ops)}
    assert bare <= UNLINKED | {launch.op for launch in launches if launch.host}


def test_views_are_told_from_what_a_call_computes(example: Callable[[str], Any]) -> None:
    workload = mlp(example)
    ops = read(workload.modules[0].data).main.body.ops
    product = next(launch for launch in workload.launches.launches if launch.op == "aten.addmm.default")
    assert [ops[number].name for number in product.view_ops] == ["stablehlo.transpose"]
    assert "stablehlo.dot_general" in {ops[number].name for number in product.ops}
    allocations = [one for one in sharded(example).launches.launches if one.op.startswith("aten.empty")]
    assert allocations
    assert all(one.is_view and not one.ops for one in allocations)
