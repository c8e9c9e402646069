"""Hugging Face configurations, small: captured in every mode, and trained as eager trains them."""

import json
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is an optional extra")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from stablecast.frontends.torch import capture_hf, capture_torch  # noqa: E402
from stablecast.frontends.torch.hf import read_config  # noqa: E402
from stablecast.frontends.torch.hf_parallel import axes_of  # noqa: E402
from stablecast.ir import capture_file  # noqa: E402
from stablecast.ir.errors import InputError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
logging.getLogger("transformers").setLevel(logging.ERROR)

COMMON = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 128,
        "n_positions": 64,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    "llama": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_key_value_heads": 2,
        "vocab_size": 128,
        **COMMON,
    },
    "bert": {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "vocab_size": 128,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        **COMMON,
    },
    "t5": {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 96,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 128,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
    },
    "mixtral": {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "num_local_experts": 4,
        **COMMON,
    },
    "vit": {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "image_size": 32,
        "patch_size": 8,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        **COMMON,
    },
}
MODES = [
    (name, mode)
    for name in CONFIGS
    for mode in ("train", "forward", "prefill", "decode")
    if mode in ("train", "forward") or name in ("gpt2", "llama", "mixtral")
]


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_mode(name: str, mode: str) -> None:
    workload = capture_hf(CONFIGS[name], 2, 16, mode, "bf16" if name == "mixtral" else "f32")
    assert not workload.metadata["unlowered"]
    kinds = Counter(str(argument.kind) for argument in workload.args)
    assert kinds["unknown"] == 0
    assert kinds["kv_cache"] == (4 if mode == "decode" else 0)
    assert bool(kinds["opt_state"]) == (mode == "train")


def test_experts_become_grouped_products() -> None:
    workload = capture_hf(CONFIGS["mixtral"], 2, 16, "train", "bf16")
    assert sum(launch.op.startswith("aten._grouped_mm") for launch in workload.launches.launches) >= 8


# softmax does not change when a number is added to every score, so the gradient of these is rounding alone
NO_GRADIENT = ("key.bias", "k_proj.bias")


@pytest.mark.parametrize("name", CONFIGS)
def test_training(name: str, execute: Callable[..., Any], error_of: Callable[..., float]) -> None:
    extra = {"experts_implementation": "batched_mm"} if name == "mixtral" else {}
    config, _ = read_config({**CONFIGS[name], **extra})
    images = name == "vit"

    def build() -> Any:
        cls = getattr(transformers, CONFIGS[name]["architectures"][0])
        model = cls._from_config(config, attn_implementation="sdpa").train()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        given = {"pixel_values": x} if images else {"input_ids": x}
        more = {} if name in ("vit", "bert") else {"use_cache": False}
        loss = model(**given, labels=y, **more).loss
        loss.backward()
        optimizer.step()
        return loss.detach(), {key: param.grad for key, param in model.named_parameters() if param.grad is not None}

    tokens = (torch.randint(0, 128, (2, 16)), torch.randint(0, 128, (2, 16)))
    batch = (torch.randn(2, 3, 32, 32), torch.zeros(2, dtype=torch.int64)) if images else tokens
    workload = capture_torch(build, step, batch)
    model, optimizer = build()
    values = {key: tensor.detach().clone() for key, tensor in [*model.named_parameters(), *model.named_buffers()]}
    found = execute(workload, values | dict(zip("xy", batch, strict=True)))
    loss, gradients = step(model, optimizer, *batch)
    assert error_of(found["result[0]"], loss) < 1e-5
    for key, gradient in gradients.items():
        if not key.endswith(NO_GRADIENT):
            assert error_of(found[f"result[1]['{key}']"], gradient) < 1e-5, key


PARALLEL = {
    "fsdp4": {"c10d._allgather_base_.default": 5, "c10d._reduce_scatter_base_.default": 3},
    "tp2": {"_c10d_functional.all_reduce.default": 16, "_c10d_functional.all_gather_into_tensor.default": 1},
    "dp4": {"c10d.broadcast_.default": 1, "c10d.allreduce_.default": 1},
    "dp2,tp2": {
        "_c10d_functional.all_reduce.default": 16,
        "_c10d_functional.all_gather_into_tensor.default": 1,
        "c10d.allreduce_.default": 3,
    },
    "fsdp2,tp2": {
        "c10d._allgather_base_.default": 5,
        "c10d._reduce_scatter_base_.default": 3,
        "_c10d_functional.all_reduce.default": 16,
        "_c10d_functional.all_gather_into_tensor.default": 1,
    },
    "dp2,fsdp4": {
        "c10d._allgather_base_.default": 5,
        "c10d._reduce_scatter_base_.default": 3,
        "c10d.allreduce_.default": 3,
    },
}


@pytest.mark.parametrize("parallel", PARALLEL)
def test_parallel(parallel: str) -> None:
    workload = capture_hf(CONFIGS["llama"], 2, 16, "train", "bf16", parallel)
    assert Counter(launch.op for launch in workload.launches.launches if launch.group) == PARALLEL[parallel]


@pytest.mark.parametrize("name", CONFIGS)
def test_data_parallel_reduces_every_parameter(name: str) -> None:
    """Tied weights are one parameter, as in the model that transformers makes with its weights."""
    config, _ = read_config(CONFIGS[name])
    real = getattr(transformers, CONFIGS[name]["architectures"][0])._from_config(config)
    wanted = sum(param.numel() for param in real.parameters())
    workload = capture_hf(CONFIGS[name], 2, 16, "train", "bf16", "dp4")
    reduced = [launch for launch in workload.launches.launches if launch.op == "c10d.allreduce_.default"]
    assert sum(launch.shapes[0][0] for launch in reduced) == wanted


SENDS = {"pp2": (4, 4), "pp2:gpipe,mb2": (2, 2), "pp2:interleaved1": (4, 4), "pp2,dp2": (4, 4), "pp2,fsdp2,tp2": (4, 4)}


@pytest.mark.parametrize("parallel", SENDS)
def test_pipeline_has_a_module_and_a_role_for_each_stage(parallel: str, tmp_path: Path) -> None:
    workload = capture_hf(CONFIGS["llama"], 4, 16, "train", "bf16", parallel)
    assert [(role.name, role.module, dict(role.coords)) for role in workload.roles] == [
        (f"stage{place}", f"stage{place}", {"pp": place}) for place in range(2)
    ]
    first, last = (workload.alone(role) for role in workload.roles)
    for stage in (first, last):
        calls = Counter(launch.op for launch in stage.launches.launches)
        assert (calls["c10d.send.default"], calls["c10d.recv_.default"]) == SENDS[parallel]
        assert not stage.metadata["unlowered"]
    names = [{argument.name for argument in stage.args} for stage in (first, last)]
    assert any(name.endswith("embed_tokens.weight") for name in names[0])
    assert "labels" not in names[0]
    assert any(name.endswith("lm_head.weight") for name in names[1])
    assert "input_ids" not in names[1]
    capture_file.write(workload, tmp_path / "pipeline.capture")
    assert capture_file.read(tmp_path / "pipeline.capture").modules == workload.modules


def test_pipelines_that_cannot_be() -> None:
    for config, batch, parallel, message in (
        ("llama", 1, "pp2", "do not fill 2 stages"),
        ("llama", 4, "pp2,mb3", "does not divide into 3"),
        ("llama", 4, "pp2:sideways", "unknown pipeline schedule"),
        ("llama", 8, "pp8", "2 layers cannot be split over 8"),
        ("gpt2", 4, "pp2", "no plan for a pipeline"),
    ):
        with pytest.raises(InputError, match=message):
            capture_hf(CONFIGS[config], batch, 16, "train", "bf16", parallel)
    with pytest.raises(InputError, match="no mode 'decode'"):
        capture_hf(CONFIGS["llama"], 4, 16, "decode", "bf16", "pp2")


def test_parallelism_by_name() -> None:
    assert axes_of("fsdp8,tp4") == (("fsdp", 8), ("tp", 4))
    assert axes_of("") == ()
    for wrong in ("zz4", "tp", "tp2,tp2", "fsdp2,dp2"):
        with pytest.raises(InputError):
            axes_of(wrong)


def test_config_files(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["llama"]))
    assert capture_hf(path, 1, 8).source == str(path)
    with pytest.raises(InputError, match="cannot be read"):
        capture_hf(tmp_path / "absent.json")
    path.write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        capture_hf(path)
    path.write_text('{"model_type": "lama"}')
    with pytest.raises(InputError, match="llama"):
        capture_hf(path)
    with pytest.raises(InputError, match="unknown mode"):
        capture_hf(CONFIGS["llama"], mode="fit")
    with pytest.raises(InputError, match="unknown dtype"):
        capture_hf(CONFIGS["llama"], dtype="f7")
