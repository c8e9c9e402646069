"""Schedule passes: `DeviceProgram -> DeviceProgram`, by name, as compilers and frameworks hide communication.

Built-in passes register exactly as a third party's would: entry points of the group `stablecast.passes`, each a class
that is made with the text after `=` (empty without one) and called with a program. `default_passes` says which ones a
prediction takes for granted.
"""

from stablecast.lowering.passes.legality import illegal
from stablecast.lowering.passes.registry import (
    DEFAULTS,
    SchedulePass,
    default_passes,
    find_pass,
    pass_names,
    pass_summaries,
    run_passes,
)

__all__ = [
    "DEFAULTS",
    "SchedulePass",
    "default_passes",
    "find_pass",
    "illegal",
    "pass_names",
    "pass_summaries",
    "run_passes",
]
