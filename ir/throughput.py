"""What a step works through: tokens, images or samples, from the shapes of its arguments."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from stablecast.ir.dtypes import DTypeKind
from stablecast.ir.program import Argument, ArgumentKind
from stablecast.ir.types import TensorType, ValueType

_INTEGERS = (DTypeKind.INT, DTypeKind.UINT)


@dataclass(frozen=True, slots=True)
class Throughput:
    """`count` items of one `unit` (`tokens`, `images`, `samples`) a step, over all devices."""

    unit: str
    count: int


def throughput_of(arguments: Sequence[Argument], replicas: int = 1) -> Throughput | None:
    """The items that the batch among `arguments` holds; None where no argument is known to be one.

    A batch is what the frontend calls so; where it calls nothing so but some arguments are overwritten by results (the
    state), it is the others. Integers [batch, sequence] alone are tokens, arrays of four dimensions images; else the
    size that most of them share counts samples. `replicas`: devices that each have arguments of their own.
    """
    named = [argument.type for argument in arguments if argument.kind is ArgumentKind.BATCH]
    batch = named or _not_overwritten(arguments)
    tensors = [kind for kind in batch if isinstance(kind, TensorType) and kind.shape]
    if not tensors:
        return None
    first = tensors[0]
    sequences = all(kind.dtype.kind in _INTEGERS and kind.shape == first.shape for kind in tensors)
    if sequences and len(first.shape) == 2 and first.shape[1] > 1:
        return Throughput("tokens", first.elements * replicas)
    for kind in tensors:
        if kind.dtype.is_float and len(kind.shape) == 4:
            return Throughput("images", kind.shape[0] * replicas)
    shared = Counter(size for kind in tensors for size in dict.fromkeys(kind.shape))
    return Throughput("samples", shared.most_common(1)[0][0] * replicas)


def _not_overwritten(arguments: Sequence[Argument]) -> list[ValueType]:
    kept = [argument.type for argument in arguments if argument.aliases_output is None]
    return kept if len(kept) < len(arguments) else []
