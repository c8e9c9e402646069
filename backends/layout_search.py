"""The layout of a step that is fastest among those that fit: every way to split the devices, predicted and ranked."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from stablecast.backends.memory_margin import FRAGMENTATION_MARGIN
from stablecast.backends.prediction import Prediction
from stablecast.ir.errors import InputError, StablecastError
from stablecast.ir.text import quantity

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranked(Generic[T]):
    """A choice and what was predicted of it; `why`: the error of one that could not be predicted."""

    choice: T
    prediction: Prediction | None
    why: str = ""

    @property
    def fits(self) -> bool:
        """Whether it was predicted and fits with the room that holes between buffers take."""
        made = self.prediction
        return made is not None and made.fits and made.headroom_bytes >= FRAGMENTATION_MARGIN * made.memory_bytes


def splits(devices: int, axes: Mapping[str, Sequence[int]]) -> Iterator[dict[str, int]]:
    """Every way to split `devices` over `axes`, each with the sizes that it may have, in the order of the sizes."""
    if not axes:
        if devices == 1:
            yield {}
        return
    (name, sizes), *rest = axes.items()
    for size in sizes:
        if size > 0 and devices % size == 0:
            yield from ({name: size, **others} for others in splits(devices // size, dict(rest)))


def rank(choices: Iterable[T], predict: Callable[[T], Prediction]) -> list[Ranked[T]]:
    """Every choice: first those that fit, fastest first, then those that do not, then those not predicted."""
    found: list[Ranked[T]] = []
    for choice in choices:
        try:
            found.append(Ranked(choice, predict(choice)))
        except StablecastError as error:
            found.append(Ranked(choice, None, error.message))
    return sorted(found, key=_place)


def best(ranked: Sequence[Ranked[T]]) -> tuple[T, Prediction]:
    """The first of `ranked`, which must fit, and its prediction. Raises `InputError` that says what the others lack."""
    if not ranked:
        raise InputError("there is no layout to choose from", "allow more sizes of an axis")
    first = ranked[0]
    if first.prediction is None:
        raise InputError(f"no layout could be predicted: {first.why}")
    if not first.fits:
        needs, has = (
            quantity(size, "B") for size in (first.prediction.peak_memory_bytes, first.prediction.memory_bytes)
        )
        room = f"{FRAGMENTATION_MARGIN:.0%} for holes between buffers"
        raise InputError(f"no layout fits: {first.choice}, the smallest, needs {needs} and {room} of {has}")
    return first.choice, first.prediction


def _place(one: Ranked[T]) -> tuple[int, float]:
    if one.prediction is None:
        return 2, 0.0
    return (0, one.prediction.step_time_s) if one.fits else (1, float(one.prediction.peak_memory_bytes))
