"""What lowering must know of the machine and of the choices made for it."""

from dataclasses import dataclass, field

from stablecast.lowering.products import Arithmetic

ATTENTION_CHOICES = ("auto", "flash", "as-written")


@dataclass(frozen=True, slots=True)
class Target:
    """The platform's name, what it does with f32 products, and what one launch is.

    `combine`: whether its compiler puts independent collectives together; programs that issue their own do not want it.
    `exec`: name of the execution model (`lowering.execution.models`). `attention`: `flash` makes attention one kernel
    where it is recognised, `as-written` never does, `auto` does what the execution model does.
    """

    platform: str = "cuda"
    arithmetic: Arithmetic = field(default_factory=Arithmetic)
    combine: bool = True
    exec: str = "xla"
    attention: str = "auto"
