"""Which memory a step asks for and when it lets go of it: the life of every storage that it makes.

Storages live as long as Python and autograd hold them, as in a real run, and FSDP empties and refills those of gathered
parameters (`UntypedStorage.resize_`). Temporaries inside an op are not seen here.
"""

# pyright: reportUnknownLambdaType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable, Iterable
from typing import Any

from stablecast.frontends.torch.private import FakeTensor, storage_of, torch
from stablecast.ir.allocations import Allocations


class _Life:
    """Rides on a storage; goes when that does. `number`: of the request that the storage stands for now, -1: none."""

    __slots__ = ("log", "number")

    def __init__(self, log: "AllocationLog", number: int) -> None:
        self.log = log
        self.number = number

    def end(self) -> None:
        if self.number >= 0:
            self.log.ended(self.number)
        self.number = -1

    def __del__(self) -> None:
        self.end()


class AllocationLog:
    """Notes requests and their ends while it is open. `here`: the current stream, and the calls made so far."""

    def __init__(self, mark: str, here: Callable[[], tuple[int, int]]) -> None:
        self._mark = f"{mark}_life"
        self._here = here
        self._open = False
        self._nbytes: list[int] = []
        self._streams: list[int] = []
        self._calls: list[int] = []
        self._reads: list[int] = []
        self._order: list[int] = []

    def open(self) -> None:
        """Begin; what there is already is no request of the step."""
        self._open = True

    def close(self) -> None:
        """What happens from now on is no longer the step's."""
        self._open = False

    def made(self, results: Iterable[Any], operands: Callable[[], Iterable[Any]]) -> None:
        """An op gave `results`: storages that are neither known nor an operand's are new."""
        if not self._open:
            return
        old: set[int] = set()
        for tensor in operands():
            storage = storage_of(tensor)
            if storage is not None:
                old.add(storage._cdata)
                known: _Life | None = getattr(storage, self._mark, None)
                if known is not None and known.number >= 0:
                    self._reads[known.number] = self._here()[1]
        for tensor in results:
            storage = storage_of(tensor) if isinstance(tensor, FakeTensor) else None
            if storage is None:
                continue
            life: _Life | None = getattr(storage, self._mark, None)
            if life is not None:
                if life.number >= 0 and storage.nbytes() != self._nbytes[life.number]:
                    self.resized(storage, self._nbytes[life.number])
                continue
            new = storage._cdata not in old and storage.nbytes()
            setattr(storage, self._mark, _Life(self, self._request(storage.nbytes()) if new else -1))

    def resized(self, storage: Any, before: int) -> None:
        """A storage of `before` bytes has another size."""
        size = storage.nbytes()
        if not self._open or size == before:
            return
        life: _Life | None = getattr(storage, self._mark, None)
        if life is not None:
            life.end()
            life.number = self._request(size) if size else -1
        elif size:
            setattr(storage, self._mark, _Life(self, self._request(size)))

    def ended(self, number: int) -> None:
        """Nobody holds request `number` any more."""
        if self._open:
            self._order.append(~number)

    def _request(self, nbytes: int) -> int:
        stream, calls = self._here()
        self._nbytes.append(nbytes)
        self._streams.append(stream)
        self._calls.append(calls)
        self._reads.append(0)
        self._order.append(len(self._nbytes) - 1)
        return self._order[-1]

    def allocations(self) -> Allocations:
        """What was noted."""
        order, reads = tuple(self._order), tuple(self._reads)
        return Allocations(tuple(self._nbytes), tuple(self._streams), tuple(self._calls), order, reads)


def storage_patches(log: AllocationLog) -> list[tuple[Any, str, Any]]:
    """(owner, name, stand-in): storages that change their size say so."""
    original = torch.UntypedStorage.resize_

    def resize(self: Any, size: int) -> Any:
        before = self.nbytes()
        done = original(self, size)
        log.resized(self, before)
        return done

    return [(torch.UntypedStorage, "resize_", resize)]
