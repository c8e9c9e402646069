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


def compile_module(data: bytes, partitions: int = 1) -> Any:
    """The loaded executable of a module for `partitions` CPU devices."""
    backend = jax.devices("cpu")[0].client
    devices = xla_client.DeviceList(tuple(jax.devices("cpu")[:partitions]))
    options = xla_client.CompileOptions()
    options.num_partitions = partitions
    options.num_replicas = 1
    options.executable_build_options.num_partitions = partitions
    options.executable_build_options.device_assignment = xla_client.DeviceAssignment.create(
        np.arange(partitions, dtype=np.int32).reshape(1, partitions)
    )
    return backend.compile_and_load(data, devices, options)


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
    names = [*workload.metadata["results"], *(["rng_state"] if workload.args and workload.args[-1].name == "rng_state" else [])]
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

    names = {"f32": np.float32, "f64": np.float64, "i64": np.int64, "i32": np.int32, "i1": np.bool_, "ui64": np.uint64,
             "bf16": ml_dtypes.bfloat16, "f16": np.float16, "ui8": np.uint8, "i8": np.int8}
    return np.zeros(kind.shape, names[kind.dtype.name])


def relative_error(found: Any, wanted: Any) -> float:
    """Largest difference over the largest value."""
    a, b = as_array(found).astype(np.float64), as_array(wanted).astype(np.float64)
    assert a.shape == b.shape, (a.shape, b.shape)
    return float(np.max(np.abs(a - b), initial=0) / max(1e-12, np.max(np.abs(b), initial=0)))
