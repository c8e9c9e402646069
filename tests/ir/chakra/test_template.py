import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stablecast.ir.chakra import (
    Attribute,
    CollectiveType,
    Node,
    TraceMetadata,
    TraceTemplate,
    ValueKind,
    collective_node,
    comp_node,
    encode_trace,
    recv_node,
    send_node,
)
from stablecast.ir.errors import InputError

HOLES = {
    (2, "pg_name"): "tp",
    (3, "comm_dst"): "next",
    (4, "comm_src"): "previous",
    (4, "comm_tag"): "tag",
    (5, "pg_name"): "tp",
}


def nodes(tp: str, following: int, previous: int, tag: int) -> list[Node]:
    return [
        comp_node(1, "COMP_NODE_a" * 11, 10, 20),
        collective_node(2, "COMM_COLL_NODE", CollectiveType.ALL_REDUCE, 1 << 20, tp, (1,)),
        send_node(3, "COMM_SEND_NODE", following, 7, 1 << 40, (2,)),
        recv_node(4, "COMM_RECV_NODE", previous, tag, 5),
        collective_node(5, "COMM_COLL_NODE" * 6, CollectiveType.ALL_GATHER, 64, tp, (3, 4)),
        comp_node(6, "COMP_NODE_b", 1, 1, (5,)),
    ]


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 10**30).map(str),
    st.integers(0, 2**31 - 1),
    st.integers(0, 2**31 - 1),
    st.integers(-(2**31), 2**31 - 1),
)
def test_rendered_bytes_equal_encoded_nodes(tp: str, following: int, previous: int, tag: int) -> None:
    template = TraceTemplate.build(nodes("1", 0, 0, 0), HOLES, TraceMetadata("0.0.4"))
    data = template.render({"tp": tp, "next": following, "previous": previous, "tag": tag})
    assert data == encode_trace(nodes(tp, following, previous, tag), TraceMetadata("0.0.4"))


def test_one_template_serves_many_lengths() -> None:
    template = TraceTemplate.build(nodes("1", 0, 0, 0), HOLES)
    assert template.holes == ("tp", "next", "previous", "tag")
    assert template.nodes == 6
    for power in range(100):
        values = {"tp": str(10**power), "next": 2 ** (power % 31), "previous": 3 ** (power % 19), "tag": power}
        want = encode_trace(nodes(values["tp"], values["next"], values["previous"], power))  # type: ignore[arg-type]
        assert template.render(values) == want


@pytest.mark.parametrize("count", [0, 1])
def test_few_holes(count: int) -> None:
    holes = dict(list(HOLES.items())[:count])
    template = TraceTemplate.build(nodes("1", 2, 3, 4), holes)
    assert template.render({"tp": "1"}) == encode_trace(nodes("1", 2, 3, 4))


def test_hole_that_is_not_there() -> None:
    with pytest.raises(InputError, match="node 1 has no attribute pg_name"):
        TraceTemplate.build(nodes("1", 0, 0, 0), {(1, "pg_name"): "tp"})
    with pytest.raises(InputError, match="node 9"):
        TraceTemplate.build(nodes("1", 0, 0, 0), {(9, "pg_name"): "tp"})


def test_hole_in_a_list() -> None:
    node = Node(1, "x", attributes=(Attribute("dims", ValueKind.INT64_LIST, (1,)),))
    with pytest.raises(InputError, match="not a single value"):
        TraceTemplate.build([node], {(1, "dims"): "d"})


def test_value_missing_or_unfit() -> None:
    template = TraceTemplate.build(nodes("1", 0, 0, 0), HOLES)
    with pytest.raises(InputError, match="no value for next"):
        template.render({"tp": "1"})
    with pytest.raises(InputError, match="value of next"):
        template.render({"tp": "1", "next": 2**31, "previous": 0, "tag": 0})
