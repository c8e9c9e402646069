import gzip
import json
from pathlib import Path

import pytest

from stablecast.ir.chakra import (
    Attribute,
    Node,
    NodeType,
    PrefixWriter,
    TraceError,
    TraceMetadata,
    TraceReader,
    TraceWriter,
    ValueKind,
    check,
    comp_node,
    encode_trace,
    find_traces,
    json_lines,
    load_trace,
    nodes_of_json,
)
from stablecast.ir.errors import InputError

NODES = [comp_node(index, f"COMP_NODE_{index}", 1 + index, 2, range(index)[-1:]) for index in range(50)]


def _listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


@pytest.mark.parametrize("name", ["a.0.et", "a.0.et.gz"])
def test_written_trace_is_read_back(tmp_path: Path, name: str) -> None:
    metadata = TraceMetadata("0.0.4", (Attribute("schema", ValueKind.STRING, "x"),))
    with TraceWriter(tmp_path / name, metadata) as writer:
        for node in NODES:
            writer.write(node)
        assert not (tmp_path / name).exists()
    assert _listing(tmp_path) == [name]
    trace = load_trace(tmp_path / name)
    assert trace.metadata == metadata
    assert list(trace.nodes) == NODES


def test_failed_writing_leaves_nothing(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "a.0.et")
    writer.write(NODES[0])
    writer.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    with pytest.raises(ValueError, match="unsigned"), TraceWriter(tmp_path / "a.0.et") as writer:
        writer.write(Node(-1))
    assert _listing(tmp_path) == []


def test_existing_file_needs_overwrite(tmp_path: Path) -> None:
    (tmp_path / "a.0.et").write_bytes(b"mine")
    with pytest.raises(InputError, match="exists"):
        TraceWriter(tmp_path / "a.0.et")
    with TraceWriter(tmp_path / "a.0.et", overwrite=True) as writer:
        writer.write(NODES[0])
    assert load_trace(tmp_path / "a.0.et").nodes == (NODES[0],)


def test_large_file_is_streamed(tmp_path: Path) -> None:
    big = Node(7, "n" * 3_000_000, NodeType.COMP)
    (tmp_path / "a.0.et").write_bytes(encode_trace([*NODES, big, *NODES * 400]))
    reader = TraceReader(tmp_path / "a.0.et")
    assert [node.id for node in reader] == [*range(50), 7, *[*range(50)] * 400]
    assert reader.metadata == TraceMetadata()


@pytest.mark.parametrize("cut", [1, 2, 30, 999])
def test_truncated_file_is_named_with_its_place(tmp_path: Path, cut: int) -> None:
    (tmp_path / "a.0.et").write_bytes(encode_trace(NODES)[:-cut])
    with pytest.raises(TraceError, match=r"a\.0\.et") as caught:
        load_trace(tmp_path / "a.0.et")
    assert caught.value.kind == "truncated file"


def test_broken_gzip(tmp_path: Path) -> None:
    data = gzip.compress(encode_trace(NODES))
    (tmp_path / "a.0.et").write_bytes(data[:-20])
    with pytest.raises(TraceError, match="cut off"):
        load_trace(tmp_path / "a.0.et")
    (tmp_path / "a.0.et").write_bytes(data[:40] + bytes(20) + data[60:])
    with pytest.raises(TraceError, match="broken"):
        load_trace(tmp_path / "a.0.et")


def test_nonsense_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.0.et").write_bytes(b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff")
    with pytest.raises(TraceError):
        load_trace(tmp_path / "a.0.et")
    (tmp_path / "b.0.et").write_bytes(b"\x02\x0a\x05" * 3)
    with pytest.raises(TraceError, match=r"malformed|cut off"):
        load_trace(tmp_path / "b.0.et")
    (tmp_path / "c.json").write_text('{"hello": 1')
    with pytest.raises(InputError, match="not JSON"):
        load_trace(tmp_path / "c.json")
    (tmp_path / "c.json").write_text("[1]")
    with pytest.raises(InputError, match="not a known JSON form"):
        load_trace(tmp_path / "c.json")


def test_finding_traces(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        find_traces(tmp_path / "no" / "w")
    with pytest.raises(InputError, match=r"w\.0\.et"):
        find_traces(tmp_path / "w")
    for name in ("w.0.et", "w.10.et", "w.2.et.gz", "w.json"):
        (tmp_path / name).write_bytes(b"")
    files = find_traces(tmp_path / "w")
    assert list(files.ranks) == [0, 2, 10]
    assert find_traces(tmp_path).ranks == files.ranks
    single = find_traces(tmp_path / "w.10.et")
    assert (single.single, list(single.ranks)) == (True, [10])
    (tmp_path / "v.0.et").write_bytes(b"")
    with pytest.raises(InputError, match="several prefixes"):
        find_traces(tmp_path)


def test_prefix_appears_whole_with_manifest(tmp_path: Path) -> None:
    with PrefixWriter(tmp_path / "new" / "w") as writer:
        for rank in range(3):
            writer.write_nodes(rank, NODES)
        writer.write_groups({"1": [0, 1, 2]})
        writer.notes["prediction"] = {"step_time_s": 1.5}
        assert find_names(tmp_path / "new") == []
    manifest = json.loads((tmp_path / "new" / "w.manifest.json").read_text())
    assert (manifest["ranks"], manifest["nodes"]) == (3, 150)
    assert manifest["prediction"] == {"step_time_s": 1.5}
    assert set(manifest["files"]) == {"w.0.et", "w.1.et", "w.2.et", "comm_group.json"}
    assert check(tmp_path / "new" / "w").ok
    assert len(_listing(tmp_path / "new")) == 5


def find_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_failed_prefix_leaves_what_was_there(tmp_path: Path) -> None:
    with PrefixWriter(tmp_path / "w") as writer:
        writer.write_nodes(0, NODES)
    before = {name: (tmp_path / name).read_bytes() for name in _listing(tmp_path)}
    with pytest.raises(InputError, match="exists"):
        PrefixWriter(tmp_path / "w")
    writer = PrefixWriter(tmp_path / "w", overwrite=True)
    writer.write_nodes(0, NODES[:3])
    writer.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert {name: (tmp_path / name).read_bytes() for name in _listing(tmp_path)} == before


def test_overwriting_removes_stale_ranks(tmp_path: Path) -> None:
    for ranks in (4, 2):
        with PrefixWriter(tmp_path / "w", overwrite=True) as writer:
            for rank in range(ranks):
                writer.write_nodes(rank, NODES)
    assert _listing(tmp_path) == ["w.0.et", "w.1.et", "w.manifest.json"]


def test_prefix_refusals(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no rank"), PrefixWriter(tmp_path / "w"):
        pass
    with PrefixWriter(tmp_path / "w") as writer:
        writer.write_nodes(0, NODES)
        with pytest.raises(InputError, match="twice"):
            writer.write_nodes(0, NODES)
        with pytest.raises(InputError, match="positive integers"):
            writer.write_groups({"tp": [0]})
        with pytest.raises(InputError, match="plain file name"):
            writer.write_file("../x", b"")
        with pytest.raises(InputError, match="no rank"):
            writer.write_nodes(-1, NODES)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file"):
        PrefixWriter(tmp_path / "file" / "w")


def test_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.write", full)
    with pytest.raises(InputError, match="disk is full"), PrefixWriter(tmp_path / "w") as writer:
        writer.write_nodes(0, NODES)
    assert _listing(tmp_path) == []


def test_json_forms(tmp_path: Path) -> None:
    nodes = [*NODES, Node(99, "x", 77, (1,), (2,), attributes=(Attribute("b", ValueKind.BYTES_LIST, (b"\xff", b"")),))]
    nodes.append(Node(100, "y", NodeType.COMP, attributes=(Attribute("d", ValueKind.DOUBLE, float("inf")),)))
    text = "\n".join(json_lines(TraceMetadata(), nodes))
    assert json.loads(text)["metadata"] == {"version": "0.0.4"}
    assert nodes_of_json(text.encode(), "x") == (TraceMetadata(), nodes)
    assert nodes_of_json("".join(json_lines(None, [])).encode(), "x") == (None, [])
    parts = json.loads(text)
    lines = "\n".join(json.dumps(one, indent=1) for one in [parts["metadata"], *parts["nodes"]])
    (tmp_path / "a.json").write_text(lines)
    assert list(load_trace(tmp_path / "a.json").nodes) == nodes
