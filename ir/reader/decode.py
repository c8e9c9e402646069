"""MLIR types and attributes to plain values, each distinct one decoded once."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

from stablecast.ir import groups
from stablecast.ir.attributes import ConvDims, Dense, DotDims, GatherDims, Opaque, RaggedDotDims, ScatterDims
from stablecast.ir.dtypes import dtype
from stablecast.ir.errors import InputError
from stablecast.ir.mlir import bindings
from stablecast.ir.program import Axis, Mesh, Sharding
from stablecast.ir.types import DYNAMIC, TensorType, TupleType, ValueType

SMALL = 64
"""Constants of up to this many elements keep their values."""

_REPLICA_GROUPS = "replica_groups"


def _mesh_of(attribute: Any, name: str) -> Mesh:
    from jaxlib.mlir.dialects import sdy

    mesh = sdy.MeshAttr(attribute)
    axes = tuple((axis.name, axis.size) for axis in map(sdy.MeshAxisAttr, mesh.axes))
    return Mesh(name, axes, tuple(mesh.device_ids))


class Decoder:
    """Turns MLIR types and attributes of one module into plain values."""

    def __init__(self, source: str) -> None:
        from jaxlib.mlir.dialects import sdy, stablehlo

        self._ir = bindings()
        self._sdy = sdy
        self._hlo = stablehlo
        self._source = source
        self._types: dict[Any, ValueType] = {}
        self._attributes: dict[Any, Any] = {}
        self._meshes: dict[str, Mesh] = {}
        self.saw_mesh_groups = False
        self._named = self._named_decoders()

    def type(self, mlir_type: Any) -> ValueType:
        """The value type of an MLIR type; raises `InputError` for types that no program of ours holds."""
        found = self._types.get(mlir_type)
        if found is None:
            found = self._types[mlir_type] = self._decode_type(mlir_type)
        return found

    def _decode_type(self, mlir_type: Any) -> ValueType:
        ir = self._ir
        if isinstance(mlir_type, ir.RankedTensorType):
            shape = tuple(DYNAMIC if size < 0 else size for size in mlir_type.shape)
            return TensorType(shape, dtype(self._element_name(mlir_type.element_type)))
        if isinstance(mlir_type, ir.TupleType):
            return TupleType(tuple(self.type(mlir_type.get_type(i)) for i in range(mlir_type.num_types)))
        if isinstance(mlir_type, (ir.IntegerType, ir.FloatType, ir.IndexType, ir.ComplexType)):
            return TensorType((), dtype(self._element_name(mlir_type)))
        if isinstance(mlir_type, ir.MemRefType):
            return TensorType(tuple(mlir_type.shape), dtype(self._element_name(mlir_type.element_type)))
        if isinstance(mlir_type, ir.UnrankedTensorType):
            raise InputError(f"{self._source}: a tensor without a rank ({mlir_type})", "export it with static shapes")
        if self._hlo.TokenType.isinstance(mlir_type):
            return TensorType((), dtype("token"))
        if self._hlo.FutureType.isinstance(mlir_type):
            return TupleType(tuple(self.type(part) for part in self._hlo.FutureType(mlir_type).types))
        raise InputError(f"{self._source}: values of type {mlir_type} are not supported")

    def _element_name(self, element: Any) -> str:
        ir = self._ir
        if isinstance(element, ir.ComplexType):
            return {"f32": "c64", "f64": "c128"}[str(element.element_type)]
        text = str(element).lower()
        if text.startswith("!quant.uniform<"):
            return text.removeprefix("!quant.uniform<").split(":", 1)[0].split("<", 1)[0]
        return text.removeprefix("s") if text.startswith("si") else text

    def attribute(self, name: str, attribute: Any) -> Any:
        """The value of the attribute called `name`."""
        key = (name if name in self._named else "", attribute)
        try:
            return self._attributes[key]
        except KeyError:
            value = self._attributes[key] = self._decode_attribute(name, attribute)
            return value

    def _decode_attribute(self, name: str, attribute: Any) -> Any:
        if attribute is None:
            return Dense(None, splat=False)
        named = self._named.get(name)
        if named is not None:
            return named(self._respelled(attribute) if name in _MHLO_TWINS else attribute)
        return self.plain(attribute)

    def _respelled(self, attribute: Any) -> Any:
        """An attribute of the MHLO dialect as the StableHLO attribute that is written the same."""
        text = str(attribute)
        if not text.startswith("#mhlo"):
            return attribute
        return self._ir.Attribute.parse("#stablehlo" + text[len("#mhlo") :], attribute.context)

    def plain(self, attribute: Any) -> Any:
        """A builtin attribute as a Python value; dialect attributes as their text."""
        ir = self._ir
        if isinstance(attribute, (ir.IntegerAttr, ir.FloatAttr, ir.StringAttr, ir.BoolAttr)):
            return attribute.value
        if isinstance(attribute, ir.FlatSymbolRefAttr):
            return attribute.value
        if isinstance(attribute, ir.SymbolRefAttr):
            return "::".join(attribute.value)
        if isinstance(attribute, (ir.DenseI64ArrayAttr, ir.DenseI32ArrayAttr, ir.DenseBoolArrayAttr)):
            return tuple(attribute)
        if isinstance(attribute, ir.ArrayAttr):
            return tuple(self.plain(item) for item in attribute)
        if isinstance(attribute, ir.DictAttr):
            return {item.name: self.plain(item.attr) for item in attribute}
        if isinstance(attribute, ir.DenseElementsAttr):
            return self.dense(attribute)
        if isinstance(attribute, ir.TypeAttr):
            return str(attribute.value)
        if isinstance(attribute, ir.UnitAttr):
            return True
        if isinstance(attribute, ir.DenseResourceElementsAttr):
            return Dense(None, splat=False)
        return _text(attribute)

    def dense(self, attribute: Any) -> Dense:
        """A constant; only splats and small tensors keep their values."""
        ir = self._ir
        if attribute.is_splat:
            element = attribute.get_splat_value()
            value = getattr(element, "value", None)
            return Dense((value,) if value is not None else None, splat=True)
        shape: list[int] = ir.ShapedType(attribute.type).shape
        if int(np.prod(shape)) <= SMALL and isinstance(attribute, (ir.DenseIntElementsAttr, ir.DenseFPElementsAttr)):
            elements: Any = attribute
            return Dense(tuple(elements), splat=False)
        return Dense(None, splat=False)

    def _named_decoders(self) -> Mapping[str, Callable[[Any], Any]]:
        hlo = self._hlo
        return {
            "dot_dimension_numbers": self._dot_dims,
            "ragged_dot_dimension_numbers": self._ragged_dims,
            "dimension_numbers": self._dimension_numbers,
            "scatter_dimension_numbers": self._scatter_dims,
            "comparison_direction": lambda a: hlo.ComparisonDirectionAttr(a).value,
            "compare_type": lambda a: hlo.ComparisonTypeAttr(a).value,
            "channel_handle": lambda a: hlo.ChannelHandle(a).handle,
            _REPLICA_GROUPS: self._groups,
            "source_target_pairs": self._table,
            "padding": self._table,
            "edge_padding_low": self._ints,
            "edge_padding_high": self._ints,
            "interior_padding": self._ints,
            **dict.fromkeys(_INT_LISTS, self._ints),
            "sdy.sharding": self._shardings,
            "sharding": self._shardings,
            "in_shardings": self._shardings,
            "out_shardings": self._shardings,
            "out_sharding": self._shardings,
            "gathering_axes": self._axis_lists,
            "slicing_axes": self._axis_lists,
            "reduce_scatter_axes": self._axis_lists,
            "reduction_axes": self._axis_list,
            "params": self._all_to_all_params,
            "manual_axes": lambda a: tuple(_strip(str(axis)) for axis in self._sdy.ManualAxesAttr(a)),
        }

    def _dot_dims(self, attribute: Any) -> DotDims:
        dims = self._hlo.DotDimensionNumbers(attribute)
        return DotDims(
            tuple(dims.lhs_batching_dimensions),
            tuple(dims.rhs_batching_dimensions),
            tuple(dims.lhs_contracting_dimensions),
            tuple(dims.rhs_contracting_dimensions),
        )

    def _ragged_dims(self, attribute: Any) -> Any:
        from stablecast.ir.reader.text_attributes import ragged_dot_dims

        return ragged_dot_dims(str(attribute))

    def _axis_lists(self, attribute: Any) -> Any:
        from stablecast.ir.reader.text_attributes import axis_lists

        return axis_lists(str(attribute))

    def _axis_list(self, attribute: Any) -> Any:
        return self._axis_lists(attribute)[0]

    def _all_to_all_params(self, attribute: Any) -> Any:
        from stablecast.ir.reader.text_attributes import all_to_all_params

        text = str(attribute)
        return all_to_all_params(text) if text.startswith("#sdy") else _text(attribute)

    def _dimension_numbers(self, attribute: Any) -> Any:
        hlo = self._hlo
        if hlo.ConvDimensionNumbers.isinstance(attribute):
            return self._conv_dims(attribute)
        if hlo.GatherDimensionNumbers.isinstance(attribute):
            return self._gather_dims(attribute)
        return _text(attribute)

    def _conv_dims(self, attribute: Any) -> ConvDims:
        dims = self._hlo.ConvDimensionNumbers(attribute)
        return ConvDims(
            dims.input_batch_dimension,
            dims.input_feature_dimension,
            tuple(dims.input_spatial_dimensions),
            dims.kernel_input_feature_dimension,
            dims.kernel_output_feature_dimension,
            tuple(dims.kernel_spatial_dimensions),
            dims.output_batch_dimension,
            dims.output_feature_dimension,
            tuple(dims.output_spatial_dimensions),
        )

    def _gather_dims(self, attribute: Any) -> GatherDims:
        dims = self._hlo.GatherDimensionNumbers(attribute)
        return GatherDims(
            tuple(dims.offset_dims),
            tuple(dims.collapsed_slice_dims),
            tuple(dims.operand_batching_dims),
            tuple(dims.start_indices_batching_dims),
            tuple(dims.start_index_map),
            dims.index_vector_dim,
        )

    def _scatter_dims(self, attribute: Any) -> ScatterDims:
        dims = self._hlo.ScatterDimensionNumbers(attribute)
        return ScatterDims(
            tuple(dims.update_window_dims),
            tuple(dims.inserted_window_dims),
            tuple(dims.input_batching_dims),
            tuple(dims.scatter_indices_batching_dims),
            tuple(dims.scattered_dims_to_operand_dims),
            dims.index_vector_dim,
        )

    def _ints(self, attribute: Any) -> tuple[int, ...]:
        if isinstance(attribute, self._ir.DenseElementsAttr):
            return tuple(int(value) for value in np.asarray(attribute).reshape(-1))
        value = self.plain(attribute)
        return cast("tuple[int, ...]", value) if isinstance(value, tuple) else (value,)

    def _table(self, attribute: Any) -> tuple[tuple[int, ...], ...]:
        if not isinstance(attribute, self._ir.DenseElementsAttr):
            return (self._ints(attribute),)
        table = np.asarray(attribute)
        return tuple(map(tuple, table.reshape(len(table), -1).tolist())) if table.ndim else ()

    def _groups(self, attribute: Any) -> Any:
        if isinstance(attribute, self._ir.DenseElementsAttr):
            table = np.asarray(attribute)
            return groups.from_lists(table.reshape(1, -1) if table.ndim < 2 else table)
        if self._hlo.ReplicaGroupMeshAxesAttr.isinstance(attribute):
            return self._mesh_groups(attribute)
        return _text(attribute)

    def _mesh_groups(self, attribute: Any) -> groups.Groups:
        form: Any = self._hlo.ReplicaGroupMeshAxesAttr(attribute)
        self.saw_mesh_groups = True
        if isinstance(form.mesh, self._ir.FlatSymbolRefAttr):
            name = form.mesh.value
            if name not in self._meshes:
                raise InputError(
                    f"{self._source}: replica groups over mesh '@{name}', which the module does not define"
                )
            axes, device_ids = self._meshes[name].axes, self._meshes[name].device_ids
        else:
            mesh: Any = self._hlo.MeshAttr(form.mesh)
            name, device_ids = "mesh", ()
            axes = tuple((axis.name, axis.size) for axis in map(self._hlo.MeshAxisAttr, mesh.axes))
        along = [self._axis_part(self._hlo.AxisRefAttr(axis)) for axis in self._ir.ArrayAttr(form.axes)]
        found = groups.over_parts(name, axes, along)
        if not device_ids:
            return found
        places = np.arange(found.num_devices).reshape(found.dims).transpose(found.permutation)
        return groups.from_lists(np.asarray(device_ids)[places].reshape(found.count, found.size))

    def _axis_part(self, axis: Any) -> tuple[str, tuple[int, int] | None]:
        if axis.sub_axis_info is None:
            return axis.name, None
        info = self._hlo.SubAxisInfoAttr(axis.sub_axis_info)
        return axis.name, (info.pre_size, info.size)

    def _shardings(self, attribute: Any) -> tuple[Sharding, ...]:
        sdy = self._sdy
        if sdy.TensorShardingPerValueAttr.isinstance(attribute):
            return tuple(map(self._sharding, sdy.TensorShardingPerValueAttr(attribute).shardings))
        if sdy.TensorShardingAttr.isinstance(attribute):
            return (self._sharding(attribute),)
        return (Sharding(gspmd=_strip(str(attribute))),)

    def _sharding(self, attribute: Any) -> Sharding:
        sharding = self._sdy.TensorShardingAttr(attribute)
        dims = [self._sdy.DimensionShardingAttr(dim) for dim in sharding.dimension_shardings]
        return Sharding(
            _strip(str(sharding.mesh_or_ref)).lstrip("@"),
            tuple(self._axes(dim.axes) for dim in dims),
            tuple(index for index, dim in enumerate(dims) if not dim.is_closed),
            self._axes(sharding.replicated_axes),
            self._axes(sharding.unreduced_axes),
        )

    def _axes(self, axes: Any) -> tuple[Axis, ...]:
        return tuple(map(self._axis, map(self._sdy.AxisRefAttr, axes)))

    def _axis(self, axis: Any) -> Axis:
        if axis.sub_axis_info is None:
            return Axis(axis.name)
        info = self._sdy.SubAxisInfoAttr(axis.sub_axis_info)
        return Axis(axis.name, (info.pre_size, info.size))

    def mesh(self, attribute: Any, name: str) -> Mesh:
        """An `sdy.mesh`, which replica groups may name from then on."""
        found = self._meshes[name] = _mesh_of(attribute, name)
        return found


_MHLO_TWINS = frozenset(
    {
        "channel_handle",
        "compare_type",
        "comparison_direction",
        "dimension_numbers",
        "dot_dimension_numbers",
        "scatter_dimension_numbers",
    }
)

_INT_LISTS = (
    "window_strides",
    "window_dilations",
    "base_dilations",
    "window_dimensions",
    "lhs_dilation",
    "rhs_dilation",
    "broadcast_dimensions",
    "broadcast_sizes",
    "dimensions",
    "permutation",
    "start_indices",
    "limit_indices",
    "strides",
    "slice_sizes",
    "fft_length",
)

__all__ = ["Decoder", "DotDims", "Opaque", "RaggedDotDims"]


def _strip(text: str) -> str:
    return text.strip('"')


def _text(attribute: Any) -> str:
    text = str(attribute)
    return text if len(text) <= 4096 else text[:4096]
