"""Runs emitted modules with jax on the CPU, and eager torch beside them."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import torch
from jaxlib import xla_client

from stablecast.ir.workload import Workload

Arrays = Sequence[npt.NDArray[Any]]


def compile_module(data: bytes, devices: int = 1) -> Any:
    """The loaded executable of a module, on as many CPU devices; each runs the same program as a replica."""
    from stablecast.ir import mlir

    module = mlir.parse(data, "module")
    with module.context:
        kind = mlir.bindings().IntegerType.get_signless(32)
        for name, count in (("mhlo.num_partitions", 1), ("mhlo.num_replicas", devices)):
            module.operation.attributes[name] = mlir.bindings().IntegerAttr.get(kind, count)
        data = mlir.write_bytecode(module)
    options = xla_client.CompileOptions()
    options.num_partitions = 1
    options.num_replicas = devices
    options.executable_build_options.device_assignment = xla_client.DeviceAssignment.create(
        np.arange(devices, dtype=np.int32).reshape(devices, 1)
    )
    places = xla_client.DeviceList(tuple(jax.devices("cpu")[:devices]))
    return jax.devices("cpu")[0].client.compile_and_load(data, places, options)


def execute(workload: Workload, values: Mapping[str, Any], seed: int = 0) -> dict[str, npt.NDArray[Any]]:
    """Results by name. `values`: arguments by name; arguments that are not given are zeros."""
    loaded = compile_module(workload.modules[0].data)
    buffers: list[Any] = []
    device = jax.devices("cpu")[0]
    for argument in workload.args:
        given = values.get(argument.name)
        array = as_array(given) if given is not None else zeros(argument.type)
        assert array.shape == argument.type.shape, (argument.name, array.shape, argument.type)
        buffers.append(jax.device_put(array, device))
    out = loaded.execute(buffers)
    names = [
        *workload.metadata["results"],
        *(["rng_state"] if workload.args and workload.args[-1].name == "rng_state" else []),
    ]
    return {name: np.asarray(value) for name, value in zip(names, out, strict=True)}


def as_array(value: Any) -> npt.NDArray[Any]:
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if value.dtype == torch.bfloat16:
            import ml_dtypes

            return value.float().numpy().astype(ml_dtypes.bfloat16)
        return value.numpy()
    return np.asarray(value)


def zeros(kind: Any) -> npt.NDArray[Any]:
    import ml_dtypes

    names = {
        "f32": np.float32,
        "f64": np.float64,
        "i64": np.int64,
        "i32": np.int32,
        "i1": np.bool_,
        "ui64": np.uint64,
        "bf16": ml_dtypes.bfloat16,
        "f16": np.float16,
        "ui8": np.uint8,
        "i8": np.int8,
    }
    return np.zeros(kind.shape, names[kind.dtype.name])


def relative_error(found: Any, wanted: Any) -> float:
    """Largest difference over the largest value."""
    a, b = as_array(found).astype(np.float64), as_array(wanted).astype(np.float64)
    assert a.shape == b.shape, (a.shape, b.shape)
    return float(np.max(np.abs(a - b), initial=0) / max(1e-12, np.max(np.abs(b), initial=0)))
