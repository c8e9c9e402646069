"""NeuSight's whole models from captures: its Hugging Face configurations through the PyTorch frontend.

Eager rows are priced kernel by ATen call, those of `torch.compile` as Inductor fuses. The peer ran forward alone, or
forward and backward from the logits with neither loss nor optimiser, in FP32 without TF32 and with eager attention.

An assumption about the compiled rows: torch 2.1, which the labels name, knew fifteen spellings of attention, f32 among
them. Run on these models as Transformers 4.35 wrote them, torch 2.1.2 replaces BERT's (its mask of ones folds away) and
not GPT-2's (a selection by a mask). Today's TorchInductor, `--attention auto`, leaves both alone without TF32.
"""

import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from stablecast.backends.predictor import Settings, predict_device_program
from stablecast.ir.device_program import DeviceProgram
from stablecast.ir.errors import InputError, StablecastError
from stablecast.ir.workload import Workload
from stablecast.lowering.products import PLAIN_ARITHMETIC
from stablecast.lowering.target import Target
from stablecast.validation.suites.base import Data, Record, Row, number, whole
from stablecast.validation.suites.captures import captured_kernels, import_models, is_captured

_MILLI: Final = 1e-3
_KEY: Final = "neusight model, heads by mode, added gradients, OPT and GPT-2 of 4.35, decoders "
_PACKAGE: Final = "transformers"
_EXECS: Final[Mapping[str, str]] = {"": "eager", "fusion": "inductor"}
_COMPILED_ATTENTION: Final[Mapping[str, str]] = {"bert": "flash"}
"""Attention of a compiled model by the first word of its name; of every other as written."""
PEERS: Final = ("neusight", "roofline", "habitat", "micro")


def run(data: Data, devices: Mapping[str, str]) -> list[Row]:
    """A row for each label on one GPU whose configuration can be captured; `devices`: the table's names -> ours."""
    rows: list[Row] = []
    programs = _Programs(data)
    for record in data.read("neusight/e2e_labels.csv"):
        device = devices.get(record["device"], "")
        if not device or record["option"] not in _EXECS:
            continue
        program = programs.get(record)
        if program is not None:
            rows += _row(data, record, device, program)
    return rows


class _Programs:
    """Kernels by model, size and execution model; what cannot be captured is noted once."""

    def __init__(self, data: Data) -> None:
        self._data = data
        self._known: dict[str, DeviceProgram | None] = {}

    def get(self, record: Record) -> DeviceProgram | None:
        """The program of a label."""
        name = config_of(record)
        execution = _EXECS[record["option"]]
        key = f"{name} {execution}"
        if key not in self._known:
            self._known[key] = self._make(record, name, execution)
        return self._known[key]

    def _make(self, record: Record, name: str, execution: str) -> DeviceProgram | None:
        path = self._data.find(f"neusight/model_configs/{record['model']}.json")
        if path is None:
            return None
        sequence, batch = whole(record, "seqlen", "batch")
        training = record["mode"] == "train"
        attention = "auto"
        if execution == "inductor":
            attention = _COMPILED_ATTENTION.get(record["model"].partition("_")[0], "as-written")
        target = Target("cuda", PLAIN_ARITHMETIC, combine=False, exec=execution, attention=attention)
        if not self._data.capture and not is_captured(_KEY + name, _PACKAGE, target):
            return None
        self._data.say(name)
        try:
            return captured_kernels(_KEY + name, _PACKAGE, target, lambda: _capture(path, batch, sequence, training))
        except (ImportError, RuntimeError, StablecastError, ValueError) as error:
            note = f"neusight: {record['model']} is not captured: {' '.join(str(error).split())[:240]}"
            if note not in self._data.notes:
                self._data.notes.append(note)
            return None


def config_of(record: Record) -> str:
    """Model, mode, sequence and batch of a label, as the operator graphs name them."""
    sequence, batch = whole(record, "seqlen", "batch")
    return f"{record['model']}-{record['mode']}-{sequence}-{batch}"


def _called(model: Any, tokens: Any) -> Any:
    """The model's first result. BERT gets the mask of ones that its version of the time made and added by itself."""
    given = {"attention_mask": tokens.new_ones(tokens.shape)} if model.config.model_type == "bert" else {}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = tokens
    return model(tokens, **given)[0]


def _forward(model: Any, tokens: Any) -> Any:
    torch: Any = importlib.import_module("torch")
    with torch.no_grad():
        return _called(model, tokens)


def _gradients(model: Any, tokens: Any) -> tuple[Any, ...]:
    """Forward, and backward from the sum of the logits; what every parameter then holds.

    Gradients are added to those of the pass before: the peer's step has these additions.
    """
    _called(model, tokens).sum().backward()
    return tuple(parameter.grad for parameter in model.parameters())


def _capture(path: Path, batch: int, sequence: int, training: bool) -> Workload:
    """Forward, or forward and backward, of the model that a configuration describes.

    BERT ran with its head for sequences, in training with those for pretraining: so say the peer's operator graphs.
    """
    torch: Any = importlib.import_module("torch")
    hub: Any = import_models(_PACKAGE)
    from stablecast.frontends.torch import capture_torch

    config = hub.AutoConfig.for_model(**_content(path))
    config.use_cache = False
    config._attn_implementation = _attention_of(config.model_type, hub)
    of_bert = hub.AutoModelForPreTraining if training else hub.AutoModelForSequenceClassification
    of_others = hub.AutoModelForSeq2SeqLM if config.is_encoder_decoder else hub.AutoModelForCausalLM
    made = of_bert if config.model_type == "bert" else of_others

    def build() -> Any:
        model = made.from_config(config).train(training)
        for parameter in model.parameters() if training else ():
            parameter.grad = torch.zeros_like(parameter)
        return model

    return capture_torch(
        build,
        _gradients if training else _forward,
        lambda: (torch.zeros(batch, sequence, dtype=torch.int64),),
        name=path.stem,
    )


def _attention_of(kind: str, hub: Any) -> str:
    """The name under which the attention of a kind of model is known as Transformers 4.35 wrote it."""
    if kind not in _ATTENTIONS:
        return "eager"
    masks: Any = importlib.import_module("transformers.masking_utils")

    def bits(*given: Any, **named: Any) -> Any:
        return masks.sdpa_mask(*given, **{**named, "allow_is_causal_skip": False})

    name = f"stablecast_{kind}_of_2023"
    hub.AttentionInterface.register(name, _ATTENTIONS[kind])
    hub.AttentionMaskInterface.register(name, bits if kind == "gpt2" else masks.eager_mask)
    return name


def _attention_of_opt(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, dropout: float = 0.0, **_: Any
) -> tuple[Any, None]:
    """`modeling_opt.py`: scores are clamped at the type's least number, a kernel forward and five backward, and scaled
    by what the queries are alone."""
    torch: Any = importlib.import_module("torch")
    batch, heads, positions, width = query.shape
    flat = [part.contiguous().view(batch * heads, -1, width) for part in (query, key, value)]
    scores = torch.bmm(flat[0], flat[1].transpose(1, 2)).view(batch, heads, positions, -1) + attention_mask
    least = torch.tensor(torch.finfo(scores.dtype).min, device=scores.device)
    weights = torch.max(scores, least).view(batch * heads, positions, -1).softmax(-1)
    weights = torch.nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.bmm(weights, flat[2]).view(batch, heads, positions, width).transpose(1, 2), None


def _attention_of_gpt2(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, dropout: float = 0.0, **_: Any
) -> tuple[Any, None]:
    """`modeling_gpt2.py`: scores are divided, and those of later positions selected away, in both passes."""
    torch: Any = importlib.import_module("torch")
    scores = torch.matmul(query, key.transpose(-1, -2))
    scores = scores / torch.full([], value.size(-1) ** 0.5, dtype=scores.dtype, device=scores.device)
    least = torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype, device=scores.device)
    weights = torch.where(attention_mask, scores, least).softmax(-1)
    weights = torch.nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2), None


_ATTENTIONS: Final[Mapping[str, Callable[..., tuple[Any, None]]]] = {
    "opt": _attention_of_opt,
    "gpt2": _attention_of_gpt2,
}


def config_content(data: Data, model: str) -> Mapping[str, Any]:
    """What the Hugging Face configuration of a model of the tables holds; nothing where the folder lacks it."""
    path = data.find(f"neusight/model_configs/{model}.json")
    return _content(path) if path is not None else {}


def _content(path: Path) -> dict[str, Any]:
    held: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return held


def _row(data: Data, record: Record, device: str, program: DeviceProgram) -> list[Row]:
    name, execution = config_of(record), _EXECS[record["option"]]
    try:
        found = predict_device_program(program, data.catalogue.resolve(device), Settings(data.choice, {}), name)
    except InputError as error:
        data.notes.append(f"neusight {name} on {device} is left out: {error.message}")
        return []
    peers = {peer: number(record, f"{peer}_e2e_ms") * _MILLI for peer in PEERS if record.get(f"{peer}_e2e_ms")}
    return [
        Row(
            "neusight",
            f"{name} {execution}",
            device,
            number(record, "e2e_ms") * _MILLI,
            found.step_time_s,
            found.step_time_low_s,
            found.step_time_high_s,
            peer="neusight" if "neusight" in peers else "",
            peer_predicted_s=peers.get("neusight"),
            peers=peers,
            group=f"model {record['mode']} {execution}",
            path="program",
            key=f"{name} {execution}",
            basis="program",
        )
    ]
