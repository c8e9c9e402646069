"""What a hardware file may say, checked with pydantic at the border; every fault is one line.

A value is `{value: 3.35, unit: TB/s, source: KEY, confidence: high, note: ...}`; in a user's own file
"3.35 TB/s" will do, and the file is the source. `{fact: FIELD}` in a system file takes a field of the device.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar, cast, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo

from stablecast.backends import units
from stablecast.backends.device import Confidence, DeviceKind, DimKind, Label, Quantity
from stablecast.ir.errors import InputError, near_names

_VALUE_KEYS: Final = frozenset({"value", "unit", "source", "source_2", "confidence", "note"})
_CONFIDENCES: Final = frozenset(cast("tuple[str, ...]", get_args(Confidence)))
PEAK_DTYPES: Final = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp6", "fp4", "int8", "int4")
PEAK_UNITS: Final = ("matrix", "matrix_acc16", "vector")
SUSTAINED_KEYS: Final = ("fp32", "tf32", "half", "fp8", "int8", "memory")
PEAK_KEYS: Final = tuple(f"{dtype}.{unit}" for dtype in PEAK_DTYPES for unit in PEAK_UNITS)

Raw = Mapping[str, object]
_Model = TypeVar("_Model", bound=BaseModel)


def _origin(raw: Raw, info: ValidationInfo) -> dict[str, Any]:
    """Source, confidence and notes of a value; in a user's file the file itself is the default source."""
    context = cast("Mapping[str, str]", info.context or {})
    strange = sorted(str(key) for key in raw if key not in _VALUE_KEYS)
    if strange:
        raise ValueError(f"unknown key '{strange[0]}'; a value has {', '.join(sorted(_VALUE_KEYS))}")
    source = raw.get("source", context.get("source"))
    if not isinstance(source, str) or not source:
        raise ValueError("has no source; add source: KEY (of sources.yaml), or source: assumption")
    confidence = raw.get("confidence", "user" if "source" in context else None)
    if confidence not in _CONFIDENCES:
        raise ValueError("confidence must be high, medium or low")
    origin = {"source": source, "confidence": confidence}
    return origin | {key: str(raw.get(key, "")) for key in ("note", "source_2")}


def _as_mapping(raw: object) -> Raw:
    """`raw` as a mapping with `value` and `unit`, splitting "3.35 TB/s"."""
    if isinstance(raw, Mapping):
        found = cast("Raw", raw)
        if "value" not in found:
            raise ValueError("has no value; write {value: NUMBER, unit: UNIT, source: KEY, confidence: high}")
        inner = found["value"]
        return {**found, **_split(inner)} if isinstance(inner, str) else found
    return _split(raw) if isinstance(raw, str) else {"value": raw}


def _split(text: str) -> dict[str, object]:
    try:
        number, unit = units.parse(text)
    except InputError as error:
        raise ValueError(str(error)) from error
    return {"value": number, "unit": unit} if unit else {"value": number}


def _quantity(dimension: str, zero: bool) -> Callable[[object, ValidationInfo], Quantity]:
    def read(raw: object, info: ValidationInfo) -> Quantity:
        if isinstance(raw, Quantity):
            return raw
        mapping = _as_mapping(raw)
        number, unit = mapping["value"], str(mapping.get("unit", ""))
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(f"is not a number; write it in {units.examples(dimension)}")
        try:
            value, found = units.to_si(float(number), unit)
        except InputError as error:
            raise ValueError(str(error)) from error
        if found != dimension:
            raise ValueError(f"'{unit or 'no unit'}' does not fit here; write {units.examples(dimension)}")
        if not (value > 0 or (zero and value == 0)) or value == float("inf"):
            raise ValueError(f"must be {'zero or more' if zero else 'more than zero'} and finite, not {number:g}")
        return Quantity(value, dimension, **_origin(mapping, info))

    return read


def _label(raw: object, info: ValidationInfo) -> Label:
    if isinstance(raw, Label):
        return raw
    mapping = cast("Raw", raw) if isinstance(raw, Mapping) else {"value": raw}
    text = mapping.get("value")
    if isinstance(text, bool) or not isinstance(text, str | int | float) or text == "":
        raise ValueError("is not a text")
    unit = str(mapping.get("unit", ""))
    return Label(f"{text} {unit}" if unit else str(text), **_origin(mapping, info))


def _peak_keys(raw: object) -> object:
    if not isinstance(raw, Mapping):
        return raw
    table = cast("Raw", raw)
    strange = next((key for key in table if key not in PEAK_KEYS), None)
    if strange is not None:
        hint = near_names(str(strange), PEAK_KEYS)
        raise ValueError(f"unknown peak '{strange}'; write DTYPE.matrix or DTYPE.vector; {hint}".rstrip("; "))
    return table


def _sustained(raw: object, info: ValidationInfo) -> object:
    if not isinstance(raw, Mapping):
        return raw
    table = cast("Raw", raw)
    found = {key: _quantity(units.COUNT, False)(value, info) for key, value in table.items()}
    for key, share in found.items():
        if key not in SUSTAINED_KEYS:
            hint = near_names(str(key), SUSTAINED_KEYS)
            raise ValueError(f"unknown family '{key}'; known: {', '.join(SUSTAINED_KEYS)}; {hint}".rstrip("; "))
        if share.value > 1:
            raise ValueError(f"{key} is {share.value:g}; a share of the peak is more than 0 and at most 1")
    return found


Text = Annotated[Label, BeforeValidator(_label)]
Bytes = Annotated[Quantity, BeforeValidator(_quantity(units.BYTES, False))]
BytesOrNone = Annotated[Quantity, BeforeValidator(_quantity(units.BYTES, True))]
Rate = Annotated[Quantity, BeforeValidator(_quantity(units.BYTES_PER_S, False))]
Compute = Annotated[Quantity, BeforeValidator(_quantity(units.FLOP_PER_S, False))]
Clock = Annotated[Quantity, BeforeValidator(_quantity(units.HERTZ, False))]
Power = Annotated[Quantity, BeforeValidator(_quantity(units.WATT, False))]
Duration = Annotated[Quantity, BeforeValidator(_quantity(units.SECOND, True))]
Count = Annotated[Quantity, BeforeValidator(_quantity(units.COUNT, False))]
Peaks = Annotated[dict[str, Compute], BeforeValidator(_peak_keys)]


Sustained = Annotated[dict[str, Quantity], BeforeValidator(_sustained)]


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class DeviceFile(_File):
    """One device file. Figures are of the whole chip or module unless the field ends in `_per_core` or stands in
    `per_device`; `omit` lists fields of the parent that this device does not take over; `exceptions` lists facts that
    do not close against others, for a reason that their notes give. `sustained`: shares of the peaks by numeric family
    and of the memory rate that somebody measured on this very device; a child does not take them over."""

    name: str = ""
    kind: DeviceKind | None = None
    inherits: str = ""
    omit: tuple[str, ...] = ()
    per_device: tuple[str, ...] = ()
    exceptions: tuple[str, ...] = ()
    system: str = ""

    vendor: Text | None = None
    arch: Text | None = None
    form_factor: Text | None = None
    jax_devices_per_chip: Count | None = None

    peaks: Peaks = Field(default_factory=dict[str, Quantity])
    sparse_peaks: Peaks = Field(default_factory=dict[str, Quantity])
    sustained: Sustained = Field(default_factory=dict[str, Quantity])

    mem_type: Text | None = None
    mem_stacks: Count | None = None
    mem_capacity: Bytes | None = None
    mem_capacity_usable: Bytes | None = None
    mem_bandwidth: Rate | None = None
    l2: Bytes | None = None
    l3: Bytes | None = None
    cmem: BytesOrNone | None = None

    core_count: Count | None = None
    tensorcores: Count | None = None
    fp32_lanes_per_core: Count | None = None
    tensor_cores_per_core: Count | None = None
    wavefront: Count | None = None
    mxus_per_core: Count | None = None
    mxu_dims: Text | None = None
    vpu_lanes: Count | None = None
    vpu_sublanes: Count | None = None
    vpu_alus_per_lane: Count | None = None
    sparsecores: Count | None = None
    dies: Count | None = None
    dies_per_device: Count | None = None
    smem_per_core: Bytes | None = None
    smem_per_block_max: Bytes | None = None
    lds_per_core: Bytes | None = None
    vmem_per_core: Bytes | None = None
    clock: Clock | None = None
    clock_base: Clock | None = None
    clock_boost: Clock | None = None
    clock_matrix: Clock | None = None
    tdp: Power | None = None
    power_min_mean_max: Text | None = None

    pcie_gen: Text | None = None
    pcie_bw_per_dir: Rate | None = None
    host_link_bw_per_dir: Rate | None = None
    nvlink_gen: Text | None = None
    scaleup_kind: Text | None = None
    scaleup_links: Count | None = None
    scaleup_link_bw_per_dir: Rate | None = None
    scaleup_bw_per_dir: Rate | None = None
    scaleup_domain: Count | None = None
    die_link_bw_per_dir: Rate | None = None
    scaleout_bw_per_dir: Rate | None = None
    ici_topology: Text | None = None
    ici_links: Count | None = None
    ici_link_bw_per_dir: Rate | None = None
    ici_bw_per_dir: Rate | None = None
    pod_chips: Count | None = None
    pod_shape: Text | None = None
    chips_per_host: Count | None = None
    dcn_per_host_per_dir: Rate | None = None


STRUCTURE: Final = frozenset(
    {"name", "kind", "inherits", "omit", "per_device", "exceptions", "system", "peaks", "sparse_peaks", "sustained"}
)
FACT_FIELDS: Final = tuple(name for name in DeviceFile.model_fields if name not in STRUCTURE)


class FactRef(_File):
    """A field of the device, times a factor: `{fact: scaleup_link_bw_per_dir, times: 2}`."""

    fact: str
    times: float = Field(default=1.0, gt=0)


class EfficiencyTable(_File):
    """Share of the link rate by collective kind and group size, fitted together."""

    by_kind: dict[Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"], dict[int, float]]
    source: str
    confidence: Confidence
    note: str = ""


def _reference(raw: object) -> object:
    """Take `{fact: ...}` for a reference at once, so that pydantic reports faults of one alternative only."""
    if isinstance(raw, Mapping) and "fact" in raw:
        return FactRef.model_validate(raw)
    return cast("object", raw)


def _rate_or_ref(raw: object, info: ValidationInfo) -> object:
    found = _reference(raw)
    return found if isinstance(found, FactRef) else _quantity(units.BYTES_PER_S, False)(found, info)


def _count_or_ref(raw: object, info: ValidationInfo) -> object:
    found = _reference(raw)
    return found if isinstance(found, FactRef) else _quantity(units.COUNT, False)(found, info)


def _efficiency(raw: object, info: ValidationInfo) -> object:
    if isinstance(raw, Mapping) and "by_kind" in raw:
        return EfficiencyTable.model_validate(raw)
    return _quantity(units.COUNT, False)(cast("object", raw), info)


def _share(raw: object, info: ValidationInfo) -> object:
    found = _quantity(units.COUNT, True)(raw, info)
    if found.value >= 1:
        raise ValueError("is a share, from 0 to below 1")
    return found


class DimFile(_File):
    """One level of a system family, innermost first.

    rate: all links of one device, one way; for a torus, one link. size_max: the most devices on this level (absent:
    no limit). pair_rate: between one pair, where less. axes, shape_max, wraps_at_multiple_of, wraps_together: of a
    torus; `wraps_together` closes axes only where every axis longer than 1 is such a multiple. oversubscription: rate
    below over rate above this tier of a fat tree. penalty: share of the rate that flow control costs (loss-less
    Ethernet). library: the measured communication library that runs here. in_network: whether switches reduce.
    """

    name: str
    kind: DimKind
    rate: Annotated[FactRef | Quantity, BeforeValidator(_rate_or_ref)]
    size_max: Annotated[FactRef | Quantity | None, BeforeValidator(_count_or_ref)] = None
    pair_rate: Annotated[FactRef | Quantity | None, BeforeValidator(_rate_or_ref)] = None
    efficiency: Annotated[EfficiencyTable | Quantity, BeforeValidator(_efficiency)]
    latency: Duration
    base_latency: Duration
    axes: int | None = Field(default=None, ge=1, le=3)
    shape_max: FactRef | None = None
    wraps_at_multiple_of: Count | None = None
    wraps_together: bool = False
    oversubscription: Count | None = None
    penalty: Annotated[Quantity | None, BeforeValidator(_share)] = None
    library: str = ""
    in_network: bool = False


class TierFile(_File):
    """Memory beyond the device's own (host, ssd): rates to a device (`read`) and from it (`write`, as `read` unless
    given), `latency` of a transfer, `capacity`: one device's share, `shared_by`: devices that share the rates."""

    name: str
    read: Annotated[FactRef | Quantity, BeforeValidator(_rate_or_ref)]
    write: Annotated[FactRef | Quantity | None, BeforeValidator(_rate_or_ref)] = None
    latency: Duration
    capacity: Bytes | None = None
    shared_by: int = Field(default=1, ge=1)


class SystemFile(_File):
    """A network family (`dims`), or a machine: a `device`, its `count`, and a `system` or `dims` of its own. `tiers`:
    memory beyond the devices' own."""

    name: str = ""
    about: str = ""
    device: str = ""
    system: str = ""
    count: int | None = Field(default=None, ge=1)
    dims: tuple[DimFile, ...] = ()
    tiers: tuple[TierFile, ...] = ()


if TYPE_CHECKING:
    _FastLoader = yaml.SafeLoader
else:
    _FastLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_FastLoader):
    """The C loader where PyYAML has it, refusing a key that stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key is a plain name", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"'{key.value}' stands twice", key.start_mark)
            seen.add(key.value)
        built: dict[Any, Any] = super().construct_mapping(node, deep)
        return built


def read_yaml(path: Path) -> dict[str, object]:
    """The mapping in a YAML file. Raises `InputError` when it cannot be read or is not a mapping with text keys."""
    try:
        loaded: object = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a text file", "a hardware file is YAML in UTF-8") from error
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from error
    if not isinstance(loaded, dict) or not all(isinstance(key, str) for key in cast("dict[object, object]", loaded)):
        raise InputError(f"{path}: not a mapping of fields to values", "write lines such as `mem_bandwidth: 3.35 TB/s`")
    return cast("dict[str, object]", loaded)


def check_field_lists(file: DeviceFile, path: Path) -> None:
    """Raise `InputError` where `omit`, `per_device` or `exceptions` names what is no field."""
    known = {*FACT_FIELDS, *(f"{table}.{key}" for table in ("peaks", "sparse_peaks") for key in PEAK_KEYS)}
    for field in ("omit", "per_device", "exceptions"):
        listed: tuple[str, ...] = getattr(file, field)
        for name in listed:
            if name not in known:
                raise InputError(f"{path}: {field} names no field '{name}'", near_names(name, known))


def is_system(raw: Raw) -> bool:
    """Whether a file describes a system (it has `dims`, `device` or `count`) rather than a device."""
    return any(key in raw for key in ("dims", "device", "count"))


def validate(model: type[_Model], raw: Raw, path: Path, user: bool) -> _Model:
    """`raw` as `model`; `user` files may leave out sources. Raises `InputError`, one line: file, field, what fits."""
    context = {"source": f"{path.name} (user file)"} if user else {}
    try:
        return model.model_validate(raw, context=context)
    except ValidationError as error:
        raise InputError(f"{path}: {_first_fault(error, model)}") from error


def _first_fault(error: ValidationError, model: type[BaseModel]) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "file"
    if first["type"] == "extra_forbidden":
        known = DimFile.model_fields if first["loc"][0] == "dims" else model.model_fields
        return f"unknown field '{where}'; {near_names(str(first['loc'][-1]), known)}".rstrip("; ")
    if first["type"] == "missing":
        return f"field '{where}' is missing"
    text = " ".join(first["msg"].removeprefix("Value error, ").split())
    return f"field '{where}': {text[0].lower() + text[1:] if text.startswith('Input') else text}"


def merge(parent: DeviceFile, child: DeviceFile, parent_name: str) -> DeviceFile:
    """`child` with everything it does not state taken from `parent`, save what it omits."""
    values: dict[str, Any] = {}
    for name in FACT_FIELDS:
        own: Quantity | Label | None = getattr(child, name)
        taken: Quantity | Label | None = None if name in child.omit else getattr(parent, name)
        values[name] = own if own is not None or taken is None else _inherited(taken, parent_name)
    for table in ("peaks", "sparse_peaks"):
        theirs: Mapping[str, Quantity] = getattr(parent, table)
        kept = {
            key: _inherited(peak, parent_name) for key, peak in theirs.items() if f"{table}.{key}" not in child.omit
        }
        values[table] = kept | getattr(child, table)
    values |= {"sustained": child.sustained}
    values |= {"name": child.name, "inherits": child.inherits, "omit": child.omit}
    values |= {"kind": child.kind or parent.kind, "system": child.system or parent.system}
    values["per_device"] = tuple(sorted({*parent.per_device, *child.per_device}))
    values["exceptions"] = tuple(sorted({*parent.exceptions, *child.exceptions}))
    return DeviceFile.model_construct(**values)


_FactT = TypeVar("_FactT", bound=Quantity | Label)


def _inherited(fact: _FactT, parent_name: str) -> _FactT:
    return replace(fact, inherited_from=fact.inherited_from or parent_name)
