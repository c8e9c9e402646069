"""Mutation and views made functional while the step runs: every tensor is a view chain over a versioned storage."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from stablecast.frontends.torch.graph import Graph, Ref, Spec
from stablecast.ir.errors import InputError

View = tuple[Any, ...]
"""A view in canonical form: kind, then its parameters (see `INVERSES` for the kinds)."""


class Storage:
    """Memory that tensors share. `version` grows with every write; `root` is the alias that covers it.

    `strides`: of the root, in elements. `host`: it lives on the host, so that ops on it are no device work.
    """

    __slots__ = ("host", "root", "strides", "version", "written")

    def __init__(self, strides: Sequence[int], host: bool = False) -> None:
        self.version = 0
        self.strides = tuple(strides)
        self.root: Alias
        self.host = host
        self.written = False


class Alias:
    """A tensor: its storage, and the view that makes it from `parent` (None for the root)."""

    __slots__ = ("parent", "spec", "storage", "value", "version", "view")

    def __init__(
        self, storage: Storage, spec: Spec, value: Ref | None, parent: "Alias | None" = None, view: View = ()
    ) -> None:
        self.storage = storage
        self.spec = spec
        self.value = value
        self.version = storage.version if value is not None else -1
        self.parent = parent
        self.view = view


class Aliases:
    """Reads and writes of aliases as nodes of a graph.

    `emit(op, args, specs)` appends a node at the place where the step is now.
    """

    def __init__(self, graph: Graph, emit: Callable[[str, tuple[Any, ...], tuple[Spec, ...]], tuple[Ref, ...]]) -> None:
        self._graph = graph
        self._emit = emit

    def fresh(self, spec: Spec, strides: Sequence[int], value: Ref | None, host: bool = False) -> Alias:
        """The root of a new storage that holds `value`."""
        storage = Storage(strides, host)
        storage.root = Alias(storage, spec, value)
        return storage.root

    def view(self, parent: Alias, view: View, spec: Spec) -> Alias:
        """A view of `parent`."""
        return Alias(parent.storage, spec, None, parent, view)

    def strided(self, storage: Storage, spec: Spec, strides: Sequence[int], offset: int) -> Alias:
        """The tensor of that geometry over a storage; the root itself where it is the same."""
        root = storage.root
        same = spec.dtype == root.spec.dtype
        if same and spec.shape == root.spec.shape and tuple(strides) == storage.strides and not offset:
            return root
        order = memory_order(root.spec.shape, storage.strides)
        if not same:
            count = math.prod(root.spec.shape) * itemsize(root.spec.dtype) // itemsize(spec.dtype)
            flat = Spec((math.prod(root.spec.shape),), root.spec.dtype)
            linear = Alias(storage, flat, None, root, ("flatten", order))
            root = Alias(storage, Spec((count,), spec.dtype), None, linear, ("bitcast", (count,), spec.dtype))
            order = (0,)
        return Alias(storage, spec, None, root, ("strided", order, spec.shape, tuple(strides), offset))

    def read(self, alias: Alias) -> Ref:
        """The value that `alias` has now."""
        if alias.version == alias.storage.version and alias.value is not None:
            return alias.value
        if alias.parent is None:
            if alias.value is None:
                raise InputError("a tensor is read that nothing has written")
            return alias.value
        kind, *params = alias.view
        base = self.read(alias.parent)
        (value,) = self._emit(f"view.{kind}", (base, *params), (alias.spec,))
        alias.value, alias.version = value, alias.storage.version
        return value

    def write(self, alias: Alias, value: Ref) -> None:
        """Store `value` through `alias`: every other view of its storage sees it at its next read."""
        steps: list[tuple[Alias, Ref]] = []
        here: Alias = alias
        while True:
            steps.append((here, value))
            if here.parent is None:
                break
            value = self._through(here, value)
            here = here.parent
        storage = alias.storage
        storage.version += 1
        storage.written = True
        for changed, held in steps:
            changed.value, changed.version = held, storage.version

    def _through(self, alias: Alias, value: Ref) -> Ref:
        """The parent's new value where `alias`, a view of it, takes `value`."""
        assert alias.parent is not None
        kind, *params = alias.view
        spec = alias.parent.spec
        inverse = INVERSES.get(kind)
        if inverse is not None:
            op, args = inverse(spec, params)
            return self._emit(op, (value, *args), (spec,))[0]
        if kind not in SCATTERS:
            raise InputError(f"a write through a view made by {kind} has no functional form", "write to a copy")
        if math.prod(alias.spec.shape) == math.prod(spec.shape) and kind in ("slice", "select"):
            return self._emit("view.reshape", (value, spec.shape), (spec,))[0]
        return self._emit(f"scatter.{kind}", (self.read(alias.parent), value, *params), (spec,))[0]


def _inverse_permutation(order: Sequence[int]) -> tuple[int, ...]:
    inverse = [0] * len(order)
    for place, axis in enumerate(order):
        inverse[axis] = place
    return tuple(inverse)


INVERSES: dict[str, Callable[[Spec, list[Any]], tuple[str, tuple[Any, ...]]]] = {
    "reshape": lambda spec, params: ("view.reshape", (spec.shape,)),
    "permute": lambda spec, params: ("view.permute", (_inverse_permutation(params[0]),)),
    "bitcast": lambda spec, params: ("view.bitcast", (spec.shape, spec.dtype)),
    "flatten": lambda spec, params: ("view.unflatten", (params[0], spec.shape)),
    "as_real": lambda spec, params: ("view.as_complex", ()),
    "as_complex": lambda spec, params: ("view.as_real", ()),
    "conj": lambda spec, params: ("view.conj", ()),
    "neg": lambda spec, params: ("view.neg", ()),
}
"""Views that lose nothing: how the parent follows from the view alone."""

SCATTERS = frozenset({"slice", "select", "strided", "diagonal"})
"""Views of a part: the parent's new value is the old one with that part replaced."""


def memory_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Dimensions from the one with the largest stride to the smallest: the order of memory."""
    return tuple(sorted(range(len(shape)), key=lambda axis: (-strides[axis], -shape[axis], axis)))


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides of `shape`, in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


_SIZES = {"i1": 1, "c64": 8, "c128": 16}


def itemsize(dtype: str) -> int:
    """Bytes of an element of a torch tensor."""
    found = _SIZES.get(dtype)
    if found is None:
        from stablecast.ir.dtypes import dtype as find

        found = _SIZES[dtype] = max(1, find(dtype).bits // 8)
    return found
