"""What XLA must know of a GPU to compile for it where there is none: our own descriptions, from `targets.yaml`."""

from functools import cache
from importlib.resources import files
from typing import Any, cast

import yaml

from stablecast.ir.errors import InputError, near_names

_HOST_CHIPS = (2, 2, 1)


@cache
def _held() -> dict[str, Any]:
    text = files("stablecast.frontends.xla").joinpath("targets.yaml").read_text(encoding="utf-8")
    return cast("dict[str, Any]", yaml.safe_load(text))


def boards() -> tuple[str, ...]:
    """The GPUs that there is a description of, by the names of the hardware catalogue."""
    return tuple(_held()["boards"])


def board_name(board: str) -> str:
    """What the driver calls the GPU."""
    return str(_board(board)["name"])


def target_config(board: str) -> str:
    """The description of `board` as XLA reads it, a `GpuTargetConfigProto` in text form.

    Raises `InputError` for a GPU that there is no description of.
    """
    held = _board(board)
    capability = str(held["capability"])
    numbers = {**_numbers(_held()["capabilities"][capability]), **_numbers(held)}
    major, minor = capability.split(".")
    version = _held()["dnn_version"]
    lines = [
        "gpu_device_info {",
        *(f"  {name}: {value}" for name, value in numbers.items()),
        f"  cuda_compute_capability {{ major: {major} minor: {minor} }}",
        "}",
        'platform_name: "CUDA"',
        f"dnn_version_info {{ major: {version['major']} minor: {version['minor']} }}",
        f'device_description_str: "{held["name"]}"',
    ]
    return "\n".join(lines) + "\n"


def _board(board: str) -> dict[str, Any]:
    known = _held()["boards"]
    if board not in known:
        hint = near_names(board, known) or "known: " + ", ".join(known)
        raise InputError(f"XLA cannot compile for {board}: there is no description of it", hint)
    return cast("dict[str, Any]", known[board])


def _numbers(held: dict[str, Any]) -> dict[str, Any]:
    """The entries that are a value with its source."""
    return {name: value[0] for name, value in held.items() if isinstance(value, list)}


def topology(device: str, count: int) -> str:
    """The slice of `count` JAX devices as libtpu names it, such as `v5e:4x4`, as square as the number allows.

    One device may be part of a chip. Raises `InputError` for a TPU whose slices nobody described, or a number that
    fills no chips.
    """
    known = _held()["tpus"]
    if device not in known:
        hint = near_names(device, known) or "known: " + ", ".join(known)
        raise InputError(f"XLA cannot compile for {device}: there is no description of its slices", hint)
    held = known[device]
    per_chip = held["devices_per_chip"]
    if count % per_chip and count != 1:
        raise InputError(f"{count} devices do not fill chips of {device}, which has {per_chip} each")
    sizes = sorted(_near_square(-(-count // per_chip), held["dimensions"]), key=lambda size: (size == 1, size))
    return f"{held['name']}:{'x'.join(map(str, sizes))}"


def slice_options(name: str) -> dict[str, Any]:
    """What libtpu must know of the slice `name` beside that: chips of a host by dimension, and what a device is.

    A host holds 2 x 2 x 1 chips, less along a dimension that these do not divide.
    """
    family, _, sizes = name.partition(":")
    chips = [int(size) for size in sizes.split("x")]
    made: dict[str, Any] = {
        "chips_per_host_bounds": [
            most if size % most == 0 else 1 for size, most in zip((*chips, 1), _HOST_CHIPS, strict=False)
        ]
    }
    config = next((held.get("config") for held in _held()["tpus"].values() if held["name"] == family), None)
    return {**made, "chip_config_name": config} if config else made


def _near_square(count: int, dimensions: int) -> list[int]:
    """`count` as a product of `dimensions` factors, each as near to the root as the rest allows."""
    if dimensions == 1:
        return [count]
    wanted = round(count ** (1 / dimensions))
    first = next(size for size in range(max(wanted, 1), 0, -1) if count % size == 0)
    return [first, *_near_square(count // first, dimensions - 1)]
