"""The child process that runs XLA, whose C++ checks may abort the process.

Reads one request from standard input (a JSON line, then a module) and writes the answer (a JSON line, then HLO text) to
standard output; everything that C++ prints goes to standard error.
"""

import importlib
import json
import os
import resource
import sys
from typing import Any

_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
"""No accelerator is looked for: neither the machine's own nor a TPU that other processes must not share."""


def compile_module(request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    """The module in `data` compiled as `request` says: memory in bytes by kind, and the optimised HLO text."""
    from stablecast.ir import mlir

    shape = (int(request["replicas"]), int(request["partitions"]))
    devices = _devices(request, shape[0] * shape[1])
    text, memory = mlir.compile_for(
        devices, data, request["source"], shape, request["options"], bool(request["shardy"])
    )
    header = {"memory": memory, "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    return header, text


def _devices(request: dict[str, Any], count: int) -> list[Any]:
    """Devices that are not there: of a TPU topology as many as asked for, of GPUs eight a host."""
    describe: Any = importlib.import_module("jax.experimental.topologies").get_topology_desc
    if request["platform"] == "tpu":
        return list(describe(request["topology"], platform="tpu", **request["slice"]).devices)[:count]
    hosts = next(number for number in range(-(-count // 8), count + 1) if count % number == 0)
    name = f"1x{hosts}x{count // hosts}"
    return list(describe(name, platform="cuda", topology=name, target_config=request["target"]).devices)


def main() -> None:
    """Answer the one request on standard input."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    request = json.loads(sys.stdin.buffer.readline())
    data = sys.stdin.buffer.read()
    os.environ.update(_ENVIRONMENT)
    try:
        header, body = compile_module(request, data)
    except Exception as error:
        header, body = {"error": str(error), "kind": type(error).__name__}, b""
    out.write(json.dumps(header).encode() + b"\n" + body)
    out.flush()


if __name__ == "__main__":
    main()
