"""The catalogue: names, values against the table they were transcribed from, systems, users' own files, errors."""

import csv
import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from stablecast.backends import units
from stablecast.backends.catalogue import Catalogue, HardwareFolder, format_list, format_show, split_count
from stablecast.backends.device import Fact, Quantity
from stablecast.backends.learned.rates import rates_for
from stablecast.ir.errors import InputError

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
needs_table = pytest.mark.skipif(
    not (DATA / "device_specs" / "devices.csv").exists(), reason="the table of device facts is not on this machine"
)
needs_measurements = pytest.mark.skipif(
    not (DATA / "aiconfigurator").exists(), reason="the measured collectives are not on this machine"
)


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return Catalogue()


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_hardware", ROOT / "benchmarks" / "make_hardware.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_hardware"] = module
    spec.loader.exec_module(module)
    return module


def write(folder: Path, text: str, name: str = "mine.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


MINIMAL = "kind: gpu\nmem_capacity: 64 GiB\nmem_bandwidth: 3.35 TB/s\npeaks:\n  bf16.matrix: 800 TFLOP/s\n"


def test_the_catalogue_has_no_faults(catalogue: Catalogue) -> None:
    assert catalogue.check() == []


@needs_table
def test_every_fact_of_the_table_is_there_and_nothing_else(catalogue: Catalogue, maker: ModuleType) -> None:
    with (DATA / "device_specs" / "devices.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    names = {key: name for name, key in maker.NAMES.items()}
    seen: dict[str, set[str]] = {}
    for row in rows:
        device = catalogue.device(names[row["device"]])
        facts: dict[str, Fact] = {**device.facts, **device.labels}
        fact = facts[row["field"]]
        where = f"{row['device']} {row['field']}"
        assert (fact.source, fact.source_2, fact.confidence) == (row["source"], row["source_2"], row["confidence"]), (
            where
        )
        if isinstance(fact, Quantity):
            value, dimension = units.to_si(float(row["value"]), row["unit"])
            assert (fact.value, fact.unit) == (value, dimension), where
        else:
            assert fact.text == f"{row['value']} {row['unit']}".strip(), where
        if maker.plain_note(row["note"]):
            assert fact.note == maker.plain_note(row["note"]), where
        seen.setdefault(device.name, set()).add(row["field"])
    assert set(catalogue.names()) - set(seen) == {"cpu"}
    for name, fields in seen.items():
        device = catalogue.device(name)
        extra = ({*device.facts} | {*device.labels}) - fields
        assert extra <= {"vpu_alus_per_lane", "jax_devices_per_chip", "dies_per_device"}, name
        assert all(device.facts[field].source for field in extra)


@needs_table
def test_the_generator_writes_what_is_committed(maker: ModuleType, tmp_path: Path) -> None:
    maker.write_devices(DATA / "device_specs", tmp_path)
    written = sorted(tmp_path.rglob("*.yaml"))
    assert len(written) == 49
    for path in written:
        assert path.read_text() == (maker.HARDWARE / path.relative_to(tmp_path)).read_text(), path.name


@needs_measurements
def test_fitted_constants_follow_from_the_measurements(catalogue: Catalogue, maker: ModuleType) -> None:
    for family, fit in maker.fits(DATA).items():
        name, _, efficiency_only = family.partition(" ")
        dim = next(dim for dim in catalogue.family(name).dims if dim.name in ("nvlink", "xgmi"))
        if not efficiency_only:
            assert dim.base_latency.value * 1e6 == pytest.approx(fit.base_us, rel=0.01)
            assert dim.latency.value * 1e6 == pytest.approx(fit.alpha_us, rel=0.01)
        table = dim.efficiency.by_kind  # type: ignore[union-attr]
        for kind, values in fit.efficiency.items():
            for size, value in values.items():
                assert table[kind][size] == pytest.approx(value, rel=0.005), (family, kind, size)


def test_h100_peaks_are_dense_and_in_si(catalogue: Catalogue) -> None:
    h100 = catalogue.device("h100-sxm")
    assert h100.peak("bf16").value == 989.4e12
    assert h100.sparse_flops["bf16"].value == 1978.9e12
    assert h100.peak("fp8_e4m3") == h100.peak("fp8_e5m2")
    assert h100.hbm_bytes_per_s.value == 3352e9
    assert h100.hbm_bytes.value == 80 * 2**30
    assert h100.memory_bytes.value == 84942979072
    assert h100.matmul_rate("fp32") == h100.vector_flops["f32"]
    assert h100.vector_rate("i32").confidence == "low"
    assert h100.scaleup_bytes_per_s is not None
    assert h100.scaleup_bytes_per_s.value == 450e9


def test_a_missing_peak_names_device_and_mode(catalogue: Catalogue) -> None:
    with pytest.raises(InputError, match="v100-sxm2 has no peak for math mode bf16"):
        catalogue.device("v100-sxm2").peak("bf16")
    with pytest.raises(InputError, match="it has fp16, fp32, fp64"):
        catalogue.device("v100-sxm2").matmul_rate("fp8_e4m3")
    p100 = catalogue.device("p100-sxm2")
    assert p100.matmul_rate("fp16") == p100.vector_flops["f16"]
    assert p100.matmul_rate("fp32") == p100.vector_flops["f32"]
    with pytest.raises(InputError, match="p100-sxm2 has no peak for math mode tf32"):
        p100.matmul_rate("tf32")


def test_a_device_is_what_the_framework_shows(catalogue: Catalogue) -> None:
    v3 = catalogue.device("tpu-v3")
    assert (v3.jax_devices_per_chip, v3.peak("bf16").value, v3.hbm_bytes.value) == (2, 61.5e12, 16 * 2**30)
    assert v3.facts["peak.bf16.matrix"].value == 123e12
    assert "1/2 of the chip" in v3.peak("bf16").note
    v7x = catalogue.device("tpu7x")
    assert (v7x.peak("bf16").value, v7x.hbm_bytes_per_s.value) == (1153.5e12, 3690e9)
    mi250x = catalogue.device("mi250x")
    assert (mi250x.peak("fp16").value, mi250x.cores and mi250x.cores.value) == (191.5e12, 110)
    assert mi250x.memory_bytes.value == 67628957696
    assert catalogue.device("tpu-v4").jax_devices_per_chip == 1


def test_doubtful_values_are_marked(catalogue: Catalogue) -> None:
    nvl = catalogue.device("h100-nvl")
    assert nvl.vector_flops["f64"].recalled
    assert nvl.vector_flops["f64"].doubtful
    shown = format_show(catalogue.show_dict("h100-nvl"))
    assert "? vector_flops f64" in shown
    assert "general knowledge" in shown
    assert all(fact.assumed for fact in catalogue.device("cpu").facts.values())
    assert "RECALLED" in (ROOT / "backends" / "hardware" / "devices" / "h100-nvl.yaml").read_text()


@pytest.mark.parametrize("count", [1, 4, 8])
def test_every_device_has_systems(catalogue: Catalogue, count: int) -> None:
    for name in catalogue.names():
        system = catalogue.resolve(f"{name}:{count}")
        assert (system.count, system.network.size, system.device.name) == (count, count, name)
        for dim in system.network.dims:
            assert dim.bytes_per_s.value > 0
            assert dim.efficiency.source
            assert dim.latency_s.unit == "s"


def test_links_of_boards(catalogue: Catalogue) -> None:
    def rates(spec: str) -> list[tuple[str, int, float]]:
        return [(dim.kind, dim.size, dim.bytes_per_s.value / 1e9) for dim in catalogue.resolve(spec).network.dims]

    assert rates("h100-sxm:8") == [("switch", 8, 450)]
    assert rates("h100-sxm:16") == [("switch", 8, 450), ("switch", 2, 50)]
    assert rates("a100-sxm-40gb:4") == [("switch", 4, 300)]
    assert rates("hgx4-a100-40gb") == [("fully_connected", 4, 300)]
    assert rates("mi300x:2") == [("fully_connected", 2, 64)]
    assert rates("mi300x:8") == [("fully_connected", 8, 448)]
    assert rates("v100-sxm2:2") == [("ring", 2, 50)]
    assert rates("a40:2") == [("pcie_tree", 2, 31.5)]
    assert rates("a40-bridge:2") == [("fully_connected", 2, 56.25)]
    assert rates("gb200-nvl72") == [("switch", 72, 900)]
    assert rates("tpu-v5e:16") == [("torus", 4, 50), ("torus", 4, 50)]
    assert rates("tpu-v5e:256") == [("torus", 16, 100), ("torus", 16, 100)]
    assert rates("tpu-v4:64") == [("torus", 4, 90)] * 3
    assert rates("tpu-v7x:8") == [("fully_connected", 2, 600), ("torus", 2, 50), ("torus", 2, 50)]


def test_efficiency_is_interpolated_between_measured_sizes(catalogue: Catalogue) -> None:
    dims = {n: catalogue.resolve(f"a100-sxm-80gb:{n}").network.dims[0] for n in (4, 6, 8)}
    values = [dims[n].efficiency_for("all_gather").value for n in (4, 6, 8)]
    assert values == sorted(values)
    assert values[0] < values[1] < values[2]
    assert dims[8].efficiency_for("something else") == dims[8].efficiency


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ("a100", "a100-pcie-40gb, a100-pcie-80gb, a100-sxm-40gb, a100-sxm-80gb"),
        ("titan-x", "titan-x-maxwell, titan-x-pascal"),
        ("h100sxm", "unknown device 'h100sxm'; did you mean h100-sxm"),
        ("h100-sxm:0", "'0' in 'h100-sxm:0' is not a count"),
        ("h100-sxm:-4", "is not a count"),
        ("h100-sxm:2.5", "is not a count"),
        ("h100-sxm:", "is not a count"),
        (":4", "names no device"),
        ("h100-sxm:13", "try 8 or 16"),
        ("tpu-v3:3", "try 2 or 4"),
        ("tpu-v5e:512", "at most 256 chips"),
        ("pcie4", "is a network family"),
        ("./absent.yaml", "cannot be read"),
    ],
)
def test_wrong_names_and_counts(catalogue: Catalogue, spec: str, match: str) -> None:
    with pytest.raises(InputError, match=match) as caught:
        catalogue.resolve(spec)
    assert "\n" not in str(caught.value)


def test_a_users_device_file(catalogue: Catalogue, tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    system = catalogue.resolve(path)
    assert (system.name, system.count) == ("mine", 1)
    assert system.device.hbm_bytes_per_s.value == 3.35e12
    assert system.device.hbm_bytes_per_s.source == "mine.yaml (user file)"
    assert system.device.hbm_bytes_per_s.confidence == "user"
    with pytest.raises(InputError, match="names no network for 4 devices; add `system: FAMILY`"):
        catalogue.resolve(f"{path}:4")
    path = write(tmp_path, "inherits: h100-sxm\nmem_bandwidth: 4 TB/s\nomit: [peaks.fp64.matrix]\n", "faster.yaml")
    eight = catalogue.resolve(f"{path}:8")
    assert eight.device.hbm_bytes_per_s.value == 4e12
    assert eight.device.peak("bf16").inherited_from == "h100-sxm"
    assert "fp64" not in eight.device.matrix_flops
    assert eight.network.size == 8


def test_measured_shares_of_a_users_device(catalogue: Catalogue, tmp_path: Path) -> None:
    """They come before the clock rule."""
    path = write(tmp_path, MINIMAL + "sustained: {half: 0.71, memory: {value: 0.9, source: my notes}}\n")
    device = catalogue.resolve(path).device
    assert {key: share.value for key, share in device.sustained.items()} == {"half": 0.71, "memory": 0.9}
    assert device.sustained["memory"].source == "my notes"
    found = rates_for(device).shares
    assert (found["half"].value, found["half"].measured, found["memory"].value) == (0.71, True, 0.9)


def test_a_users_system_file(catalogue: Catalogue, tmp_path: Path) -> None:
    dims = (
        "dims:\n  - {name: fabric, kind: switch, rate: 100 GB/s, efficiency: 0.9, latency: 2 us, base_latency: 9 us}\n"
    )
    system = catalogue.resolve(write(tmp_path, f"device: h100-sxm\ncount: 16\n{dims}"))
    assert (system.count, system.network.dims[0].bytes_per_s.value) == (16, 100e9)
    write(tmp_path, MINIMAL, "chip.yaml")
    system = catalogue.resolve(write(tmp_path, "device: chip.yaml\nsystem: pcie5\ncount: 1\n", "box.yaml"))
    assert system.device.name == "chip"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (MINIMAL + "mem_bandwith: 3 TB/s\n", "unknown field 'mem_bandwith'; did you mean mem_bandwidth"),
        (MINIMAL + "sustained: {bf16: 0.7}\n", "field 'sustained': unknown family 'bf16'; known: fp32, tf32, half"),
        (MINIMAL + "sustained: {half: 1.2}\n", "half is 1.2; a share of the peak is more than 0 and at most 1"),
        (MINIMAL.replace("3.35 TB/s", "3.35 TB"), "field 'mem_bandwidth': 'TB' does not fit here; write GB/s"),
        (MINIMAL.replace("3.35 TB/s", "-1 TB/s"), "field 'mem_bandwidth': must be more than zero"),
        (MINIMAL.replace("3.35 TB/s", "0 TB/s"), "must be more than zero"),
        (MINIMAL.replace("3.35 TB/s", "fast"), "is not a number with a unit"),
        (MINIMAL.replace("3.35 TB/s", "3 parsec"), "unknown unit 'parsec'"),
        (MINIMAL.replace("3.35 TB/s", "3.35"), "'no unit' does not fit here"),
        (MINIMAL.replace("3.35 TB/s", "{value: .nan, unit: TB/s}"), "must be more than zero and finite"),
        (MINIMAL.replace("3.35 TB/s", "true"), "is not a number"),
        (MINIMAL.replace("3.35 TB/s", "{unit: TB/s}"), "has no value"),
        (MINIMAL.replace("3.35 TB/s", "{value: 3, unit: TB/s, colour: red}"), "unknown key 'colour'"),
        (MINIMAL.replace("bf16.matrix", "bf61.matrix"), "unknown peak 'bf61.matrix'.*bf16.matrix"),
        (MINIMAL.replace("gpu", "abacus"), "field 'kind': input should be 'gpu', 'tpu' or 'cpu'"),
        (MINIMAL.replace("kind: gpu\n", ""), "field 'kind' is missing"),
        (MINIMAL + "kind: tpu\n", "'kind' stands twice"),
        (MINIMAL + "inherits: h200-sx\n", "inherits unknown 'h200-sx'; did you mean h200-sxm"),
        (MINIMAL + "omit: [l7]\n", "omit names no field 'l7'"),
        ("[1, 2]", "not a mapping"),
        ("a: [", "not valid YAML"),
        ("? [1]\n: 2\n", "a key is a plain name"),
        ("", "not a mapping"),
        ("device: h100-sxm\ncount: 0\n", "field 'count': input should be greater than or equal to 1"),
        (
            "device: h100-sxm\ncount: 2\ndims: [{name: a, kind: mesh}]\n",
            "field 'dims.0.kind': input should be 'switch'",
        ),
        ("device: h100-sxm\ncount: 2\nsystem: nvlink9\n", "unknown system family 'nvlink9'"),
    ],
)
def test_faulty_files_are_one_line_with_file_and_field(
    catalogue: Catalogue, tmp_path: Path, text: str, match: str
) -> None:
    with pytest.raises(InputError, match=match) as caught:
        catalogue.resolve(write(tmp_path, text))
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_other_packages_bring_hardware_but_not_the_same_names(catalogue: Catalogue, tmp_path: Path) -> None:
    (tmp_path / "devices").mkdir()
    entry = "{value: 1, unit: TB/s, source: assumption, confidence: low}"
    text = MINIMAL.replace("3.35 TB/s", entry).replace("64 GiB", entry.replace("TB/s", "TB"))
    text = text.replace("800 TFLOP/s", entry.replace("TB/s", "TFLOP/s"))
    write(tmp_path / "devices", f"name: wafer\n{text}", "wafer.yaml")
    both = Catalogue([*catalogue.folders, HardwareFolder(tmp_path, "theirs")])
    assert both.device("wafer").peak("bf16").value == 1e12
    assert any("wafer: system: names no network family" in fault for fault in both.check())
    write(tmp_path / "devices", f"name: l4\n{text}", "l4.yaml")
    with pytest.raises(InputError, match="'l4' stands twice"):
        Catalogue([*catalogue.folders, HardwareFolder(tmp_path, "theirs")]).names()


def test_a_catalogue_value_needs_a_source(tmp_path: Path) -> None:
    (tmp_path / "devices").mkdir()
    write(tmp_path / "devices", f"name: bare\n{MINIMAL}", "bare.yaml")
    with pytest.raises(InputError, match="has no source"):
        Catalogue([HardwareFolder(tmp_path, "theirs")]).device("bare")


def test_one_device_does_not_cost_the_whole_catalogue() -> None:
    Catalogue().resolve("h100-sxm")
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        Catalogue().resolve("h100-sxm")
        best = min(best, time.perf_counter() - start)
    assert best < 0.02


def test_lists_and_shows_are_plain(catalogue: Catalogue) -> None:
    rows = catalogue.list_rows()
    assert len(rows) == 49
    assert "tpu-v5p" in format_list(rows)
    shown = catalogue.show_dict("mi300x:8")
    assert [system["count"] for system in shown["systems"]] == [8]  # type: ignore[index,union-attr,attr-defined]
    assert "8 (xgmi, fully connected)" in format_show(shown)
    assert catalogue.device("h200") is catalogue.device("H200_SXM")


@pytest.mark.parametrize(
    ("text", "value", "dimension"),
    [
        ("3.35 TB/s", 3.35e12, units.BYTES_PER_S),
        ("400 Gb/s", 50e9, units.BYTES_PER_S),
        ("80GiB", 80 * 2**30, units.BYTES),
        ("989.4 TFLOP/s", 989.4e12, units.FLOP_PER_S),
        ("5 us", 5e-6, units.SECOND),
        ("1980 MHz", 1.98e9, units.HERTZ),
        ("90 %", 0.9, units.COUNT),
        ("132", 132, units.COUNT),
    ],
)
def test_units(text: str, value: float, dimension: str) -> None:
    number, unit = units.parse(text)
    found, found_dimension = units.to_si(number, unit)
    assert (found, found_dimension) == (pytest.approx(value), dimension)


def test_split_count() -> None:
    assert split_count("h100-sxm") == ("h100-sxm", None)
    assert split_count("mine.yaml:4") == ("mine.yaml", 4)
