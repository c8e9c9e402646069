"""The fragmentation margin: holes between buffers are no part of the peak, which is said where it matters.

Where the allocator is PyTorch's, its holes are known, and what they cost is said instead.
"""

from dataclasses import replace
from typing import Final

from stablecast.backends.prediction import Prediction
from stablecast.ir.text import quantity

FRAGMENTATION_MARGIN: Final = 0.05
"""Share of device memory that a step should leave free for holes between buffers: an assumption, what XLA:GPU leaves of
its memory limit (`xla_gpu_memory_limit_slop_factor` is 95)."""
_NAME: Final = "fragmentation margin"


def with_memory_margin(made: Prediction) -> Prediction:
    """`made` with an assumption that names the margin, where its peak fits and leaves less than that free."""
    said = tuple(text for text in made.assumptions if not text.startswith(_NAME))
    margin = FRAGMENTATION_MARGIN * made.memory_bytes
    if made.reserved_memory_bytes is not None:
        said = (*said, *_reserved(made))
    elif 0 <= made.headroom_bytes < margin:
        note = (
            f"{_NAME}: fits counts no holes between buffers; {FRAGMENTATION_MARGIN:.0%} of device memory "
            f"({quantity(margin, 'B')}) should be free for them (assumption, as XLA's memory_limit_slop_factor of 95), "
            f"{quantity(made.headroom_bytes, 'B')} is"
        )
        said = (*said, note)
    return replace(made, assumptions=said)


def _reserved(made: Prediction) -> tuple[str, ...]:
    reserved = made.reserved_memory_bytes or 0
    if made.fits and reserved > made.memory_bytes:
        return (
            f"PyTorch's allocator needs {quantity(reserved, 'B')} for holes between buffers too: out of memory on "
            f"{made.system} (--expandable-segments may help)",
        )
    if made.fits and made.memory_retries:
        return (
            f"PyTorch's allocator runs out of memory {made.memory_retries} time(s) a step and then gives back what it "
            "keeps, which waits for the device and is not in the time",
        )
    return ()
