"""A pipeline from a script's `--mesh` to traces with one role a stage."""

import json
from pathlib import Path
from typing import Any

import pytest

from stablecast.ir.chakra import Node, NodeType, TraceReader

Run = Any
SIZES = ["layers=8", "d_model=512", "vocab=1024", "seq=64", "microbatches=4"]
MESH = "dp=2,tp=2,pp=4"


@pytest.fixture
def words(examples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """INPUT and flags of a small pipelined step on 16 devices."""
    monkeypatch.chdir(tmp_path)
    settings = [word for size in SIZES for word in ("--set", size)]
    return [f"{examples}/llama.py:step", *settings, "--mesh", MESH, "--on", "h100-sxm"]


def peers(rank: int, kind: NodeType, attribute: str) -> list[int]:
    nodes: list[Node] = [node for node in TraceReader(Path(f"out/step.{rank}.et")) if node.type == kind]
    assert all(node.value("stands_for") == "collective_permute" for node in nodes)
    return [value for node in nodes if isinstance(value := node.value(attribute), int)]


def test_traces_have_a_role_a_stage(run: Run, words: list[str]) -> None:
    made = run("chakra", *words, "--ranks", 16, "-o", "out/step", "--json")
    assert (made.code, made.err) == (0, "")
    report = json.loads(made.out)
    assert [(role["name"], role["ranks"]) for role in report["roles"]] == [(f"stage{at}", 4) for at in range(4)]
    assert not [note for note in report["notes"] if "joined" in note]
    checked = run("chakra", "check", "out/step", "--json")
    assert (checked.code, json.loads(checked.out)["warnings"]) == (0, [])
    trips = 4 + 4 - 1
    first, middle, last = 8, 9, 11
    assert peers(first, NodeType.COMM_SEND, "comm_dst") == [9] * trips
    assert peers(first, NodeType.COMM_RECV, "comm_src") == [9] * trips
    assert peers(middle, NodeType.COMM_SEND, "comm_dst") == [10] * trips + [8] * trips
    assert peers(middle, NodeType.COMM_RECV, "comm_src") == [8] * trips + [10] * trips
    assert peers(last, NodeType.COMM_SEND, "comm_dst") == [10] * trips
    assert peers(last, NodeType.COMM_RECV, "comm_src") == [10] * trips


@pytest.mark.parametrize("flags", [(), ("--max-unroll", 1)])
def test_written_again_bit_for_bit(run: Run, words: list[str], flags: tuple[object, ...]) -> None:
    assert run("chakra", *words, "-o", "out/step", *flags).code == 0
    assert run("chakra", "out/step", "-o", "again/step", *flags).code == 0
    for path in Path("out").glob("*.et"):
        assert (Path("again") / path.name).read_bytes() == path.read_bytes()


def test_stages_go_through_a_network(run: Run, words: list[str]) -> None:
    run("chakra", *words, "-o", "out/step")
    groups = ("--group-file", "out/comm_group.json")
    made = run("simulate", "out/step", "--on", "h100-sxm:16", *groups, "--json")
    assert made.code == 0
    assert len(json.loads(made.out)["ranks"]) == 16


def test_predictions_say_what_the_pipeline_leaves_idle(run: Run, words: list[str]) -> None:
    answer = json.loads(run("predict", *words, "--json").out)
    assert answer["devices"] == 16
    (note,) = [note for note in answer["assumptions"] if "stages" in note]
    assert note.startswith("4 stages along pipeline run one program")
    assert "in at least 3 of 7 trips (43 %) a stage has no micro-batch" in note
    compared = json.loads(run("compare", *words, "--on", "tpu-v5p", "--json").out)
    assert [row["devices"] for row in compared["rows"]] == [16, 16]


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        (
            "dp=2,other=3",
            "--mesh other=3 fits neither a parameter of the factory of the arguments of step nor the mesh",
        ),
        ("dp=2,fsdp=2", ""),
        ("layers=3", "--mesh says layers=3, --set says layers=8"),
        ("tp=3", "does not divide shape (512, 8, 128) split over ('fsdp', 'tensor'): 8 by 3"),
        ("pp=8", "8 stages must divide 4 micro-batches"),
        ("other=3", "name the axes of --mesh as the program does"),
    ],
)
def test_axes_that_fit_nothing(run: Run, words: list[str], mesh: str, said: str) -> None:
    words[words.index(MESH)] = mesh
    if "pp" not in mesh:
        words = [word for at, word in enumerate(words) if "microbatches=4" not in words[at : at + 2]]
    made = run("work", *[word for word in words if word not in ("--on", "h100-sxm")])
    assert (made.code, made.err.count("\n")) == ((2, 1) if said else (0, 0))
    assert said in made.err
