"""Scope paths as people read them: the user's own names, without what tracing and differentiation wrap around them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

_WRAPPERS = ("jvp", "transpose", "vmap", "jit", "pjit", "remat", "checkpoint", "custom_jvp", "custom_vjp")
_MECHANICS = frozenset(
    {
        "checkpoint",
        "rematted_computation",
        "closed_call",
        "while",
        "body",
        "cond",
        "pjit",
        "custom_jvp_call",
        "custom_vjp_call",
        "remat",
        "remat2",
        "scan",
        "shard_map",
    }
)
REMATERIALISED = "rematted_computation"
"""The component that JAX puts into the scope of recomputation."""


@dataclass(frozen=True, slots=True)
class Scope:
    """`path`: the user's scopes, outermost first; `op`: the last component, the primitive; and what pass it is in."""

    path: tuple[str, ...]
    op: str
    backward: bool
    recomputed: bool

    @property
    def label(self) -> str:
        """`layer0/attention` with ` (backward)` or ` (recomputed)` where it is; the primitive where no scope is."""
        where = "/".join(self.path) or self.op
        mark = " (recomputed)" if self.recomputed else " (backward)" if self.backward else ""
        return where + mark


@lru_cache(maxsize=65536)
def parse_scope(text: str) -> Scope:
    """The scope that the name stack `text` stands for.

    JAX writes `jit(step)/transpose(jvp(layer0))/mlp/dot_general`: functions of the transformations are unwrapped,
    the mechanics of loops, calls and checkpoints dropped, repeated names said once, and einsum formulas left out.
    """
    parts = _split(text)
    op = parts[-1] if parts else ""
    path: list[str] = []
    for part in parts[:-1]:
        name = _unwrapped(part)
        if not name or name in _MECHANICS or "->" in name or (path and path[-1] == name):
            continue
        if name in path:
            del path[path.index(name) :]
        path.append(name)
    return Scope(tuple(path), op, "transpose(" in text, REMATERIALISED in parts)


def _split(text: str) -> list[str]:
    """Components of a name stack; a slash within brackets does not separate."""
    if "(" not in text:
        return [part for part in text.split("/") if part]
    parts: list[str] = []
    depth, start = 0, 0
    for index, char in enumerate(text):
        if char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
        elif char == "/" and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    parts.append(text[start:])
    return [part for part in parts if part]


def _unwrapped(part: str) -> str:
    """`layer0` of `transpose(jvp(layer0))`; nothing of `jit(step)`, which only names the function."""
    while part.endswith(")") and "(" in part:
        outer, _, inner = part[:-1].partition("(")
        if outer in ("jit", "pjit"):
            return ""
        if outer not in _WRAPPERS:
            break
        part = inner
    return part


def generalised(labels: Sequence[str]) -> str:
    """One label for several: components that differ only in a number get `*` in its place."""
    first = labels[0]
    if all(label == first for label in labels):
        return first
    return "/".join(_star(part) for part in first.split("/"))


def _star(part: str) -> str:
    """`layer*` of `layer12`: the last run of digits replaced."""
    end = len(part.rstrip(")abcdefghijklmnopqrstuvwxyz (")) if part.endswith(")") else len(part)
    head, tail = part[:end], part[end:]
    stem = head.rstrip("0123456789")
    return stem + "*" + tail if len(stem) < len(head) else part


def family(label: str) -> str:
    """`label` with `*` for the numbers that end its components: equal for the same place in different layers."""
    return "/".join(_star(part) for part in label.split("/"))
