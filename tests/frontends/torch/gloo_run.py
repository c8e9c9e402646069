"""One training step for real in eight gloo processes, every dispatched op counted: `python gloo_run.py KIND OUT.json`."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

WORLD = 8
MESHES: dict[str, dict[str, int]] = {
    "ddp": {"dp": 8},
    "fsdp": {"dp": 8},
    "hsdp": {"rep": 2, "shard": 4},
    "tp": {"tp": 8},
    "tp_sp": {"tp": 8},
    "fsdp_tp": {"dp": 2, "tp": 4},
}


def llama() -> ModuleType:
    """The example."""
    path = Path(__file__).parents[3] / "examples" / "torch_llama.py"
    spec = importlib.util.spec_from_file_location("torch_llama_example", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault("torch_llama_example", module)
    spec.loader.exec_module(module)
    return module


def build(kind: str, mesh: Any, example: ModuleType) -> tuple[Any, Any]:
    """The model over the mesh, with plain SGD."""
    model = example.model(device="cpu")
    if kind in ("tp", "tp_sp", "fsdp_tp"):
        example.tensor_parallel(model, mesh["tp"], kind != "tp")
    if kind == "fsdp_tp":
        example.shard(model, mesh["dp"])
    elif kind in ("fsdp", "hsdp"):
        example.shard(model, mesh)
    elif kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)


class Counter(TorchDispatchMode):
    """Name, and for collectives the bytes of the first operand, of every op that reaches a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[int]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "FakeTensor" for kind in types):
            return func(*args, **(kwargs or {}))
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if func.namespace not in ("profiler", "prim"):
            flat = [tensor for tensor in torch.utils._pytree.tree_leaves(args) if isinstance(tensor, torch.Tensor)]
            self.calls.append((str(func), list(flat[0].shape) if flat else []))
        return out


def worker(rank: int, kind: str, out: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ.get("GLOO_PORT", "29631"))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    example = llama()
    shape = MESHES[kind]
    mesh = dist.init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    model, optimizer = build(kind, mesh, example)
    batch = example.inputs(2, 32)
    steps = 2 if kind == "ddp" else 1
    for number in range(steps):
        counter = Counter()
        if number == steps - 1:
            with counter:
                example.step(model, optimizer, *batch)
            if rank == 0:
                Path(out).write_text(json.dumps(counter.calls))
        else:
            example.step(model, optimizer, *batch)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(worker, args=(sys.argv[1], sys.argv[2]), nprocs=WORLD)
