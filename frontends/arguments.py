"""Arguments from the command line: `--arg 'batch.tokens=i32[8,4096]'` and `--set layers=32`."""

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from stablecast.ir.dtypes import DType, dtype
from stablecast.ir.errors import InputError, near_names

_SPEC = re.compile(r"^(?P<dtype>[A-Za-z][A-Za-z0-9_]*)\[(?P<dims>[0-9, ]*)\]$")
_STEP = re.compile(r"\.([A-Za-z_]\w*)|\[(\d+)\]|\[(?:'([^']*)'|\"([^\"]*)\")\]")


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Shape and element type of an argument that nobody allocates; `dtype` in numpy's spelling."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class ArgumentOptions:
    """How the command line gives arguments: `--args FILE:FUNCTION`, `--arg NAME=DTYPE[SHAPE]`, `--set NAME=VALUE`.

    `model`: settings of a model that a configuration describes (`batch`, `seq`, `mode`, `dtype`, `parallel`), as text.
    """

    args: str = ""
    arrays: Sequence[str] = ()
    settings: Sequence[str] = ()
    model: Mapping[str, str] = field(default_factory=dict[str, str])

    def values(self) -> dict[str, Any]:
        """The `--set` pairs."""
        return {name: parse_value(value) for name, value in parse_assignments(self.settings, "--set")}


def parse_array(text: str) -> ArraySpec:
    """`i32[8,4096]`, `bf16[128,128]`, `f32[]`. Raises `InputError` for anything else."""
    found = _SPEC.match(text.strip())
    if found is None:
        raise InputError(f"'{text}' is not an array", "write dtype and shape, as in i32[8,4096]")
    dims = [dim for dim in found["dims"].replace(" ", "").split(",") if dim]
    return ArraySpec(tuple(map(int, dims)), numpy_name(dtype(found["dtype"])))


def numpy_name(kind: DType) -> str:
    """The name that numpy (with ml_dtypes) gives an element type."""
    names = {"i1": "bool", "bf16": "bfloat16", "c64": "complex64", "c128": "complex128"}
    if kind.name in names:
        return names[kind.name]
    if kind.name.startswith("f8") or kind.name.startswith(("f4", "f6")):
        return "float" + kind.name[1:2] + "_" + kind.name[2:]
    return (
        kind.name.replace("ui", "uint")
        if kind.name.startswith("ui")
        else kind.name.replace("f", "float").replace("i", "int")
    )


def parse_assignments(texts: Sequence[str], what: str) -> list[tuple[str, str]]:
    """`name=value` pairs in order; raises `InputError` for a text without `=` or a name."""
    pairs: list[tuple[str, str]] = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise InputError(f"{what} '{text}' is not name=value", f"write {what} name=value")
        pairs.append((name.strip(), value.strip()))
    return pairs


def parse_arrays(texts: Sequence[str]) -> dict[str, Any]:
    """Parameter name -> array, or the pytree that its paths (`batch.tokens`, `layers[0].w`, `x['a']`) describe."""
    roots: dict[str, Any] = {}
    for path, value in parse_assignments(texts, "--arg"):
        name, steps = _path(path)
        spec = parse_array(value)
        if not steps:
            roots[name] = spec
            continue
        _insert(roots, name, steps, spec, path)
    return {name: _lists(tree) for name, tree in roots.items()}


def _path(text: str) -> tuple[str, list[str | int]]:
    found = re.match(r"[A-Za-z_]\w*", text)
    if found is None:
        raise InputError(f"--arg path '{text}' does not start with a parameter's name")
    steps: list[str | int] = []
    position = found.end()
    while position < len(text):
        step = _STEP.match(text, position)
        if step is None:
            raise InputError(
                f"--arg path '{text}' is not understood at '{text[position:]}'", "write name.key[0]['key']"
            )
        key, index, single, double = step.groups()
        steps.append(
            int(index) if index is not None else next(part for part in (key, single, double) if part is not None)
        )
        position = step.end()
    return found[0], steps


def _insert(roots: dict[str, Any], name: str, steps: list[str | int], spec: ArraySpec, path: str) -> None:
    node: Any = roots.setdefault(name, {})
    for step in steps[:-1]:
        node = cast("dict[Any, Any]", node).setdefault(step, {}) if isinstance(node, dict) else None
    if not isinstance(node, dict) or isinstance(node.get(steps[-1]), dict):
        raise InputError(f"--arg '{path}' contradicts another --arg", "an argument is an array or a tree, not both")
    node[steps[-1]] = spec


def _lists(tree: Any) -> Any:
    """Dictionaries with the keys 0..n-1 are lists."""
    if not isinstance(tree, dict):
        return tree
    held = cast("dict[str | int, Any]", tree)
    built = {key: _lists(value) for key, value in held.items()}
    if built and all(isinstance(key, int) for key in built):
        if set(built) != set(range(len(built))):
            raise InputError(f"--arg: list indices {list(built)} have gaps", "number them from 0")
        return [built[index] for index in range(len(built))]
    return built


def parse_value(text: str) -> Any:
    """A Python literal, or the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def call_factory(factory: Callable[..., Any], settings: Mapping[str, Any], where: str) -> Any:
    """Call `factory` with keyword `settings`; raises `InputError` for a parameter that it does not have."""
    import inspect

    parameters = inspect.signature(factory).parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in settings:
        if name not in parameters and not open_ended:
            raise InputError(f"{where} has no parameter '{name}' to --set", near_names(name, parameters))
    return factory(**settings)
