"""Damaged and odd files: what was read, and where it broke."""

import gzip
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stablecast.frontends.traces import read_trace
from stablecast.frontends.traces.json_scan import JsonScanner
from stablecast.ir.errors import InputError


def _event(number: int) -> str:
    return json.dumps(
        {
            "ph": "X",
            "cat": "kernel",
            "name": f"k{number % 7}",
            "pid": 0,
            "tid": 7,
            "ts": 10 * number,
            "dur": 5,
            "args": {"stream": 7},
        }
    )


def _trace(events: int) -> str:
    return '{"schemaVersion": 1, "traceEvents": [\n' + ",\n".join(map(_event, range(events))) + '\n], "traceName": "t"}'


def test_truncated_text(tmp_path: Path) -> None:
    text = _trace(100)
    path = tmp_path / "cut.json"
    path.write_text(text[: text.index('"k5"', 3000)])
    events = read_trace(path)
    assert 20 < len(events) < 100
    assert "cut off after" in events.damage


def test_truncated_gzip(tmp_path: Path) -> None:
    packed = gzip.compress(_trace(20000).encode())
    path = tmp_path / "cut.json.gz"
    path.write_bytes(packed[: len(packed) // 2])
    events = read_trace(path)
    assert 1000 < len(events) < 20000
    assert "compressed data is cut off" in events.damage


def test_truncated_compressed_chakra(traces: Path, tmp_path: Path) -> None:
    """All nodes before the place where the compressed data ends."""
    packed = (traces / "chakra" / "chakra_rank0.et.gz").read_bytes()
    path = tmp_path / "cut.et.gz"
    path.write_bytes(packed[: len(packed) // 2])
    events = read_trace(path)
    assert 1000 < len(events) < 3664
    assert "the compressed data is cut off" in events.damage


def test_broken_record_is_skipped(tmp_path: Path) -> None:
    text = _trace(100).replace('"k3"', '"k\\q3"', 1)
    path = tmp_path / "broken.json"
    path.write_text(text)
    events = read_trace(path)
    assert (len(events), events.skipped, events.damage) == (99, 1, "")


def test_array_form_without_end(tmp_path: Path) -> None:
    path = tmp_path / "array.json"
    path.write_text("[" + ",".join(map(_event, range(5))))
    events = read_trace(path)
    assert len(events) == 5
    assert "ends after 5 elements" in events.damage


def test_begin_and_end_events(tmp_path: Path) -> None:
    path = tmp_path / "be.json"
    begin = {"ph": "B", "name": "f", "pid": 1, "tid": 1, "ts": 3}
    path.write_text(json.dumps({"traceEvents": [begin, {"ph": "E", "pid": 1, "tid": 1, "ts": 8}]}))
    events = read_trace(path)
    assert events.names == ("f",)
    assert float(events.duration_s[0]) == pytest.approx(5e-6)


def test_truncated_xplane(traces: Path, tmp_path: Path) -> None:
    whole = (traces / "tpu_v4_jax" / "matmul_1024x1024x1024.xplane.pb").read_bytes()
    path = tmp_path / "cut.xplane.pb"
    path.write_bytes(whole[: len(whole) // 2])
    events = read_trace(path)
    assert 0 < len(events) < 753
    assert "cut off" in events.damage


def test_truncated_chakra(traces: Path, tmp_path: Path) -> None:
    whole = gzip.decompress((traces / "chakra" / "chakra_rank0.et.gz").read_bytes())
    path = tmp_path / "cut.0.et"
    path.write_bytes(whole[: len(whole) // 3])
    events = read_trace(path)
    assert 0 < len(events) < 3664
    assert "after" in events.damage


@pytest.mark.parametrize("content", [b"", b"hello", b"\x1f\x8b\x08", b'{"traceEvents": []}', b"{}"])
def test_no_trace(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(InputError):
        read_trace(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no file"):
        read_trace(tmp_path / "absent.json")


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(
        st.recursive(
            st.none() | st.integers() | st.text(max_size=9),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
            max_leaves=6,
        ).map(lambda value: {"v": value}),
        max_size=6,
    ),
    size=st.integers(1, 40),
)
def test_scanner_equals_json_for_any_cut(values: list[object], size: int) -> None:
    """Whatever the size of the pieces, the elements are those of a whole parse."""
    text = json.dumps({"a": 12, "events": values, "z": [True, 1.5]})
    scanner = JsonScanner((text[at : at + size] for at in range(0, len(text), size)), ("events",))
    found = list(scanner)
    assert [value for key, value in found if key == "events"] == values
    assert [(key, value) for key, value in found if key != "events"] == [("a", 12), ("z", [True, 1.5])]
    assert (scanner.damage, scanner.skipped) == ("", 0)


def test_memory_stays_bounded() -> None:
    """Text of any length goes through in the memory of a few pieces."""
    record = _event(1) + ",\n"
    piece = record * ((1 << 18) // len(record))

    def pieces() -> Iterator[str]:
        yield '{"traceEvents": ['
        for _ in range(40):
            yield piece
        yield _event(2) + "]}"

    tracemalloc.start()
    count = sum(1 for _ in JsonScanner(pieces(), ("traceEvents",)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 40 * piece.count("\n") + 1
    assert peak < 4 << 20
