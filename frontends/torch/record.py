"""The recorder: a dispatch mode that sees every op of the step, keeps it as launched, and makes it functional."""

# pyright: reportUnknownLambdaType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from stablecast.frontends.torch import effects, private
from stablecast.frontends.torch.aliases import Alias, Aliases, contiguous_strides, itemsize
from stablecast.frontends.torch.allocations import AllocationLog
from stablecast.frontends.torch.graph import Graph, Group, Place, Ref, Spec
from stablecast.frontends.torch.names import DTYPES, dtype_name
from stablecast.frontends.torch.places import Places, user_frame
from stablecast.frontends.torch.private import (
    DATA_DEPENDENT,
    FakeTensor,
    TorchDispatchMode,
    group_ranks,
    storage_of,
    torch,
    unset_fake,
)
from stablecast.frontends.torch.views import CANONICAL, SAME
from stablecast.ir.errors import InputError

SMALL_CONSTANT = 65536
"""Tensors that the step makes from data of up to this many elements travel in the program; others are arguments."""

NO_KERNEL = frozenset(
    {
        *(f"aten.{name}" for name in (*SAME, "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")),
        *("aten.set_", "aten.resize_", "_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor_autograd"),
        *("c10d.monitored_barrier_", "c10d.check_for_nan"),
    }
)
"""Calls that launch nothing although they are no views: allocations, waits, changes of metadata."""

Handler = Callable[["Recorder", "OpInfo", tuple[Any, ...], dict[str, Any]], Any]


class OpInfo(NamedTuple):
    """What the recorder knows of an op: `name` without overload or trailing underscore, and what it writes."""

    func: Any
    full: str
    name: str
    namespace: str
    is_view: bool
    writes: tuple[tuple[int, str], ...]
    handler: Handler


class Call(NamedTuple):
    """One dispatched call. `nodes`: first and last value node (exclusive) that it became."""

    op: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    results: tuple[Spec, ...]
    stream: int
    place: int
    is_view: bool
    host: bool
    group: str


class Input(NamedTuple):
    """A tensor that the step found and did not make."""

    ref: Ref
    alias: Alias
    storage: Any
    tensor: Any


class Recorder(TorchDispatchMode):
    """Records the ops that run under it.

    `graph`: the functional nodes. `calls`: the ops as dispatched. `inputs`: tensors that were there before. `syncs`:
    calls after which the host waits. `copies`: storage -> calls that copied into it, where DDP is in use. `memory`: the
    requests for memory.
    """

    _number = 0
    supports_higher_order_operators = True

    def __init__(self, fake_mode: Any) -> None:
        super().__init__()
        Recorder._number += 1
        self.mark = f"_stablecast{Recorder._number}"
        self.fake_mode = fake_mode
        self.graph = Graph()
        self.places = Places()
        self.graph.places = self.places.table
        self.aliases = Aliases(self.graph, self._emit_view)
        self.calls: list[Call] = []
        self.inputs: list[Input] = []
        self.syncs: list[int] = []
        self.notes: dict[str, int] = {}
        self.host_storages: set[int] = set()
        self.constants: list[Any] = []
        self.paused = 0
        self.timeline: Any = None
        self.memory = AllocationLog(self.mark, lambda: (self.timeline.current.number, len(self.calls)))
        self.copies: dict[int, list[int]] | None = None
        self._place = 0
        self._infos: dict[Any, OpInfo] = {}
        self._plain = {torch.Tensor, FakeTensor, torch.nn.Parameter, torch.nn.Buffer}
        self._device = torch.ops.prim.device.default

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is self._device and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if self.paused:
            return func(*args, **(kwargs or {}))
        for kind in types:
            if kind not in self._plain:
                return NotImplemented
        if isinstance(func, private.HigherOrderOperator):
            return self._higher_order(func, args, kwargs or {})
        info = self._infos.get(func)
        if info is None:
            info = self._infos[func] = self._learn(func)
        self._place = self.places.here(info)
        try:
            out = info.handler(self, info, args, kwargs or {})
        except DATA_DEPENDENT as error:
            raise self.dynamic(f"{info.full} makes a result whose shape or value depends on data") from error
        self.memory.made(_tensors([out]), lambda: _tensors([*args, *(kwargs or {}).values()]))
        return out

    def _higher_order(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An op over functions: the calls inside it are recorded, as eager makes them."""
        run = private.eager_form(func)
        file, line = self.places.line or user_frame()
        where = f"{file}:{line}: " if file else ""
        if run is None:
            raise InputError(
                f"{where}torch.{func.name()} chooses by data what runs, which a capture without data cannot know",
                "use torch.where in place of a branch, and a loop of fixed length in place of one that data ends",
            )
        self.note(f"{func.name()} is recorded as eager runs it, op by op")
        try:
            with self:
                return run(*args, **kwargs)
        except (AssertionError, NotImplementedError) as error:
            raise InputError(
                f"{where}torch's {func.name()} cannot run outside a compiler: {error}", "write the loop in Python"
            ) from error

    def dynamic(self, what: str) -> InputError:
        """The error for a step that depends on data, naming the line of user code."""
        place = self.places.table[self._place]
        where = f"{place.file}:{place.line}: " if place.file else ""
        return InputError(
            f"{where}{what}, which a capture without data cannot know",
            "use a fixed shape (pad to capacity), torch.where in place of a branch, or move the read out of the step",
        )

    def _learn(self, func: Any) -> OpInfo:
        full = str(func)
        schema = func._schema
        namespace, _, name = schema.name.partition("::")
        writes = tuple(
            (index if not argument.kwarg_only else -1, argument.name)
            for index, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        is_view = not writes and any(
            result.alias_info is not None and not result.alias_info.is_write for result in schema.returns
        )
        is_view = is_view or name in ("_unsafe_view",)
        functional = name[:-1] if writes and name.endswith("_") and not name.endswith("__") else name
        handler = effects.handler_of(namespace, name, functional, is_view)
        if namespace == "aten" and name not in SAME and private.is_composite(func):
            handler = effects.decomposed
        is_view = is_view or full.rpartition(".")[0] in NO_KERNEL
        return OpInfo(func, full, f"{namespace}.{functional}", namespace, is_view, writes, handler)

    # values of tensors

    def alias(self, tensor: Any) -> Alias:
        """The alias of a tensor; one that was not seen before becomes a view of its storage, or an input."""
        found = getattr(tensor, self.mark, None)
        if found is None:
            found = self._adopt(tensor)
            setattr(tensor, self.mark, found)
        return found

    def ref(self, tensor: Any) -> Ref:
        """The value that a tensor has now."""
        return self.aliases.read(self.alias(tensor))

    def spec(self, tensor: Any) -> Spec:
        dtype = DTYPES.get(tensor.dtype)
        return Spec(tuple(tensor.shape), dtype if dtype is not None else dtype_name(tensor.dtype))

    def bind(self, tensor: Any, alias: Alias) -> None:
        """From now on `tensor` is that alias."""
        setattr(tensor, self.mark, alias)
        if alias.parent is None:
            storage = storage_of(tensor)
            if storage is not None:
                setattr(storage, self.mark, alias.storage)

    def fresh(self, tensor: Any, value: Ref) -> None:
        """`tensor` is new and holds `value`."""
        self.bind(tensor, self.aliases.fresh(self.spec(tensor), _strides(tensor), value))

    def known_storage(self, tensor: Any) -> Any:
        storage = storage_of(tensor)
        return None if storage is None else getattr(storage, self.mark, None)

    def adopt_known(self, tensor: Any, storage: Any) -> Alias:
        return self.aliases.strided(storage, self.spec(tensor), _strides(tensor), tensor.storage_offset())

    def _adopt(self, tensor: Any) -> Alias:
        known = self.known_storage(tensor)
        if known is not None:
            return self.adopt_known(tensor, known)
        if not isinstance(tensor, FakeTensor):
            return self._constant(tensor)
        return self.adopt_input(tensor)

    def adopt_input(self, tensor: Any) -> Alias:
        """A tensor from before the step: the storage below it becomes an argument."""
        storage = storage_of(tensor)
        spec, strides = self.spec(tensor), _strides(tensor)
        size = itemsize(spec.dtype)
        covers = strides == contiguous_strides(spec.shape) or _dense(spec.shape, strides)
        count = 1
        for dim in spec.shape:
            count *= dim
        whole = storage is None or (covers and not tensor.storage_offset() and storage.nbytes() in (0, count * size))
        if whole or storage is None:
            root_spec, root_strides = spec, strides
        else:
            root_spec, root_strides = Spec((storage.nbytes() // size,), spec.dtype), (1,)
        ref = self.graph.value(root_spec)
        root = self.aliases.fresh(root_spec, root_strides, ref)
        if storage is not None:
            setattr(storage, self.mark, root.storage)
            root.storage.host = storage._cdata in self.host_storages
        self.inputs.append(Input(ref, root, storage, tensor))
        return root if whole else self.aliases.strided(root.storage, spec, strides, tensor.storage_offset())

    def _constant(self, tensor: Any) -> Alias:
        """A real tensor that the step reads: small ones are constants of the program."""
        spec = self.spec(tensor)
        if tensor.numel() > SMALL_CONSTANT:
            fake = self.fake_mode.from_tensor(tensor)
            self.constants.append(tensor)
            return self.adopt_input(fake)
        with unset_fake():
            plain = tensor.detach().to("cpu")
            data = (
                plain.float().numpy() if spec.dtype in ("bf16", "f16") or spec.dtype.startswith("f8") else plain.numpy()
            )
        (ref,) = self.emit("const.data", (data.copy(),), (spec,))
        assert ref is not None
        alias = self.aliases.fresh(spec, contiguous_strides(spec.shape), ref)
        self.constants.append(tensor)
        return alias

    # nodes

    def emit(
        self,
        op: str,
        args: tuple[Any, ...],
        specs: tuple[Spec | None, ...],
        kwargs: dict[str, Any] | None = None,
        keep: bool = False,
    ) -> tuple[Ref | None, ...]:
        """A node that belongs to the call being recorded."""
        return self.graph.add(op, args, specs, kwargs, len(self.calls), self._place, keep)

    def _emit_view(self, op: str, args: tuple[Any, ...], specs: tuple[Spec, ...]) -> tuple[Ref, ...]:
        return self.graph.add(op, args, specs, None, len(self.calls), self._place)  # type: ignore[return-value]

    def take(self, arg: Any) -> Any:
        """An argument as a plain value: tensors as their values, dtypes by name, devices and layouts dropped."""
        if isinstance(arg, torch.Tensor):
            return self.ref(arg)
        if isinstance(arg, (list, tuple)):
            return [self.take(item) for item in arg]
        if isinstance(arg, torch.dtype):
            return dtype_name(arg)
        if isinstance(arg, (torch.device, torch.layout, torch.memory_format, torch.Generator)):
            return None
        return arg

    def call(
        self, info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any], out: Any, group: str = "", host: bool = False
    ) -> None:
        """Note a dispatched call; nodes emitted before it and after the call before are its own."""
        inputs = _tensors(args) + (_tensors(list(kwargs.values())) if kwargs else [])
        if self.host_storages and inputs and not inputs[0].dim():
            host = host or self.alias(inputs[0]).storage.host
        results = tuple([self.spec(tensor) for tensor in _tensors([out])])
        shapes = tuple([tuple(tensor.shape) for tensor in inputs])
        dtypes = tuple([DTYPES.get(tensor.dtype, "") for tensor in inputs])
        stream = 0
        if self.timeline is not None:
            stream = self.timeline.current.number
            self.timeline.issued(stream, len(self.calls))
        self.calls.append(Call(info.full, shapes, dtypes, results, stream, self._place, info.is_view, host, group))

    def scale_copied(self, tensor: Any, scale: Callable[[], Any]) -> None:
        """`scale` a bucket of DDP, whose reducer scales gradients as it copies them in: no launch of its own."""
        storage = self.alias(tensor).storage
        first, nodes = len(self.calls), len(self.graph.nodes)
        scale()
        copied = (self.copies or {}).pop(id(storage), [])
        if copied and copied[-1] == first - 1:
            del self.calls[first:]
            for node in self.graph.nodes[nodes:]:
                node.launch = first - 1
            for number in copied:
                call = self.calls[number]
                self.calls[number] = call._replace(op="aten.mul.out", place=self.places.renamed(call.place, "aten.mul"))
            scaled = set(copied)
            for node in self.graph.nodes:
                if node.launch in scaled:
                    node.place = self.calls[node.launch].place

    def note(self, text: str) -> None:
        """An assumption that the capture rests on."""
        self.notes[text] = self.notes.get(text, 0) + 1

    def group(self, name: str) -> Group:
        """The process group called `name`."""
        found = self.graph.groups.get(name)
        if found is None:
            found = self.graph.groups[name] = Group(name, group_ranks(name))
        return found

    def place(self) -> Place:
        """Where the step is now."""
        return self.places.table[self._place]


def _strides(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.stride())


def _dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the strides are those of some dense order of the dimensions."""
    step = 1
    for size, stride in sorted(
        ((size, stride) for size, stride in zip(shape, strides, strict=True) if size > 1), key=lambda p: p[1]
    ):
        if stride != step:
            return False
        step *= size
    return True


def _tensors(args: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            found.append(arg)
        elif isinstance(arg, (list, tuple)):
            found.extend(_tensors(arg))
    return found


__all__ = ["CANONICAL", "SAME", "Call", "Input", "OpInfo", "Recorder"]
