"""One parallel SGD step on eight virtual CPU devices against one process: `python distributed_check.py KIND`.

Every rank is captured for itself; the modules become branches of one program, so that their collectives meet as they
would on eight devices. Prints the largest error of the loss, and of each parameter's update relative to the update.
"""

import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parent))

import execute
import gloo_run
import jax
import numpy as np
import torch
from torch.distributed.tensor import Shard

from stablecast.frontends.torch import capture_torch
from stablecast.ir import mlir

LR = 0.1
DATA = {"tp": 1, "tp_sp": 1, "fsdp_tp": 2}
"""Distinct batches, where it is not one for each rank."""


def merged(modules: list[bytes]) -> bytes:
    """One program that runs the module of its own rank."""
    texts: list[str] = []
    signature = None
    for rank, data in enumerate(modules):
        text = mlir.parse(data, "module").operation.get_asm(enable_debug_info=False, large_elements_limit=None)
        body = text[text.index("{", text.index("} {") + 2) + 1 : text.rindex("}")]
        signature = signature or re.search(r"func\.func @main\((.*?)\) -> \((.*?)\) \{\n", body, re.DOTALL)
        body = re.sub(r'@"?(aten[\w.]*)"?', lambda found, rank=rank: f'@"{found[1]}.r{rank}"', body)
        texts.append(body.replace("func.func @main", f"func.func private @rank{rank}"))
    assert signature is not None
    inputs = re.findall(r"(%\w+): (tensor<[^>]*>)", signature[1])
    outputs = re.findall(r"tensor<[^>]*>", re.sub(r"\{[^}]*\}", "", signature[2]))
    names, types = (", ".join(part) for part in zip(*inputs, strict=True))
    result, count = ", ".join(outputs), len(outputs)
    each = ", ".join(f"%x#{index}" for index in range(count))
    branches = ",".join(
        f"{{ %x:{count} = func.call @rank{rank}({names}) : ({types}) -> ({result})\n stablehlo.return {each} : {result} }}"
        for rank in range(len(modules))
    )
    arguments = ", ".join(f"{name}: {kind}" for name, kind in inputs)
    return (
        f"module @merged {{\nfunc.func @main({arguments}) -> ({result}) {{\n%id = stablehlo.replica_id : tensor<ui32>\n"
        f"%ix = stablehlo.convert %id : (tensor<ui32>) -> tensor<i32>\n"
        f'%x:{count} = "stablehlo.case"(%ix) ({branches}) : (tensor<i32>) -> ({result})\n'
        f"return {each} : {result} }}\n" + "\n".join(texts) + "}"
    ).encode()


class Check:
    """The captures of all ranks and what belongs to them."""

    def __init__(self, kind: str) -> None:
        self.example = gloo_run.llama()
        self.kind = kind
        self.mesh = gloo_run.MESHES[kind]
        torch.manual_seed(0)
        self.real = self.example.model(device="cpu")
        self.start = {name: tensor.detach().clone() for name, tensor in self.real.named_parameters()}
        self.count = DATA.get(kind, gloo_run.WORLD)
        self.batches = [self.example.inputs(2, 32) for _ in range(self.count)]
        self.placements: dict[str, Any] = {}
        self.workloads = [self.capture(rank) for rank in range(gloo_run.WORLD)]

    def capture(self, rank: int) -> Any:
        def build(mesh: Any) -> Any:
            model, optimizer = gloo_run.build(self.kind, mesh, self.example)
            for name, param in model.named_parameters():
                self.placements[name.replace("module.", "")] = (
                    list(zip(param.placements, param.device_mesh.mesh_dim_names, strict=True))
                    if hasattr(param, "placements")
                    else []
                )
            return model, optimizer

        return capture_torch(build, self.example.step, self.batches[0], mesh=self.mesh, rank=rank)

    def batch_of(self, rank: int) -> int:
        return rank * self.count // gloo_run.WORLD

    def local(self, name: str, whole: Any, rank: int) -> Any:
        """The part of a parameter that a rank holds; inner mesh axes split first, as FSDP2 over TP does."""
        coords = dict(zip(self.mesh, np.unravel_index(rank, tuple(self.mesh.values())), strict=True))
        for placement, axis in reversed(self.placements[name]):
            if isinstance(placement, Shard) or getattr(placement, "dim", None) is not None:
                whole = whole.chunk(self.mesh[axis], placement.dim)[int(coords[axis])]
        return whole

    def argument(self, argument: Any) -> Any:
        """The values of an argument on every device."""
        rows: list[Any] = []
        for rank in range(gloo_run.WORLD):
            if argument.kind == "batch":
                value = self.batches[self.batch_of(rank)][0 if argument.name == "tokens" else 1]
            elif argument.name in self.start:
                value = self.local(argument.name, self.start[argument.name], rank)
            else:
                value = execute.zeros(argument.type)
            rows.append(jax.device_put(execute.as_array(value).reshape(argument.type.shape), jax.devices("cpu")[rank]))
        mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[: gloo_run.WORLD]), ("x",))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        shape = (gloo_run.WORLD * rows[0].shape[0], *rows[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, sharding, rows)

    def run(self) -> dict[str, Any]:
        first = self.workloads[0]
        loaded = execute.compile_module(merged([one.modules[0].data for one in self.workloads]), gloo_run.WORLD)
        out = loaded.execute_sharded([self.argument(one) for one in first.args])
        rows = [[np.asarray(x) for x in parts] for parts in out.disassemble_into_single_device_arrays()]
        return dict(zip(first.metadata["results"], rows, strict=True))

    def errors(self) -> dict[str, float]:
        found = self.run()
        losses: list[float] = []
        total = [torch.zeros_like(param) for param in self.real.parameters()]
        for tokens, labels in self.batches:
            loss = torch.nn.functional.cross_entropy(self.real(tokens).flatten(0, 1), labels.flatten())
            gradients = torch.autograd.grad(loss, list(self.real.parameters()))
            total = [a + b / self.count for a, b in zip(total, gradients, strict=True)]
            losses.append(loss.item())
        worst = {"loss": max(abs(float(row) - losses[self.batch_of(rank)]) for rank, row in enumerate(found["result"]))}
        for (name, start), gradient in zip(self.start.items(), total, strict=True):
            wanted = start - LR * gradient
            gap = 0.0
            for rank, row in enumerate(found[name]):
                part = execute.as_array(self.local(name, wanted, rank)).reshape(-1)
                gap = max(gap, float(np.abs(row.reshape(-1) - part).max()))
            worst[name] = gap / max(LR * float(gradient.abs().max()), 1e-12)
        assert not any(math.isnan(value) for value in worst.values())
        return worst


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    print(json.dumps(Check(sys.argv[1]).errors()))
