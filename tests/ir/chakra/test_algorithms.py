"""Collective algorithms from MSCCL's XML and from point-to-point graphs."""

from fractions import Fraction
from pathlib import Path

import pytest

from stablecast.ir.chakra import load_trace
from stablecast.ir.chakra.algorithms import Action, parse_msccl, read_algorithm
from stablecast.ir.errors import InputError

SWAP = """<algo name="swap" coll="allgather" ngpus="2" nchunksperloop="2">
<gpu id="1"><tb id="0" send="0" recv="0" chan="0"><step s="0" type="s" cnt="1"/><step s="1" type="r" cnt="1"/></tb></gpu>
<gpu id="0"><tb id="0" send="1" recv="1" chan="0"><step s="0" type="s" cnt="1"/><step s="1" type="r" cnt="1"/></tb>
<tb id="1" send="-1" recv="-1" chan="1"><step s="0" type="nop" depid="0" deps="1"/>
<step s="1" type="cpy" cnt="2" depid="-1" deps="-1"/></tb></gpu></algo>"""


def test_steps_and_what_they_wait_for() -> None:
    found = parse_msccl(SWAP)
    assert (found.name, found.collective, found.size, found.tags) == ("swap", "all_gather", 2, 1)
    send, recv, copy = found.members[0]
    assert (send.action, send.peer, send.share, send.deps) == (Action.SEND, 1, Fraction(1, 2), ())
    assert (recv.action, recv.peer, recv.deps) == (Action.RECV, 1, (0,))
    assert (copy.action, copy.share, copy.deps) == (Action.COPY, Fraction(1), (1,))
    assert found.nbytes(send, 5) == 3
    assert found.nbytes(send, 0) == 1


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('coll="allgather"', 'coll="sort"', "is not an MSCCL algorithm"),
        ('ngpus="2"', 'ngpus="3"', "not numbered from 0"),
        ('type="nop"', 'type="zip"', "unknown step type 'zip'"),
        ('depid="0" deps="1"', 'depid="1" deps="1"', "wait for each other"),
        ('send="1" recv="1"', 'send="5" recv="1"', "talks to 5, which is not there"),
        ('send="1" recv="1"', 'send="0" recv="1"', "gpu 0 has no peer for step 0"),
        ('<step s="1" type="r" cnt="1"/></tb></gpu>\n', "</tb></gpu>\n", "sends what is not received"),
        ('cnt="2"', 'cnt="two"', "has no number 'cnt'"),
        ("<algo", "<!DOCTYPE a><algo", "document types"),
        ("</algo>", "", "is not XML"),
    ],
)
def test_faults_are_said(old: str, new: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        parse_msccl(SWAP.replace(old, new, 1), "swap.xml")


def test_a_graph_says_what_its_source_says(unpacked: Path, tmp_path: Path) -> None:
    (folder,) = (unpacked / "examples" / "system" / "custom_collectives").iterdir()
    head = load_trace(folder / "custom_allreduce.0.et").metadata
    assert head is not None
    (tmp_path / "ring.xml").write_text(str(next(a.value for a in head.attributes if a.name == "input_file")))
    ring = read_algorithm(tmp_path / "ring.xml", "all_reduce")
    assert (ring.size, len(ring.members[0])) == (8, 35)
    for prefix in (f"{folder}/custom_allreduce", f"{folder}/custom_allreduce@1048576"):
        graph = read_algorithm(prefix, "all_reduce")
        for left, right in zip(ring.members, graph.members, strict=True):
            assert [(s.action, s.share, s.peer, s.deps) for s in left] == [
                (s.action, s.share, s.peer, s.deps) for s in right
            ]
    half = read_algorithm(f"{folder}/custom_allreduce@2097152", "all_reduce")
    assert half.members[0][0].share == Fraction(1, 16)
    with pytest.raises(InputError, match="for all_reduce, not for all_gather"):
        read_algorithm(tmp_path / "ring.xml", "all_gather")
    with pytest.raises(InputError, match="'many' is no number of bytes"):
        read_algorithm(f"{folder}/custom_allreduce@many", "all_reduce")


def test_graphs_that_are_no_collective(shared_data: Path) -> None:
    folder = shared_data / "astrasim_golden" / "workloads"
    with pytest.raises(InputError, match="does not say for how many bytes"):
        read_algorithm(folder / "pp4_gpipe" / "pp4_gpipe", "all_reduce")
    with pytest.raises(InputError, match="neither a message nor compute"):
        read_algorithm(f"{folder}/dp8_mlp3/dp8_mlp3@64", "all_reduce")
    with pytest.raises(InputError):
        read_algorithm("nowhere", "all_reduce")
