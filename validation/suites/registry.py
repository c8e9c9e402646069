"""Every suite by name."""

from collections.abc import Mapping
from typing import Final

from stablecast.ir.errors import InputError, near_names
from stablecast.validation.suites import (
    collectives,
    hespas,
    kernels,
    llmcompass,
    megatron,
    neusight_models,
    timm,
    titan,
    tpu_steps,
)
from stablecast.validation.suites.base import Data, Row, Suite

SUITES: Final[Mapping[str, Suite]] = {
    suite.name: suite
    for suite in (
        Suite(
            "neusight",
            "NeuSight: FP32 kernels, operators and models",
            neusight_models.run,
            "github.com/sitar-lab/NeuSight",
            held_out=True,
        ),
        Suite(
            "deepbench",
            "DeepBench: products and convolutions, 2016-2019",
            kernels.deepbench,
            "github.com/baidu-research/DeepBench",
        ),
        Suite("vidur", "Vidur: FP16 LLM layers", kernels.vidur, "github.com/microsoft/vidur", held_out=True),
        Suite(
            "llmcompass",
            "LLMCompass: FP16 operators",
            llmcompass.run,
            "github.com/PrincetonUniversity/LLMCompass",
            held_out=True,
        ),
        Suite(
            "tpu-v4",
            "TPU v4 kernels in FP16",
            kernels.tpu_v4,
            "github.com/scalesim-project/SCALE-Sim-validation",
            held_out=True,
        ),
        Suite(
            "gemm",
            "Large tables of matrix products",
            kernels.gemm,
            "github.com/ai-dynamo/aiconfigurator, github.com/openxla/xla",
        ),
        Suite(
            "collectives", "Collectives", collectives.run, "github.com/ai-dynamo/aiconfigurator, github.com/openxla/xla"
        ),
        Suite(
            "hespas",
            "HeSPaS: training steps on four GPUs",
            hespas.run,
            "github.com/imec-int/hespas",
            held_out=True,
            path="program",
        ),
        Suite(
            "vtrain",
            "vTrain: GPT training steps on 2 to 512 A100",
            megatron.vtrain,
            "github.com/VIA-Research/vTrain",
            held_out=True,
            path="program",
        ),
        Suite(
            "torchtitan",
            "TorchTitan: Llama 3.1 training steps on 8 to 512 H100",
            titan.torchtitan,
            "github.com/pytorch/torchtitan",
            held_out=True,
            path="program",
        ),
        Suite(
            "tpu-steps",
            "TPU training steps: Llama, Gemma and mixtures of experts on TPU v7x, Llama on v3",
            tpu_steps.run,
            "github.com/AI-Hypercomputer/tpu-recipes, github.com/imec-int/hespas",
            held_out=True,
            path="program",
        ),
        Suite(
            "timm",
            "timm: forty vision models on workstation GPUs",
            timm.run,
            "github.com/huggingface/pytorch-image-models (results/)",
            held_out=True,
            path="program",
        ),
    )
}


def suite_names(text: str) -> tuple[str, ...]:
    """The suites that `--suite` names: one, several with commas, or `all`. Raises `InputError` for an unknown one."""
    if text == "all":
        return tuple(SUITES)
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    for name in names:
        if name not in SUITES:
            raise InputError(f"unknown suite '{name}'", near_names(name, SUITES) or "known: " + ", ".join(SUITES))
    if not names:
        raise InputError("no suite is named", "known: all, " + ", ".join(SUITES))
    return names


def run_suite(name: str, data: Data) -> list[Row]:
    """The rows of one suite. Raises `InputError` where the folder holds none of its files."""
    suite = SUITES[name]
    before, said = len(data.missing), len(data.notes)
    rows = suite.run(data)
    missing, why = data.missing[before:], data.notes[said:]
    if not rows and not missing and why:
        raise InputError(f"no row of suite {name} could be made: {'; '.join(why[:2])}")
    if not rows:
        raise InputError(
            f"{data.folder} holds no data of suite {name}" + (f" ({', '.join(missing[:3])})" if missing else ""),
            f"it comes from {suite.origin}; say where it lies with --data",
        )
    return rows
