"""The surroundings that user code is captured in: fake tensors, a fake process group, stand-ins for the device."""

# pyright: reportUnknownLambdaType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import contextlib
import warnings
from collections.abc import Callable, Generator, Mapping
from typing import Any

from stablecast.frontends.torch import private
from stablecast.frontends.torch.allocations import storage_patches
from stablecast.frontends.torch.devices import Rewriter, number_patches, patches
from stablecast.frontends.torch.emit.emitter import RuleFault
from stablecast.frontends.torch.private import DATA_DEPENDENT, FakeTensor, FakeTensorMode, load, torch
from stablecast.frontends.torch.record import Recorder
from stablecast.frontends.torch.state import StateNames
from stablecast.frontends.torch.streams import Timeline
from stablecast.ir.errors import InputError
from stablecast.ir.pause import paused_gc

FAULT = "a rule of stablecast's own failed, please report it:"


class Session:
    """One capture. `axes`: the mesh, major to minor; empty for one device."""

    def __init__(self, axes: tuple[tuple[str, int], ...], rank: int, device: str, attention: str) -> None:
        self.axes = axes
        self.rank = rank
        self.device = device
        self.timeline = Timeline()
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.names = StateNames()
        self.recorder = Recorder(self.fake_mode)
        self.replicas = private.Replicas(self.recorder)
        self.rewriter = Rewriter(device, attention, self.timeline)
        self.compiled = False
        self.faults: list[str] = []
        self._roots: dict[int, Any] = {}
        self._paths: dict[int, str] = {}

    @property
    def world(self) -> int:
        product = 1
        for _, size in self.axes:
            product *= size
        return product

    @contextlib.contextmanager
    def open(self) -> Generator["Session", None, None]:
        """Everything in place; all of it is undone at the end. Warns (`RuleFault`) where a rule of ours failed."""
        if self.rank >= self.world:
            raise InputError(f"rank {self.rank} is outside a mesh of {self.world} devices")
        replaced = patches(self.device, self.timeline) + private.module_patches()
        replaced += private.engine_patches(self.rewriter, self.replicas.after_backward)
        replaced += private.transformers_patches(self.timeline) + number_patches()
        replaced += storage_patches(self.recorder.memory)
        if self.device.startswith("cuda"):
            replaced += private.foreach_patches() + private.flex_patches()
        if self.axes:
            private.fake_process_group(self.rank, self.world)
            replaced += private.mesh_patches() + self.replicas.patches() + private.pipeline_patches()
            replaced += private.dtensor_patches(self.recorder) + private.fsdp_patches()
        with contextlib.ExitStack() as stack:
            if self.axes:
                stack.callback(private.end_process_group)
            stack.enter_context(replacing(replaced))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
            stack.enter_context(private.eager_only())
            stack.enter_context(self.fake_mode)
            stack.enter_context(self.rewriter)
            yield self
        for fault in self.faults:
            warnings.warn(f"{FAULT} {fault}", RuleFault, stacklevel=4)

    def mesh(self) -> Any:
        """The device mesh with the names and sizes asked for."""
        sizes, names = tuple(size for _, size in self.axes), tuple(name for name, _ in self.axes)
        return load("torch.distributed").init_device_mesh("cpu", sizes, mesh_dim_names=names)

    def fake(self, held: Any) -> Any:
        """`held` with every real tensor, array or shape in it as a fake tensor."""
        return load("torch.utils._pytree").tree_map(self._fake, held)

    def _fake(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if leaf.device.type == "meta":
                return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)
            return leaf if isinstance(leaf, FakeTensor) else self.fake_mode.from_tensor(leaf)
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            name = str(getattr(leaf.dtype, "name", leaf.dtype)).removeprefix("torch.")
            return torch.empty(tuple(leaf.shape), dtype=getattr(torch, name))
        return leaf

    def prepare(self, state: Any) -> None:
        """Name the state, and let optimisers make theirs as a first step would."""
        self.names.add(state, self.device)
        for optimizer in self.names.optimizers:
            if not optimizer.state:
                self._first_step(optimizer)
        self.names.add_optimizers(self.device)

    def _first_step(self, optimizer: Any) -> None:
        scratch = Recorder(self.fake_mode)
        params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
        held = [param.grad for param in params]
        try:
            with torch.no_grad():
                for param in params:
                    if param.grad is None:
                        param.grad = torch.empty_like(param)
            with scratch:
                type(optimizer).step(optimizer)
        except (RuntimeError, TypeError, NotImplementedError, *DATA_DEPENDENT):
            optimizer.state.clear()
        finally:
            for param, grad in zip(params, held, strict=True):
                param.grad = grad
            self._rewind(optimizer)

    @staticmethod
    def _rewind(optimizer: Any) -> None:
        """Counters whose values torch keeps stand at 0 again, so that the captured step is the first."""
        for state in optimizer.state.values():
            for value in state.values():
                constant = _constant(value)
                if constant is not None:
                    with private.unset_fake():
                        constant.zero_()

    def _settle(self, run: Callable[[], Any]) -> None:
        """DDP fills its buckets as from its second step on; the trial run for it leaves nothing behind."""
        if not self.replicas.modules:
            return
        modules = self.replicas.modules
        params = [param for module in modules for param in module.parameters()]
        params += [param for one in self.names.optimizers for group in one.param_groups for param in group["params"]]
        grads = [param.grad for param in params]
        counters = [buffer for module in modules for buffer in module.buffers() if _constant(buffer) is not None]
        with private.unset_fake():
            values = [buffer.constant.clone() for buffer in counters]
        reads = self.rewriter.early_reads
        self.replicas.settle(run)
        self.rewriter.early_reads = reads
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        with private.unset_fake():
            for buffer, value in zip(counters, values, strict=True):
                if buffer.constant is not None:
                    buffer.constant.copy_(value)

    def record(self, run: Callable[[], Any]) -> Any:
        """What `run` returns, with every op of it recorded."""
        self._settle(run)
        recorder = self.recorder
        recorder.host_storages = {number for number, named in self.names.known.items() if named.host}
        recorder.timeline = self.timeline
        self.timeline.recorder = recorder
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, self.timeline, "recorder", None)
            for handle in self._hooks():
                stack.callback(handle.remove)
            stack.enter_context(recorder)
            stack.enter_context(paused_gc())
            recorder.memory.open()
            stack.callback(recorder.memory.close)
            try:
                return run()
            except DATA_DEPENDENT as error:
                raise recorder.dynamic("a result has a shape or value that depends on data") from error

    def _hooks(self) -> list[Any]:
        module = load("torch.nn.modules.module")
        optimizer = load("torch.optim.optimizer")
        places = self.recorder.places

        optimized = load("torch._dynamo.eval_frame").OptimizedModule

        def enter(target: Any, args: Any) -> None:
            self.compiled = self.compiled or isinstance(target, optimized)
            places.modules.append(self._path(target, places.modules))

        def leave(target: Any, args: Any, out: Any) -> None:
            if places.modules:
                places.modules.pop()

        def begin(*_: Any) -> None:
            places.optimizer += 1

        def end(*_: Any) -> None:
            places.optimizer -= 1

        return [
            module.register_module_forward_pre_hook(enter),
            module.register_module_forward_hook(leave, always_call=True),
            optimizer.register_optimizer_step_pre_hook(begin),
            optimizer.register_optimizer_step_post_hook(end),
        ]

    def _path(self, target: Any, stack: list[str]) -> str:
        found = self._paths.get(id(target))
        if found is not None:
            return found
        kind = type(getattr(target, "_orig_mod", target)).__name__
        root = kind if not stack else f"{stack[-1]}/{kind}"
        self._roots[id(target)] = target
        if not stack:
            self.names.add_module(target)
        for name, sub in target.named_modules():
            self._paths.setdefault(id(sub), f"{root}/{_clean(name)}" if name else root)
        return self._paths[id(target)]


def _constant(tensor: Any) -> Any:
    """The value of a small fake tensor that torch keeps, None where it has none."""
    return getattr(tensor, "constant", None)


def _clean(name: str) -> str:
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "").replace(".", "/")


@contextlib.contextmanager
def replacing(entries: list[tuple[Any, str, Any]]) -> Generator[None, None, None]:
    """Attributes replaced while the context lasts."""
    missing = object()
    held = [(owner, name, vars(owner).get(name, missing)) for owner, name, _ in entries]
    try:
        for owner, name, value in entries:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(held):
            if value is missing:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def mesh_axes(mesh: Mapping[str, int] | None) -> tuple[tuple[str, int], ...]:
    """The axes of a mesh given by name; raises `InputError` for a size below one."""
    axes = tuple((str(name), int(size)) for name, size in (mesh or {}).items())
    for name, size in axes:
        if size < 1:
            raise InputError(f"mesh axis '{name}' has the size {size}", "sizes are at least 1")
    return axes
