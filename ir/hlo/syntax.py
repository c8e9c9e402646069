"""The syntax of HLO text: computations, instructions, their attributes."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from stablecast.ir.errors import InputError

_COMMENT = re.compile(r"/\*.*?\*/")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([^\s=(]+) (?:\(.*\) -> .* )?\{")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([^\s=]+) = ")
_METADATA = re.compile(r', metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}')
_STOP = re.compile(r'[(){}\[\]",]')
_FRAME_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_CLOSING = {"(": ")", "{": "}", "[": "]"}


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation.

    `shape`: its text. `operands`: names of instructions of the same computation; of a constant, parameter or iota the
    text in the brackets. `rest`: the text of its attributes but for `metadata`.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str
    metadata: str = ""
    root: bool = False


@dataclass(slots=True)
class Computation:
    """Instructions in order, which in a scheduled module is that of execution."""

    name: str
    instructions: list[Instruction] = field(default_factory=list[Instruction])

    @property
    def root(self) -> Instruction:
        return next((held for held in self.instructions if held.root), self.instructions[-1])


@dataclass(slots=True)
class Module:
    """A whole text. `header`: its first line. `frames`: stack frame number -> file and line."""

    name: str
    header: str
    computations: dict[str, Computation]
    entry: str
    frames: dict[int, tuple[str, int]]


def parse(text: str, source: str) -> Module:
    """The module in `text`. Raises `InputError` where it is none, is cut off, or a line cannot be read."""
    lines = iter(text.splitlines())
    header = next((line for line in lines if line.strip()), "")
    if not header.startswith("HloModule "):
        raise InputError(f"{source} is not HLO text", "it begins with 'HloModule'")
    computations: dict[str, Computation] = {}
    tables: dict[str, list[str]] = {}
    entry = ""
    for line in lines:
        if line in _FRAME_TABLES:
            tables[line] = list(_table(lines))
            continue
        match = _COMPUTATION.match(line)
        if match is None:
            if line.strip() and line[0] not in " }":
                raise InputError(f"{source}: cannot read the line '{line.strip()[:80]}'")
            continue
        computation = _computation(match[2], lines, source)
        computations[computation.name] = computation
        if match[1]:
            entry = computation.name
    if not entry:
        raise InputError(f"{source} has no entry computation", "is the text cut off?")
    name = header.removeprefix("HloModule ").split(",", 1)[0].split(" ", 1)[0]
    try:
        return Module(name, header, computations, entry, _frames(tables))
    except ValueError:
        raise InputError(f"{source}: its tables of files and lines are damaged") from None


def _table(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if not line.strip():
            return
        yield line


def _computation(name: str, lines: Iterator[str], source: str) -> Computation:
    found = Computation(name)
    for line in lines:
        if line.startswith("}"):
            if not found.instructions:
                raise InputError(f"{source}: the computation %{name} is empty")
            return found
        if not line.strip():
            continue
        while line.count("{") > line.count("}") and "constant(" in line:
            line += " " + next(lines, "}")
        found.instructions.append(_instruction(line, source))
    raise InputError(f"{source}: the computation %{name} does not end", "is the text cut off?")


def _instruction(line: str, source: str) -> Instruction:
    match = _INSTRUCTION.match(line)
    if match is None:
        raise InputError(f"{source}: cannot read the line '{line.strip()[:80]}'")
    try:
        return _read(_COMMENT.sub("", line) if "/*" in line else line, match)
    except (ValueError, IndexError):
        raise InputError(f"{source}: the line of %{match[2]} is cut off or damaged") from None


def _read(line: str, match: re.Match[str]) -> Instruction:
    start = match.end()
    middle = _shape_end(line, start)
    opening = line.index("(", middle)
    closing = _matching(line, opening)
    opcode = line[middle:opening].strip()
    inside, rest = line[opening + 1 : closing], line[closing + 1 :]
    metadata = ""
    found = _METADATA.search(rest)
    if found is not None:
        metadata, rest = found[0], rest[: found.start()] + rest[found.end() :]
    raw = opcode in ("constant", "parameter", "iota")
    operands = (inside,) if raw else tuple(map(_operand, split(inside))) if inside.strip() else ()
    return Instruction(match[2], line[start:middle].strip(), opcode, operands, rest, metadata, bool(match[1]))


def _operand(text: str) -> str:
    """The name of an operand, which older dumps print behind its shape."""
    return text.strip().rsplit(" ", 1)[-1].lstrip("%")


def _shape_end(line: str, start: int) -> int:
    return _matching(line, start) + 1 if line[start] == "(" else line.index(" ", start)


def _matching(text: str, start: int) -> int:
    """Where the bracket at `start` closes."""
    stack: list[str] = []
    position = start
    while True:
        found = _STOP.search(text, position)
        if found is None:
            raise ValueError("unbalanced")
        char, position = found[0], found.end()
        if char == '"':
            position = _quote_end(text, position)
        elif char in _CLOSING:
            stack.append(_CLOSING[char])
        elif char != ",":
            if not stack or stack.pop() != char:
                raise ValueError("unbalanced")
            if not stack:
                return found.start()


def _quote_end(text: str, position: int) -> int:
    while True:
        end = text.index('"', position)
        slashes = len(text[:end]) - len(text[:end].rstrip("\\"))
        if slashes % 2 == 0:
            return end + 1
        position = end + 1


def split(text: str) -> list[str]:
    """`text` cut at the commas that lie in no bracket and no quotes."""
    if not _STOP.search(text.replace(",", "")):
        return text.split(",")
    parts: list[str] = []
    start = position = 0
    while True:
        found = _STOP.search(text, position)
        if found is None:
            parts.append(text[start:])
            return parts
        char, position = found[0], found.end()
        if char == '"':
            position = _quote_end(text, position)
        elif char in _CLOSING:
            position = _matching(text, found.start()) + 1
        elif char == ",":
            parts.append(text[start : found.start()])
            start = position


def attributes(rest: str) -> dict[str, str]:
    """`, kind=kLoop, calls=%f` by name."""
    pairs = (part.partition("=") for part in split(rest.removeprefix(",")))
    return {name.strip(): value.strip() for name, equals, value in pairs if equals}


def _frames(tables: dict[str, list[str]]) -> dict[int, tuple[str, int]]:
    files = dict(_numbered(tables.get("FileNames", ())))
    places: dict[int, tuple[str, int]] = {}
    for number, text in _numbered(tables.get("FileLocations", ())):
        fields = dict(part.split("=", 1) for part in text.strip("{}").split() if "=" in part)
        name = files.get(int(fields.get("file_name_id", 0)), "").strip('"')
        places[number] = (name, int(fields.get("line", 0)))
    frames: dict[int, tuple[str, int]] = {}
    for number, text in _numbered(tables.get("StackFrames", ())):
        fields = dict(part.split("=", 1) for part in text.strip("{}").split() if "=" in part)
        frames[number] = places.get(int(fields.get("file_location_id", 0)), ("", 0))
    return frames


def _numbered(lines: "list[str] | tuple[str, ...]") -> Iterator[tuple[int, str]]:
    for line in lines:
        number, _, text = line.partition(" ")
        if number.isdigit():
            yield int(number), text
