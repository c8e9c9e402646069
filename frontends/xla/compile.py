"""Asks XLA, in a child process, for the program that it would run on hardware that is not there."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from stablecast.frontends.xla.targets import slice_options, target_config
from stablecast.ir.device_program import Buffers
from stablecast.ir.errors import InputError, ToolError
from stablecast.ir.program import Stage
from stablecast.ir.workload import Workload

TIMEOUT_S = 1800.0
MAX_DEVICES = 131072
EXTRA = "pip install 'stablecast[xla-gpu]'"
TPU_EXTRA = "pip install 'libtpu==0.0.42.1'"
_MODULE = "stablecast.frontends.xla.child"
_NO_ROOM = "RESOURCE_EXHAUSTED"
_NO_TILES = "output tile sizes"
_UNTUNED = {"xla_gpu_autotune_level": 0}
_LIBRARY = {"xla_gpu_enable_triton_gemm": False}
_FORMS = ("auto", "generated", "library")
UNTUNED_NOTE = "compiled without a GPU: nothing was autotuned, tilings and algorithms are XLA's defaults"
LIBRARY_NOTE = "matrix products by cuBLAS: XLA found no tiling of its own for them without autotuning"


@dataclass(frozen=True, slots=True)
class Settings:
    """How XLA is to compile.

    `products`: matrix products as XLA's own kernels (`generated`), by cuBLAS (`library`), or `auto`: generated where
    XLA can, else all by cuBLAS. `options`: further XLA options by name. `accept_libtpu_terms`: the user has read and
    accepted the terms that libtpu comes under, without which it is not touched.
    """

    products: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    timeout_s: float = TIMEOUT_S
    accept_libtpu_terms: bool = False


@dataclass(frozen=True, slots=True)
class Compiled:
    """What XLA made: optimised, scheduled HLO text of one device, the memory it laid out, and what was assumed."""

    text: bytes
    memory: Buffers
    notes: tuple[str, ...] = ()


def compile_ahead(
    workload: Workload, target: str, settings: Settings | None = None, *, data: bytes | None = None
) -> Compiled:
    """The first module of `workload` as XLA compiles it for `target`, with no accelerator, driver or toolkit.

    `target`: a GPU of `boards()`, or a TPU topology such as `v5e:4x4`. `data`: the module with its open dimensions
    bound. Raises `ToolError` where the compiler is not installed, fails, dies or takes too long, and `InputError` for
    an unknown target, more than `MAX_DEVICES` devices or terms that were not accepted.
    """
    chosen = settings or Settings()
    if chosen.products not in _FORMS:
        raise InputError(f"products='{chosen.products}' is not known", f"choose {', '.join(_FORMS)}")
    if workload.num_devices > MAX_DEVICES:
        raise InputError(f"XLA compiles ahead for up to {MAX_DEVICES} devices, not {workload.num_devices}")
    module = workload.modules[0].data if data is None else data
    request = {
        "source": workload.source or "program",
        "replicas": workload.num_replicas,
        "partitions": workload.num_partitions,
        "shardy": workload.stage is not Stage.GLOBAL_GSPMD,
    }
    if ":" in target:
        return _for_tpu(request, module, target, chosen)
    return _for_gpu(request, module, target, chosen)


def _for_gpu(request: Mapping[str, Any], module: bytes, board: str, settings: Settings) -> Compiled:
    described = target_config(board)
    if not compiler_installed():
        raise ToolError("--exec xla-aot needs XLA's CUDA compiler, which is not installed", EXTRA)
    base = {**request, "platform": "cuda", "target": described}
    options = {**_UNTUNED, **settings.options}
    if settings.products == "library":
        return _compiled({**base, "options": {**options, **_LIBRARY}}, module, settings, (UNTUNED_NOTE,))
    try:
        return _compiled({**base, "options": options}, module, settings, (UNTUNED_NOTE,))
    except ToolError as error:
        if settings.products != "auto" or _NO_TILES not in str(error):
            raise
    return _compiled({**base, "options": {**options, **_LIBRARY}}, module, settings, (UNTUNED_NOTE, LIBRARY_NOTE))


def _for_tpu(request: Mapping[str, Any], module: bytes, topology: str, settings: Settings) -> Compiled:
    check_terms(settings)
    if not _installed("libtpu"):
        raise ToolError("--exec xla-aot for a TPU needs libtpu, which is not installed", TPU_EXTRA)
    where = {"platform": "tpu", "topology": topology, "slice": slice_options(topology)}
    base = {**request, **where, "options": dict(settings.options)}
    return _compiled(base, module, settings, ("compiled by libtpu for a TPU that is not there",))


def check_terms(settings: Settings) -> None:
    """Raises `InputError` unless the user has accepted the terms that libtpu comes under, which only he can do."""
    if not settings.accept_libtpu_terms:
        raise InputError(
            "compiling for a TPU uses libtpu, which comes under the Google Cloud Platform Terms of Service",
            "read them, and say --accept-libtpu-terms if you accept them",
        )


def compiler_installed() -> bool:
    """Whether XLA's CUDA compiler (extra `xla-gpu`) is there."""
    return _installed("jax_plugins.xla_cuda12")


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _compiled(request: Mapping[str, Any], module: bytes, settings: Settings, notes: tuple[str, ...]) -> Compiled:
    header, text = _ask(json.dumps(request).encode() + b"\n" + module, settings.timeout_s, str(request["source"]))
    held = header["memory"]
    memory = Buffers(held["argument"], held["output"], held["alias"], held["temp"])
    return Compiled(text, memory, notes)


def _ask(request: bytes, timeout_s: float, source: str) -> tuple[dict[str, Any], bytes]:
    command = [sys.executable, "-m", _MODULE]
    try:
        done = subprocess.run(command, input=request, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise ToolError(
            f"XLA did not compile {source} within {timeout_s:g} s", "give it longer, or use --exec xla"
        ) from None
    line, _, text = done.stdout.partition(b"\n")
    if done.returncode or not line:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise ToolError(f"XLA died compiling {source}: {last[0][:200]}", "try --exec xla")
    header: dict[str, Any] = json.loads(line)
    if "error" in header:
        first = " ".join(str(header["error"]).split("\n", 1)[0].split())[:300]
        if first.startswith(_NO_ROOM):
            short = first.removeprefix(_NO_ROOM).strip(": .;")
            raise ToolError(f"{source} does not fit, says XLA: {short}", "--exec xla says what holds the memory")
        raise ToolError(f"XLA does not compile {source}: {first}", "try --exec xla")
    return header, text
