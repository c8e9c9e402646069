"""Refuses arguments whose dimensions their mesh axes do not divide, as JAX does."""

from collections.abc import Sequence
from typing import Any

from stablecast.ir.errors import InputError
from stablecast.ir.program import Sharding
from stablecast.ir.reader.decode import Decoder
from stablecast.ir.types import as_tensor
from stablecast.lowering.partition.layout import Layout


def check_divisible(module: Any, entry: Any, names: Sequence[str]) -> None:
    """Raises `InputError`, naming the argument of `entry`, where a sharded dimension does not come out even."""
    decoder = Decoder("the module to partition")
    meshes = [
        decoder.mesh(view.operation.attributes["mesh"], view.operation.attributes["sym_name"].value)
        for view in module.body.operations
        if view.operation.name == "sdy.mesh"
    ]
    layout = Layout(meshes)
    attributes = entry.attributes
    given = list(attributes["arg_attrs"]) if "arg_attrs" in attributes else []
    for name, value, held in zip(names, entry.regions[0].blocks[0].arguments, given, strict=False):
        if "sdy.sharding" not in held:
            continue
        sharding: Sharding = decoder.attribute("sdy.sharding", held["sdy.sharding"])[0]
        if sharding.axes:
            _check(name, as_tensor(decoder.type(value.type)).shape, sharding, layout)


def _check(name: str, shape: Sequence[int], sharding: Sharding, layout: Layout) -> None:
    for dim, size in enumerate(shape):
        parts = layout.parts(sharding, dim)
        if size % parts:
            axes = ", ".join(f"'{axis}'" for axis in sharding.dims[dim])
            raise InputError(
                f"argument '{name}' is split over {axes}, so the global size of its dimension {dim} should be "
                f"divisible by {parts}, but it is {size} (full shape {tuple(shape)})",
                "choose other mesh axes or another size",
            )
