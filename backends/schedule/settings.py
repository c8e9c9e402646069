"""What a schedule takes for granted, each choice with a name."""

from dataclasses import dataclass
from typing import Final, Literal

from stablecast.backends.device import Device

Overlap = Literal["program", "all", "none"]
CommStreams = Literal["program", "axis", "one"]
Starts = Literal["in-order", "free"]
LoopEdges = Literal["barrier", "carry"]
Collectives = Literal["calibrated", "astra-sim"]

CORES_SHARE: Final = 0.1
"""Assumed share of a GPU's cores that a running collective keeps busy (the libraries' channels)."""
MEMORY_PASSES: Final = 3.0
"""Passes of a message over device memory: two reads and a write, as reductions in a ring make them."""
FORWARD_PASSES: Final = 2.0
"""Passes where nothing is added up: a read to send on, and a write of what comes."""
_REDUCING: Final = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True, slots=True)
class Contention:
    """What a running collective takes from kernels beside it.

    `cores_share`: of the rate of compute-bound kernels. `memory_passes`: how often the message of a reduction crosses
    device memory while it is sent, `forward_passes`: that of a gather, an exchange or a transfer; that rate over the
    device's is taken from memory-bound kernels. Devices that move data by DMA engines (TPUs) give no cores. That
    communication takes cores and memory bandwidth from compute is the observation of "Enabling Compute-Communication
    Overlap in Distributed Deep Learning Training Platforms" (ACE, ISCA 2021); the shares here are assumptions.
    `share_links`: collectives that run at once over one network dimension get equal parts of its rate.
    """

    cores_share: float = CORES_SHARE
    memory_passes: float = MEMORY_PASSES
    forward_passes: float = FORWARD_PASSES
    share_links: bool = True

    def of_cores(self, device: Device) -> float:
        """Share of the cores taken on `device`."""
        return self.cores_share if device.kind == "gpu" else 0.0

    def of_memory(self, kind: str, nbytes: float, time_s: float, device: Device) -> float:
        """Share of the memory rate taken by a collective (or `send`, `load`, ...) that lasts `time_s`, at most 0.9."""
        if time_s <= 0.0:
            return 0.0
        forward = 1.0 if kind in ("load", "store") else self.forward_passes
        passes = self.memory_passes if kind in _REDUCING else forward
        return min(0.9, passes * nbytes / time_s / device.hbm_bytes_per_s.value)


@dataclass(frozen=True, slots=True)
class ScheduleSettings:
    """How nodes are put on streams.

    `overlap`: `program`: collectives that it marks asynchronous run on streams of their own, the others in the compute
    stream; `all`: every collective on a stream of its own, as early as its operands allow; `none`: one stream.
    `starts`: `in-order`: an asynchronous collective starts when the kernels issued before it have ended, as compilers
    issue them; `free`: as soon as its operands are there and its stream is free. `comm_streams`: as numbered by the
    program, one for each set of mesh axes, or one for all.
    `loops`: `barrier`: a trip ends when all that it began has ended (XLA's loops); `carry`: collectives whose results
    nothing in the trip reads run on into the next. `collectives`: whose times: the calibrated model's, or those of
    ASTRA-sim's congestion-unaware backend. `incast`: of an all-to-all, what the busiest member receives over the mean
    (1: routing is even); its senders share its link, and the others wait for it.
    `algorithm`: of the calibrated model, for every collective that can go by it.
    """

    overlap: Overlap = "program"
    starts: Starts = "in-order"
    comm_streams: CommStreams = "axis"
    loops: LoopEdges = "barrier"
    contention: Contention | None = None
    collectives: Collectives = "calibrated"
    incast: float = 1.0
    algorithm: str = "auto"

    def assumptions(self, device: Device) -> tuple[str, ...]:
        """One sentence each."""
        overlap = {
            "program": "collectives overlap with kernels where the program starts them asynchronously",
            "all": "every collective overlaps with the kernels that do not need it",
            "none": "communication is not overlapped with kernels",
        }[self.overlap]
        said = [overlap]
        if self.overlap == "program" and self.starts == "free":
            said.append("asynchronous collectives start when their operands are there and their stream is free")
        if self.collectives == "astra-sim":
            said.append("collectives take what ASTRA-sim's congestion-unaware backend says")
        if self.algorithm != "auto":
            said.append(f"collectives that can go by the algorithm {self.algorithm} do")
        if self.incast != 1.0:
            said.append(f"the busiest receiver of an all-to-all gets {self.incast:g} times the mean")
        if self.contention is None:
            said.append("communication takes no cores and no memory bandwidth from kernels")
        else:
            cores = self.contention.of_cores(device)
            said.append(
                f"a running collective takes {cores:.0%} of the cores, and {self.contention.memory_passes:g} passes "
                f"of its message over device memory ({self.contention.forward_passes:g} where nothing is added up), "
                "from kernels beside it (assumption)"
            )
            if self.contention.share_links:
                said.append("collectives that run at once over one network dimension share its rate evenly")
        return tuple(said)
