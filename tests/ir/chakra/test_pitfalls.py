"""Every probe of `pitfalls.csv` rebuilt: those at fault by the trace are caught by that kind, the others pass."""

import csv
import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from stablecast.ir.chakra import (
    Attribute,
    CollectiveType,
    Node,
    NodeType,
    ValueKind,
    bool_attr,
    check,
    encode_node,
    encode_trace,
    int32_attr,
    int64_attr,
    memory_node,
    string_attr,
    uint64_attr,
)
from stablecast.ir.chakra.wire import frame

MB = 1 << 20
AR, AG = CollectiveType.ALL_REDUCE, CollectiveType.ALL_GATHER
Program = Callable[[int], Sequence[Node]]


@dataclass(frozen=True)
class Case:
    """A trace of `ranks` ranks by program, and what lies beside it."""

    program: Program
    ranks: int = 4
    files: int | None = None
    roofline: bool = True
    npus: tuple[int, ...] = ()
    groups: Mapping[str, object] = field(default_factory=dict[str, object])
    metadata: bool = True
    zipped: bool = False

    def write(self, folder: Path) -> Path:
        for rank in range(self.ranks if self.files is None else self.files):
            nodes = self.program(rank)
            data = encode_trace(nodes) if self.metadata else b"".join(frame(encode_node(node)) for node in nodes)
            (folder / f"t.{rank}.et").write_bytes(gzip.compress(data) if self.zipped else data)
        (folder / "network.yml").write_text(f"npus_count: {list(self.npus or [self.ranks])}\n")
        (folder / "system.json").write_text(json.dumps({"roofline-enabled": int(self.roofline)}))
        if self.groups:
            (folder / "comm_group.json").write_text(json.dumps(self.groups))
        return folder / "t"


def comp(node_id: int, deps: Sequence[int] = (), ops: int | None = 1000, size: int | None = MB, us: int = 0) -> Node:
    attributes = [bool_attr("is_cpu_op", False)]
    attributes += [int64_attr("num_ops", ops)] if ops is not None else []
    attributes += [uint64_attr("tensor_size", size)] if size is not None else []
    return Node(node_id, "COMP_NODE", NodeType.COMP, tuple(deps), duration_micros=us, attributes=tuple(attributes))


def coll(node_id: int = 0, deps: Sequence[int] = (), kind: int = AR, size: int = MB, *more: Attribute) -> Node:
    attributes = (bool_attr("is_cpu_op", False), int64_attr("comm_type", kind), int64_attr("comm_size", size), *more)
    return Node(node_id, "COMM_COLL_NODE", NodeType.COMM_COLL, tuple(deps), attributes=attributes)


def changed(node: Node, name: str, attribute: Attribute | None) -> Node:
    kept = tuple(one for one in node.attributes if one.name != name)
    return replace(node, attributes=kept if attribute is None else (*kept, attribute))


def peer(sends: bool, rank: int, size: int = MB, node_id: int = 0, tag: int | None = 1) -> Node:
    tags = () if tag is None else (int32_attr("comm_tag", tag),)
    attributes = (int32_attr("comm_dst" if sends else "comm_src", rank), int64_attr("comm_size", size), *tags)
    return Node(node_id, "x", NodeType.COMM_SEND if sends else NodeType.COMM_RECV, attributes=attributes)


def plain(node_id: int, kind: int, deps: Sequence[int] = ()) -> Node:
    return Node(node_id, "x", kind, tuple(deps))


def same(*nodes: Node, **options: object) -> Case:
    return Case(lambda rank: nodes, **options)  # type: ignore[arg-type]


def sized(kind: ValueKind, value: int | float | str) -> Case:
    return same(changed(coll(), "comm_size", Attribute("comm_size", kind, value)))


def typed(kind: int) -> Case:
    return same(coll(kind=kind))


def grouped(name: str, members: Mapping[str, object] | None = None, ranks: int = 4, **options: object) -> Case:
    return same(coll(0, (), AR, MB, string_attr("pg_name", name)), groups=members or {name: [*range(ranks)]}, **options)


def halves(first: Sequence[int], second: Sequence[int]) -> Case:
    def program(rank: int) -> Sequence[Node]:
        return [coll(0, (), AR, MB, string_attr("pg_name", "1" if rank in first else "2"))]

    return Case(program, groups={"1": list(first), "2": list(second)})


def involved(*flags: bool, npus: tuple[int, ...] = ()) -> Case:
    return same(coll(0, (), AR, MB, Attribute("involved_dim", ValueKind.BOOL_LIST, flags)), npus=npus)


def pair(send: Node | None, receive: Node | None) -> Case:
    return Case(lambda rank: [send] if rank == 0 and send else [receive] if rank == 1 and receive else [comp(0)])


def by_rank(first: Sequence[Node], others: Sequence[Node]) -> Case:
    return Case(lambda rank: first if rank == 3 else others)


BASE = same(comp(0), coll(1, (0,)))
AR_CASE = same(coll())
TWICE = [coll(0, (), AR, MB, string_attr("pg_name", "1")), coll(1, (0,), AR, MB, string_attr("pg_name", "501"))]
CPU = bool_attr("is_cpu_op", True)

MISSING, TYPE, ZERO = "missing attribute", "attribute type", "zero size or work"
NO_TAKER, CYCLE, UNSUPPORTED = "node type no consumer takes", "dependency cycle", "unsupported collective"

CASES: dict[str, tuple[Case, str]] = {
    "baseline comp+AR": (BASE, ""),
    "missing num_ops (roofline)": (same(comp(0, ops=None)), MISSING),
    "missing tensor_size (roofline)": (same(comp(0, size=None)), MISSING),
    "missing both + duration (roofline)": (same(comp(0, ops=None, size=None, us=5)), MISSING),
    "num_ops=0,tensor_size=1MB (roofline)": (same(comp(0, ops=0)), ZERO),
    "num_ops=1,tensor_size=1MB (roofline)": (same(comp(0, ops=1)), ""),
    "num_ops=0,ts=0 leaf": (same(comp(0, ops=0, size=0)), ""),
    "ts=0 comp then AR (dep)": (same(comp(0, size=0), coll(1, (0,))), ZERO),
    "comp, ts=0 comp, then AR chain": (same(comp(0), comp(1, (0,), size=0), coll(2, (1,))), ZERO),
    "METADATA root then comp dep": (same(plain(0, 1), comp(1, (0,))), NO_TAKER),
    "METADATA root, comp independent": (same(plain(0, 1), comp(1)), NO_TAKER),
    "comp, METADATA mid, comp": (same(comp(0), plain(1, 1, (0,)), comp(2, (1,))), NO_TAKER),
    "only METADATA": (same(plain(0, 1)), NO_TAKER),
    "empty trace (metadata msg only)": (same(), "rank without nodes"),
    "rank 3 empty trace": (by_rank([], [comp(0)]), "rank without nodes"),
    "missing file for rank 3": (replace(BASE, files=3), "missing rank file"),
    "no GlobalMetadata first": (same(comp(0), comp(1), metadata=False), "no metadata record"),
    "dep on missing id": (same(comp(0), comp(1, (7,))), "dangling dependency"),
    "cycle 1<->2 + free 0": (same(comp(0), comp(1, (2,)), comp(2, (1,))), CYCLE),
    "cycle all": (same(comp(0, (1,)), comp(1, (0,))), CYCLE),
    "self dep": (same(comp(0), comp(1, (1,))), CYCLE),
    "dup deps [0,0]": (same(comp(0), comp(1, (0, 0))), "repeated dependency"),
    "same id in data and ctrl": (same(comp(0), replace(comp(1, (0,)), ctrl_deps=(0,))), ""),
    "ctrl dep only": (same(comp(0), replace(coll(1), ctrl_deps=(0,))), "ordering only in ctrl_deps"),
    "dup node ids": (same(comp(0), comp(0)), "duplicate id"),
    "child before parent in file": (same(comp(1, (0,)), comp(0)), ""),
    "big ids (2^40)": (same(comp(2**40), comp(2**40 + 1, (2**40,))), ""),
    "comm_size as int64_val": (sized(ValueKind.INT64, MB), ""),
    "comm_size as uint64_val": (sized(ValueKind.UINT64, MB), TYPE),
    "comm_size as int32_val": (sized(ValueKind.INT32, MB), TYPE),
    "comm_size as uint32_val": (sized(ValueKind.UINT32, MB), TYPE),
    "comm_size as double_val": (sized(ValueKind.DOUBLE, float(MB)), TYPE),
    "comm_size as string_val": (sized(ValueKind.STRING, str(MB)), TYPE),
    "comm_size as sint64_val": (sized(ValueKind.SINT64, MB), TYPE),
    "comm_size as fixed64_val": (sized(ValueKind.FIXED64, MB), TYPE),
    "comm_size as bool_val": (sized(ValueKind.BOOL, True), TYPE),
    "comm_type as string": (same(changed(coll(), "comm_type", string_attr("comm_type", "0"))), TYPE),
    "comm_type missing": (same(changed(coll(), "comm_type", None)), MISSING),
    "comm_size 0": (same(coll(size=0)), ""),
    "is_cpu_op missing": (same(changed(coll(), "is_cpu_op", None)), ""),
    "is_cpu_op true on coll": (same(changed(coll(), "is_cpu_op", CPU)), "cpu flag on communication"),
    "is_cpu_op int32 0": (same(changed(coll(), "is_cpu_op", int32_attr("is_cpu_op", 0))), ""),
    "num_ops double": (same(changed(comp(0), "num_ops", Attribute("num_ops", ValueKind.DOUBLE, 1.0))), TYPE),
    "tensor_size int64_val": (same(changed(comp(0), "tensor_size", int64_attr("tensor_size", MB))), ""),
    "comm_type REDUCE": (typed(1), UNSUPPORTED),
    "comm_type GATHER": (typed(3), UNSUPPORTED),
    "comm_type SCATTER": (typed(4), UNSUPPORTED),
    "comm_type BROADCAST": (typed(5), ""),
    "comm_type BARRIER": (typed(9), UNSUPPORTED),
    "comm_type REDUCE_SCATTER_BLOCK": (typed(8), UNSUPPORTED),
    'pg_name "tp"': (grouped("tp", {"1": [0, 1, 2, 3]}), "group name"),
    "pg_name int64_val 1": (replace(same(coll(0, (), AR, MB, int64_attr("pg_name", 1))), groups={"1": [0]}), TYPE),
    'json key "tp"': (replace(AR_CASE, groups={"tp": [0, 1, 2, 3]}), "group file"),
    'json key "0"': (replace(AR_CASE, groups={"0": [0, 1, 2, 3]}), "group file"),
    'pg "0", no json': (same(coll(0, (), AR, MB, string_attr("pg_name", "0"))), ""),
    "two groups [0,1],[2,3]": (halves([0, 1], [2, 3]), ""),
    "groups strided": (halves([0, 2], [1, 3]), ""),
    "rank not in its group": (grouped("1", {"1": [0, 1, 2]}), "rank outside its group"),
    "group of 1 rank": (halves([0], [1, 2, 3]), "one-rank group"),
    "group list of list": (grouped("1", {"1": [[0, 1, 2, 3]]}), "group file"),
    'cg path containing "empty"': (grouped("1"), ""),
    **{f"group id {key}": (grouped(str(key)), "") for key in (499, 501, 2000, 2147, 2148, 5000, 100000)},
    "ids 1 & 501 same ranks both used": (same(*TWICE, groups={"1": [0, 1, 2, 3], "501": [0, 1, 2, 3]}), ""),
    "order mismatch AR,AG vs AG,AR": (
        by_rank([coll(0, (), AG), coll(1, (0,))], [coll(0), coll(1, (0,), AG)]),
        "collective order differs",
    ),
    "sizes mismatch": (by_rank([coll(size=2 * MB)], [coll()]), "collective size differs"),
    "rank 3 lacks collective": (by_rank([comp(0)], [comp(0), coll(1, (0,))]), "collective missing on a member"),
    "involved_dim [True]": (involved(True), ""),
    "involved_dim [False]": (involved(False), "involved_dim"),
    "involved_dim int32_list": (
        same(coll(0, (), AR, MB, Attribute("involved_dim", ValueKind.INT32_LIST, (1,)))),
        "involved_dim",
    ),
    "2D net, involved [T]": (involved(True, npus=(2, 2)), "involved_dim"),
    "2D net, involved [T,F]": (involved(True, False, npus=(2, 2)), ""),
    "5D net, default involved": (replace(AR_CASE, ranks=32, npus=(2,) * 5), ""),
    "send/recv ok": (pair(peer(True, 1), peer(False, 0)), ""),
    "send/recv size mismatch": (pair(peer(True, 1), peer(False, 0, 2 * MB)), "send/receive sizes differ"),
    "send no recv": (pair(peer(True, 1), None), ""),
    "recv no send": (pair(None, peer(False, 0)), "receive without send"),
    "send missing tag": (pair(peer(True, 1, tag=None), None), MISSING),
    "send only dst,tag,size (no src)": (pair(peer(True, 1), peer(False, 0)), ""),
    "send self": (pair(peer(True, 0), None), "send to self"),
    "send size 0": (pair(peer(True, 1, 0), peer(False, 0, 0)), ZERO),
    "generator-style send (tensor_size only)": (
        pair(Node(0, "x", NodeType.COMM_SEND, attributes=(uint64_attr("tensor_size", MB),)), None),
        MISSING,
    ),
    "send + AR overlap? (independent)": (
        Case(lambda rank: [peer(True, (rank + 1) % 4), peer(False, (rank - 1) % 4, node_id=1), coll(2)]),
        "",
    ),
    "two independent comps": (same(comp(0), comp(1)), ""),
    "MEM_LOAD NO_MEMORY_EXPANSION": (same(memory_node(0, "m", NodeType.MEM_LOAD, MB)), ""),
    "MEM_LOAD PER_NPU lat100 bw10": (same(memory_node(0, "m", NodeType.MEM_LOAD, MB)), ""),
    "MEM_LOAD MEMORY_POOL": (same(memory_node(0, "m", NodeType.MEM_LOAD, MB)), ""),
    "INVALID_NODE root then comp": (same(plain(0, 0), comp(1, (0,))), NO_TAKER),
    "type 99": (same(plain(0, 99)), NO_TAKER),
    "duration 5us, roofline 0": (same(comp(0, ops=None, size=None, us=5), roofline=False), ""),
    "duration 0, roofline 0": (same(comp(0, ops=None, size=None), roofline=False), ""),
    "attr runtime=5 only, roofline 0": (
        same(replace(comp(0), attributes=(uint64_attr("runtime", 5),)), roofline=False),
        "attribute ignored by consumers",
    ),
    "cpu op dur 5, roofline 1": (same(changed(comp(0, (), None, None, 5), "is_cpu_op", CPU)), ""),
    "AG 1 byte": (same(coll(kind=AG, size=1)), ""),
    "AR 1 byte": (same(coll(size=1)), ""),
    "AR 1023 bytes": (same(coll(size=1023)), ""),
    "AR odd 1000003": (same(coll(size=1000003)), ""),
    "latency 0, size 4 bytes p2p": (pair(peer(True, 1, 4), peer(False, 0, 4)), ""),
    "AG w/ DBT": (same(coll(kind=AG)), ""),
    "A2A w/ HD": (same(coll(kind=CollectiveType.ALL_TO_ALL)), ""),
    "gzip et": (replace(BASE, zipped=True), "compressed file"),
    "huge AR 64 GiB (int32 bytes?)": (same(coll(size=1 << 36)), ""),
}
CONFIGURATION_ONLY = {
    "2D net, 1 impl only": replace(AR_CASE, npus=(2, 2)),
    "2D net, 2 impl": replace(AR_CASE, npus=(2, 2)),
    "2D net, 3 impl": replace(AR_CASE, npus=(2, 2)),
    "2D net Aware backend": replace(AR_CASE, npus=(2, 2)),
    "doubleBinaryTree + pg subset": halves([0, 1], [2, 3]),
    "AR npus 3 halvingDoubling": replace(AR_CASE, ranks=3),
    "AR npus 3 ring": replace(AR_CASE, ranks=3),
    "AR npus 6 DBT": replace(AR_CASE, ranks=6),
    **dict.fromkeys(
        (
            "no preferred-dataset-splits",
            "no local-mem-bw",
            "no all-reduce-implementation",
            "no endpoint-delay",
            "roofline w/o peak-perf",
            "no scheduling-policy",
        ),
        BASE,
    ),
}
CASES.update((name, (case, "")) for name, case in CONFIGURATION_ONLY.items())


@pytest.mark.parametrize("name", CASES)
def test_probe(name: str, tmp_path: Path) -> None:
    case, fault = CASES[name]
    report = check(case.write(tmp_path))
    assert report.ok == (not fault), str(report)
    assert set(report.counts) <= {fault}, str(report)


def test_the_table_is_complete(shared_data: Path) -> None:
    with (shared_data / "astrasim_golden" / "pitfalls.csv").open(newline="") as stream:
        rows = {row["case"]: row["trace_fault"] for row in csv.DictReader(stream)}
    assert rows == {name: fault for name, (_, fault) in CASES.items()}
