"""The one module that touches torch's private entry points, with a check of its version.

Every other module of this package takes what it needs of torch from here.
"""

import importlib
import re
from functools import cache
from typing import Any

from stablecast.ir.errors import ToolError

SUPPORTED = ((2, 13), (2, 14))
"""First torch version that is supported, and the first that is not."""

_INSTALL = "pip install 'stablecast[torch]'"


@cache
def load(name: str = "torch") -> Any:
    """The module `name` of torch; raises `ToolError` where torch is absent or of another version."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise ToolError("torch is not installed, and the program is a PyTorch one", _INSTALL) from error
    numbers = tuple(int(part) for part in re.findall(r"\d+", str(torch.__version__))[:2])
    low, high = SUPPORTED
    if not low <= numbers < high:
        wanted = f">={'.'.join(map(str, low))},<{'.'.join(map(str, high))}"
        raise ToolError(f"torch {torch.__version__} is outside the supported range {wanted}", f"pip install 'torch{wanted}'")
    return torch if name == "torch" else importlib.import_module(name)


torch: Any = load()
TorchDispatchMode: Any = load("torch.utils._python_dispatch").TorchDispatchMode
TorchFunctionMode: Any = load("torch.overrides").TorchFunctionMode
FakeTensor: Any = load("torch._subclasses.fake_tensor").FakeTensor
FakeTensorMode: Any = load("torch._subclasses.fake_tensor").FakeTensorMode
unset_fake: Any = load("torch._subclasses.fake_tensor").unset_fake_temporarily
DATA_DEPENDENT: tuple[type[Exception], ...] = (
    load("torch._subclasses.fake_tensor").DataDependentOutputException,
    load("torch._subclasses.fake_tensor").DynamicOutputShapeException,
)


def sequence_number() -> int:
    """Number that the next autograd node will get."""
    return torch.autograd._get_sequence_nr()


def backward_node() -> Any:
    """The autograd node that runs now, None outside the backward pass."""
    return torch._C._current_autograd_node()


def storage_of(tensor: Any) -> Any:
    """The storage of a tensor, None for a layout that has none."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


@cache
def decompositions() -> Any:
    """torch's own table: op -> function in terms of simpler ops."""
    table = dict(load("torch._decomp").core_aten_decompositions())
    found = load("torch._decomp").global_decomposition_table["post_autograd"]
    return {**found, **table}


def process_group_name(group: Any) -> str:
    """The name of a process group given as an object, a boxed object or a name."""
    if isinstance(group, str):
        return group
    dist = load("torch.distributed")
    if isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    return str(group.group_name)


def group_ranks(name: str) -> tuple[int, ...]:
    """The ranks of the process group called `name`, in order."""
    c10d = load("torch.distributed.distributed_c10d")
    return tuple(c10d.get_process_group_ranks(c10d._resolve_process_group(name)))
