"""A prediction beside a real trace: the TPU v4 products; and a program matched to itself."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from stablecast._predict import Options, Session
from stablecast._validate import validate
from stablecast.ir.errors import InputError
from stablecast.validation.items import Item
from stablecast.validation.kernel_names import MeasuredClass
from stablecast.validation.match import match
from stablecast.validation.report import largest_of, layers_of

_MODULE = """module @jit_product {{
  func.func public @main(%a: tensor<{m}x{k}xbf16>, %b: tensor<{k}x{n}xbf16>) -> tensor<{m}x{n}xbf16> {{
    %0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]
      : (tensor<{m}x{k}xbf16>, tensor<{k}x{n}xbf16>) -> tensor<{m}x{n}xbf16>
    return %0 : tensor<{m}x{n}xbf16>
  }}
}}
"""


def _session(folder: Path, trace: Path) -> Session:
    m, n, k = map(int, re.findall(r"\d+", trace.name.split("_")[1])[:3])
    path = folder / "product.mlir"
    path.write_text(_MODULE.format(m=m, n=n, k=k))
    return Session(str(path), Options())


def test_tpu_products_are_matched_by_shape(traces: Path, tmp_path: Path) -> None:
    for trace in sorted((traces / "tpu_v4_jax").glob("*.xplane.pb")):
        report = validate(trace, workload=_session(tmp_path, trace), on="tpu-v4")
        assert report.matching is not None
        assert report.matching.matched_share > 0.99
        assert [pair.how for pair in report.matching.pairs] == ["shape"]
        assert report.graph is not None
        assert report.graph.operators["gemm"] == (1, 1)


def test_report_keeps_its_contract(traces: Path, tmp_path: Path) -> None:
    trace = traces / "tpu_v4_jax" / "matmul_1024x1024x1024.xplane.pb"
    report = validate(trace, workload=_session(tmp_path, trace), on="tpu-v4")
    data = json.loads(report.to_json())
    assert {
        "schema",
        "steps",
        "measured_step_s",
        "predicted_step_s",
        "matched_share",
        "classes",
        "largest",
        "graph",
    } <= set(data)
    assert {"class", "measured_s", "predicted_s"} <= set(data["classes"][0])
    assert (data["schema"], data["steps"]) == (1, 10)
    text, page = repr(report), report.to_html()
    assert "largest differences" in text
    assert page.count("<svg") == 3, "measured, predicted, and the short one on its own scale"
    assert "http" not in page.split("<body>")[0], "the page needs no outside file"


def test_trace_alone(traces: Path) -> None:
    report = validate(traces / "hta" / "a100_2ranks_nccl_rank0_kineto.json.gz")
    data = report.to_dict()
    assert data["predicted_step_s"] is None
    assert data["measured_step_s"] == pytest.approx(0.2224, rel=0.01)
    assert "3 steps" in repr(report)


def test_slowest_rank_is_reported(traces: Path) -> None:
    paths = [traces / "param" / f"v100x8_dlrm_rank{rank}_kineto.json.gz" for rank in (0, 1, 2)]
    assert validate(*paths).run.events.rank == 1


def test_workload_needs_a_device(traces: Path, tmp_path: Path) -> None:
    trace = traces / "tpu_v4_jax" / "matmul_1024x1024x1024.xplane.pb"
    with pytest.raises(InputError, match="needs a device"):
        validate(trace, workload=_session(tmp_path, trace))


def _item(
    klass: MeasuredClass, scope: str = "", shape: tuple[int, ...] = (), kind: str = "", nbytes: float = 0
) -> Item:
    return Item(klass, klass.value, scope, shape, 1.0, 0.0, kind=kind, nbytes=nbytes)


def test_layers_are_those_of_the_program() -> None:
    """What ran counts for the layer of the kernel that it is matched to, whatever the profiler called its place; the
    tree is cut where it has at most as many branches as a report can hold."""
    measured = [_item(MeasuredClass.MATMUL, "forward/Net.forward", (8,)), _item(MeasuredClass.SORT, "elsewhere")]
    predicted = [_item(MeasuredClass.MATMUL, f"forward/Net/layers/{at}/mlp", (8 + at,)) for at in range(3)]
    found = {share.name: (share.measured_s, share.predicted_s) for share in layers_of(match(measured, predicted))}
    paths = [f"forward/Net/layers/{at}/mlp" for at in range(3)]
    assert found == {paths[0]: (1.0, 1.0), paths[1]: (0.0, 1.0), paths[2]: (0.0, 1.0), "elsewhere": (1.0, 0.0)}
    many = [_item(MeasuredClass.MATMUL, f"forward/Net/layers/{at}", (at,)) for at in range(40)]
    assert [share.name for share in layers_of(match([], many))] == ["forward/Net/layers"]


def test_kernels_that_one_call_launches_are_counted_on_both_sides() -> None:
    """26 kernels of a sort beside one call that is predicted to launch 26: no fusion, but slow kernels."""
    measured = replace(_item(MeasuredClass.SORT), parts=26, time_s=2.0)
    for launched, reason in ((26, "efficiency"), (1, "fusion: 26 kernels ran where 1 is predicted")):
        predicted = replace(_item(MeasuredClass.SORT), parts=launched, time_s=1.0)
        (largest,) = largest_of(match([measured], [predicted]))
        assert largest.reason.startswith(reason)


def test_matching_rules_in_turn() -> None:
    product, add, talk = MeasuredClass.MATMUL, MeasuredClass.ELEMENTWISE, MeasuredClass.COMMUNICATION
    measured = [
        _item(product, "layer1", (8,)),
        _item(product, "", (64,)),
        _item(talk, kind="all_reduce", nbytes=512),
        _item(add),
        _item(MeasuredClass.MEMCPY),
        _item(MeasuredClass.FFT),
    ]
    predicted = [
        _item(talk, kind="all_reduce", nbytes=256),
        _item(product, "", (64,)),
        _item(product, "layer1", (8,)),
        _item(add, "norm"),
        _item(MeasuredClass.SORT),
    ]
    found = match(measured, predicted)
    assert [(pair.measured, pair.predicted, pair.how) for pair in found.pairs] == [
        (0, 2, "scope"),
        (1, 1, "shape"),
        (2, 0, "collective"),
        (3, 3, "order"),
    ]
    assert (found.only_measured, found.only_predicted) == ((4, 5), (4,))
    assert found.matched_share == pytest.approx(0.8), "copies between host and device apart"


def test_ranks_together_show_what_waiting_is(traces: Path) -> None:
    """What a collective takes on the rank that comes last is its own time; the rest is waiting."""
    ranks = sorted((traces / "param").glob("v100x8_dlrm_rank*_kineto.json.gz"))
    alone, together = validate(ranks[1]), validate(*ranks)
    assert together.run.events.rank == 1, "the slowest"
    assert alone.waiting_s is None
    assert together.waiting_s == pytest.approx(11.12e-3, abs=0.05e-3)
    times = {share.name: share.measured_s for share in validate(*ranks, on="v100-sxm2:8").classes}
    assert times["communication"] == pytest.approx(217e-6, abs=1e-6)
    assert "waiting for other ranks" in repr(together)
