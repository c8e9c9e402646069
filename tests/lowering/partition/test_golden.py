"""Partitions against XLA's own: `benchmarks/partition_golden.py` made the golden files."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from jax.sharding import AbstractMesh

from stablecast.ir import mlir
from stablecast.ir.program import Mesh, Program
from stablecast.lowering.device import Target, lower
from stablecast.lowering.partition import partition
from stablecast.lowering.partition.rewrite import two_rewrites
from stablecast.lowering.partition.tally import Tally, tally

GOLDEN = Path(__file__).parent / "golden"
FAMILIES = (
    *("data_parallel", "tensor_parallel", "dp_tp", "fsdp", "fsdp_tp_unrolled", "fsdp_tp_scan", "sequence_parallel"),
    *("context_parallel", "moe_one_hot", "moe_ragged", "vocabulary", "spatial_convolution", "cond", "nested_loops"),
    *("shard_map_collectives", "ppermute_pipeline", "zero1"),
)
FRESH = (
    *("three_axes", "zero2", "label_smoothing", "conv_channels", "encoder_decoder", "mixed_precision", "decode"),
    *(
        "split_cache",
        "recurrence",
        "expert_all_to_all",
        "adapters",
        "moe_top2",
        "ulysses",
        "sequence_parallel_attention",
    ),
)
FRESH_KNOWN_TO_DIFFER = ("embedding_both_ways", "gqa_unrolled")
SMALL = (
    *("slice_half", "slice_stride", "slice_second_half", "pad_double", "concat", "concat_no_room", "roll", "reverse"),
    *("cumsum", "cummax", "sort", "pool", "pool_stride", "pool_grad", "conv_3", "conv_5", "conv_3_stride"),
    *("conv_3_dilated", "conv_3_grad", "conv_3_stride_grad", "dynamic_slice", "dynamic_update", "argmax", "top_k"),
    *("gather_rows", "scatter_rows", "flip_transpose"),
)
KNOWN_TO_DIFFER = {
    "pad_shift": (("collective_permute", 2, 832.0), ("collective_permute", 1, 64.0)),
    "pool_grad_overlap": (("collective_permute", 6, 1152.0), ("collective_permute", 5, 1408.0)),
    "fft": (("all_to_all", 2, 1792.0), ("all_gather", 1, 7168.0)),
}
"""Kind, count and bytes on the wire: ours, then XLA's."""


def _partitioned(families: ModuleType, name: str, family: Any) -> Program:
    mesh = AbstractMesh(tuple(family.mesh.values()), tuple(family.mesh))
    return partition(mlir.write_bytecode(families.lowered(name, family, mesh).compiler_ir("stablehlo")), name)


def _by_axes(counts: Tally) -> dict[str, float]:
    sums: dict[str, float] = {}
    for line in counts.traffic:
        sums[line.axes] = sums.get(line.axes, 0.0) + line.wire_bytes
    return sums


def _golden_by_axes(golden: Mapping[str, Any]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for line in golden["collectives"]:
        sums[line["axes"]] = sums.get(line["axes"], 0.0) + line["wire_bytes"]
    return sums


def _compare(program: Program, name: str, family: Any) -> None:
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    assert golden["mesh"] == dict(family.mesh)
    counts = tally(two_rewrites(program), [Mesh("logical", tuple(family.mesh.items()))])
    assert _by_axes(counts) == pytest.approx(_golden_by_axes(golden["rewritten"]))
    assert math.isclose(counts.matmul_flops, golden["rewritten"]["matmul_flops"])


@pytest.mark.parametrize("name", FAMILIES)
def test_family_sends_and_multiplies_what_xla_does(families: ModuleType, name: str) -> None:
    family = families.FAMILIES[name]
    program = _partitioned(families, name, family)
    _compare(program, name, family)
    device = lower(program, Target("tpu"))
    assert device.num_devices == math.prod(family.mesh.values())
    assert device.complete


@pytest.mark.parametrize("name", FRESH)
def test_fresh_family_sends_and_multiplies_what_xla_does(families: ModuleType, fresh: ModuleType, name: str) -> None:
    family = fresh.FRESH[name]
    program = _partitioned(families, name, family)
    _compare(program, name, family)
    assert lower(program, Target("tpu")).complete


def _sums(lines: Any) -> dict[tuple[str, str], tuple[int, int]]:
    kinds = ("all_reduce", "reduce_scatter")
    return {
        (line["kind"], line["axes"]): (line["count"], line["operand_bytes"]) for line in lines if line["kind"] in kinds
    }


@pytest.mark.parametrize("name", [*FAMILIES, *FRESH])
def test_sums_for_a_cpu_are_as_xla_leaves_them(families: ModuleType, fresh: ModuleType, name: str) -> None:
    """As counted, before any rewrite: whole sums, of which devices keep their part."""
    family = families.FAMILIES.get(name) or fresh.FRESH[name]
    mesh = AbstractMesh(tuple(family.mesh.values()), tuple(family.mesh))
    data = mlir.write_bytecode(families.lowered(name, family, mesh).compiler_ir("stablehlo"))
    counts = tally(partition(data, name, platform="cpu"), [Mesh("logical", tuple(family.mesh.items()))])
    golden = json.loads((GOLDEN / f"{name}.json").read_text())["raw"]["collectives"]
    assert _sums(map(asdict, counts.traffic)) == _sums(golden)


@pytest.mark.parametrize("name", FRESH_KNOWN_TO_DIFFER)
def test_how_far_off_the_others_are(families: ModuleType, fresh: ModuleType, name: str) -> None:
    """Bytes on the wire within 1 % of XLA's, products within 4 %."""
    golden = json.loads((GOLDEN / f"{name}.json").read_text())["rewritten"]
    counts = tally(two_rewrites(_partitioned(families, name, fresh.FRESH[name])))
    assert counts.wire_bytes == pytest.approx(golden["wire_bytes"], rel=0.01)
    assert counts.matmul_flops == pytest.approx(golden["matmul_flops"], rel=0.04)


@pytest.mark.parametrize("name", SMALL)
def test_what_shardy_leaves_out(families: ModuleType, small: ModuleType, name: str) -> None:
    family = small.SMALL[name]
    _compare(_partitioned(families, name, family), name, family)


@pytest.mark.parametrize("name", KNOWN_TO_DIFFER)
def test_how_the_other_small_ones_differ(families: ModuleType, small: ModuleType, name: str) -> None:
    family = small.SMALL[name]
    counts = tally(two_rewrites(_partitioned(families, name, family)), [Mesh("logical", tuple(family.mesh.items()))])
    (golden,) = json.loads((GOLDEN / f"{name}.json").read_text())["rewritten"]["collectives"]
    ours, xla = KNOWN_TO_DIFFER[name]
    assert [(line.kind, line.count, line.wire_bytes) for line in counts.traffic] == [ours]
    assert (golden["kind"], golden["count"], golden["wire_bytes"]) == xla


def test_every_family_has_a_test(families: ModuleType, fresh: ModuleType, small: ModuleType) -> None:
    assert set(FAMILIES) == set(families.FAMILIES)
    assert {*FRESH, *FRESH_KNOWN_TO_DIFFER} == set(fresh.FRESH)
    assert {*SMALL, *KNOWN_TO_DIFFER} == set(small.SMALL)
