"""The nodes of one kernel in the making."""

from dataclasses import dataclass

from stablecast.lowering.attention_shape import AttentionShape


@dataclass(slots=True)
class Group:
    """The nodes of one kernel.

    `roots`: those whose results leave it. `reads`: values that it reads. `hero`: the node that decides its class, -1
    if none does. `extent`: elements that it walks over; `rows`: results of its reductions, 0 if it has none. `fusible`:
    whether it may merge with others. `launch`: number of the ATen call that it is, -1 if it is none; a call may have no
    nodes. `attention`: its sizes, if it is one. `columns`: whether its reductions fold all but the last dimensions.
    `block`: whether rows are folded inside it and spread again; such a kernel has one result. `split`: parts of the
    contraction of a product whose partial results are added up afterwards. `merged`: products that became one.
    """

    roots: list[int]
    members: set[int]
    reads: set[int]
    hero: int = -1
    extent: int = 0
    fusible: bool = True
    launch: int = -1
    attention: AttentionShape | None = None
    rows: int = 0
    columns: bool = False
    block: bool = False
    split: int = 1
    merged: tuple[int, ...] = ()
