"""Custom collective algorithms: ASTRA-sim runs each rank's trace of sends, receives and waits as one phase."""

from collections.abc import Callable
from pathlib import Path

from stablecast.backends.astrasim.algorithms import begin
from stablecast.backends.astrasim.config import SystemConfig
from stablecast.backends.astrasim.engine import Rank, Stream
from stablecast.backends.astrasim.programs import Act, Programs, RankProgram
from stablecast.ir.errors import InputError


def begin_custom(folder: Path) -> Callable[[Rank, Stream], None]:
    """`begin` with custom algorithms, whose trace prefixes are looked up from `folder` on upwards."""
    programs: dict[tuple[str, int], RankProgram] = {}
    readers: dict[str, Programs] = {}

    def start(rank: Rank, stream: Stream) -> None:
        phase = stream.phase
        assert phase is not None
        prefix = phase.impl.traces
        if not prefix:
            begin(rank, stream)
            return
        key = (prefix, rank.number)
        if key not in programs:
            reader = readers.setdefault(prefix, Programs(SystemConfig(source=prefix)))
            programs[key] = reader.read(rank.number, _find(folder, f"{prefix}.{rank.number}.et"))
        Custom(rank, stream, programs[key]).start()

    return start


def _find(folder: Path, name: str) -> Path:
    """The file from the current folder, else `name` with leading folders taken off below a parent of `folder`."""
    if Path(name).is_file():
        return Path(name)
    parts = Path(name).parts
    for base in (folder, *folder.parents):
        for start in range(len(parts)):
            path = base.joinpath(*parts[start:])
            if path.is_file():
                return path
    raise InputError(f"{name}: no such trace of a custom collective")


class Custom:
    """One rank's trace of a custom algorithm; nothing limits how many of its nodes run at once."""

    def __init__(self, rank: Rank, stream: Stream, program: RankProgram) -> None:
        self.rank, self.stream, self.program = rank, stream, program
        self.waits = list(program.shape.waits)
        self.left = len(program.steps)

    def start(self) -> None:
        for index, count in enumerate(self.program.shape.waits):
            if count == 0:
                self.issue(index)

    def issue(self, index: int) -> None:
        step, rank = self.program.steps[index], self.rank
        messages = rank.machine.messages
        tag = (self.stream.tag, step.tag)
        if step.act is Act.SEND:
            messages.send(tag, rank.number, step.peer, step.nbytes, (self.end, index))
        elif step.act is Act.RECV:
            messages.receive(tag, step.peer, rank.number, step.nbytes, (self.end, index))
        elif step.act is Act.WAIT:
            rank.after(step.time_ns, self.end, index)
        else:
            raise InputError(f"custom collective, rank {rank.number} {step}: only sends, receives and compute run")

    def end(self, index: int) -> None:
        self.left -= 1
        for child in self.program.shape.children[index]:
            self.waits[child] -= 1
            if self.waits[child] == 0:
                self.issue(child)
        if self.left == 0:
            self.rank.advance(self.stream)
