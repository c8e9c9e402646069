"""What torch dispatches in eight real gloo processes, beside what one captured process says.

`python gloo_run.py` prints the counts of both, `--overwrite-golden` runs the eight processes again (two minutes).
"""

import importlib.util
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

WORLD = 8
GOLDEN = Path(__file__).parent / "golden" / "gloo.json"
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


class Seen(TorchDispatchMode):
    """Every op that reaches a plain tensor: name, and for communication the tensors and the ranks of the group."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind.__name__ == "FakeTensor" for kind in types):
            return func(*args, **kwargs)
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented
        out = func(*args, **kwargs)
        if func.namespace in ("profiler", "prim"):
            return out
        call: list[Any] = [str(func)]
        group = _group(args) if "c10d" in func.namespace else []
        if group:
            flat = [leaf for leaf in torch.utils._pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            call += [[[list(leaf.shape), str(leaf.dtype)] for leaf in flat], group]
        self.calls.append(call)
        return out


def _group(args: Any) -> list[int]:
    from torch.distributed.distributed_c10d import _resolve_process_group

    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return dist.get_process_group_ranks(dist.ProcessGroup.unbox(arg))
    name = next((arg for arg in reversed(args) if isinstance(arg, str)), None)
    return [] if name is None else dist.get_process_group_ranks(_resolve_process_group(name))


def worker(rank: int, out: str) -> None:
    """Three steps of every kind; rank 0 writes what the last one dispatched."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ.get("GLOO_PORT", "29631"))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    example = llama()
    batch = example.inputs(2, 32)
    found: dict[str, Any] = {}
    for kind, shape in MESHES.items():
        mesh = dist.init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
        model, optimizer = build(kind, mesh, example)
        for _ in range(2):
            example.step(model, optimizer, *batch)
        with Seen() as seen:
            example.step(model, optimizer, *batch)
        found[kind] = seen.calls
    if rank == 0:
        Path(out).write_text(json.dumps(packed(found), separators=(",", ":")))
    dist.barrier()
    dist.destroy_process_group()


def packed(found: Mapping[str, list[list[Any]]]) -> dict[str, Any]:
    """Calls as numbers into one list of distinct calls."""
    known: dict[str, int] = {}
    steps = {kind: [known.setdefault(json.dumps(call), len(known)) for call in calls] for kind, calls in found.items()}
    return {"torch": torch.__version__, "calls": [json.loads(text) for text in known], "steps": steps}


def recorded() -> dict[str, list[list[Any]]]:
    """What eight processes dispatched, from the golden file."""
    held = json.loads(GOLDEN.read_text())
    return {kind: [held["calls"][number] for number in numbers] for kind, numbers in held["steps"].items()}


def captured(kind: str) -> list[list[Any]]:
    """The calls of rank 0's capture, in the form of the golden file."""
    from stablecast.frontends.torch import capture_torch

    names = {"f32": "torch.float32", "i64": "torch.int64", "ui8": "torch.uint8", "i32": "torch.int32"}
    example = llama()
    groups: dict[str, list[int]] = {}

    def step(*given: Any) -> Any:
        loss = example.step(*given)
        for name, group in dist.distributed_c10d._world.pg_names.items():
            groups[group] = dist.get_process_group_ranks(name)
        return loss

    workload = capture_torch(
        lambda mesh: build(kind, mesh, example), step, example.inputs(2, 32), mesh=MESHES[kind], device="cpu"
    )
    calls: list[list[Any]] = []
    for launch in workload.launches.launches:
        call: list[Any] = [launch.op]
        if launch.group:
            shapes = zip(launch.shapes, launch.dtypes, strict=True)
            call += [[[list(shape), names[dtype]] for shape, dtype in shapes], groups[launch.group]]
        calls.append(call)
    return calls


ALIKE = {"aten.__or__.Tensor": "aten.bitwise_or.Tensor"}
"""Ops that torch itself takes apart, and what becomes of them."""

IDLE = ("empty", "detach", "wait_tensor", "_wrap_tensor_autograd")


def kernels(calls: list[list[Any]]) -> list[list[Any]]:
    """The calls that launch something: no views, allocations and waits.

    gloo has no reduce-scatter and makes one of an all-reduce, whose result it splits and copies: its own affair.
    """
    found: list[list[Any]] = []
    after = ""
    for name, *rest in calls:
        if not _idle(name) and not (name == "aten.copy_.default" and after == "c10d._reduce_scatter_base_.default"):
            found.append([ALIKE.get(name, name), *rest])
            after = name
    return found


def _idle(name: str) -> bool:
    namespace, short, overload = name.split(".")
    if short.startswith(IDLE):
        return True
    func = getattr(getattr(getattr(torch.ops, namespace), short), overload)
    aliased = [result.alias_info for result in func._schema.returns if result.alias_info is not None]
    return short in ("chunk", "split") or any(not info.is_write for info in aliased)


def table(found: Mapping[str, list[list[Any]]]) -> None:
    """Prints counts of real run and capture side by side."""
    for kind, real in found.items():
        ours = captured(kind)
        moved = [Counter(call[0] for call in calls if len(call) > 1) for calls in (real, ours)]
        print(f"{kind}: {len(real)} calls in eight processes, {len(ours)} captured")
        real, ours = kernels(real), kernels(ours)
        print(f"  that launch something: {len(real)} and {len(ours)}, one by one the same: {real == ours}")
        for name in sorted(moved[0] | moved[1]):
            print(f"  {name}: {moved[0][name]} and {moved[1][name]}")
        differ = Counter(call[0] for call in real)
        differ.subtract(call[0] for call in ours)
        print("  differences:", {name: count for name, count in differ.items() if count} or "none")


if __name__ == "__main__":
    if "--overwrite-golden" in sys.argv:
        torch.multiprocessing.spawn(worker, args=(str(GOLDEN),), nprocs=WORLD)
    table(recorded())
