"""Parallelisms by name, as `fsdp8,tp4`, for models that transformers makes."""

import fnmatch
import re
from typing import Any

from stablecast.frontends.torch.private import load, torch
from stablecast.ir.errors import InputError

KNOWN = ("pp", "dp", "fsdp", "tp")


def axes_of(parallel: str) -> tuple[tuple[str, int], ...]:
    """Mesh axes of `dp4`, `fsdp8,tp4`, `pp4,tp2` and the like, major to minor; `InputError` for an unknown one."""
    axes: list[tuple[str, int]] = []
    for part in re.split(r"[,x+ ]+", parallel.strip()) if parallel.strip() else []:
        found = re.fullmatch(r"([a-z]+)=?(\d+)", part)
        if found is None or found[1] not in KNOWN:
            raise InputError(
                f"unknown parallelism '{part}'", f"known: {', '.join(f'{name}N' for name in KNOWN)}, joined by commas"
            )
        axes.append((found[1], int(found[2])))
    names = [name for name, _ in axes]
    if len(set(names)) < len(names):
        raise InputError(f"'{parallel}' names an axis twice")
    if "dp" in names and "fsdp" in names and names.index("dp") > names.index("fsdp"):
        raise InputError(f"'{parallel}': replicas stand outside shards", "write dpN before fsdpM")
    return tuple(axes)


def apply(model: Any, mesh: Any, axes: dict[str, int]) -> Any:
    """The model over its mesh: tensor parallel by its own plan, then over the data axes."""
    if mesh is None:
        return model
    if "tp" in axes:
        tensor_parallel(model, mesh["tp"])
    return over_data(model, mesh, axes)


def over_data(model: Any, mesh: Any, axes: dict[str, int]) -> Any:
    """FSDP2 (with `dp`: hybrid); replicas beside `tp` as FSDP2 replicates, alone as DDP does."""
    if "fsdp" in axes:
        names = ("dp", "fsdp") if "dp" in axes else ("fsdp",)
        # a pipeline would gather again for every micro-batch, so that torch's own recipes keep what was gathered
        shard(model, mesh[names] if len(names) > 1 else mesh["fsdp"], "pp" not in axes)
    elif "dp" in axes and "tp" in axes:
        replicate(model, mesh["dp"])
    elif "dp" in axes:
        return data_parallel(model, mesh["dp"])
    return model


def replicate(model: Any, mesh: Any) -> None:
    """Replicas whose parameters are distributed tensors, which DDP does not take: a reduction for each block."""
    function = load("torch.distributed._composable.replicate_with_fsdp").replicate
    for layer in layers_of(model):
        function(layer, mesh=mesh)
    function(model, mesh=mesh)


def layers_of(model: Any) -> list[Any]:
    """The repeated blocks: members of the longest module list."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    longest = max(lists, key=len, default=None)
    return list(longest) if longest is not None else []


def shard(model: Any, mesh: Any, reshard: bool = True) -> None:
    """FSDP2 with a group for each block; `reshard`: after the forward pass each rank keeps its shard only."""
    fully_shard = load("torch.distributed.fsdp").fully_shard
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=None if reshard else False)


def data_parallel(model: Any, mesh: Any) -> Any:
    """DDP."""
    return load("torch.nn.parallel").DistributedDataParallel(model, process_group=mesh.get_group())


def tensor_parallel(model: Any, mesh: Any) -> None:
    """The model's own plan (`base_model_tp_plan`) with DTensor's styles."""
    plan = dict(getattr(model, "_tp_plan", None) or {})
    base = getattr(model.config, "base_model_tp_plan", None)
    if base:
        prefix = f"{model.base_model_prefix}." if getattr(model, model.base_model_prefix, None) is not None else ""
        plan = {f"{prefix}{name}": style for name, style in base.items()} | plan
    if not plan:
        raise InputError(f"{type(model).__name__} has no plan for tensor parallelism", "use dpN or fsdpN")
    parallel = load("torch.distributed.tensor.parallel")
    replicate = load("torch.distributed.tensor").Replicate
    styles = {
        "colwise": parallel.ColwiseParallel,
        "rowwise": parallel.RowwiseParallel,
        "colwise_rep": lambda: parallel.ColwiseParallel(output_layouts=replicate()),
        "colwise_gather_output": lambda: parallel.ColwiseParallel(output_layouts=replicate()),
        "embedding_rowwise": lambda: parallel.RowwiseParallel(input_layouts=replicate()),
    }
    chosen: dict[str, Any] = {}
    for name, module in model.named_modules():
        style = next((style for pattern, style in plan.items() if fnmatch.fnmatchcase(name, pattern)), None)
        if style in styles and isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
            chosen[name] = styles[style]()
    parallel.parallelize_module(model, mesh, chosen)
    model._stablecast_tp = mesh.size()


def local_heads(model: Any, heads: int) -> int:
    """Key and value heads on one rank."""
    return max(1, heads // getattr(model, "_stablecast_tp", 1))
