"""Dimensions whose size a program leaves open: their names, and binding them to numbers."""

from collections.abc import Mapping
from dataclasses import dataclass

from stablecast.ir import mlir
from stablecast.ir.errors import InputError, near_names
from stablecast.ir.program import Program
from stablecast.ir.reader.module import read
from stablecast.ir.types import DYNAMIC, TensorType

_SIZE_OPS = frozenset({"stablehlo.get_dimension_size", "mhlo.get_dimension_size"})
_REFINEMENT = "stablehlo-refine-shapes,func.func(stablehlo-canonicalize-dynamism)"


@dataclass(frozen=True, slots=True)
class DynamicDimension:
    """Dimension `axis` of argument `argument` of the entry function.

    `name`: as in `jax.export.symbolic_shape`, else `argument_name[axis]`.
    """

    name: str
    argument: int
    axis: int


def dynamic_dimensions(program: Program) -> tuple[DynamicDimension, ...]:
    """The open dimensions of the entry function's arguments; one name may stand for several."""
    names = _exported_names(program)
    found: list[DynamicDimension] = []
    for index, argument in enumerate(program.main.arguments):
        if isinstance(argument.type, TensorType):
            for axis, size in enumerate(argument.type.shape):
                if size == DYNAMIC:
                    name = names.get((index, axis), f"{argument.name}[{axis}]")
                    found.append(DynamicDimension(name, index, axis))
    return tuple(found)


def _exported_names(program: Program) -> dict[tuple[int, int], str]:
    """JAX passes the size of a named dimension on as an argument that bears its name."""
    main = program.main
    places = {value: index for index, value in enumerate(main.body.args)}
    sizes: dict[int, tuple[int, int]] = {}
    names: dict[tuple[int, int], str] = {}
    for op in main.body.ops:
        if op.name in _SIZE_OPS and op.operands[0] in places:
            sizes[op.result] = (places[op.operands[0]], int(op.attrs["dimension"]))
        elif op.callee in program.functions:
            for value, argument in zip(op.operands, program.functions[op.callee].arguments, strict=False):
                if value in sizes:
                    names.setdefault(sizes[value], argument.name)
    return names


def bind_dimensions(data: bytes, sizes: Mapping[str, int], source: str = "module") -> bytes:
    """The module in `data` with its open dimensions set to `sizes` (by name), as MLIR bytecode.

    Raises `InputError` for a name that the program has not, a dimension that no size is given for, and sizes that the
    program cannot take.
    """
    program = read(data, source)
    open_dimensions = dynamic_dimensions(program)
    names = list(dict.fromkeys(dimension.name for dimension in open_dimensions))
    for name in sizes:
        if name not in names:
            hint = near_names(name, names) if names else "all its shapes are fixed"
            raise InputError(f"{source} has no dynamic dimension '{name}'", hint)
    missing = [name for name in names if name not in sizes]
    if missing:
        raise unbound(source, missing)
    by_place = {(item.argument, item.axis): sizes[item.name] for item in open_dimensions}
    return _refined(data, source, program, by_place) if by_place else data


def unbound(source: str, names: list[str]) -> InputError:
    """The error for dimensions that nobody gave a size."""
    listed = ", ".join(f"'{name}'" for name in names)
    plural = "dimensions" if len(names) > 1 else "dimension"
    return InputError(f"{source} leaves the size of {plural} {listed} open", f"bind it, as in --dim {names[0]}=16")


def _refined(data: bytes, source: str, program: Program, sizes: Mapping[tuple[int, int], int]) -> bytes:
    """StableHLO's own shape refinement does the work."""
    from jaxlib.mlir.dialects import stablehlo
    from jaxlib.mlir.passmanager import PassManager

    ir = mlir.bindings()
    module = mlir.parse(data, source)
    types = ir.FunctionType(_entry(module, program.entry).attributes["function_type"].value).inputs
    with module.context:
        stablehlo.register_stablehlo_passes()
        texts = [_sized(str(kind), index, sizes) for index, kind in enumerate(types)]
        try:
            passes = f"stablehlo-refine-arguments{{types={','.join(texts)}}},{_REFINEMENT}"
            PassManager.parse(f"builtin.module({passes})").run(module.operation)
        except (ir.MLIRError, ValueError) as error:
            reason = mlir.first_diagnostic(error)
            raise InputError(f"{source} does not take these sizes: {reason}", "check the values of --dim") from None
    return mlir.write_bytecode(module)


def _entry(module: object, name: str) -> mlir.Any:
    operations: mlir.Any = getattr(module, "body").operations  # noqa: B009
    return next(view.operation for view in operations if view.operation.attributes["sym_name"].value == name)


def _sized(text: str, index: int, sizes: Mapping[tuple[int, int], int]) -> str:
    """`tensor<?x16xf32>` with its open dimensions filled in."""
    head, mark, tail = text.partition("<")
    parts = tail.split("x")
    for axis, part in enumerate(parts):
        if part == "?":
            parts[axis] = str(sizes[index, axis])
    return head + mark + "x".join(parts)
