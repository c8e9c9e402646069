"""What a step asks of a device's allocator, and gives back, in order."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Allocations:
    """Requests for device memory and their ends, as PyTorch makes them over a step.

    `nbytes`, `streams`, `calls`: of each request its bytes, its stream, and how many calls the step had made by then.
    `reads`: how many it had made when it was last read, 0 if never. `order`: n is request n, ~n its end; what has no
    end outlives the step (gradients, results). `held`: bytes of each argument that is there from the start; `late`: of
    those that the first step makes (an optimiser's state), just before place `late_at` of `order`. `threads`: host
    threads that call matrix libraries, each with a workspace.
    """

    nbytes: tuple[int, ...]
    streams: tuple[int, ...]
    calls: tuple[int, ...]
    order: tuple[int, ...]
    reads: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    late_at: int = 0
    threads: int = 0


def allocations_of_json(held: Mapping[str, Any] | None) -> Allocations | None:
    """What `asdict` made of allocations and JSON of that."""
    if held is None:
        return None
    nbytes, streams, calls, order, reads, given, late = (
        tuple(held[name]) for name in ("nbytes", "streams", "calls", "order", "reads", "held", "late")
    )
    return Allocations(nbytes, streams, calls, order, reads, given, late, held["late_at"], held["threads"])
