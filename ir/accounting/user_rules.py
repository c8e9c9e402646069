"""Work rules that users write in YAML, for custom calls and composites.

    my_kernel:
      class: matmul
      matmul_flops: 2 * operands[0].elements * results[0].shape[-1]
      bytes_read: operands[0].bytes + operands[1].bytes
      note: from the kernel's paper

Expressions are arithmetic over the sizes of operands and results (`elements`, `bytes`, `bits`, `rank`, `shape[i]`) and
numbers of the call's configuration (`config.name`); nothing else is evaluated.
"""

import ast
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import yaml

from stablecast.ir.accounting.context import Context, reads_of, tensor, writes_of
from stablecast.ir.accounting.custom_config import config_of
from stablecast.ir.accounting.registry import TARGETS, Rule, register_work
from stablecast.ir.accounting.values import Basis, OpWork
from stablecast.ir.errors import InputError, near_names
from stablecast.ir.kernels import KernelClass
from stablecast.ir.program import Op
from stablecast.ir.types import ValueType

_AMOUNTS = ("matmul_flops", "padded_flops", "vector_flops", "transcendentals", "bytes_read", "bytes_written")
_KEYS = frozenset({*_AMOUNTS, "class", "note"})
_BINARY: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
    ast.Pow: lambda a, b: a**b,
}
_FUNCTIONS: Mapping[str, Callable[..., float]] = {
    "ceil": math.ceil,
    "floor": math.floor,
    "log2": math.log2,
    "max": max,
    "min": min,
    "sqrt": math.sqrt,
}


def load_rules(path: Path | str) -> tuple[str, ...]:
    """Register every rule of the YAML file `path`; the targets that it names.

    Raises `InputError` for a file that is not such a table, an unknown key, an expression that is not arithmetic over
    sizes, and a target that has a rule already. Nothing is registered then.
    """
    table = _table(Path(path))
    rules = {target: _rule(f"{path}: {target}", body) for target, body in table.items()}
    for target in rules:
        if target in TARGETS:
            raise InputError(f"{path}: target '{target}' already has a work rule")
    for target, (function, klass) in rules.items():
        register_work(target, klass=klass, basis=Basis.FORMULA, notes=f"user rule from {Path(path).name}")(function)
    return tuple(rules)


def _table(path: Path) -> Mapping[str, Any]:
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(loaded, dict):
        raise InputError(f"{path} is not a table of targets", "write 'my_kernel:' with its amounts below")
    return cast(Mapping[str, Any], loaded)


def _rule(where: str, body: Any) -> tuple[Rule, KernelClass]:
    if not isinstance(body, dict):
        raise InputError(f"{where} has no amounts", f"give some of {', '.join(_AMOUNTS)}")
    fields = cast(dict[str, Any], body)
    for key in fields:
        if key not in _KEYS:
            raise InputError(f"{where}: unknown key '{key}'", near_names(str(key), _KEYS))
    klass = _klass(where, str(fields.get("class", KernelClass.CUSTOM)))
    amounts = {name: _parse(f"{where}: {name}", fields[name]) for name in _AMOUNTS if name in fields}
    note = str(fields.get("note", ""))

    def work(op: Op, context: Context) -> OpWork:
        values = {name: _evaluate(f"{where}: {name}", tree, op) for name, tree in amounts.items()}
        return _work(op, values, klass, note)

    return work, klass


def _klass(where: str, name: str) -> KernelClass:
    try:
        return KernelClass(name)
    except ValueError:
        raise InputError(f"{where}: unknown class '{name}'", near_names(name, list(KernelClass))) from None


def _work(op: Op, values: Mapping[str, float], klass: KernelClass, note: str) -> OpWork:
    return OpWork(
        matmul_flops=values.get("matmul_flops", 0),
        padded_flops=values.get("padded_flops", 0),
        vector_flops=values.get("vector_flops", 0),
        transcendentals=values.get("transcendentals", 0),
        reads=_shared(reads_of(op), values.get("bytes_read")),
        writes=_shared(writes_of(op), values.get("bytes_written")),
        klass=klass,
        basis=Basis.FORMULA,
        note=note,
    )


def _shared(boundary: tuple[float, ...], total: float | None) -> tuple[float, ...]:
    """The boundary's bytes, scaled to `total` where that is given."""
    whole = sum(boundary)
    if total is None or not boundary:
        return boundary
    return tuple(part * total / whole for part in boundary) if whole else (total, *boundary[1:])


def _parse(where: str, expression: Any) -> ast.expr:
    if isinstance(expression, bool) or not isinstance(expression, (int, float, str)):
        raise InputError(f"{where} is not an expression: {expression!r}")
    try:
        tree = ast.parse(str(expression), mode="eval").body
    except SyntaxError:
        raise InputError(f"{where}: '{expression}' is not an expression") from None
    for node in ast.walk(tree):
        if not isinstance(node, _NODES):
            raise InputError(f"{where}: '{expression}' is more than arithmetic over sizes", f"no {_kind(node)} here")
    return tree


_NODES = (
    ast.BinOp,
    ast.UnaryOp,
    ast.USub,
    ast.Constant,
    ast.Call,
    ast.Name,
    ast.Load,
    ast.Attribute,
    ast.Subscript,
    *_BINARY,
)


def _kind(node: ast.AST) -> str:
    return type(node).__name__.lower()


def _evaluate(where: str, tree: ast.expr, op: Op) -> float:
    try:
        value = _value(tree, op)
    except (IndexError, KeyError, TypeError, ZeroDivisionError, OverflowError, ValueError) as error:
        raise InputError(f"{where}: cannot work out '{ast.unparse(tree)}' for {op.name}: {error}") from None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise InputError(f"{where}: '{ast.unparse(tree)}' gives {value!r}, not an amount")
    return value


def _value(node: ast.expr, op: Op) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return node.value
    if isinstance(node, ast.BinOp):
        return _BINARY[type(node.op)](_value(node.left, op), _value(node.right, op))
    if isinstance(node, ast.UnaryOp):
        return -_value(node.operand, op)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        return _FUNCTIONS[node.func.id](*(_value(argument, op) for argument in node.args))
    if isinstance(node, ast.Subscript):
        return _value(node.value, op)[_value(node.slice, op)]
    if isinstance(node, ast.Attribute):
        return _size(node, op)
    if isinstance(node, ast.Name):
        return {"operands": op.operand_types, "results": op.result_types}[node.id]
    raise TypeError(f"{ast.unparse(node)} is not a size")


def _size(node: ast.Attribute, op: Op) -> Any:
    if isinstance(node.value, ast.Name) and node.value.id == "config":
        return float(config_of(op)[node.attr])
    kind: ValueType = _value(node.value, op)
    sizes = {
        "elements": lambda: kind.elements,
        "bytes": lambda: kind.nbytes,
        "bits": lambda: tensor(kind).dtype.bits,
        "rank": lambda: tensor(kind).rank,
        "shape": lambda: tensor(kind).shape,
    }
    return sizes[node.attr]()
