"""Arguments in memory tiers: what is moved, when, and what stays on the device."""

from pathlib import Path

import numpy as np
import pytest

from stablecast.backends.catalogue import Catalogue
from stablecast.backends.estimates import Estimates
from stablecast.backends.predictor import Settings, predict_device_program
from stablecast.backends.registry import Choice
from stablecast.backends.schedule import schedule
from stablecast.ir.device_program import P2P, ArgumentBuffer, Buffers, DeviceProgram, Kernel
from stablecast.ir.errors import InputError
from stablecast.ir.kernels import KernelClass, KernelRow, KernelTable
from stablecast.ir.work import SymbolicWork
from stablecast.lowering.chakra import emit
from stablecast.lowering.passes import find_pass, illegal, run_passes

MB = 2**20
ROWS = (KernelRow(elems=1), KernelRow(KernelClass.GATHER, bytes_read=4.0 * MB))
COSTS = Estimates(
    np.array([1e-3, 1e-3]),
    np.array([1e-3] * 2),
    np.array([1e-3] * 2),
    np.array(["analytical"] * 2),
    np.array(["memory"] * 2),
)


def program(updates: int = 6) -> DeviceProgram:
    """A look-up in a table, then updates of moments one after the other."""
    arguments = [ArgumentBuffer("params['table']", 1000 * MB)]
    arguments += [ArgumentBuffer(f"state['adam'][{number}]", 100 * MB, True) for number in range(updates)]
    body = [Kernel(1, arguments=(0,))]
    body += [Kernel(0, deps=(number,), arguments=(number + 1,)) for number in range(updates)]
    size = sum(argument.nbytes for argument in arguments)
    buffers = Buffers(size, 100 * MB * updates, 100 * MB * updates, 10 * MB)
    table = KernelTable(ROWS, np.array([float(updates), 1.0]))
    return DeviceProgram("step", tuple(body), table, SymbolicWork(), buffers=buffers, arguments=tuple(arguments))


def moves(changed: DeviceProgram) -> list[tuple[str, int]]:
    return [(node.direction, node.nbytes // MB) for node in changed.body if isinstance(node, P2P)]


def test_moments_come_and_go() -> None:
    changed = run_passes(program(), ["offload=*adam*:host"])
    assert moves(changed) == [("load", 100), ("store", 100)] * 6
    assert illegal(find_pass("offload=*adam*:host")[0], program()) == ""
    loads = [node for node in changed.body if isinstance(node, P2P) and node.direction == "load"]
    assert [len(node.after) for node in loads] == [0, 0, 0, 0, 1, 1]
    assert changed.buffers == Buffers(1000 * MB, 0, 0, 10 * MB + 400 * MB)


def test_of_a_table_the_rows_that_are_looked_up() -> None:
    changed = run_passes(program(), ["offload=params*:ssd", "offload=*adam*:ssd"])
    assert changed.offloaded == {"ssd": 1600 * MB}
    changed = run_passes(program(), ["offload=params*:ssd"])
    assert moves(changed) == [("load", 4)]
    assert changed.offloaded == {"ssd": 1000 * MB}
    assert changed.buffers is not None
    assert changed.buffers.argument_bytes == 600 * MB


def test_transfers_run_beside_kernels_at_the_tiers_rate() -> None:
    system = Catalogue().resolve("dgx-h100")
    host, ssd = system.tier("host"), system.tier("ssd")
    assert host.read_bytes_per_s.value == system.device.host_bytes_per_s.value  # type: ignore[union-attr]
    for tier in (host, ssd):
        load, store = tier.seconds(100 * MB, load=True), tier.seconds(100 * MB, load=False)
        assert store >= load == pytest.approx(tier.latency_s.value + 100 * MB / tier.read_bytes_per_s.value)
        one = schedule(run_passes(program(1), [f"offload=*adam*:{tier.name}"]), COSTS, system)
        assert one.time_s == pytest.approx(max(1e-3, load) + 1e-3 + store)
        assert one.exposed_by_axis_s == pytest.approx({tier.name: max(load - 1e-3, 0.0) + store})
        many = schedule(run_passes(program(), [f"offload=*adam*:{tier.name}"]), COSTS, system)
        assert many.time_s < 6 * (load + store) + 7e-3, "loads run beside stores"
    assert {entry.stream for entry in many.slices} == {"compute", "load ssd", "store ssd"}


def test_what_does_not_fit_in_its_tier(tmp_path: Path) -> None:
    own = tmp_path / "mine.yaml"
    tier = "tiers:\n  - {name: ssd, read: 6 GB/s, latency: 80 us, capacity: 1 GB}\n"
    own.write_text(f"device: h100-sxm\ncount: 1\nsystem: nvlink4-switch\n{tier}")
    system = Catalogue().resolve(str(own))
    for text, fits in (("offload=state*0?:ssd", True), ("offload=*:ssd", False)):
        made = predict_device_program(run_passes(program(), [text]), system, Settings(Choice(), {}), "")
        assert made.fits == fits
        assert made.tiers["ssd"][1] == 10**9
        assert ("DOES NOT FIT" in repr(made)) != fits


def test_traces_have_memory_nodes(tmp_path: Path) -> None:
    changed = run_passes(program(2), ["offload=*adam*:host"])
    report = emit(changed, COSTS.time_s, tmp_path / "t")
    assert report.ranks == 1
    assert (tmp_path / "t.0.et").read_bytes().count(b"MEM_LOAD_NODE_host") == 2
    assert (tmp_path / "t.0.et").read_bytes().count(b"MEM_STORE_NODE_host") == 2


def test_what_cannot_be_offloaded(tmp_path: Path) -> None:
    for text, message in (
        ("offload=*adam*", "takes PATTERN:TIER"),
        ("offload=nothing:host", "no argument is called 'nothing'"),
    ):
        with pytest.raises(InputError, match=message):
            run_passes(program(), [text])
    with pytest.raises(InputError, match="no memory tier 'tape'"):
        schedule(run_passes(program(), ["offload=*:tape"]), COSTS, Catalogue().resolve("h100-sxm"))
    own = tmp_path / "mine.yaml"
    own.write_text(
        "device: h100-sxm\ncount: 8\nsystem: nvlink4-switch\n"
        "tiers:\n  - {name: host, read: 20 GB/s, latency: 5 us, shared_by: 2}\n"
    )
    host = Catalogue().resolve(str(own)).tier("host")
    assert host.seconds(10**9, load=False) == pytest.approx(5e-6 + 2 * 10**9 / 20e9)
