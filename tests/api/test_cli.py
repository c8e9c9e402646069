"""Every command: its answer, its JSON against the published schema, its errors in one line."""

import csv
import io
import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import stablecast
from stablecast.ir.accounting.registry import TARGETS

Run = Callable[..., Any]
SCHEMA = json.loads((files("stablecast") / "schema" / "stablecast-1.json").read_text())


def valid(text: str, part: str) -> Any:
    answer = json.loads(text)
    jsonschema.validate(answer, {**SCHEMA, "anyOf": [{"$ref": f"#/$defs/{part}"}]})
    return answer


def test_predict(run: Run, module: str) -> None:
    result = run("predict", module, "--on", "h100-sxm", "--json")
    assert (result.code, result.err) == (0, "")
    answer = valid(result.out, "predict")
    assert answer["work"]["matmul_flops"] == 2 * 1024 * 1024 * 4096
    assert answer["step_time_low_s"] <= answer["step_time_s"] <= answer["step_time_high_s"]
    assert 0 < answer["mfu"] <= answer["hfu"] <= 1
    assert answer["fits"]
    assert answer["complete"]
    assert [kernel["class"] for kernel in answer["kernels"]] == ["matmul"]
    assert any("dense peak" in text for text in answer["assumptions"])
    text = run("predict", module, "--on", "h100-sxm").out
    assert "a step on h100-sxm" in text
    assert "everything in the program is modelled" in text


def test_the_step_as_a_perfetto_trace(run: Run, module: str) -> None:
    pytest.importorskip("perfetto", reason="the perfetto package is not installed")
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

    result = run("predict", module, "--on", "h100-sxm", "--json", "--perfetto", "x.pftrace")
    assert (result.code, result.err) == (0, "")
    trace = Trace()
    trace.ParseFromString(Path("x.pftrace").read_bytes())
    begins = [packet for packet in trace.packet if packet.track_event.name]
    notes = {note.name for note in begins[0].track_event.debug_annotations}
    assert [begin.track_event.name for begin in begins] == ["matmul"]
    assert {"scope", "shape", "bytes"} <= notes
    ends = [packet.timestamp for packet in trace.packet if packet.HasField("timestamp")]
    assert max(ends) == round(json.loads(result.out)["step_time_s"] * 1e9)
    assert run("predict", module, "--on", "h100-sxm", "--perfetto", "absent/x").code == 2


def test_predict_without_a_device_gives_work_and_kernels(run: Run, module: str) -> None:
    result = run("predict", module)
    assert result.code == 0
    assert "give --on DEVICE for a time" in result.out
    answer = json.loads(run("predict", module, "--json").out)
    assert answer["work"]["matmul_flops"] == 2 * 1024 * 1024 * 4096
    assert "step_time_s" not in answer


def test_the_same_from_python(run: Run, module: str) -> None:
    by_command = json.loads(run("predict", module, "--on", "a100-sxm-40gb", "--json").out)
    prediction = stablecast.predict(module, on="a100-sxm-40gb")
    by_library = prediction.to_dict()
    for answer in (by_command, by_library):
        answer.pop("wall_s")
    assert by_library == by_command
    frame = prediction.to_pandas()
    assert frame["time_s"].sum() == pytest.approx(prediction.step_time_s)
    assert "<table>" in prediction._repr_html_()
    rows = list(csv.DictReader(io.StringIO(run("predict", module, "--on", "a100-sxm-40gb", "--csv").out)))
    assert [row["class"] for row in rows] == ["matmul"]


def test_compare(run: Run, module: str) -> None:
    systems = ("--on", "a100-sxm-40gb", "--on", "h100-sxm", "--on", "tpu-v5p")
    result = run("compare", module, *systems, "--json")
    answer = valid(result.out, "compare")
    times = [row["step_time_s"] for row in answer["rows"]]
    assert times == sorted(times)
    assert {row["system"] for row in answer["rows"]} == {"a100-sxm-40gb", "h100-sxm", "tpu-v5p"}
    assert answer["rows"][0]["system"] == "h100-sxm"
    rows = list(csv.DictReader(io.StringIO(run("compare", module, *systems, "--csv").out)))
    assert [float(row["step_time_s"]) for row in rows] == times
    comparison = stablecast.compare(module, on=["a100-sxm-40gb", "h100-sxm"])
    assert list(comparison.to_pandas()["system"]) == ["h100-sxm", "a100-sxm-40gb"]
    assert "<table>" in comparison._repr_html_()


def test_overlapping_ranges_are_ties(run: Run, module: str) -> None:
    answer = json.loads(run("compare", module, "--on", "h100-sxm", "--on", "h200-sxm", "--on", "m40", "--json").out)
    assert ["h100-sxm (analytical)", "h200-sxm (analytical)"] in [sorted(pair) for pair in answer["ties"]]
    assert not any("m40" in name for pair in answer["ties"] for name in pair)


def test_a_missing_peak_is_a_row_in_a_comparison_and_an_error_alone(run: Run, module: str) -> None:
    Path(module).write_text(Path(module).read_text().replace("bf16", "f8E4M3FN"))
    alone = run("predict", module, "--on", "a100-sxm-40gb")
    assert alone.code == 2
    assert "a100-sxm-40gb" in alone.err
    assert "fp8_e4m3" in alone.err
    answer = valid(run("compare", module, "--on", "a100-sxm-40gb", "--on", "h100-sxm", "--json").out, "compare")
    assert [row["system"] for row in answer["rows"]] == ["h100-sxm", "a100-sxm-40gb"]
    assert "fp8_e4m3" in answer["rows"][1]["error"]


def test_capture_then_predict(run: Run, examples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = json.loads(
        run("capture", f"{examples}/mlp.py:train_step", "-o", "step.sc", "--set", "batch=256", "--json").out
    )
    assert made["platform"] == "cuda"
    answer = valid(run("predict", "step.sc", "--on", "tpu-v5p", "--json").out, "predict")
    assert answer["platform"] == "cuda"
    assert "the module was lowered for cuda, not for tpu" in answer["assumptions"]
    direct = json.loads(
        run("predict", f"{examples}/mlp.py:train_step", "--set", "batch=256", "--on", "h100-sxm", "--json").out
    )
    captured = json.loads(run("predict", "step.sc", "--on", "h100-sxm", "--json").out)
    assert captured["step_time_s"] == direct["step_time_s"]
    assert direct["kernels"][0]["source"].startswith("mlp.py:")


def test_work(run: Run, module: str) -> None:
    answer = valid(run("work", module, "--json").out, "work_command")
    assert answer["matmul_flops"] == 2 * 1024 * 1024 * 4096
    assert answer["complete"]
    unfused = answer["bytes_read"] + answer["bytes_written"]
    fused = valid(run("work", module, "--fused", "--json").out, "work_command")
    assert fused["bytes_read"] + fused["bytes_written"] < unfused
    assert "counted with" in run("work", module).out


def test_kernel(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = ("--m", 4096, "--n", 4096, "--k", 4096)
    answer = valid(
        run("kernel", "matmul", *sizes, "--dtype", "bf16", "--on", "h100-sxm", "--json").out, "kernel_command"
    )
    assert 2 * 4096**3 / 989.4e12 < answer["time_s"] < 2 * 4096**3 / 300e12
    Path("rows.csv").write_text("kind,m,n,k,dtype,note\nmatmul,4096,4096,4096,bf16,a\nsoftmax,4096,4096,,f32,\n")
    rows = list(csv.DictReader(io.StringIO(run("kernel", "--table", "rows.csv", "--on", "h100-sxm").out)))
    assert float(rows[0]["time_s"]) == answer["time_s"]
    assert rows[0]["note"] == "a"
    assert run("kernel", "--table", "rows.csv", "--on", "h100-sxm", "-o", "out.csv").code == 0
    assert Path("out.csv").read_text().startswith("kind,m,n,k,dtype,note,time_s,low_s,high_s,basis\n")


def test_hardware(run: Run) -> None:
    assert "h100-sxm" in run("hardware", "list").out
    names = [row["name"] for row in json.loads(run("hardware", "list", "--json").out)["devices"]]
    assert len(names) >= 48
    assert "989.4" in run("hardware", "show", "h100-sxm").out
    assert run("hardware", "check").code == 0


def test_ops(run: Run) -> None:
    rows = json.loads(run("ops", "--json").out)["ops"]
    assert {"stablehlo.add", "chlo.top_k", "sdy.manual_computation"} <= {row["op"] for row in rows}


def test_run(run: Run, examples: Path) -> None:
    result = run("run", f"{examples}/mlp.py", "--on", "h100-sxm", "--json")
    (answer,) = json.loads(result.out)["predictions"]
    assert answer["work"]["matmul_flops"] > 1e9
    assert "loss" in result.err


def test_a_device_file_of_ones_own(run: Run, module: str) -> None:
    Path("mine.yaml").write_text("inherits: h100-sxm\nname: mine\nmem_bandwidth: 6.7 TB/s\n")
    mine = run("predict", module, "--on", "./mine.yaml", "--json")
    assert mine.code == 0, mine.err
    assert "mine.yaml" in " ".join(json.loads(mine.out)["assumptions"])


def test_strict(run: Run, module: str) -> None:
    assert run("predict", module, "--on", "h100-sxm", "--strict").code == 0
    Path(module).write_text(
        """module { func.func @main(%x: tensor<30000000x4096xbf16>) -> tensor<30000000x4096xbf16> {
 %0 = stablehlo.negate %x : tensor<30000000x4096xbf16> return %0 : tensor<30000000x4096xbf16> } }"""
    )
    result = run("predict", module, "--on", "h100-sxm", "--strict")
    assert result.code == 3
    assert "DOES NOT FIT" in result.out
    assert result.err == "stablecast: the prediction does not fit on h100-sxm\n"


BAD = [
    ("predict none.mlir --on h100-sxm", "there is no file none.mlir"),
    ("predict small.mlir --on h900", "unknown device 'h900'"),
    ("predict small.mlir --on h100", "h100-sxm"),
    ("predict small.mlir --on h100-sxm:0", "'0' in 'h100-sxm:0' is not a count"),
    ("predict small.mlir --on h100-sxm:4", "has 4 device(s), but the program is written for 1"),
    ("predict small.mlir --on h100-sxm --backend magic", "unknown backend 'magic'"),
    ("predict small.mlir --on h100-sxm --backend matmull=analytical", "unknown kernel class 'matmull'"),
    ("predict small.mlir --on h100-sxm --exec slow", "unknown execution model 'slow'"),
    ("predict small.mlir --on h100-sxm --json --csv", "exclude each other"),
    ("predict small.mlir --on h100-sxm --loop n", "--loop 'n' is not name=number"),
    ("predict small.mlir --on h100-sxm --branch often", "--branch 'often'"),
    ("predict small.mlir --on", "requires an argument"),
    ("predict", "Missing argument"),
    ("compare small.mlir", "nothing to compare on"),
    ("predikt", "No such command"),
    ("capture small.mlir -o nowhere/x.sc", "there is no folder nowhere"),
    ("kernel matmul --m 5 --on h100-sxm", "kernel matmul needs n, k"),
    ("kernel matmull --m 5 --on h100-sxm", "unknown kernel 'matmull'"),
    ("kernel matmul --m -5 --n 3 --k 3 --on h100-sxm", "size m is '-5'"),
    ("kernel --table none.csv --on h100-sxm", "there is no file none.csv"),
    ("kernel matmul --m 5 --n 5 --k 5", "kernel needs a device"),
    ("hardware show nothing", "unknown device 'nothing'"),
    ("run small.mlir", "run needs a device"),
]


@pytest.mark.parametrize(("words", "message"), BAD)
def test_what_is_wrong_is_one_line(run: Run, module: str, words: str, message: str) -> None:
    before = sorted(Path.cwd().iterdir())
    result = run(*words.split())
    assert result.code == 2
    assert result.out == ""
    assert message in result.err
    assert result.err.count("\n") == 1
    assert "Traceback" not in result.err
    assert sorted(Path.cwd().iterdir()) == before


def test_reports_look_as_agreed(run: Run, module: str, golden: Callable[[str, str], None]) -> None:
    def steady(text: str) -> str:
        return (
            "\n".join(line for line in text.splitlines() if not line.startswith(("  predicted in", "  compared in")))
            + "\n"
        )

    golden("predict.txt", steady(run("predict", module, "--on", "h100-sxm").out))
    golden("program.txt", run("predict", module).out)
    golden("work.txt", run("work", module).out)
    golden("compare.txt", steady(run("compare", module, "--on", "h100-sxm", "--on", "tpu-v5p").out))
    golden("kernel.txt", run("kernel", "matmul", "--m", 512, "--n", 512, "--k", 512, "--on", "h100-sxm").out)
    golden("help.txt", run("--help").out)


def test_integer_products_need_an_integer_peak(run: Run, module: str) -> None:
    """int8 runs on the H100's matrix units; a V100 has none of that mode, and no device has one for int16."""
    for element, mode, device, code in (
        ("i8", "int8", "h100-sxm", 0),
        ("i8", "int8", "v100-sxm2", 2),
        ("i16", "int16", "h100-sxm", 2),
    ):
        Path(module).write_text(
            f"""module {{ func.func @main(%x: tensor<64x64x{element}>, %y: tensor<64x64x{element}>) -> tensor<64x64xi32> {{
 %0 = stablehlo.dot_general %x, %y, contracting_dims = [1] x [0] : (tensor<64x64x{element}>, tensor<64x64x{element}>) -> tensor<64x64xi32>
 return %0 : tensor<64x64xi32> }} }}"""
        )
        assert json.loads(run("work", module, "--json").out)["matmul_flops"] == 524_288
        result = run("predict", module, "--on", device, "--json")
        assert result.code == code, result.err
        assert code == 0 or (mode in result.err and device in result.err)


def test_open_dimensions_are_named_and_bound(run: Run, module: str) -> None:
    Path(module).write_text(
        """module { func.func @main(%x: tensor<?x64xf32>) -> tensor<?x64xf32> {
 %0 = stablehlo.negate %x : tensor<?x64xf32> return %0 : tensor<?x64xf32> } }"""
    )
    refused = run("predict", module, "--on", "h100-sxm")
    assert refused.code == 2
    assert "--dim" in refused.err
    name = refused.err.split("--dim ")[1].split("=")[0].strip("'\"")
    answer = json.loads(run("work", module, "--dim", f"{name}=16", "--json").out)
    assert answer["bytes_read"] == 16 * 64 * 4


def test_rules_of_ones_own_cover_a_custom_call(run: Run, module: str) -> None:
    Path(module).write_text(
        """module { func.func @main(%x: tensor<128x128xf32>) -> tensor<128x128xf32> {
 %0 = stablehlo.custom_call @my_own_kernel(%x) : (tensor<128x128xf32>) -> tensor<128x128xf32>
 return %0 : tensor<128x128xf32> } }"""
    )
    opaque = json.loads(run("predict", module, "--on", "h100-sxm", "--json").out)
    assert not opaque["complete"]
    assert [(entry["op"], entry["bytes"], entry["share"]) for entry in opaque["unmodelled"]] == [
        ("stablehlo.custom_call @my_own_kernel", 131_072, 1.0)
    ]
    assert "not modelled" in run("predict", module, "--on", "h100-sxm").out
    Path("rules.yaml").write_text("my_own_kernel:\n  vector_flops: 3 * operands[0].elements\n")
    try:
        known = json.loads(run("work", module, "--rules", "rules.yaml", "--json").out)
    finally:
        TARGETS.remove("my_own_kernel")
    assert known["complete"]
    assert known["vector_flops"] == 3 * 128 * 128


SHARDED = """module @fsdp attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
 func.func public @main(%x: tensor<8192x8192xbf16>, %a: tensor<1024x8192xbf16>, %b: tensor<1024x8192xbf16>) -> tensor<8192x8192xbf16> {
 %0 = "stablehlo.all_gather"(%a) <{all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
  replica_groups = dense<[[0,1,2,3,4,5,6,7]]> : tensor<1x8xi64>, use_global_device_ids}> : (tensor<1024x8192xbf16>) -> tensor<8192x8192xbf16>
 %1 = stablehlo.dot_general %x, %0, contracting_dims = [1] x [0] : (tensor<8192x8192xbf16>, tensor<8192x8192xbf16>) -> tensor<8192x8192xbf16>
 %2 = "stablehlo.all_gather"(%b) <{all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>,
  replica_groups = dense<[[0,1,2,3,4,5,6,7]]> : tensor<1x8xi64>, use_global_device_ids}> : (tensor<1024x8192xbf16>) -> tensor<8192x8192xbf16>
 %3 = stablehlo.dot_general %1, %2, contracting_dims = [1] x [0] : (tensor<8192x8192xbf16>, tensor<8192x8192xbf16>) -> tensor<8192x8192xbf16>
 return %3 : tensor<8192x8192xbf16> } }
"""


def test_schedule_passes(run: Run, module: str) -> None:
    """A gather of the second layer's parameters beside the first product; the traces show the order too."""
    Path(module).write_text(SHARDED)
    words = ("predict", module, "--on", "h100-sxm", "--json")
    plain = json.loads(run(*words, "--pass", "none").out)
    ahead = json.loads(run(*words, "--pass", "fsdp-prefetch=1").out)
    assert ahead["step_time_s"] < plain["step_time_s"]
    assert ahead["exposed_communication_s"] < plain["exposed_communication_s"]
    assert ahead["peak_memory_bytes"] > plain["peak_memory_bytes"]
    assert "schedule passes: fsdp-prefetch=1" in ahead["assumptions"]
    assert any("schedule passes of xla: latency-hiding" in text for text in json.loads(run(*words).out)["assumptions"])
    free = json.loads(run(*words, "--pass", "fsdp-prefetch=1", "--no-contention").out)
    assert free["step_time_s"] <= ahead["step_time_s"]
    unknown = run(*words, "--pass", "fsdp-prefetsh")
    assert (unknown.code, unknown.err.count("\n")) == (2, 1)
    assert "fsdp-prefetch" in unknown.err
    listed = json.loads(run("passes", "--json").out)
    assert {"name", "about"} == set(listed["passes"][0])
    assert "latency-hiding" in run("passes").out
    cycles: dict[str, int] = {}
    for name, extra in (("plain", ("--pass", "async")), ("ahead", ("--pass", "fsdp-prefetch=1", "--pass", "async"))):
        emitted = run("chakra", module, "--on", "h100-sxm:8", "-o", f"{name}/step", *extra, "--pass", "pin")
        assert emitted.code == 0
        answer = json.loads(run("simulate", f"{name}/step", "--on", "h100-sxm:8", "--json").out)
        cycles[name] = answer["ranks"][0]["cycles"]
    assert cycles["ahead"] < cycles["plain"]


def test_mesh_axes_on_network_dimensions(run: Run, module: str) -> None:
    Path(module).write_text(SHARDED)
    words = ("predict", module, "--on", "h100-sxm", "--json")
    unnamed = run(*words, "--map", "model=nvlink")
    assert (unnamed.code, unnamed.err.count("\n")) == (2, 1)
    assert "no mesh with names" in unnamed.err
    wrong = run(*words, "--map", "model")
    assert "--map 'model' is not axis=dimension" in wrong.err


def test_stragglers(run: Run, module: str) -> None:
    """All ranks wait for the slow one in the next collective."""
    Path(module).write_text(SHARDED)
    words = ("predict", module, "--on", "h100-sxm", "--pass", "none", "--json")
    plain, slow = (valid(run(*words, *more).out, "predict") for more in ((), ("--slow", "3=0.5")))
    assert slow["step_time_s"] > plain["step_time_s"]
    assert {role["name"]: role["idle_s"] > 0 for role in slow["roles"]} == {"others": True, "rank 3": False}
    assert 0 < slow["bubble"] < 0.5
    for text, message in (("9=0.5", "no such rank"), ("3", "is not rank=speed"), ("3=0", "more than zero")):
        assert message in run(*words, "--slow", text).err
    reference = valid(run(*words, "--collectives", "astra-sim").out, "predict")
    assert [one["algorithm"] for one in reference["collectives"]] == ["astra-sim"]
    assert "unknown mode 'astra' of collectives" in run(*words, "--collectives", "astra").err
    assert "at least the mean" in run(*words, "--incast", "0.5").err
    assert "has no pipeline" in run(*words, "--pipeline", "1f1b").err
    assert "no number of chunks" in run(*words, "--pipeline", "interleaved=x").err
