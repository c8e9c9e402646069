"""The one module that touches torch's private entry points, with a check of its version.

Every other module of this package takes what it needs of torch from here.
"""

# pyright: reportUnknownLambdaType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import contextlib
import importlib
import inspect
import re
import sys
from collections.abc import Callable
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
        raise ToolError(
            f"torch {torch.__version__} is outside the supported range {wanted}", f"pip install 'torch{wanted}'"
        )
    return torch if name == "torch" else importlib.import_module(name)


torch: Any = load()
TorchDispatchMode: Any = load("torch.utils._python_dispatch").TorchDispatchMode
TorchFunctionMode: Any = load("torch.overrides").TorchFunctionMode
FakeTensor: Any = load("torch._subclasses.fake_tensor").FakeTensor
FakeTensorMode: Any = load("torch._subclasses.fake_tensor").FakeTensorMode
HigherOrderOperator: Any = load("torch._ops").HigherOrderOperator
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


def is_composite(func: Any) -> bool:
    """Whether torch itself takes the op apart before any backend sees it."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    if func.name() == "aten::_fused_rms_norm":
        return False
    return has(func.name(), "CompositeImplicitAutograd") and not has(func.name(), "CPU")


CONTROL_FLOW = frozenset({"cond", "while_loop", "while_loop_stack_output", "switch"})


def eager_form(func: Any) -> Any:
    """How eager runs a higher-order op in terms of its function arguments; None for a choice that data makes."""
    if func.name() in CONTROL_FLOW:
        return None
    return func.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)


def below_autograd() -> Any:
    """A context in which ops are dispatched as if autograd had seen them already."""
    return torch._C._AutoDispatchBelowAutograd()


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


class _Chunks:
    """`torch.chunk` with empty chunks at the end, each made when it is asked for: FSDP makes all and keeps one."""

    def __init__(self, tensor: Any, count: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, count, dim

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        size = self._tensor.size(self._dim)
        step = -(-size // self._count)
        start = index * step
        if start >= size:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(step, size - start))


def fsdp_patches() -> list[tuple[Any, str, Any]]:
    """(owner, name, stand-in): sharding a parameter costs the same for any number of ranks."""
    param = load("torch.distributed.fsdp._fully_shard._fsdp_param")
    return [(param, "_chunk_with_empty", lambda tensor, count, dim: _Chunks(tensor, count, dim))]


def in_flight(tensor: Any) -> Any:
    """The result of a collective that nobody has waited for."""
    return load("torch.distributed._functional_collectives").AsyncCollectiveTensor(tensor)


def fake_process_group(rank: int, world: int) -> None:
    """A process group of `world` ranks that answers at once and moves nothing."""
    dist = load("torch.distributed")
    store = load("torch.testing._internal.distributed.fake_pg").FakeStore()
    if dist.is_initialized():
        dist.destroy_process_group()
    hook = sys.excepthook
    dist.init_process_group("fake", rank=rank, world_size=world, store=store)
    # torch puts the rank before every line of every later traceback
    sys.excepthook = hook


def end_process_group() -> None:
    """Forget the process group."""
    dist = load("torch.distributed")
    if dist.is_initialized():
        dist.destroy_process_group()


_captures = [0]


def mesh_patches() -> list[tuple[Any, str, Any]]:
    """(owner, name, stand-in): device meshes do host arithmetic on their rank map, so they work with fake mode off.

    DTensor's caches compare meshes without the rank: a number of its own for each capture keeps them apart.
    """
    import functools
    import types

    module = load("torch.distributed.device_mesh")
    mesh = module.DeviceMesh
    _captures[0] += 1
    number = _captures[0]

    def unfaked(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with unset_fake():
                return function(*args, **kwargs)

        return call

    found: list[tuple[Any, str, Any]] = []
    skipped = ("__hash__", "__eq__", "__enter__", "__exit__", "__init__", "__getattr__", "__getattribute__")
    for name, value in list(vars(mesh).items()):
        if isinstance(value, types.FunctionType) and name not in skipped:
            found.append((mesh, name, unfaked(value)))
        elif isinstance(value, staticmethod):
            found.append((mesh, name, staticmethod(unfaked(value.__func__))))
    original = mesh.__init__

    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        with unset_fake():
            original(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)
        self._thread_id = number
        self._hash = None

    found.append((mesh, "__init__", init))
    make = unfaked(module.init_device_mesh)

    def make_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return make("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    found += [(module, "init_device_mesh", make_mesh), (load("torch.distributed"), "init_device_mesh", make_mesh)]
    return found


def foreach_patches() -> list[tuple[Any, str, Any]]:
    """(owner, name, stand-in): optimisers take the fake tensors for what they take CUDA's."""
    optimizer = load("torch.optim.optimizer")
    types = [*optimizer._foreach_supported_types, FakeTensor]
    devices = load("torch.utils._foreach_utils")
    return [
        (optimizer, "_foreach_supported_types", types),
        (optimizer, "_get_foreach_kernels_supported_devices", lambda: ["cpu", "cuda"]),
        (devices, "_get_foreach_kernels_supported_devices", lambda: ["cpu", "cuda"]),
        (devices, "_foreach_supported_types", [*devices._foreach_supported_types, FakeTensor]),
    ]


def eager_only() -> Any:
    """A context in which compiled functions run as they were written."""
    return load("torch.compiler").set_stance("force_eager")


def module_patches() -> list[tuple[Any, str, Any]]:
    """(owner, name, stand-in): `Module.to` and its like replace fake parameters, which torch would swap inside."""
    module = load("torch.nn").Module
    original = module._apply
    memo: list[dict[int, Any]] = []

    def apply(self: Any, function: Any, recurse: bool = True) -> Any:
        if any(not isinstance(param, FakeTensor) for param in self._parameters.values() if param is not None):
            return original(self, function, recurse)
        outermost = not memo
        if outermost:
            memo.append({})
        try:
            for child in self.children() if recurse else ():
                child._apply(function)
            for name, param in self._parameters.items():
                if param is not None:
                    self._parameters[name] = _converted(param, function, memo[0])
            for name, buffer in self._buffers.items():
                if buffer is not None:
                    self._buffers[name] = function(buffer)
        finally:
            if outermost:
                memo.clear()
        return self

    return [(module, "_apply", apply)]


def _converted(param: Any, function: Any, memo: dict[int, Any]) -> Any:
    if id(param) not in memo:
        with torch.no_grad():
            made = function(param)
        same = made is param or (
            made.dtype == param.dtype and made.shape == param.shape and made.device == param.device
        )
        memo[id(param)] = param if same else torch.nn.Parameter(made, param.requires_grad)
    return memo[id(param)]


def engine_patches(mode: Any, after: Callable[[], None]) -> list[tuple[Any, str, Any]]:
    """(owner, name, stand-in): the backward pass may run user code again (checkpoints, hooks), under `mode`.

    `after` is called when the pass is over.
    """
    graph = load("torch.autograd.graph")
    original = graph._engine_run_backward

    def run(*args: Any, **kwargs: Any) -> Any:
        with mode:
            out = original(*args, **kwargs)
        after()
        return out

    return [(graph, "_engine_run_backward", run), (torch.autograd, "_engine_run_backward", run)]


class Arrived(BaseException):
    """Ends a trial run: the gradients of every `DistributedDataParallel` have arrived."""


class _Unread(TorchDispatchMode):  # type: ignore[misc, valid-type]
    """Numbers that the host reads from tensors are 0, as in a step whose data nobody knows yet."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except DATA_DEPENDENT:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            return 0.0 if args[0].dtype.is_floating_point else 0


class Replicas:
    """The `DistributedDataParallel` modules of a capture, and how their gradients are put into buckets.

    torch reduces everything in one bucket a type in the first step, notes in which order gradients arrive, and fills
    buckets in that order from the second step on. A trial run up to the end of the first reduced backward pass finds
    that order here (`settle`). Nothing is checked or sent between ranks at construction; the fake group's work has no
    future, so a hook reduces each bucket.
    """

    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder
        self.modules: list[Any] = []
        self._orders: dict[int, list[int]] = {}
        self._set_ups: dict[int, tuple[Any, ...]] = {}
        self._arrived: dict[int, list[int]] = {}

    def patches(self) -> list[tuple[Any, str, Any]]:
        """(owner, name, stand-in) for the time in which user code runs."""
        dist = load("torch.distributed")
        ddp = load("torch.nn.parallel").DistributedDataParallel
        original, assign = ddp.__init__, dist._compute_bucket_assignment_by_size
        helper = ddp._ddp_init_helper
        building: list[Any] = []

        class Reducer(dist.Reducer):  # type: ignore[misc, name-defined]
            """Buckets are set at once: torch's own way to rebuild them reads tensors that all ranks agree on."""

            def _rebuild_buckets(self) -> bool:
                return False

        def set_up(module: Any, *args: Any, **kwargs: Any) -> None:
            building[:] = [module]
            self._set_ups[id(module)] = tuple(inspect.signature(helper).bind(module, *args, **kwargs).args[1:])
            helper(module, *self._set_ups[id(module)])

        def init(module: Any, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **{**kwargs, "init_sync": False})
            self.recorder.copies = {}
            self.modules.append(module)
            self._hook(module)

        def hook(module: Any, state: Any, function: Any) -> None:
            raise ToolError(
                "a communication hook of the user's own cannot be captured under DDP", "leave register_comm_hook out"
            )

        def buckets(parameters: Any, limits: Any, sparse: Any = ()) -> Any:
            (module,) = building
            if not self._rebuilds(module):
                return assign(parameters, limits, sparse)
            order = self._orders.get(id(module)) or list(reversed(range(len(parameters))))
            config = module._bucket_config
            first, each = config.first_bucket_bytes_cap, config.bucket_bytes_cap
            limits = list(config.per_bucket_bytes_caps or ()) or ([first, each] if first < each else [each])
            tensors, sparse = ([held[index] for index in order] if held else [] for held in (parameters, sparse))
            found, sizes = assign(tensors, limits, sparse, order)
            return list(reversed(found)), list(reversed(sizes))

        return [
            (ddp, "__init__", init),
            (ddp, "_ddp_init_helper", set_up),
            (ddp, "register_comm_hook", hook),
            (dist, "_compute_bucket_assignment_by_size", buckets),
            (dist, "Reducer", Reducer),
        ]

    def _hook(self, module: Any) -> None:
        # torch accepts a hook's annotations only if they are its own classes
        _reduce_bucket.__annotations__.clear()
        held = (module.process_group, self.recorder)
        load("torch.distributed")._register_comm_hook(module.reducer, held, _reduce_bucket)

    def settle(self, run: Callable[[], Any]) -> None:
        """Buckets as they are after a first step, whose backward pass `run` runs."""
        modules = [module for module in self.modules if self._rebuilds(module)]
        if modules:
            self._try(run, modules)
        static = [module for module in modules if module.static_graph]
        if static:  # the first pass of a static graph reduces at its end
            self._try(run, static)

    def _rebuilds(self, module: Any) -> bool:
        *_, static = self._set_ups[id(module)]
        return static or module.static_graph or not module.find_unused_parameters

    def _try(self, run: Callable[[], Any], modules: list[Any]) -> None:
        self._arrived = {id(module): [] for module in modules}
        handles = [
            param.register_post_accumulate_grad_hook(_arrival(module, self._arrived[id(module)], index))
            for module in modules
            for index, param in enumerate(self._set_ups[id(module)][0])
        ]
        done = False
        try:
            # what goes wrong here goes wrong again in the captured run, which says so
            with contextlib.suppress(Exception), _Unread():
                run()
        except Arrived:
            done = True
        finally:
            arrived, self._arrived = self._arrived, {}
            for handle in handles:
                handle.remove()
        for module in modules:
            if id(module) not in self._orders or not done:
                self._rebuild(module, arrived[id(module)])

    def _rebuild(self, module: Any, arrived: list[int]) -> None:
        parameters = self._set_ups[id(module)][0]
        missing = [index for index in reversed(range(len(parameters))) if index not in set(arrived)]
        self._orders[id(module)] = [*arrived, *missing]
        module._ddp_init_helper(*self._set_ups[id(module)])
        if module.static_graph:
            module._static_graph_delay_allreduce_enqueued = False
            module.reducer._set_static_graph()
        self._hook(module)

    def after_backward(self) -> None:
        """Raises `Arrived` where a trial run has seen what it is for."""
        if self._arrived and all(self._arrived.values()) and backward_node() is None:
            raise Arrived


def _arrival(module: Any, arrived: list[int], index: int) -> Callable[[Any], None]:
    def note(_: Any) -> None:
        if module.require_backward_grad_sync:
            arrived.append(index)

    return note


def unreduced(replica: Any) -> list[str]:
    """Parameters of a `DistributedDataParallel` that got no gradient, so that their buckets were not reduced."""
    pairs = [(name, param) for name, param in replica.module.named_parameters() if param.requires_grad]
    missing = [name for name, param in pairs if param.grad is None]
    return missing if len(missing) < len(pairs) and not replica.find_unused_parameters else []


def _reduce_bucket(held: Any, bucket: Any) -> Any:
    group, recorder = held
    tensor = bucket.buffer()
    if recorder.timeline is not None:
        recorder.scale_copied(tensor, lambda: tensor.div_(group.size()))
        load("torch.distributed").all_reduce(tensor, group=group, async_op=True)
    future = torch.futures.Future()
    future.set_result(tensor)
    return future


def transformers_patches(timeline: Any) -> list[tuple[Any, str, Any]]:
    """(owner, name, stand-in): transformers reads on the host whether sequences are packed; a batch here is not."""
    masks = sys.modules.get("transformers.masking_utils")
    if masks is None:
        return []
    original = masks.find_packed_sequence_indices

    def find(position_ids: Any) -> None:
        original(position_ids)
        timeline.synchronise()

    return [(masks, "find_packed_sequence_indices", find)]


def flex_patches() -> list[tuple[Any, str, Any]]:
    """(owner, name, stand-in): flex attention has a backward pass on CUDA, which the fake CPU tensors stand for."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return [] if module is None else [(module, "_validate_device", lambda *_: None)]


def pipeline_patches() -> list[tuple[Any, str, Any]]:
    """(owner, name, stand-in): a pipeline's stages agree on shapes before the first step; here they are given."""
    schedules = load("torch.distributed.pipelining.schedules")
    stage = load("torch.distributed.pipelining.stage")

    def warm_up(self: Any, stages: Any, has_backward: bool, p2p_done: bool) -> None:
        for one in stages:
            if isinstance(one, stage.PipelineStage):
                one._inference_mode = schedules.InferenceMode.STATIC

    def anew(original: Any) -> Any:
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            self._internal_losses.clear()  # those of a trial run that ended early
            return original(self, *args, **kwargs)

        return step

    kinds = (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti)
    return [
        (schedules._PipelineSchedule, "_warmup_p2p", warm_up),
        *((kind, "step", anew(kind.step)) for kind in kinds),
    ]


def dtensor_patches(recorder: Any) -> list[tuple[Any, str, Any]]:
    """(owner, name, stand-in): DTensor finds shapes by running ops on fake tensors, which nothing launches."""
    propagator = load("torch.distributed.tensor._sharding_prop").ShardingPropagator
    original = propagator._propagate_tensor_meta_non_cached

    def propagate(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.paused += 1
        try:
            return original(self, *args, **kwargs)
        finally:
            recorder.paused -= 1

    collectives = load("torch.distributed._functional_collectives")
    # torch takes fake tensors for tracing, and would then wait at once where eager waits at the first use
    return [
        (propagator, "_propagate_tensor_meta_non_cached", propagate),
        (collectives, "_are_we_tracing", lambda: False),
    ]
