"""The graph as SVG."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

from stablecast.ir.chakra import TraceWriter, comp_node, trace_svg

SPACE = "{http://www.w3.org/2000/svg}"


def test_layers_edges_and_what_is_left_out(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.0.et") as writer:
        for node_id, deps in ((1, ()), (2, (1,)), (3, (1,)), (7, (2, 3)), (9, (7,))):
            writer.write(comp_node(node_id, f"COMP_NODE_<{node_id}>", 1, 1, deps))
    picture = ElementTree.fromstring(trace_svg(tmp_path / "t"))
    boxes = {box.findtext(f"{SPACE}title"): box.find(f"{SPACE}rect") for box in picture.iter(f"{SPACE}g")}
    assert list(boxes) == [f"COMP_NODE_<{node_id}>" for node_id in (1, 2, 3, 7, 9)]
    heights = [int(box.attrib["y"]) for box in boxes.values() if box is not None]
    assert heights == sorted(heights)
    assert heights[1] == heights[2] > heights[0]
    assert len([path for path in picture.iter(f"{SPACE}path") if path.get("marker-end")]) == 5
    short = trace_svg(tmp_path / "t", limit=3)
    assert "2 more nodes" in short
    assert len([1 for _ in ElementTree.fromstring(short).iter(f"{SPACE}g")]) == 3
