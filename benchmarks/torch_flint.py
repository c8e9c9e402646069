"""Operators of Llama-8B under the four layouts that Flint measured: `python benchmarks/torch_flint.py [LAYOUT ...]`.

Flint publishes 675 products, 64 attention kernels, 224 to 516 all-reduces, 292 reduce-scatters, and 292 or 582
all-gathers. Products and attention are equal. What differs, and why:

- All-reduces: 224 is seven a layer (two behind row-split products, five in front of the gradients of column-split
  ones); eager adds one behind the split embedding and one at the split head.
- 292 is one for each of the 291 parameters, and one more; 582 is twice 291. A compiler's FSDP gathers and reduces
  parameter by parameter; eager FSDP2 joins those of a block: 33 groups, gathered forward and backward.
- 516 is 224 and 292: a reduction of each parameter's gradient over the replicas, where eager joins them by block.
- With sequence parallelism the all-reduces behind products become reduce-scatters and all-gathers, four of each a
  layer; what is left are the gradients of the 65 norm weights, reduced once each where the fused optimiser reads them
  (an optimiser that takes tensors one by one, `foreach=False`, reads each three times and reduces it each time: 195).
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Any

from torch_capture import example

from stablecast.frontends.torch import capture_torch

LAYOUTS: dict[str, dict[str, int]] = {
    "tp8": {"tp": 8},
    "tp8+fsdp2": {"dp": 2, "tp": 8},
    "tp2+fsdp2+dp2": {"rep": 2, "dp": 2, "tp": 2},
    "tp4+fsdp4": {"dp": 4, "tp": 4},
}
CLASSES = {
    "products": ("aten.mm", "aten.addmm", "aten.bmm"),
    "attention": ("aten._scaled_dot_product",),
    "all-reduce": ("_c10d_functional.all_reduce", "c10d.allreduce_"),
    "reduce-scatter": ("_c10d_functional.reduce_scatter", "c10d._reduce_scatter_base_"),
    "all-gather": ("_c10d_functional.all_gather", "c10d._allgather_base_"),
}


def build(mesh: Any, sequence: bool) -> Any:
    """Llama-8B over the axes that the mesh has; `sequence`: tokens are split between the split layers too."""
    import torch

    llama = example()
    made = llama.model("8b", "bfloat16")
    names = mesh.mesh_dim_names
    llama.tensor_parallel(made, mesh["tp"], sequence)
    if "dp" in names:
        llama.shard(made, mesh["rep", "dp"] if "rep" in names else mesh["dp"])
    # without sequence parallelism norms are plain tensors, which cannot be updated together with distributed ones
    options = {"fused": True} if sequence else {"foreach": False}
    return made, torch.optim.AdamW(made.parameters(), lr=1e-4, **options)


def main(*wanted: str) -> None:
    """Prints, for each layout, counts with and without sequence parallelism."""
    llama = example()
    for name in wanted or LAYOUTS:
        for sequence in (False, True):
            start = time.process_time()
            workload = capture_torch(
                lambda mesh, sequence=sequence: build(mesh, sequence),
                llama.step,
                lambda: llama.inputs(1, 2048),
                mesh=LAYOUTS[name],
            )
            ops = Counter(launch.op for launch in workload.launches.launches) if workload.launches else Counter[str]()
            counts = {
                kind: sum(count for op, count in ops.items() if op.startswith(prefixes))
                for kind, prefixes in CLASSES.items()
            }
            said = "with sequence parallelism" if sequence else "tensor parallelism alone"
            print(f"{name}, {said}: {counts} ({time.process_time() - start:.1f} s CPU)", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
