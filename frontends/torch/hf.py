"""Hugging Face configurations: the model that transformers makes of one, without weights and without a network."""

# pyright: reportUnknownLambdaType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import contextlib
import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stablecast.frontends.torch import assemble, hf_parallel, hf_pipeline
from stablecast.frontends.torch.capture import loss_of
from stablecast.frontends.torch.private import load, torch
from stablecast.frontends.torch.session import Session
from stablecast.ir.errors import InputError, ToolError, near_names
from stablecast.ir.workload import Workload

MODES = ("train", "forward", "prefill", "decode")
DTYPES = {
    "f32": "float32",
    "fp32": "float32",
    "bf16": "bfloat16",
    "f16": "float16",
    "fp16": "float16",
    "f64": "float64",
}
_PER_SAMPLE = ("ForSequenceClassification", "ForImageClassification")


def capture_hf(
    config_path: str | Path | Mapping[str, Any],
    batch: int = 1,
    seq: int = 1024,
    mode: str = "forward",
    dtype: str = "bf16",
    parallel: str = "",
    *,
    rank: int = 0,
    device: str = "cuda",
    attention: str = "auto",
    optimizer: Callable[[Any], Any] | None = None,
) -> Workload:
    """The step of a model given by its `config.json`.

    `mode`: `train` (forward, loss, backward, fused AdamW), `forward`, `prefill` (`seq` tokens in, cache out) or
    `decode` (one token beside a cache of `seq`). `parallel`: `dp4`, `fsdp8`, `tp4`, `pp4`, or several as `pp4,dp2,tp2`.
    A pipeline runs 1F1B with a micro-batch a sample; `pp4:gpipe`, `pp4:interleaved2` (two parts a rank) and `pp4:zb2`
    choose another schedule, `mb8` the number of micro-batches; the workload then has a module and a role for each
    stage. Raises `InputError` for a configuration, mode or parallelism that is not known.
    """
    if mode not in MODES:
        raise InputError(f"unknown mode '{mode}'", near_names(mode, MODES))
    if dtype.lower() not in {*DTYPES, *DTYPES.values()}:
        raise InputError(f"unknown dtype '{dtype}'", near_names(dtype, DTYPES))
    config, source = read_config(config_path)
    load("transformers.masking_utils")
    parallel, pipeline = hf_pipeline.parse(parallel)
    axes = hf_parallel.axes_of(parallel)
    kind = getattr(torch, DTYPES.get(dtype.lower(), dtype.lower()))
    if "pp" in dict(axes):
        shape = _Step(config, source, batch, seq, mode, kind)
        places = range(pipeline.stages)
        stages = [_stage(shape, axes, pipeline, place, rank, device, attention, optimizer) for place in places]
        return hf_pipeline.joined(stages)
    session = Session(axes, rank, device, attention)
    with session.open():
        made = build_model(config, kind, mode)
        made = hf_parallel.apply(made, session.mesh() if axes else None, dict(axes))
        given = inputs_for(made, config, batch, seq, mode, kind)
        run = _step(made, mode, session, optimizer)
        session.names.add(made, device)
        assemble.batch_names(session, list(map(_plain, given.values())), list(given))
        out = session.record(lambda: run(given))
        return assemble.workload(session, out, source, type(made).__name__)


@dataclass(frozen=True, slots=True)
class _Step:
    config: Any
    source: str
    batch: int
    seq: int
    mode: str
    dtype: Any


def _stage(
    wanted: _Step,
    axes: tuple[tuple[str, int], ...],
    plan: hf_pipeline.Pipeline,
    place: int,
    rank: int,
    device: str,
    attention: str,
    optimizer: Callable[[Any], Any] | None,
) -> Workload:
    """The step of the rank at `place` along `pp`."""
    if wanted.mode not in ("train", "forward"):
        raise InputError(f"a pipeline has no mode '{wanted.mode}'", "use train or forward")
    session = Session(axes, hf_pipeline.world_of(axes, place, rank), device, attention)
    with session.open():
        mesh = session.mesh()
        modules: list[Any] = []
        for part in range(plan.parts):
            model = build_model(wanted.config, wanted.dtype, wanted.mode)
            edges = hf_pipeline.bounds(hf_pipeline.layers_in(model), plan.stages * plan.parts)
            if "tp" in dict(axes):
                hf_parallel.tensor_parallel(model, mesh["tp"])
            made = hf_pipeline.Stage(model, *edges[place + part * plan.stages])
            modules.append(hf_parallel.over_data(made, mesh, dict(axes)))
        held = modules[0] if len(modules) == 1 else torch.nn.ModuleList(modules)
        tokens, labels = (torch.zeros(wanted.batch, wanted.seq, dtype=torch.int64) for _ in range(2))
        run = _pipeline_step(wanted, plan, place, held, modules, mesh, session, optimizer)
        session.names.add(held, device)
        assemble.batch_names(session, [tokens, labels], ["input_ids", "labels"])
        out = session.record(lambda: run(tokens, labels))
        return assemble.workload(session, out, wanted.source, f"stage{place}")


def _pipeline_step(
    wanted: _Step,
    plan: hf_pipeline.Pipeline,
    place: int,
    held: Any,
    modules: Sequence[Any],
    mesh: Any,
    session: Session,
    optimizer: Callable[[Any], Any] | None,
) -> Callable[[Any, Any], Any]:
    config, train = wanted.config, wanted.mode == "train"
    text = config.get_text_config(decoder=True)
    sizes = {"hidden": text.hidden_size, "vocab": text.vocab_size, "dtype": wanted.dtype}
    shape = (wanted.batch, wanted.seq)
    loss = hf_pipeline.loss_of(modules[-1], text.vocab_size) if train else None
    schedule = hf_pipeline.schedule_of(plan, place, modules, mesh["pp"].get_group(), shape, sizes, loss)
    made: Any = None
    if train:
        made = optimizer(held.parameters()) if optimizer is not None else _adamw(held)
        session.prepare((held, made))
    first, last = place == 0, place == plan.stages - 1

    def run(tokens: Any, labels: Any) -> Any:
        losses: list[Any] = []
        given = (tokens,) if first else ()
        if not train:
            with torch.no_grad():
                return schedule.step(*given)
        made.zero_grad()
        schedule.step(*given, **({"target": labels, "losses": losses} if last else {}))
        made.step()
        return torch.stack(losses).mean().detach() if losses else None

    return run


def read_config(config: str | Path | Mapping[str, Any]) -> tuple[Any, str]:
    """The transformers configuration in a file, folder or mapping, and where it came from."""
    try:
        auto = load("transformers.models.auto.configuration_auto")
    except ImportError as error:
        raise ToolError(
            "transformers is not installed, and the input is a Hugging Face configuration", "pip install transformers"
        ) from error
    source = "config"
    if not isinstance(config, Mapping):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        source = str(path)
        try:
            config = json.loads(path.read_text())
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise InputError(f"{path} is not JSON: {error}") from None
    assert isinstance(config, Mapping)
    kind = config.get("model_type")
    if not kind:
        raise InputError(f"{source} names no model_type", "give a Hugging Face config.json")
    if kind not in auto.CONFIG_MAPPING:
        raise InputError(
            f"{source}: transformers knows no model_type '{kind}'", near_names(str(kind), auto.CONFIG_MAPPING.keys())
        )
    return auto.CONFIG_MAPPING[kind].from_dict(dict(config)), source


def build_model(config: Any, dtype: Any, mode: str) -> Any:
    """The model of a configuration, its weights never made."""
    transformers = load("transformers")
    names = config.architectures or []
    cls = getattr(transformers, names[0], None) if names else None
    if names and cls is None:
        raise InputError(f"transformers has no architecture '{names[0]}'")
    with without_init(), default_dtype(dtype):
        if cls is None:
            cls = _auto_class(transformers, config)
            made = cls.from_config(config, attn_implementation="sdpa")
        else:
            made = cls._from_config(config, attn_implementation=_attention(cls))
    made.tie_weights()
    return made.train() if mode == "train" else made.eval()


def _auto_class(transformers: Any, config: Any) -> Any:
    if getattr(config, "is_encoder_decoder", False):
        return transformers.AutoModelForSeq2SeqLM
    for name in ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForImageClassification"):
        auto = getattr(transformers, name)
        if type(config) in auto._model_mapping:
            return auto
    return transformers.AutoModel


def _attention(cls: Any) -> str:
    return "sdpa" if getattr(cls, "_supports_sdpa", True) else "eager"


@contextlib.contextmanager
def default_dtype(dtype: Any) -> Generator[None, None, None]:
    """Floating tensors are made in `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def without_init() -> Generator[None, None, None]:
    """Models are made without drawing their weights."""
    with contextlib.ExitStack() as stack:
        initialization = load("transformers.initialization")
        stack.enter_context(initialization.no_init_weights())
        yield


def inputs_for(model: Any, config: Any, batch: int, seq: int, mode: str, dtype: Any) -> dict[str, Any]:
    """The batch that a model takes, by name."""
    model = getattr(model, "module", model)
    if model.main_input_name == "pixel_values":
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        images = torch.empty(batch, config.num_channels, height, width, dtype=dtype)
        found = {"pixel_values": images}
        return found | ({"labels": torch.zeros(batch, dtype=torch.int64)} if _has_loss(model, mode) else {})
    vocab = getattr(config, "vocab_size", 2)
    tokens = lambda *shape: torch.randint(0, vocab, shape)  # noqa: E731
    if mode == "decode":
        return {"input_ids": tokens(batch, 1), "past_key_values": _cache(model, config, batch, seq, dtype)}
    found: dict[str, Any] = {"input_ids": tokens(batch, seq)}
    if getattr(config, "is_encoder_decoder", False):
        found["decoder_input_ids"] = tokens(batch, seq)
    if _has_loss(model, mode):
        per_sample = type(model).__name__.endswith(_PER_SAMPLE)
        found["labels"] = torch.zeros(batch, dtype=torch.int64) if per_sample else tokens(batch, seq)
        found.pop("decoder_input_ids", None)
    return found


def _has_loss(model: Any, mode: str) -> bool:
    import inspect

    inner = getattr(model, "module", model)
    return mode == "train" and "labels" in inspect.signature(inner.forward).parameters


def _cache(model: Any, config: Any, batch: int, seq: int, dtype: Any) -> Any:
    """A cache of `seq` tokens, as the model's own prefill leaves it."""
    transformers = load("transformers")
    cache = transformers.DynamicCache(config=config)
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    for layer in range(text.num_hidden_layers):
        shape = (batch, hf_parallel.local_heads(model, heads), seq, size)
        cache.update(torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype), layer)
    return cache


def _step(
    model: Any, mode: str, session: Session, optimizer: Callable[[Any], Any] | None
) -> Callable[[dict[str, Any]], Any]:
    if mode == "train":
        made = optimizer(model.parameters()) if optimizer is not None else _adamw(model)
        session.prepare((model, made))

        def train(given: dict[str, Any]) -> Any:
            made.zero_grad()
            loss = loss_of(model(**given, use_cache=False) if _takes_cache(model) else model(**given))
            loss.backward()
            made.step()
            return loss.detach()

        return train

    def infer(given: dict[str, Any]) -> Any:
        more: dict[str, Any] = {"use_cache": mode != "forward"} if _takes_cache(model) else {}
        if mode in ("prefill", "decode") and "logits_to_keep" in _parameters(model):
            more["logits_to_keep"] = 1
        with torch.no_grad():
            out = model(**given, **more)
        return _outputs(out, mode)

    return infer


def _adamw(model: Any) -> Any:
    """Fused AdamW; distributed and plain parameters cannot share one launch, so they are groups of their own."""
    groups: dict[str, list[Any]] = {}
    for param in model.parameters():
        groups.setdefault(type(param).__name__, []).append(param)
    return torch.optim.AdamW([{"params": params} for params in groups.values()], lr=1e-4, fused=True)


def _plain(held: Any) -> Any:
    """A cache as pairs of tensors."""
    layers = getattr(held, "layers", None)
    return held if layers is None else [(layer.keys, layer.values) for layer in layers]


def _outputs(out: Any, mode: str) -> Any:
    """Logits (or the last hidden state), and with them the cache where one is kept."""
    first = getattr(out, "logits", None)
    first = first if first is not None else getattr(out, "last_hidden_state", out)
    cache = getattr(out, "past_key_values", None)
    if mode == "forward" or cache is None:
        return first
    return first, _plain(getattr(cache, "self_attention_cache", cache))


def _parameters(model: Any) -> Mapping[str, Any]:
    import inspect

    return inspect.signature(getattr(model, "module", model).forward).parameters


def _takes_cache(model: Any) -> bool:
    return "use_cache" in _parameters(model)


def is_config(path: str | Path) -> bool:
    """Whether a file looks like a Hugging Face configuration."""
    try:
        held = json.loads(Path(path).read_text())
    except (OSError, ValueError, UnicodeDecodeError):
        return False
    return isinstance(held, dict) and bool(re.fullmatch(r"[\w.-]+", str(held.get("model_type", ""))))
