"""ASTRA-sim's configuration files: read, refused, and written from our systems."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from stablecast.backends.astrasim import (
    MemoryConfig,
    NetworkConfig,
    ReferenceModel,
    collective_cycles,
    memory_json,
    network_yaml,
    read_memory,
    read_network,
    read_system,
    system_json,
)
from stablecast.backends.astrasim.config import Implementation
from stablecast.backends.catalogue import Catalogue
from stablecast.backends.device import Network, System
from stablecast.ir.device_program import P2P, Collective
from stablecast.ir.errors import InputError
from stablecast.ir.groups import over_axes


def test_a_network_file(tmp_path: Path) -> None:
    path = tmp_path / "network.yml"
    path.write_text(
        "topology: [ Ring, Switch ]\nnpus_count: [ 4, 2 ]\nbandwidth: [ 50.0, 25 ]\nlatency: [ 500, 1.5 ]\n"
    )
    found = read_network(path)
    assert found == NetworkConfig(("Ring", "Switch"), (4, 2), (50.0, 25.0), (500.0, 1.5))
    assert found.ranks == 8
    assert found.bytes_per_ns[0] == pytest.approx(53.687091)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("topology: [ Rings ]\nnpus_count: [4]\nbandwidth: [1]\nlatency: [1]\n", "did you mean Ring"),
        ("topology: [ Ring ]\nnpus_count: [4, 2]\nbandwidth: [1]\nlatency: [1]\n", "differ in length"),
        ("topology: [ Ring ]\nnpus_count: [4]\nbandwidth: [0]\nlatency: [1]\n", "bandwidth of 0"),
        ("topology: [ Ring ]\nnpus_count: [4.5]\nbandwidth: [1]\nlatency: [1]\n", "whole number"),
        ("topology: [ Ring ]\nnpus_count: [4]\nbandwidth: [fast]\nlatency: [1]\n", "expected a number"),
        ("topology: [ Ring ]\nnpus_count: [4]\nlatency: [1]\n", "no bandwidth"),
        ("topology: [\n", "cannot be read"),
        ("just words\n", "expected an object"),
    ],
)
def test_what_is_wrong_with_a_network_file_is_named(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "network.yml"
    path.write_text(text)
    with pytest.raises(InputError, match=words) as error:
        read_network(path)
    assert str(path) in error.value.message


def test_a_system_file() -> None:
    found = read_system(
        {
            "scheduling-policy": "FIFO",
            "endpoint-delay": 7,
            "active-chunks-per-dimension": 2,
            "preferred-dataset-splits": 8,
            "all-reduce-implementation": ["oneRing", "direct3"],
            "all-gather-implementation-custom": ["a/b"],
            "collective-optimization": "localBWAware",
            "local-mem-bw": 50,
            "roofline-enabled": 1,
            "peak-perf": 900,
            "a-key-of-the-future": 1,
        }
    )
    assert found.implementation("all_reduce") == (Implementation("ring", flat=True), Implementation("direct", 3))
    assert found.implementation("all_gather") == (Implementation("custom", traces="a/b"),)
    assert (found.splits, found.active_chunks, found.endpoint_delay_ns, found.peak_tflops) == (8, 2, 7, 900.0)
    assert found.local_bw_aware
    assert found.roofline
    assert not read_system({}).local_bw_aware
    with pytest.raises(InputError, match="no all-to-all-implementation"):
        found.implementation("all_to_all")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"all-reduce-implementation": ["rings"]}, "did you mean"),
        ({"scheduling-policy": "SOON"}, "scheduling-policy"),
        ({"collective-optimization": "best"}, "collective-optimization"),
        ({"model-shared-bus": 1}, "not modelled"),
        ({"inter-dimension-scheduling": "offlineGreedy"}, "not modelled"),
        ({"local-mem-bw": "much"}, "expected a number"),
    ],
)
def test_what_is_wrong_with_a_system_file_is_named(content: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_system(content)


def test_memory_files(tmp_path: Path) -> None:
    assert read_memory({"memory-type": "NO_MEMORY_EXPANSION"}) == MemoryConfig()
    per_node = {
        "memory-type": "PER_NODE_MEMORY_EXPANSION",
        "remote-mem-latency": 500,
        "remote-mem-bw": 100,
        "num-npus-per-node": 4,
    }
    assert read_memory(per_node) == MemoryConfig("PER_NODE_MEMORY_EXPANSION", 500.0, 100.0, 4)
    with pytest.raises(InputError, match="num-npus-per-node"):
        read_memory({**per_node, "num-npus-per-node": 0})
    with pytest.raises(InputError, match="unknown memory-type"):
        read_memory({"memory-type": "MUCH"})
    with pytest.raises(InputError, match="needs remote-mem-latency"):
        read_memory({"memory-type": "MEMORY_POOL"})
    with pytest.raises(InputError, match="No such file"):
        read_memory(tmp_path / "absent.json")


@pytest.fixture(scope="module")
def two_nodes() -> System:
    return Catalogue().resolve("h100-sxm:16")


def test_our_systems_are_written_and_read_back(two_nodes: System, tmp_path: Path) -> None:
    (tmp_path / "network.yml").write_text(network_yaml(two_nodes))
    (tmp_path / "system.json").write_text(system_json(two_nodes, roofline=True))
    network, system = read_network(tmp_path / "network.yml"), read_system(tmp_path / "system.json")
    dims = [dim for dim in two_nodes.network.dims if dim.size > 1]
    assert network.npus_count == tuple(dim.size for dim in dims)
    assert network.ranks == 16
    for dim, rate in zip(dims, network.bytes_per_ns, strict=True):
        assert rate == pytest.approx(dim.bytes_per_s.value * dim.efficiency.value / 1e9, rel=1e-5)
    assert system.roofline
    assert system.peak_tflops == pytest.approx(two_nodes.device.peak("bf16").value / 1e12)
    assert system.local_mem_gbps == pytest.approx(two_nodes.device.hbm_bytes_per_s.value / 1e9)
    assert collective_cycles("all_reduce", 1 << 20, network, system).cycles_max > 0


def test_what_a_link_is(two_nodes: System) -> None:
    """Ours is all links of a device together: half of it a way round a ring, a share a peer where all are connected."""
    dim = two_nodes.network.dims[0]
    reached = dim.bytes_per_s.value * dim.efficiency.value / 2**30
    hop = dim.latency_s.value * 1e9
    for kind, wrapped, name, rate, latency in (
        ("switch", True, "Switch", reached, hop / 2),
        ("ring", True, "Ring", reached / 2, hop),
        ("torus", False, "Ring", reached, hop),
        ("fully_connected", True, "FullyConnected", reached / (dim.size - 1), hop),
    ):
        one = replace(two_nodes, network=Network((replace(dim, kind=kind, wrapped=wrapped),)))
        content = yaml.safe_load(network_yaml(one))
        assert content["topology"] == [name]
        assert content["bandwidth"][0] == pytest.approx(rate, rel=1e-5)
        assert content["latency"][0] == pytest.approx(latency, abs=1e-3)


@pytest.mark.parametrize(
    "name", ["dgx-h100-superpod", "h100-roce-24k", "gb200-nvl72-superpod", "tpu-v5p-pod", "mi300x-node"]
)
def test_machines_of_the_catalogue_can_be_written(name: str) -> None:
    system = Catalogue().resolve(name)
    content = yaml.safe_load(network_yaml(system))
    assert math.prod(content["npus_count"]) == system.count
    for kind, rate, dim in zip(content["topology"], content["bandwidth"], system.network.dims, strict=True):
        if dim.kind == "fat_tree":
            assert kind == "Switch"
            assert rate == pytest.approx(dim.bytes_per_s.value * dim.efficiency.value / 2**30, rel=1e-5)


def test_memory_of_a_system(two_nodes: System) -> None:
    assert json.loads(memory_json(two_nodes)) == {"memory-type": "NO_MEMORY_EXPANSION"}
    remote = read_memory(json.loads(memory_json(two_nodes, remote=True)))
    assert two_nodes.device.host_bytes_per_s is not None
    assert remote.bytes_per_ns == pytest.approx(two_nodes.device.host_bytes_per_s.value / 1e9)
    with pytest.raises(InputError, match="one device has no network"):
        network_yaml(replace(two_nodes, count=1, network=Network(())))


def test_collectives_of_a_program_in_the_reference(two_nodes: System) -> None:
    """Over all devices as a world of its own, over fewer as a group, of the sizes that ASTRA-sim's traces carry."""
    model = ReferenceModel(two_nodes)
    axes = [("node", 2), ("gpu", 8)]
    whole = Collective("all_gather", over_axes("mesh", axes, ["node", "gpu"]), 1 << 20, 16 << 20)
    expected = collective_cycles("all_gather", 1 << 20, model.network, model.config).cycles_max
    priced = model.estimate(whole)
    assert priced.time_s == priced.low_s == priced.high_s == pytest.approx(expected * 1e-9)
    inner = Collective("all_reduce", over_axes("mesh", axes, ["gpu"]), 1 << 20, 1 << 20)
    expected = collective_cycles("all_reduce", 1 << 20, model.network, model.config, [list(range(8))]).cycles_max
    assert model.estimate(inner).time_s == pytest.approx(expected * 1e-9)
    sizes = {"reduce_scatter": 1 << 20, "all_gather": 1 << 17}
    parts = [Collective(kind, inner.groups, size, 0) for kind, size in sizes.items()]
    spread = Collective("collective_broadcast", inner.groups, 1 << 20, 1 << 20)
    assert model.estimate(spread).time_s == pytest.approx(sum(model.estimate(part).time_s for part in parts))
    message = model.p2p(P2P("send", "node", 1, 0, 1 << 20)).time_s
    assert message > model.estimate(Collective("collective_permute", inner.groups, 1 << 20, 1 << 20)).time_s > 0
    with pytest.raises(InputError, match="unknown collective"):
        model.estimate(Collective("all_redo", inner.groups, 1, 1))
