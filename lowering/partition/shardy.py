"""The parent's side of the child process: start it, feed it, and turn its death into one clear line."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from stablecast.ir.errors import InputError, ToolError

TIMEOUT_S = 600.0
_MODULE = "stablecast.lowering.partition.child"
_ABORT_NOTE = "XLA's import aborted on the module; Shardy ran on it as captured, in another order than XLA's"


@dataclass(frozen=True, slots=True)
class Partitioned:
    """What the child answered: the module as bytecode and its header."""

    module: bytes
    header: Mapping[str, Any]


@dataclass(slots=True)
class Worker:
    """A child process that waits for one module; started early, its start-up overlaps with the capture."""

    process: subprocess.Popen[bytes]
    errors: IO[bytes] = field(repr=False)

    def close(self) -> None:
        """End the child, if it still waits."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.errors):
            if stream is not None:
                stream.close()


def start_worker() -> Worker:
    """A child that is ready for one `partition(..., worker=...)`."""
    errors = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the child)
    process = subprocess.Popen(
        [sys.executable, "-m", _MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
    )
    return Worker(process, errors)


def run_shardy(
    data: bytes, source: str, *, route: str = "auto", timeout_s: float = TIMEOUT_S, worker: Worker | None = None
) -> Partitioned:
    """`data` with explicit Shardy collectives, made in a child process.

    Where XLA's import aborts the child, a second one takes the direct route and the header says so. Raises
    `ToolError` when the child dies, exceeds `timeout_s` or a pass fails, `InputError` for a module it cannot read.
    """
    code, out, errors = _ask(worker or start_worker(), data, route, timeout_s, source)
    notes: list[str] = []
    if code and route == "auto":
        notes.append(_ABORT_NOTE)
        code, out, errors = _ask(start_worker(), data, "direct", timeout_s, source)
    if code:
        raise ToolError(
            f"partitioning {source} failed: {_reason(code, errors)}", "try route='direct', or report the module"
        )
    line, _, module = out.partition(b"\n")
    header: dict[str, Any] = json.loads(line)
    if "error" in header:
        if header["kind"] == "InputError":
            raise InputError(header["error"], header["hint"])
        raise ToolError(f"partitioning {source}: {header['error']}", header["hint"])
    header["notes"] = notes + header["notes"]
    return Partitioned(module, header)


def _ask(worker: Worker, data: bytes, route: str, timeout_s: float, source: str) -> tuple[int, bytes, str]:
    process = worker.process
    request = json.dumps({"route": route, "source": source}).encode() + b"\n" + data
    try:
        out, _ = process.communicate(request, timeout=timeout_s)
        worker.errors.seek(0)
        return process.returncode, out, worker.errors.read().decode(errors="replace")
    except subprocess.TimeoutExpired:
        raise ToolError(f"partitioning {source} took longer than {timeout_s:g} s", "raise the timeout") from None
    finally:
        worker.close()


def _reason(code: int, errors: str) -> str:
    """The line of the child's standard error that says why it died."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"Check failed|Assertion|LLVM ERROR|Error|error:|UNREACHABLE", line)]
    died = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    said = (telling or lines or ["no message"])[-1 if not telling else 0]
    return f"{died}: {' '.join(said.split())[:300]}"
